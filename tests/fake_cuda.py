"""The launcher library over host memory: the operators run as on a GPU, with a driver that records.

The library is compiled with MARLIN_CUTLASS_HOST_TEST, so that its operators take CPU tensors (under
the namespace `marlin_cutlass_host`), and loads tests/fake_driver.cpp in the place of the NVIDIA
driver.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
from pathlib import Path

import torch

from marlin_cutlass import dispatch, library, ops
from marlin_cutlass.manifest import MANIFEST_FORMAT

TESTS = Path(__file__).resolve().parent
FIELDS = (
    "launches",
    "grid",
    "threads",
    "shared_bytes",
    "cluster",
    "programmatic",
    "stream",
    "max_shared",
    "function_count",
    "allocations",
    "allocated_bytes",
    "encodes",
    "memsets",
    "synchronisations",
    "dirty_flags",
    "pushes",
    "relaxed",
    "partials",
    "flags",
    "vector_store",
    "lda",
    "ldc",
    "m",
    "n",
    "k",
    "k_steps",
    "raster",
    "whole_passes",
    "owner_steps",
    "share_each",
    "share_more",
    "map_rows",
    "map_slices",
    "map_stride",
    "map_box_rows",
    "map_box_slices",
)
NAMESPACE = "marlin_cutlass_host"


class Record(ctypes.Structure):
    """What the driver saw; see tests/fake_driver.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]


class Fake:
    """A recorded driver and the launcher that uses it."""

    def __init__(self, driver: Path, launcher: library.Launcher) -> None:
        self._driver = ctypes.CDLL(str(driver))
        self._driver.fake_record.restype = ctypes.POINTER(Record)
        self._driver.fake_last_kernel.restype = ctypes.c_char_p
        self.launcher = launcher

    @property
    def record(self) -> Record:
        return self._driver.fake_record().contents

    @property
    def last_kernel(self) -> str:
        return self._driver.fake_last_kernel().decode()

    def reset(self) -> None:
        self._driver.fake_reset()
        self._driver.fake_context(ctypes.c_int64(0x1000))
        self.occupancy(8)
        self.compute(True)

    def fail(self, symbol: str, code: int = 999) -> None:
        self._driver.fake_fail(symbol.encode(), code)

    def capture(self, stream: int, capture_id: int, graph: int, active: bool = True) -> None:
        values = (ctypes.c_int64(stream), int(active), ctypes.c_int64(capture_id))
        self._driver.fake_capture(*values, ctypes.c_int64(graph))

    def destroy_graph(self, graph: int) -> None:
        self._driver.fake_destroy_graph(ctypes.c_int64(graph))

    def occupancy(self, blocks: int) -> None:
        self._driver.fake_occupancy(blocks)

    def compute(self, on: bool) -> None:
        """Whether launches write results; host time is measured without."""
        self._driver.fake_compute(int(on))

    def context(self, value: int) -> None:
        self._driver.fake_context(ctypes.c_int64(value))


def build(folder: Path) -> Fake:
    """Compiles both libraries into `folder` (unless they are there) and loads them."""
    driver = _build_driver(folder)
    path = library.build(defines=("MARLIN_CUTLASS_HOST_TEST",), folder=folder)
    registry = torch.library.Library(NAMESPACE, "DEF")
    for schema in ops.SCHEMAS:
        if not schema.startswith("grad_input"):  # has no CUDA implementation
            registry.define(schema)
    before = os.environ.get("MARLIN_CUTLASS_LIBCUDA")
    os.environ["MARLIN_CUTLASS_LIBCUDA"] = str(driver)
    try:
        launcher = library.Launcher(path)
        launcher.load_driver()
    finally:
        os.environ.pop("MARLIN_CUTLASS_LIBCUDA")
        if before is not None:
            os.environ["MARLIN_CUTLASS_LIBCUDA"] = before
    fake = Fake(driver, launcher)
    fake.registry = registry  # the operators live as long as it does
    return fake


def _build_driver(folder: Path) -> Path:
    source = TESTS / "fake_driver.cpp"
    key = hashlib.sha256(source.read_bytes() + library.source_hash().encode()).hexdigest()[:16]
    target = folder / f"libfakecuda_{key}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{path}" for path in library.include_folders()]
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
        aside = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*library.compiler(), *flags, str(source), "-o", str(aside)], check=True)
        aside.replace(target)
    return target


# ---- kernel tables made by hand
# --------------------------------------------------------------------------------------


def kernel(family="ampere", dtype="f16", zeros=False, group_size=128, **fields) -> dict:
    """A manifest entry with plausible numbers; `file` is a text file that the fake driver
    accepts."""
    values = {
        "family": family,
        "dtype": dtype,
        "zeros": zeros,
        "group_size": group_size,
        "m_tile": 16,
        "n_sm": 128,
        "k_sm": 128,
        "warps_n": 4,
        "warps_k": 1,
        "stages": 4,
        "decomposition": "data_parallel",
        "split": 1,
        "ctas_per_sm": 1,
        "multicast": 1,
        "threads": 128,
        "shared_bytes": 65536,
        **fields,
    }
    split = values["decomposition"] == "split_k"
    cluster = values["split"] if split else values["multicast"]
    values["cluster"] = cluster if values["family"] in ("hopper", "hopper_sparse") else 1
    values["name"] = dispatch.kernel_name(values)
    values["file"] = f"{values['name']}.cubin"
    values["sha256"] = hashlib.sha256(values["name"].encode()).hexdigest()
    return values


def geometry(entry: dict) -> str:
    """Name of an entry without its format."""
    names = {name: entry[name] for name in dispatch.Kernel.__dataclass_fields__}
    return dispatch.Kernel(**names).geometry


def row(entry: dict, m=(0, None), n=(1, None), k=(1, None), **filters) -> dict:
    """A dispatch row that leads to an entry's geometry."""
    fields = {"group_size": None, "dtype": None, "zeros": None, "sms": None, **filters}
    ranges = {"m": list(m), "n": list(n), "k": list(k)}
    return {**ranges, **fields, "geometry": geometry(entry), "source": "made by hand"}


def formats() -> list[dict]:
    """All 16 formats as keyword arguments of `kernel`."""
    return [
        {"dtype": dtype, "zeros": zeros, "group_size": group}
        for dtype in dispatch.DTYPES
        for zeros in (False, True)
        for group in dispatch.GROUPS
    ]


def write_table(folder: Path, variants: list[dict], rows: list[dict], arch: str = "sm_90a") -> Path:
    """A manifest and its cubins in `folder`/`arch`; returns that folder."""
    target = folder / arch
    target.mkdir(parents=True, exist_ok=True)
    for entry in variants:
        (target / entry["file"]).write_text(entry["name"])
    manifest = {"format": MANIFEST_FORMAT, "arch": arch, "layout_version": 1, "variants": variants}
    (target / "manifest.json").write_text(json.dumps({**manifest, "dispatch": rows}))
    return target
