"""Coordinate descent on codes and scales: what a single sweep of GPTQ leaves on the table.

GPTQ decides each code once, knowing the errors before it but not those behind. Here every code is
looked at again with all others fixed, and replaced where another one lowers the same error; then
every scale is set to its best value for the codes. The error never grows, up to the rounding of
scales.
"""

from __future__ import annotations

import torch

from .grid import MAX_CODE, round_mantissa

BLOCK = 128  # rows whose changes are applied lazily to the rest


def refine(
    wanted: torch.Tensor,
    hessian: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    *,
    passes: int,
    scale_dtype: torch.dtype,
    keep_zeros: bool = False,
) -> float:
    """Lower tr(R^T H R), R = wanted - (q - zeros) * scales, by changing q and scales in place.

    wanted: float32 [K, N]. hessian: float32 [K, K], positive diagonal. q: uint8 [K, N]. scales,
    zeros: float32 [G, N] of groups of K / G neighbouring rows. keep_zeros: weights that are 0 stay
    so (sparsity). Returns the error. Extra memory: 4 K*N floats.
    """
    size = wanted.shape[0] // scales.shape[0]
    codes = q.view(scales.shape[0], size, -1).float().sub_(zeros.unsqueeze(1))  # steps from zero
    left = wanted - (codes * scales.unsqueeze(1)).view_as(wanted)
    gradient = hessian @ left
    for _ in range(passes):
        for group, scale in enumerate(scales):
            steps = codes[group]
            for start in range(0, size, BLOCK):
                rows = slice(start, min(start + BLOCK, size))
                at = slice(group * size + rows.start, group * size + rows.stop)
                free = steps[rows] != 0 if keep_zeros else None
                change = _better_codes(
                    steps[rows], hessian[at, at], gradient[at].clone(), scale, zeros[group], free
                )
                left[at] -= change
                gradient.addmm_(hessian[:, at], change, alpha=-1.0)
            at = slice(group * size, (group + 1) * size)
            shift = _better_scale(steps, hessian[at, at], gradient[at], scale, scale_dtype)
            change = steps * shift
            left[at] -= change
            gradient.addmm_(hessian[:, at], change, alpha=-1.0)
    q.copy_(codes.add_(zeros.unsqueeze(1)).view_as(q))
    return float((left.double() * (hessian @ left)).sum())


def _better_codes(steps, hessian, gradient, scale, zero, free) -> torch.Tensor:
    """Replace steps [B, N], where they are `free`, row by row by the best ones; returns the change
    of the weights."""
    used = scale != 0  # a group of zeros has nothing to choose: its steps stay 0
    low, high = torch.where(used, -zero, 0), torch.where(used, MAX_CODE - zero, 0)
    safe = torch.where(used, scale, 1)
    change = torch.empty_like(steps)
    for i in range(steps.shape[0]):
        best = steps[i] + gradient[i] / hessian[i, i] / safe
        best = torch.minimum(torch.maximum(best.round_(), low), high)
        if free is not None:
            best = torch.where(free[i], best, steps[i])
        change[i] = (best - steps[i]) * scale
        steps[i] = best
        gradient.addr_(hessian[:, i], change[i], alpha=-1.0)
    return change


def _better_scale(steps, hessian, gradient, scale, scale_dtype: torch.dtype) -> torch.Tensor:
    """Set `scale` [N] of one group to the least error for its codes; returns the difference."""
    curvature = (steps * (hessian @ steps)).sum(0)
    slope = (steps * gradient).sum(0)
    best = scale + torch.where(curvature > 0, slope / curvature, torch.zeros_like(scale))
    best = round_mantissa(best, scale_dtype)
    best = torch.where(best * scale > 0, best, scale)  # of the sign that was chosen
    shift = best - scale
    scale.copy_(best)
    return shift
