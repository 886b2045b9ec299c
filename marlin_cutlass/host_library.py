"""Packing on the host in C++: a library of one file, compiled once, that nothing depends on.

It does what `pack` and the readers do with torch, several times as fast. Without a compiler, or
without a folder to keep it in, torch does the work and the bits are the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .errors import LibraryError

SOURCE = Path(__file__).resolve().parent / "csrc" / "host_pack.cc"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
# Weights of this many codes are worth the second that compiling takes, once on a machine.
BUILD_CODES = 1 << 22
THREAD_CODES = 1 << 18  # a thread for less is a loss
_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_failed = False


def _path_name() -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, platform.machine())).encode())
    digest.update(SOURCE.read_bytes())
    return f"libmarlin_cutlass_host_{digest.hexdigest()[:16]}.so"


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; returns its path. Raises LibraryError where there is no
    compiler, CalledProcessError where it fails."""
    return _compile(_path_name(), folder)


def _compile(name: str, folder: Path | None = None) -> Path:
    """Builds aside and renames, so that several processes may do it at once."""
    from .library import _writable_folder, compiler

    target = (folder or _writable_folder()) / name
    aside = target.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
    try:
        command = [*compiler(), *FLAGS, str(SOURCE), "-o", str(aside)]
        subprocess.run(command, check=True, capture_output=True)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return target


def _find_or_compile(build: bool) -> Path | None:
    from .library import library_folders

    name = _path_name()
    found = next((f / name for f in library_folders() if (f / name).is_file()), None)
    return found or (_compile(name) if build else None)


def load(build: bool = False) -> ctypes.CDLL | None:
    """The library; None where there is none and `build` does not ask for one, or none can be."""
    global _library, _failed
    with _lock:
        if _library is None and not _failed:
            try:
                path = _find_or_compile(build)
                _library = None if path is None else ctypes.CDLL(str(path))
            except (OSError, LibraryError, subprocess.CalledProcessError):
                _failed = True
        return _library


def required() -> ctypes.CDLL:
    """The library, built if it is not there; LibraryError where it cannot be."""
    library = load(build=True)
    if library is None:
        raise LibraryError(
            "the host library is needed and cannot be built: no C++ compiler (g++, or set CXX), or "
            "no folder for what it makes (MARLIN_CUTLASS_BUILD)"
        )
    return library


def _for(tensor: Tensor, codes: int) -> ctypes.CDLL | None:
    return load(codes >= BUILD_CODES) if tensor.device.type == "cpu" else None


def _threads(codes: int) -> int:
    return max(1, min(torch.get_num_threads(), codes // THREAD_CODES))


def pack_codes(q: Tensor, fill: int, out: Tensor) -> bool:
    """Writes the code words of q uint8 [K, N] into blocks `out` uint8 [blocks, block bytes], each
    at the start of its block; False if the library is not there for it."""
    library = _for(q, q.numel())
    if library is None:
        return False
    q = q if q.stride(1) == 1 else q.contiguous()
    library.mc_pack_codes(
        ctypes.c_void_p(q.data_ptr()),
        *(ctypes.c_int64(value) for value in (q.stride(0), *q.shape)),
        fill,
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.stride(0)),
        _threads(q.numel()),
    )
    return True


def unpack_fields(words: Tensor, across: bool, order: Sequence[int]) -> Tensor | None:
    """Codes uint8 of the 4-bit fields of int32 words [rows, columns], side by side or, `across`,
    one below the other; field i is code order[i]. None if the library is not there for it."""
    library = _for(words, 8 * words.numel())
    if library is None:
        return None
    rows, columns = words.shape
    words = words.contiguous()
    shape = (8 * rows, columns) if across else (rows, 8 * columns)
    out = torch.empty(shape, dtype=torch.uint8)
    library.mc_unpack_fields(
        ctypes.c_void_p(words.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        int(across),
        (ctypes.c_int32 * 8)(*order),
        ctypes.c_void_p(out.data_ptr()),
        _threads(out.numel()),
    )
    return out


def better_codes(
    hessian: Tensor,
    output: Tensor,
    gradient: Tensor,
    steps: Tensor,
    scales: Tensor,
    low: Tensor,
    high: Tensor,
    free: Tensor | None,
    change: Tensor,
    spread: Tensor,
) -> None:
    """`mc_better_codes` (csrc/host_pack.cc) on contiguous float32 CPU tensors; `free` is uint8.

    Raises LibraryError as `required`: torch has nothing of the kind.
    """
    library = required()
    rows, n = steps.shape
    tensors = (hessian, output, gradient, steps, scales, low, high, free, change, spread)
    library.mc_better_codes(
        ctypes.c_int64(rows),
        ctypes.c_int64(n),
        *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors),
    )
