"""Scales and zero points of groups: the grid on which weights are rounded.

All functions take a group slab `w` float32 [..., g, N] (g rows of one group, N columns) and give
scale and zero of shape [..., N]. Codes are 0..15; W ~ (q - zero) * scale. Symmetric scales may be
negative: codes mean -8..7 steps, and the eighth step serves the side that needs it.
"""

from __future__ import annotations

import torch

MAX_CODE = 15
SYMMETRIC_ZERO = 8
MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}  # with the implied one


def round_mantissa(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 scales to the significand of `dtype`, keeping float32's exponent range.

    Packed weights normalise scales by a power of two per column, so a scale too small for fp16
    itself (below 2^-24) is stored without loss; only its significand has to fit.
    """
    if dtype not in MANTISSA_BITS:
        raise TypeError(f"scale_dtype={dtype} is not supported: fp16, bf16 or fp32")
    mantissa, exponent = torch.frexp(scale)
    unit = float(1 << MANTISSA_BITS[dtype])
    return torch.ldexp(torch.round(mantissa * unit) / unit, exponent)


def quantize_codes(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float):
    """Nearest codes as float32 0..15, for scale (and zero) broadcast over the rows of `w`."""
    safe = torch.where(scale != 0, scale, torch.ones_like(scale))
    q = torch.round(w / safe).add_(zero).clamp_(0, MAX_CODE)
    if isinstance(zero, torch.Tensor):
        return torch.where(scale != 0, q, zero.expand_as(q))  # (q - z) * 0 = 0 whatever q is
    return torch.where(scale != 0, q, torch.full_like(q, zero))


def symmetric_grid(w: torch.Tensor, scale_dtype: torch.dtype, clip: float | torch.Tensor = 1.0):
    """Scale 2 * clip * max|w| / 15 with zero 8 (paper.md a.7): codes 0..15 mean -8..7.

    The largest weight of a group lies half a step beyond the top code, so that positive and
    negative extremes are treated alike up to half a step; all-positive groups lose no range. A
    negative `clip` gives a negative scale.
    """
    top = w.abs().amax(-2)
    return round_mantissa(top * clip * (2.0 / MAX_CODE), scale_dtype), float(SYMMETRIC_ZERO)


def asymmetric_grid(w: torch.Tensor, scale_dtype: torch.dtype, clip: float | torch.Tensor = 1.0):
    """Scale and integer zero point of [min(w, 0), max(w, 0)] * clip; zero is in 0..15."""
    low, high = w.amin(-2).clamp_max(0) * clip, w.amax(-2).clamp_min(0) * clip
    scale = round_mantissa((high - low) / MAX_CODE, scale_dtype)
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = torch.round(-low / safe).clamp_(0, MAX_CODE)
    # An empty group gets zero point 8: the symmetric one, so that it never forces zero points.
    return scale, torch.where(scale > 0, zero, torch.full_like(zero, SYMMETRIC_ZERO))


def make_grid(w, symmetric: bool, scale_dtype: torch.dtype, clip: float | torch.Tensor = 1.0):
    """`symmetric_grid` or `asymmetric_grid`."""
    return (symmetric_grid if symmetric else asymmetric_grid)(w, scale_dtype, clip)


def _row_zero(zero):
    return zero.unsqueeze(-2) if isinstance(zero, torch.Tensor) else zero


def fake_quantize(w: torch.Tensor, scale: torch.Tensor, zero) -> torch.Tensor:
    """Round `w` [..., g, N] to its grid and back; scale and zero are [..., N]."""
    row_scale, row_zero = scale.unsqueeze(-2), _row_zero(zero)
    return (quantize_codes(w, row_scale, row_zero) - row_zero) * row_scale


def clip_candidates(steps: int = 100, max_shrink: float = 0.75) -> list[float]:
    """Clipping ratios 1.00, 0.99 ... 0.25 of the GPTQ recipe (paper.md a.7: 76 of them)."""
    return [1.0 - i / steps for i in range(int(max_shrink * steps) + 1)]


SEARCH_ELEMENTS = 1 << 19  # weights tried at a time: enough to hide the call overhead, fits L2


def search_clip(
    w, symmetric: bool, scale_dtype: torch.dtype, error, candidates=None, signed: bool = True
):
    """Best grid of each column of a group over clipping ratios, of either sign if `signed` (and
    symmetric).

    `error(delta)` maps rounding errors [C, g, N] to costs [C, N]: the sum of squares for an MSE
    search, the GPTQ-weighted error inside GPTQ. The first candidate, unclipped, wins ties.
    """
    ratios = torch.tensor(candidates or clip_candidates(), device=w.device).view(-1, 1)
    if symmetric and signed:
        ratios = torch.cat((ratios, -ratios))
    step = max(1, SEARCH_ELEMENTS // w.numel())
    best = best_scale = best_zero = None
    for chunk in ratios.split(step):
        scale, zero = make_grid(w, symmetric, scale_dtype, chunk)  # [C, N]
        cost, index = error(fake_quantize(w, scale, zero) - w).min(0, keepdim=True)
        scale = scale.gather(0, index)[0]
        zero = zero if symmetric else zero.gather(0, index)[0]
        if best is None:
            best, best_scale, best_zero = cost[0], scale, zero
            continue
        better = cost[0] < best
        best = torch.where(better, cost[0], best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = zero if symmetric else torch.where(better, zero, best_zero)
    return best_scale, best_zero
