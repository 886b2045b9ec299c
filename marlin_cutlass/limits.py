"""The fastest a call can be: streaming the weights or the tensor cores, whichever is longer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from marlin_cutlass.layout import (
    BLOCK_COLUMNS,
    BLOCK_DEPTH,
    block_bytes,
    ceil_div,
    sparse_block_bytes,
)

SPARSE_SPEED_UP = 2  # of tensor cores that multiply only two of four, by the data sheets


@dataclass(frozen=True)
class DeviceLimits:
    """What one GPU can do at best: measured streaming times and the tensor-core rate.

    stream: (megabytes, us without PDL, us in a PDL chain) of a kernel that only reads the weights
        into shared memory; ascending in megabytes.
    tensor_flops: fp16 FLOP/s of a large dense product.
    source: where and when this was measured.
    """

    stream: tuple[tuple[float, float, float], ...]
    tensor_flops: float
    source: str

    def stream_us(self, megabytes: float, pdl: bool = False) -> float:
        """Time to read `megabytes` from memory, in us: linear between the measured points.

        Below the first point the first segment is continued (start-up cost stays), above the last
        one the last measured rate.
        """
        sizes = [row[0] for row in self.stream]
        times = [row[2 if pdl else 1] for row in self.stream]
        if megabytes >= sizes[-1]:
            return times[-1] * megabytes / sizes[-1]
        hi = min(max(bisect_left(sizes, megabytes), 1), len(sizes) - 1)
        slope = (times[hi] - times[hi - 1]) / (sizes[hi] - sizes[hi - 1])
        return times[hi - 1] + slope * (megabytes - sizes[hi - 1])


# Keyed by a part of the device's name. Measured 2026-11-29 (docs/performance.md).
DEVICE_LIMITS = {
    "H200": DeviceLimits(
        stream=((8.65, 4.1, 2.4), (34.6, 10.3, 8.5), (60.6, 16.5, 14.8), (242.2, 57.6, 56.8)),
        tensor_flops=790e12,
        source="bulk-copy streaming kernel and cuBLAS fp16, NVIDIA H200, driver 580, 2026-11-29",
    ),
}


def device_limits(name: str) -> DeviceLimits | None:
    """The measured limits of the GPU called `name`, or None where nothing was measured."""
    return next((v for key, v in DEVICE_LIMITS.items() if key in name), None)


def packed_bytes(
    n: int, k: int, group_size: int = 128, has_zeros: bool = False, sparse: bool = False
) -> int:
    """Bytes of one packed [k, n] weight: codes, scales and zero points, padding included."""
    blocks = ceil_div(n, BLOCK_COLUMNS) * ceil_div(k, BLOCK_DEPTH)
    width = sparse_block_bytes(group_size) if sparse else block_bytes(group_size, has_zeros)
    return blocks * width


def limit(
    m: int,
    n: int,
    k: int,
    *,
    group_size: int = 128,
    has_zeros: bool = False,
    sparse: bool = False,
    pdl: bool = False,
    device: str = "NVIDIA H200",
) -> float | None:
    """Shortest possible time of one call in us: max(weight streaming, 2 m n k / tensor rate), the
    rate doubled for a 2:4-sparse weight.

    None where the device's limits were not measured.
    """
    limits = device_limits(device)
    if limits is None:
        return None
    stream = limits.stream_us(packed_bytes(n, k, group_size, has_zeros, sparse) / 1e6, pdl)
    rate = limits.tensor_flops * (SPARSE_SPEED_UP if sparse else 1)
    return max(stream, 2.0 * m * n * k / rate * 1e6)
