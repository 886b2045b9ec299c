"""Safetensors files read by header and written as a stream, whatever the size of the tensors.

The writer leaves room for the header, appends tensors as they come and fills the header in at the
end, padded with spaces (which the format allows): one tensor in memory at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .json_file import parse_object

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # limit of the format's own reader
MAX_RANK = 64  # of a tensor; torch itself has the same limit
ALIGN = 64
WRITEBACK_BYTES = 32 << 20  # of new data, after which the disk is set to work


class TensorInfo(NamedTuple):
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # absolute file offset
    stop: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a file, without reading data.

    ValueError for a damaged file: sizes and offsets that do not agree, tensors that overlap (a
    small file could grow without bound when it is copied), repeated names, anything cut short.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file (header of {length} bytes)")
        entries = parse_object(file.read(length), f"{path} has a damaged header: it")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path} has a damaged header: __metadata__ must map names to texts")
    tensors = {}
    for name, entry in entries.items():
        try:
            found = tensors[name] = _info(entry, 8 + length)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name[:200]} {error}") from None
        if found.stop > size:
            end = f"tensor {name[:200]} ends at {found.stop} of {size} bytes"
            raise ValueError(f"{path} is cut short: {end}")
    _check_disjoint(path, tensors)
    return tensors, metadata


def _info(entry: Any, base: int) -> TensorInfo:
    """One checked entry of a header whose data start at `base`."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("has a damaged entry: dtype, shape and data_offsets are required")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has dtype {str(dtype)[:40]}, not supported")
    if not _sizes(shape) or len(shape) > MAX_RANK:
        raise ValueError(f"has shape {str(shape)[:80]}: at most {MAX_RANK} sizes from 0 on")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"has data_offsets {str(offsets)[:80]}: a start and an end are required")
    start, stop = (base + offset for offset in offsets)
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if needed != stop - start:
        raise ValueError(f"of {dtype} {shape} needs {needed} bytes and has {stop - start}")
    return TensorInfo(DTYPES[dtype], tuple(shape), start, stop)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_disjoint(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    used = sorted((t.start, t.stop, name) for name, t in tensors.items() if t.stop > t.start)
    for (_, end, first), (start, _, second) in itertools.pairwise(used):
        if start < end:
            raise ValueError(f"{path}: tensors {first[:200]} and {second[:200]} overlap")


class StreamWriter:
    """Appends tensors to a new safetensors file; `close` writes the header.

    `names`: how many tensors at most, and `name_bytes` the length of all their names: room for the
    header. A context manager; an exception leaves an unreadable file for the caller to delete.
    """

    def __init__(self, path: Path, names: int, name_bytes: int, metadata_bytes: int) -> None:
        # 120 bytes hold dtype, a 4-D shape, two 13-digit offsets and the JSON around them.
        room = 64 + 120 * names + name_bytes + metadata_bytes
        self.room = -(-room // ALIGN) * ALIGN + ALIGN - 8
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self.file.seek(8 + self.room)
        self.entries: dict[str, dict] = {}
        self.offset = 0
        self._sent = 0  # bytes of data that the system was told to write back

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one CPU tensor."""
        if name in self.entries:
            raise ValueError(f"tensor {name} is written twice")
        data = tensor.detach().contiguous()
        size = data.numel() * data.element_size()
        if size:
            self._write(memoryview(data.view(-1).view(torch.uint8).numpy()))
        self.entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.offset, self.offset + size],
        }
        self.offset += size
        if self.offset - self._sent >= WRITEBACK_BYTES:
            self._start_writeback()

    def _write(self, view: memoryview) -> None:
        while view:  # one call writes 2 GiB at most
            view = view[self.file.write(view) :]

    def _start_writeback(self) -> None:
        """Has the system write what it holds to the disk while the next tensors are made: left to
        the end, all of it would wait for `close`."""
        if hasattr(os, "posix_fadvise"):
            start, size = 8 + self.room + self._sent, self.offset - self._sent
            os.posix_fadvise(self.file.fileno(), start, size, os.POSIX_FADV_DONTNEED)
        self._sent = self.offset

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header and flush to disk."""
        text = json.dumps({"__metadata__": dict(metadata), **self.entries}, separators=(",", ":"))
        header = text.encode()
        if len(header) > self.room:
            raise RuntimeError(f"header of {len(header)} bytes does not fit its {self.room} bytes")
        self.file.seek(0)
        self._write(memoryview(struct.pack("<Q", self.room) + header.ljust(self.room)))
        os.fsync(self.file.fileno())
        self.file.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *_exc) -> None:
        self.file.close()
