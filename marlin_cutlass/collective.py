"""Running the opt-in family `collective`: CUTLASS's own mixed-input GEMM on a repacked weight.

`gemm(a, w, kernel="w4a16_collective_...")` comes here. A unit is a shared library beside the cubins
(build.py --arch sm_90a --family collective), listed apart in the manifest and checked against it.
It reads weights in another order than the kernels of this project, so a PackedWeight is repacked at
the first call and the copy is kept as long as the weight lives; `repack` and `run` do the same in
the open. See docs/collective.md.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import dispatch, ops
from .collective_weight import ALIGNMENT, CollectiveWeight, repack, repacked, why_not
from .errors import LibraryError, TableError, short_dtype
from .json_file import read_object
from .packed_weight import PackedWeight

__all__ = ["CollectiveWeight", "Unit", "built", "gemm", "load", "repack", "run", "units"]

PREFIX = "w4a16_collective_"
ABI = 1  # of templates/include/marlin_cutlass/collective_api.cuh
TORCH_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


# ---- the units -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One built unit: an entry of the manifest's list `collective`."""

    name: str
    dtype: str
    m_tile: int
    decomposition: str
    file: Path
    sha256: str


class Call(ctypes.Structure):
    """CollectiveCall of collective_api.cuh."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("lda", ctypes.c_int64),
        ("ldc", ctypes.c_int64),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("sms", ctypes.c_int32),
        ("alpha", ctypes.c_float),
    )


class UnitLibrary:
    """The C interface of a loaded unit."""

    def __init__(self, unit: Unit) -> None:
        try:
            data = unit.file.read_bytes()
        except OSError as error:
            raise TableError(f"{unit.file} cannot be read: {error}; run build.py again") from error
        if hashlib.sha256(data).hexdigest() != unit.sha256:
            raise TableError(f"{unit.file} is not what the manifest lists; run build.py again")
        try:
            self._lib = ctypes.CDLL(str(unit.file))
        except OSError as error:
            raise LibraryError(f"{unit.file} does not load: {error}") from error
        self._lib.mc_collective_workspace.restype = ctypes.c_int64
        self._lib.mc_collective_error.restype = ctypes.c_char_p
        if self._lib.mc_collective_abi() != ABI:
            raise TableError(f"{unit.file} is of another version; run build.py again")

    def facts(self) -> tuple[int, int, int]:
        """Threads, shared memory in bytes and pipeline stages of a CTA."""
        out = (ctypes.c_int32 * 3)()
        self._lib.mc_collective_facts(out)
        return tuple(out)

    def workspace_bytes(self, call: Call) -> int:
        return self._lib.mc_collective_workspace(ctypes.byref(call))

    def launch(self, call: Call, workspace: int | None, stream: int) -> None:
        """Raises RuntimeError with CUTLASS's or CUDA's reason."""
        addresses = (ctypes.c_void_p(workspace), ctypes.c_void_p(stream))
        if self._lib.mc_collective_launch(ctypes.byref(call), *addresses):
            text = self._lib.mc_collective_error().decode(errors="replace")
            raise RuntimeError(f"the collective kernel was not launched: {text}")


@functools.lru_cache(maxsize=64)
def load(unit: Unit) -> UnitLibrary:
    """The library of a unit. Raises TableError if it is not the one that the manifest lists,
    LibraryError if it does not load."""
    return UnitLibrary(unit)


def units(folder: Path) -> dict[str, Unit]:
    """Units by name that the manifest in `folder` lists; TableError if an entry is damaged."""
    path = Path(folder) / "manifest.json"
    try:
        status = path.stat()
        return dict(_units(path, (status.st_mtime_ns, status.st_size, status.st_ino)))
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path}: list of collective units: {error}") from error


@functools.lru_cache(maxsize=8)
def _units(path: Path, state: tuple[int, ...]) -> dict[str, Unit]:
    return {entry["name"]: _unit(entry, path) for entry in read_object(path).get("collective", [])}


def _unit(entry: dict, path: Path) -> Unit:
    name, file, digest = entry["name"], entry["file"], entry["sha256"]
    if not is_collective(name) or entry["dtype"] not in TORCH_DTYPES:
        raise ValueError(f"name={name!r}, dtype={entry['dtype']!r}")
    if re.fullmatch(r"\w[\w.-]*", file, re.ASCII) is None:
        raise ValueError(f"{name}: file={file!r} is not a plain file name")
    tile, decomposition = int(entry["m_tile"]), str(entry["decomposition"])
    return Unit(name, entry["dtype"], tile, decomposition, path.parent / file, str(digest))


def built(device: torch.device | int | None = None) -> dict[str, Unit]:
    """Units by name for a CUDA device; none where no table is built for it."""
    arch = dispatch.arch_for(*torch.cuda.get_device_capability(device))
    return units(dispatch.built_archs()[arch])


def is_collective(name: object) -> bool:
    """Whether a kernel's name or geometry is of this family."""
    return isinstance(name, str) and name.startswith(PREFIX)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float16` -> `f16`; ValueError for what no unit takes."""
    for name, kind in TORCH_DTYPES.items():
        if kind == dtype:
            return name
    raise ValueError(f"dtype={short_dtype(dtype)} is not one of float16, bfloat16")


def full_name(kernel: str, dtype: str) -> str:
    """The unit that a name or a geometry means for activations of `dtype`; ValueError if it is for
    the other type."""
    given = re.match(rf"{PREFIX}(f16|bf16)_", kernel)
    if given is None:
        return kernel.replace(PREFIX, f"{PREFIX}{dtype}_", 1)
    if given[1] != dtype:
        raise ValueError(f"kernel={kernel!r} serves {given[1]}: the activations are {dtype}")
    return kernel


def find(kernel: str, dtype: str, known: dict[str, Unit]) -> Unit:
    """The built unit that a name or geometry means; ValueError with the rule or the command."""
    name = full_name(kernel, dtype)
    if name in known:
        return known[name]
    reason = _illegal(name)
    if reason is not None:
        raise ValueError(f"kernel={kernel!r} can never exist: {reason}")
    raise ValueError(
        f"kernel={kernel!r} is not built (built: {', '.join(known) or 'none'}), and units of this "
        f"family are not compiled on demand: python build.py --arch sm_90a --only {name}"
    )


def _illegal(name: str) -> str | None:
    """The rule that a name breaks, where the generator is there to say so."""
    try:
        from generator.arch import ARCHS
        from generator.collective import CollectiveVariant
        from generator.collective import why_not as illegal

        return illegal(CollectiveVariant.parse(name), ARCHS["sm_90a"])
    except ModuleNotFoundError:
        return None
    except ValueError as error:
        return str(error)


# ---- a call --------------------------------------------------------------------------------------


def gemm(
    a: Tensor,
    w: PackedWeight,
    kernel: str,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`marlin_cutlass.gemm` with a collective kernel: no bias and no gradient.

    Raises ValueError naming the rule where the kernel cannot serve the call.
    """
    if not _on_cuda(a):
        raise ValueError(f"kernel={kernel!r} is a CUDA kernel and a is on {a.device}")
    ops.check_activations(a, w.n, w.k, w.group_size, w.device)
    if out is not None:
        ops.check_out(out, a, w.n)
    reason = why_not(w) or _refused(a, bias)
    if reason is not None:
        raise ValueError(f"kernel={kernel!r} cannot serve this call: {reason}")
    unit = _found(kernel, dtype_name(a.dtype), a.device)
    if batch_invariant and unit.decomposition != "data_parallel":
        raise ValueError(f"kernel={kernel!r} is not batch-invariant: its sums depend on M")
    result = a.new_empty((*a.shape[:-1], w.n)) if out is None else out
    rows = run(unit, a.reshape(-1, w.k), repacked(w, a.dtype), _rows_of(result, w.n))
    if rows.data_ptr() != result.data_ptr():
        result.copy_(rows.view(result.shape))
    return result


@functools.lru_cache(maxsize=256)
def _found(kernel: str, dtype: str, device: torch.device) -> Unit:
    """`find` for a device, remembered: a unit that is built anew needs a new process."""
    return find(kernel, dtype, built(device))


def _on_cuda(a: Tensor) -> bool:
    return a.is_cuda


def _refused(a: Tensor, bias: Tensor | None) -> str | None:
    if bias is not None:
        return "cutlass_library emits no bias; add it to the result"
    if torch.is_grad_enabled() and a.requires_grad:
        return "it has no gradient; call it under torch.no_grad()"
    return None


def _rows_of(out: Tensor, n: int) -> Tensor | None:
    """`out` as [M, N] if the kernel can write there, else None."""
    if not out.is_contiguous() and out.dim() != 2:
        return None
    rows = out.view(-1, n)
    return rows if _aligned(rows) else None


def _aligned(rows: Tensor) -> bool:
    """Whether TMA can address a matrix: unit column stride, rows and base of whole 16 bytes."""
    stride_ok = rows.stride(1) == 1 and rows.stride(0) % ALIGNMENT == 0
    return stride_ok and rows.stride(0) >= rows.shape[1] and rows.data_ptr() % 16 == 0


def run(unit: Unit, a: Tensor, w: CollectiveWeight, out: Tensor | None = None) -> Tensor:
    """a [M, K] times a repacked weight of the same activation type -> [M, N], into `out` if given
    (rows of whole 16 bytes)."""
    if w.perm is not None:
        a = a.index_select(1, w.perm)
    if not _aligned(a):
        a = a.clone(memory_format=torch.contiguous_format)
    out = a.new_empty(a.shape[0], w.n) if out is None else out
    if a.shape[0] == 0:
        return out
    device, library = a.device, load(unit)
    call = Call(
        weights=w.codes.data_ptr(),
        scales=w.scales.data_ptr(),
        a=a.data_ptr(),
        c=out.data_ptr(),
        lda=a.stride(0),
        ldc=out.stride(0),
        m=a.shape[0],
        n=w.n,
        k=w.k,
        group_size=w.group_size,
        device=a.get_device(),
        sms=torch.cuda.get_device_properties(device).multi_processor_count,
        alpha=w.alpha,
    )
    with torch.cuda.device(device):
        size = library.workspace_bytes(call)
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        stream = torch.cuda.current_stream(device).cuda_stream
        library.launch(call, None if workspace is None else workspace.data_ptr(), stream)
    return out
