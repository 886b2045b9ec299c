"""`explain`: which kernel serves a shape, why, and what was passed over. `build_info`: what this
installation has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import dispatch
from .errors import TableError, UnsupportedArchError, sizes
from .layout import LAYOUT_VERSION, check_sizes, stored_group_size

DTYPE_NAMES = {
    "f16": "f16",
    "fp16": "f16",
    "half": "f16",
    "float16": "f16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
# SMs of a common GPU of each architecture, for shapes explained without a device.
TYPICAL_SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_90a": 132}
DEFAULT_SMS = 132
SETTINGS = ("BUILD", "KERNEL", "EXCLUDE", "PDL", "DEBUG")


@dataclass(frozen=True)
class Explanation:
    """The kernel that a call would use; `kernel` is None where there is none and `why` says so."""

    m: int
    n: int
    k: int
    group_size: int
    dtype: str
    zeros: bool
    arch: str
    sms: int
    kernel: str | None
    why: str
    source: str = ""  # of the dispatch row: which measurement or model it comes from
    schedule: dispatch.Schedule | None = None
    refused: tuple[tuple[str, str], ...] = field(default=())  # (geometry, reason), in table order
    sparse: bool = False

    def __str__(self) -> str:
        kind = "2:4 sparse" if self.sparse else "zero points" if self.zeros else "symmetric"
        lines = [
            f"{sizes(self.k, self.n, self.group_size, self.m)}, {self.dtype}, {kind} "
            f"on {self.arch} with {self.sms} SMs",
            f"kernel   {self.kernel or 'none'}",
            f"why      {self.why}",
        ]
        if self.source:
            lines.append(f"source   {self.source}")
        if self.schedule is not None:
            numbers = ", ".join(f"{name}={value}" for name, value in asdict(self.schedule).items())
            lines.append(f"launch   {numbers}")
        lines += [f"refused  {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def explain(
    m: int,
    n: int,
    k: int,
    group_size: int = 128,
    dtype: str | torch.dtype = "f16",
    arch: str | int | tuple[int, int] | None = None,
    zeros: bool = False,
    *,
    sparse: bool = False,
    g: int | None = None,
    sms: int | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
) -> Explanation:
    """Which kernel multiplies [m, k] by [k, n], and why; needs no GPU where `arch` is given.

    dtype: "f16" or "bf16" (or a torch dtype). arch: 86, "sm_86", "90a" or a capability (8, 6); None
    is the current GPU. sparse: a 2:4-sparse weight. sms: number of SMs, default the GPU's or a
    typical one. g: short for group_size. kernel, batch_invariant: as in `gemm`. Raises ValueError
    for sizes that `pack` refuses; what the device or its table cannot do is an Explanation without
    a kernel.
    """
    group_size = group_size if g is None else g
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int):
            raise TypeError(f"{name}={size!r} must be an int")
    check_sizes(k, n, group_size)
    if m < 0:
        raise ValueError(f"m={m} is negative")
    if sms is not None and sms < 1:
        raise ValueError(f"sms={sms} must be at least 1")
    capability, asked, default_sms = _device(arch)
    call = {
        "m": m,
        "n": n,
        "k": k,
        "group_size": group_size,
        "dtype": _dtype(dtype),
        "zeros": zeros,
        "sparse": sparse,
    }
    try:
        table = dispatch.current_table(dispatch.built_archs()[dispatch.arch_for(*capability)])
    except (UnsupportedArchError, TableError) as error:
        text = f"sm_{capability[0]}{capability[1]} unsupported: {error}"
        return Explanation(**call, arch=asked, sms=sms or default_sms, kernel=None, why=text)
    call |= {"arch": table.arch, "sms": sms or default_sms}
    if m == 0:
        return Explanation(**call, kernel=None, why="no rows: the result is empty, nothing runs")
    forced = kernel or os.environ.get("MARLIN_CUTLASS_KERNEL")
    if forced or batch_invariant:
        return _without_rows(table, call, forced)
    return _by_rows(table, call)


def _dtype(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ValueError(f"dtype={name!r} is not supported: use f16 (float16) or bf16 (bfloat16)")
    return DTYPE_NAMES[name]


def _device(arch: str | int | tuple[int, int] | None) -> tuple[tuple[int, int], str, int]:
    """(compute capability, name, SMs) of what `arch` means."""
    if arch is None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU is available: give arch, such as arch='sm_86'")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        capability = (properties.major, properties.minor)
        name = f"sm_{capability[0]}{capability[1]}"
        return capability, name, properties.multi_processor_count
    if isinstance(arch, tuple) and len(arch) == 2:
        arch = f"{arch[0]}{arch[1]}"
    match = re.fullmatch(r"(?:sm_)?(\d{1,2})(\d)a?", str(arch))
    if match is None:
        raise ValueError(f"arch={arch!r} is malformed: give 86, 'sm_86' or (8, 6)")
    name = f"sm_{match[1]}{match[2]}"
    return (int(match[1]), int(match[2])), name, TYPICAL_SMS.get(name, DEFAULT_SMS)


def _launch(table: dispatch.Table, call: dict[str, Any], chosen: dispatch.Kernel) -> dict[str, Any]:
    numbers = dispatch.schedule(chosen, call["m"], call["n"], call["k"], call["sms"])
    return {**call, "kernel": chosen.name, "schedule": numbers}


def _without_rows(table: dispatch.Table, call: dict[str, Any], forced: str | None) -> Explanation:
    """A forced kernel, or the one that serves every number of rows."""
    form = (call["dtype"], call["zeros"], stored_group_size(call["group_size"]))
    sparse = call["sparse"]
    if forced:
        try:
            index, why = table.find(forced, *form, sparse), "forced by name"
        except ValueError as error:
            return Explanation(**call, kernel=None, why=str(error))
    else:
        index = table.batch_invariant()[dispatch.format_index(*form, sparse)]
        why = "batch-invariant: the same for every number of rows"
        if index < 0:
            return Explanation(**call, kernel=None, why=f"{why}; none is built for this format")
        if not dispatch.is_invariant(table.kernels[index]):
            why += f", {table.kernels[index].m_tile} rows a launch"
    return Explanation(**_launch(table, call, table.kernels[index]), why=why)


def _by_rows(table: dispatch.Table, call: dict[str, Any]) -> Explanation:
    form = (call["dtype"], call["zeros"], stored_group_size(call["group_size"]))
    sparse = call["sparse"]
    shape = (call["m"], call["n"], call["k"], call["sms"])
    wanted = dispatch.format_index(*form, sparse)
    refused = []
    for number, row in enumerate(table.rows):
        if not row.matches(*shape) or not row.covers(*form, sparse):
            continue
        if row.kernels[wanted] >= 0:
            chosen = table.kernels[row.kernels[wanted]]
            why = f"row {number} of {len(table.rows)} is the first that matches and is built"
            launch = _launch(table, call, chosen)
            return Explanation(**launch, why=why, source=row.source, refused=tuple(refused))
        name = dispatch.with_format(row.geometry, *form)
        built = table.index(name) >= 0
        reason = "excluded by MARLIN_CUTLASS_EXCLUDE" if built else f"{name} is not built"
        refused.append((row.geometry, f"row {number}: {reason}"))
    why = "no row of the table matches with a kernel that is built"
    if sparse and not any(kernel.sparse for kernel in table.kernels):
        why += f": python build.py --arch {table.arch} --family sparse"
    return Explanation(**call, kernel=None, why=why, refused=tuple(refused))


# ---- the installation


def build_info() -> dict[str, Any]:
    """Versions, settings, tables, tools and devices, as plain values; nothing is compiled or
    loaded.

    Keys: version, layout_version, torch, torch_cuda, launcher (path or None), launcher_hash,
    launcher_torch_target, compiler, nvcc (list of path and version, first found first), tables (per
    arch: folder, number of kernels and rows, or the error), devices (name, arch, table or the
    reason there is none), settings (environment).
    """
    from . import __version__, library

    return {
        "version": __version__,
        "layout_version": LAYOUT_VERSION,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "launcher": None if library.find_library() is None else str(library.find_library()),
        "launcher_hash": library.source_hash(),
        "launcher_torch_target": library.TORCH_TARGET,
        "compiler": _compiler(library),
        "nvcc": [{"path": path, "version": _version(path)} for path in nvcc_candidates()],
        "tables": {arch: _table_info(folder) for arch, folder in dispatch.built_archs().items()},
        "devices": _devices(),
        "settings": {
            name: os.environ[name]
            for name in (f"MARLIN_CUTLASS_{setting}" for setting in SETTINGS)
            if name in os.environ
        },
    }


def nvcc_candidates() -> list[str]:
    """Every nvcc that a build could use, in the order of preference: $NVCC, $CUDA_HOME, PATH."""
    home = os.environ.get("CUDA_HOME")
    places = [os.environ.get("NVCC"), str(Path(home, "bin", "nvcc")) if home else None]
    places += [str(Path(folder, "nvcc")) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    found = [shutil.which(place) for place in places if place]
    return list(dict.fromkeys(path for path in found if path))


def _compiler(library: Any) -> str:
    try:
        return " ".join(library.compiler())
    except RuntimeError as error:
        return str(error)


def _version(path: str) -> str:
    """Last line of `nvcc --version` that names a release."""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    releases = re.findall(r"release [\d.]+.*|V[\d.]+", run.stdout)
    return releases[-1] if releases else "unknown"


def _table_info(folder: Path) -> dict[str, Any]:
    try:
        table = dispatch.current_table(folder)
    except TableError as error:
        return {"folder": str(folder), "error": str(error)}
    return {"folder": str(folder), "kernels": len(table.kernels), "rows": len(table.rows)}


def _devices() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        entry: dict[str, Any] = {
            "name": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "sms": properties.multi_processor_count,
        }
        try:
            entry["table"] = dispatch.arch_for(properties.major, properties.minor)
        except UnsupportedArchError as error:
            entry["table"] = str(error)
        devices.append(entry)
    return devices
