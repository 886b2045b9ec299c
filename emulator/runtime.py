"""ctypes mirror of emulator/runtime/launch.h."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emulator.build import INCLUDE, build_runtime
from emulator.errors import EmulationError, resolve_sites

READ, WRITE, WRITE_ONCE, ORDERED, SYNC, PREVIOUS = 1, 2, 4, 8, 16, 32

STATISTICS = (
    "mma",
    "ldmatrix",
    "wgmma",
    "cp_async",
    "bulk",
    "tensor",
    "remote_store",
    "block_sync",
    "mbarrier_wait",
    *(
        f"{kind}_{what}"
        for kind in ("shared_load", "shared_store", "ldmatrix_access", "cp_async_access")
        for what in ("count", "waves", "ideal")
    ),
    "switches",
    "bulk_bytes",
    "tensor_bytes",
)


def _parameter_fields() -> list[tuple[str, type]]:
    """Fields of struct GemmParams, read from params.h: the struct is declared in one place."""
    text = (INCLUDE / "marlin_cutlass" / "params.h").read_text()
    body = re.search(r"struct GemmParams \{(.*?)\n\};", text, re.DOTALL)[1]
    types = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32}
    fields = []
    for line in re.sub(r"//.*", "", body).split(";"):
        if declaration := re.fullmatch(r"\s*(?:const )?(\w+)(\*?) ([\w, ]+)", line):
            kind = ctypes.c_void_p if declaration[2] else types[declaration[1]]
            fields += [(name.strip(), kind) for name in declaration[3].split(",")]
    return fields


class GemmParams(ctypes.Structure):
    """marlin_cutlass::GemmParams."""

    _fields_ = _parameter_fields()


class TensorMap(ctypes.Structure):
    """Mirror of EmuTensorMap: a 3-D tensor of 2-byte elements in the 128-byte swizzle."""

    MAGIC = 0x7E450A93
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("dim", ctypes.c_int64 * 3),
        ("stride", ctypes.c_int64 * 2),
        ("box", ctypes.c_int32 * 3),
        ("magic", ctypes.c_uint32),
        ("padding", ctypes.c_uint8 * 64),  # the C++ type is aligned, and so padded, to 64 bytes
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("pitch_bytes", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("tensor_map", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("buffer_count", "grid", "threads", "shared_bytes", "cluster", "resident")
        ),
        ("programmatic", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Buffer:
    """Global memory that a kernel may touch, and how."""

    name: str
    address: int
    bytes: int
    flags: int
    element_bytes: int = 1
    row_bytes: int = 0  # of each row of `pitch_bytes`, the accessible part; 0: everything
    pitch_bytes: int = 0

    def _structure(self) -> _Buffer:
        rows = (self.row_bytes or self.bytes, self.pitch_bytes or self.bytes)
        return _Buffer(
            self.name.encode(), self.address, self.bytes, *rows, self.flags, self.element_bytes
        )


@dataclass(frozen=True)
class Launch:
    """One launch: the geometry that a driver would be given, and the seed of the schedule.

    resident: blocks that run at a time, started in order as others end; 0 means all. seed 0 is the
    plain order; other seeds draw preemption, priorities of warps and landing times of copies.
    """

    params: GemmParams
    buffers: Sequence[Buffer]
    grid: int
    threads: int
    shared_bytes: int
    cluster: int = 1
    resident: int = 0
    tensor_map: TensorMap | None = None
    programmatic: bool = False
    seed: int = 0


@functools.lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    # RTLD_GLOBAL: kernels find the runtime's functions without being linked to it.
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.emu_run.restype = ctypes.c_int
    return library


@functools.cache
def _kernel(path: Path, symbol: str) -> int:
    _runtime()
    return ctypes.cast(getattr(ctypes.CDLL(str(path)), symbol), ctypes.c_void_p).value


def run(library: Path, symbol: str, launch: Launch) -> dict[str, int]:
    """Runs kernel `symbol` of `library` to its end; returns counts by the names in STATISTICS.

    Raises EmulationError for everything the emulator objects to.
    """
    buffers = (_Buffer * len(launch.buffers))(*(buffer._structure() for buffer in launch.buffers))
    tensor_map, storage = None, None
    if launch.tensor_map is not None:
        storage, tensor_map = _aligned_copy(launch.tensor_map)
    arguments = _Launch(
        _kernel(library, symbol),
        ctypes.addressof(launch.params),
        tensor_map,
        ctypes.addressof(buffers),
        *(len(buffers), launch.grid, launch.threads, launch.shared_bytes, launch.cluster),
        launch.resident,
        *(int(launch.programmatic), launch.seed),
    )
    kind, text = ctypes.c_char_p(), ctypes.c_char_p()
    counts = (ctypes.c_int64 * len(STATISTICS))()
    failed = _runtime().emu_run(
        ctypes.byref(arguments), ctypes.byref(kind), ctypes.byref(text), counts
    )
    del storage
    if failed:
        raise EmulationError(kind.value.decode(), resolve_sites(text.value.decode(), library))
    return dict(zip(STATISTICS, counts))


def _aligned_copy(tensor_map: TensorMap) -> tuple[ctypes.Array, int]:
    """The map at a 64-byte aligned address, as cuTensorMapEncode wants it."""
    size = ctypes.sizeof(tensor_map)
    storage = ctypes.create_string_buffer(size + 64)
    address = -(-ctypes.addressof(storage) // 64) * 64
    ctypes.memmove(address, ctypes.addressof(tensor_map), size)
    return storage, address
