"""Safetensors files read by header and written as a stream, whatever the size of the tensors.

The writer leaves room for the header, appends tensors as they come and fills the header in at the
end, padded with spaces (which the format allows): one tensor in memory at a time.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

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
ALIGN = 64


class TensorInfo(NamedTuple):
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # absolute file offset
    stop: int


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a file, without reading data; ValueError for a damaged file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file (header of {length} bytes)")
        try:
            entries = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} has a damaged header: {error}") from None
    metadata = entries.pop("__metadata__", {})
    tensors = {}
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {entry['dtype']}, not supported")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop > size:
            raise ValueError(f"{path} is cut short: tensor {name} ends at {stop} of {size} bytes")
        tensors[name] = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    return tensors, metadata


class StreamWriter:
    """Appends tensors to a new safetensors file; `close` writes the header.

    `names`: how many tensors at most, and `name_bytes` the length of all their names: room for the
    header. A context manager; an exception leaves an unreadable file for the caller to delete.
    """

    def __init__(self, path: Path, names: int, name_bytes: int, metadata_bytes: int) -> None:
        # 120 bytes hold dtype, a 4-D shape, two 13-digit offsets and the JSON around them.
        room = 64 + 120 * names + name_bytes + metadata_bytes
        self.room = -(-room // ALIGN) * ALIGN + ALIGN - 8
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self.file.seek(8 + self.room)
        self.entries: dict[str, dict] = {}
        self.offset = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one CPU tensor."""
        if name in self.entries:
            raise ValueError(f"tensor {name} is written twice")
        data = tensor.detach().contiguous()
        size = data.numel() * data.element_size()
        if size:
            self.file.write(memoryview(data.view(-1).view(torch.uint8).numpy()))
        self.entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.offset, self.offset + size],
        }
        self.offset += size

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header and flush to disk."""
        text = json.dumps({"__metadata__": dict(metadata), **self.entries}, separators=(",", ":"))
        header = text.encode()
        if len(header) > self.room:
            raise RuntimeError(f"header of {len(header)} bytes does not fit its {self.room} bytes")
        self.file.seek(0)
        self.file.write(struct.pack("<Q", self.room) + header.ljust(self.room))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *_exc) -> None:
        self.file.close()
