"""Coordinate descent on codes and scales: what a single sweep of GPTQ leaves on the table.

GPTQ decides each code once, knowing the errors before it but not those behind. Here every code is
looked at again with all others fixed, and replaced where another one lowers the same error; then
every scale is set to its best value for the codes. The error never grows, up to the rounding of
scales. Where columns are coupled (`sensitivity`) codes are taken one by one, in C++ on the host.
"""

from __future__ import annotations

import torch

from .. import host_library
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
    output: torch.Tensor | None = None,
) -> float:
    """Lower tr(R^T H R O), R = wanted - (q - zeros) * scales, by changing q and scales in place.

    wanted: float32 [K, N]. hessian: H, float32 [K, K], positive diagonal. q: uint8 [K, N]. scales,
    zeros: float32 [G, N] of groups of K / G neighbouring rows. keep_zeros: weights that are 0 stay
    so (sparsity). output: O, float32 [N, N], positive definite, which couples the columns; None is
    the unit matrix. Returns tr(R^T H R). Extra memory: 4 K*N floats. LibraryError if columns are
    coupled and there is no C++ compiler.
    """
    size = wanted.shape[0] // scales.shape[0]
    codes = q.view(scales.shape[0], size, -1).float().sub_(zeros.unsqueeze(1))  # steps from zero
    left = wanted - (codes * scales.unsqueeze(1)).view_as(wanted)
    gradient = hessian @ left if output is None else hessian @ left @ output
    move, host = _better_codes, None
    if output is not None:
        move, host = _better_coupled_codes, output.detach().to("cpu", torch.float32).contiguous()
    for _ in range(passes):
        for group, scale in enumerate(scales):
            steps = codes[group]
            for start in range(0, size, BLOCK):
                rows = slice(start, min(start + BLOCK, size))
                at = slice(group * size + rows.start, group * size + rows.stop)
                free = steps[rows] != 0 if keep_zeros else None
                change, spread = move(
                    steps[rows], hessian[at, at], gradient[at], scale, zeros[group], free, host
                )
                left[at] -= change
                gradient.addmm_(hessian[:, at], spread, alpha=-1.0)
            at = slice(group * size, (group + 1) * size)
            shift = _better_scale(steps, hessian[at, at], gradient[at], scale, scale_dtype, output)
            change = steps * shift
            left[at] -= change
            spread = change if output is None else change @ output
            gradient.addmm_(hessian[:, at], spread, alpha=-1.0)
    q.copy_(codes.add_(zeros.unsqueeze(1)).view_as(q))
    return float((left.double() * (hessian @ left)).sum())


def _limits(scale, zero) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest step of each column; those of a group of zeros, with scale 0, stay 0."""
    used = scale != 0
    return torch.where(used, -zero, 0), torch.where(used, MAX_CODE - zero, 0)


def _better_codes(steps, hessian, gradient, scale, zero, free, _output):
    """Replace steps [B, N], where they are `free`, row by row by the best ones; returns the change
    of the weights, twice."""
    gradient = gradient.clone()
    low, high = _limits(scale, zero)
    safe = torch.where(scale != 0, scale, 1)
    change = torch.empty_like(steps)
    for i in range(steps.shape[0]):
        best = steps[i] + gradient[i] / hessian[i, i] / safe
        best = torch.minimum(torch.maximum(best.round_(), low), high)
        if free is not None:
            best = torch.where(free[i], best, steps[i])
        change[i] = (best - steps[i]) * scale
        steps[i] = best
        gradient.addr_(hessian[:, i], change[i], alpha=-1.0)
    return change, change


def _better_coupled_codes(steps, hessian, gradient, scale, zero, free, output):
    """The same code by code, on the host, where `output` lies; returns the change of the weights,
    and that times `output`."""
    columns = [t.cpu().contiguous() for t in (scale, *_limits(scale, zero))]
    # copy=True: gradient is changed on the way, and steps may be a view that is not contiguous.
    values = [t.to("cpu", copy=True).contiguous() for t in (gradient, steps)]
    change = torch.zeros_like(values[1])
    spread = torch.zeros_like(change)
    free = None if free is None else free.to("cpu", torch.uint8).contiguous()
    hessian = hessian.cpu().contiguous()
    host_library.better_codes(hessian, output, *values, *columns, free, change, spread)
    steps.copy_(values[1])
    return change.to(steps.device), spread.to(steps.device)


def _better_scale(steps, hessian, gradient, scale, scale_dtype: torch.dtype, output):
    """Set `scale` [N] of one group to the least error for its codes; returns the difference."""
    slope = (steps * gradient).sum(0)
    if output is None:
        curvature = (steps * (hessian @ steps)).sum(0)
        best = scale + torch.where(curvature > 0, slope / curvature, 0)
    else:  # one after the other, as the solution of a triangular system
        curvature = (steps.t() @ (hessian @ steps)) * output
        diagonal = torch.diagonal(curvature)
        diagonal[diagonal <= 0] = 1.0  # columns without a step: nothing to solve, no 0 / 0
        solve = torch.linalg.solve_triangular
        best = scale + solve(curvature.tril(), slope.unsqueeze(1), upper=False).squeeze(1)
    best = round_mantissa(best, scale_dtype)
    best = torch.where(best * scale > 0, best, scale)  # of the sign that was chosen
    shift = best - scale
    scale.copy_(best)
    return shift
