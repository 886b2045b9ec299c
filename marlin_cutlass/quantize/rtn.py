"""Round to nearest: no data, optionally with the clipping that minimises the squared error."""

from __future__ import annotations

import torch

from ..formats.weight import QuantizedWeight, check_group_size
from .grid import make_grid, quantize_codes, search_clip


def all_finite(weight: torch.Tensor) -> bool:
    """No NaN and no infinity, without a temporary of the weight's size (aminmax passes NaN on)."""
    low, high = torch.aminmax(weight)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _squares(delta: torch.Tensor) -> torch.Tensor:
    return delta.square().sum(-2)


def quantize_rtn(
    weight: torch.Tensor,
    group_size: int = 128,
    *,
    symmetric: bool = True,
    clip: str | None = None,
    signed_scales: bool = True,
    scale_dtype: torch.dtype = torch.float16,
    sparse: bool = False,
) -> QuantizedWeight:
    """Quantise `weight` [N, K] (out_features, in_features), one group after the other.

    clip: None keeps the largest weight, "mse" searches ratios 1.00 ... 0.25 per group and column,
    of either sign if signed_scales (symmetric only).
    sparse: the weight has 2:4 sparsity, and is to be packed as such.
    Extra memory is one group slab in float32 besides the result. Errors: ValueError / TypeError.
    """
    if clip not in (None, "mse"):
        raise ValueError(f"clip={clip!r} is unknown for rtn: None or 'mse'")
    n, k = weight.shape
    groups = check_group_size(group_size, k)
    size = k // groups
    q = torch.empty((k, n), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((groups, n), dtype=torch.float32, device=weight.device)
    zeros = None if symmetric else torch.empty_like(scales, dtype=torch.uint8)
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        w = weight[:, rows].t().float().contiguous()  # [g, N]
        if clip == "mse":
            scale, zero = search_clip(w, symmetric, scale_dtype, _squares, signed=signed_scales)
        else:
            scale, zero = make_grid(w, symmetric, scale_dtype)
        q[rows] = quantize_codes(w, scale, zero).to(torch.uint8)
        scales[group] = scale
        if zeros is not None:
            zeros[group] = zero.to(torch.uint8)
    return QuantizedWeight(q, scales, zeros, group_size, sparse=sparse)
