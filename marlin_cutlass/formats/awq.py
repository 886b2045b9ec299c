"""AWQ checkpoints of AutoAWQ, version "gemm".

qweight int32 [K, N/8] and qzeros int32 [G, N/8], both packed along N with the interleave
0 2 4 6 1 3 5 7; scales [G, N]. Zero points are stored as they are (0..15).
"""

from __future__ import annotations

import torch

from .bits import AWQ_ORDER, unpack_nibbles
from .weight import QuantizedWeight, check_group_size, check_scales, drop_symmetric


def read_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    group_size: int,
    name: str = "awq weight",
) -> QuantizedWeight:
    """Decode one AWQ layer (GEMM version). qzeros=None is a symmetric file without zero points."""
    if qweight.dim() != 2:
        raise ValueError(f"{name}: qweight has shape {tuple(qweight.shape)}; [K, N/8] is required")
    q = unpack_nibbles(qweight, 1, AWQ_ORDER)
    k, n = q.shape
    groups = check_group_size(group_size, k)
    check_scales(scales, groups, n, f"{name}: scales")
    zeros = None
    if qzeros is not None:
        if tuple(qzeros.shape) != (groups, n // 8):
            raise ValueError(
                f"{name}: qzeros has shape {tuple(qzeros.shape)}; [{groups}, {n // 8}] is required"
            )
        zeros = unpack_nibbles(qzeros, 1, AWQ_ORDER)
    return QuantizedWeight(q, scales, drop_symmetric(zeros, None, name), group_size)


def from_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    group_size: int,
):
    """One AWQ layer -> `PackedWeight`; arguments and errors as in `read_awq`."""
    return read_awq(qweight, qzeros, scales, group_size=group_size).to_packed()
