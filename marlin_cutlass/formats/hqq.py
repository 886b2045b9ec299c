"""HQQ tensors: nibbles with fractional zero points, W = (q - zero) * scale.

W_q uint8 [N*K/g/2, g]: rows are groups along K (axis 1), the first half of them in the high
nibble, the second half in the low one. Kernels here subtract integer zero points exactly, so
fractional ones are refused by name and never rounded; `dequantize_hqq` gives the float weight to
quantise again.
"""

from __future__ import annotations

import torch

from .weight import QuantizedWeight, check_group_size, drop_symmetric


def _codes(W_q: torch.Tensor, n: int, k: int, group_size: int, axis: int, name: str):
    if axis != 1:
        raise ValueError(f"{name}: axis={axis} groups along N; only axis=1 (along K) is supported")
    groups = check_group_size(group_size, k)
    width = k // groups
    if W_q.dtype != torch.uint8 or tuple(W_q.shape) != (n * groups // 2, width):
        raise ValueError(
            f"{name}: W_q has shape {tuple(W_q.shape)} and dtype {W_q.dtype}; uint8"
            f" [{n * groups // 2}, {width}] is required for N={n}, K={k}, group_size={group_size}"
        )
    return torch.cat([W_q >> 4, W_q & 15]), groups  # [N * G, g]


def dequantize_hqq(
    W_q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *,
    shape: tuple[int, int],
    group_size: int,
    axis: int = 1,
) -> torch.Tensor:
    """float32 [N, K] weight of an HQQ layer of `shape` (N, K), to be quantised again."""
    n, k = shape
    codes, _ = _codes(W_q, n, k, group_size, axis, "hqq weight")
    return ((codes.float() - zero.float().view(-1, 1)) * scale.float().view(-1, 1)).view(n, k)


def read_hqq(
    W_q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *,
    shape: tuple[int, int],
    group_size: int,
    axis: int = 1,
    name: str = "hqq weight",
) -> QuantizedWeight:
    """Decode an HQQ layer whose zero points are whole numbers 0..16; refuse any other by value."""
    n, k = shape
    codes, groups = _codes(W_q, n, k, group_size, axis, name)
    zeros = zero.float().view(n, groups)
    bad = (zeros != zeros.round()) | (zeros < 0) | (zeros > 16)
    if bool(bad.any()):
        column, group = (int(v) for v in bad.nonzero()[0])
        raise ValueError(
            f"{name}: zero point {zeros[column, group].item():g} (column {column}, group {group};"
            f" {int(bad.sum())} such) is not an integer in 0..16; fractional zero points are not"
            " supported and not rounded: quantise dequantize_hqq(...) again instead"
        )
    return QuantizedWeight(
        codes.view(n, k).t().contiguous(),
        scale.view(n, groups).t().contiguous(),
        drop_symmetric(zeros.t().to(torch.uint8).contiguous(), None, name),
        group_size,
    )


def from_hqq(
    W_q: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *,
    shape: tuple[int, int],
    group_size: int,
    axis: int = 1,
):
    """One HQQ layer -> `PackedWeight`; arguments and errors as in `read_hqq`."""
    return read_hqq(W_q, scale, zero, shape=shape, group_size=group_size, axis=axis).to_packed()
