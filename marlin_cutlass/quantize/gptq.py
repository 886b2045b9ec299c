"""GPTQ with the two changes of the MARLIN paper: group-wise clip search and free sequence lengths.

Rows of the slab are input features (K), columns are outputs (N): every row is quantised for all
columns at once and its error is spread over the rows that follow (Frantar et al., GPTQ, 2022). With
2:4 sparsity two of each four rows become 0 in the same sweep (Frantar & Alistarh, SparseGPT, 2023).
What a sweep in one direction leaves is then searched for better codes and scales, one at a time
(`refine`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats.weight import SYMMETRIC_ZERO, QuantizedWeight, check_group_size
from ..prune import CHUNK, check_sparsity, saliency_mask
from .grid import make_grid, quantize_codes, search_clip
from .hessian import damped_factor
from .refine import refine

BLOCK = 128  # rows whose error is applied lazily to the rest; the paper's block size


def check_search(refine: int, signed_scales: bool) -> None:
    """Raises ValueError or TypeError for what is no number of passes, or no switch."""
    if type(refine) is not int or refine < 0:
        raise ValueError(f"refine={refine!r}: a number of passes from 0 on is required")
    if type(signed_scales) is not bool:
        raise TypeError(f"signed_scales={signed_scales!r}: True or False is required")


@dataclass(frozen=True)
class GptqOptions:
    """percdamp, clip search, order and sparsity of GPTQ, and what follows it; see `quantize`."""

    group_size: int = 128
    symmetric: bool = True
    clip: bool = True
    percdamp: float = 0.1
    act_order: bool | str = False
    scale_dtype: torch.dtype = torch.float16
    sparsity: str | None = None
    refine: int = 4
    signed_scales: bool = True

    def __post_init__(self) -> None:
        check_search(self.refine, self.signed_scales)
        if self.act_order not in (False, True, "static"):
            raise ValueError(f"act_order={self.act_order!r}: False, True or 'static' is required")


class _Grids:
    """Scales and zeros of every group, chosen on weights that already carry earlier errors."""

    def __init__(self, groups: int, n: int, options: GptqOptions, device) -> None:
        self.scales = torch.zeros((groups, n), dtype=torch.float32, device=device)
        self.zeros = torch.full((groups, n), 8.0, dtype=torch.float32, device=device)
        self.options = options

    def choose(self, group: int, w: torch.Tensor, factor: torch.Tensor | None) -> None:
        """Set the grid of `group` from its rows w [g, N]; factor [g, g] weighs the errors."""
        options = self.options
        if options.clip and factor is not None:
            error = _weighted_error(factor)
            scale, zero = search_clip(
                w, options.symmetric, options.scale_dtype, error, signed=options.signed_scales
            )
        else:
            scale, zero = make_grid(w, options.symmetric, options.scale_dtype)
        self.scales[group], self.zeros[group] = scale, zero


def _weighted_error(factor: torch.Tensor):
    """Cost [C, N] of rounding errors delta [C, g, N]: ||U^-T delta||^2 in slices of BLOCK rows.

    The triangular solve gives the errors GPTQ would have to spread. Long groups (256, whole
    columns) use the diagonal blocks only: the cost stays linear in g, at no visible loss.
    """
    eye = torch.eye(min(BLOCK, factor.shape[0]), device=factor.device)
    solvers = []
    for start in range(0, factor.shape[0], BLOCK):
        upper = factor[start : start + BLOCK, start : start + BLOCK]
        rows = upper.shape[0]
        solvers.append(torch.linalg.solve_triangular(upper.t(), eye[:rows, :rows], upper=False))

    def error(delta: torch.Tensor) -> torch.Tensor:
        starts = range(0, factor.shape[0], BLOCK)
        blocks = (delta[:, i : i + s.shape[0]] for i, s in zip(starts, solvers, strict=True))
        return sum((s @ d).square_().sum(1) for s, d in zip(solvers, blocks, strict=True))

    return error


def _static_grids(grids: _Grids, w: torch.Tensor, diagonal: torch.Tensor, size: int) -> None:
    """Grids of natural-order groups, chosen before any error is spread (act_order="static")."""
    for group in range(grids.scales.shape[0]):
        rows = slice(group * size, (group + 1) * size)
        # Without an order there is no factor yet: weigh errors by the input energy alone.
        energy = torch.diag(diagonal[rows].clamp_min(1e-12).rsqrt())
        grids.choose(group, w[rows], energy)


class _Fours:
    """Which rows of each four stay: none is dropped without sparsity, else those of `mask` [K, N],
    or the ones that cost most when the sweep gets there."""

    def __init__(self, options: GptqOptions, mask: torch.Tensor | None, factor) -> None:
        self.sparse, self.mask = options.sparsity is not None, mask
        self.diagonal = torch.diagonal(factor)
        self.kept: torch.Tensor | None = None

    def _choose(self, first: int, w: torch.Tensor) -> torch.Tensor:
        """bool [rows, N] for rows first, first + 1 ... with the values w."""
        rows = slice(first, first + w.shape[0])
        if self.mask is not None:
            return self.mask[rows]
        return saliency_mask(w.t(), self.diagonal[rows]).t()

    def pruned(self, first: int, w: torch.Tensor) -> torch.Tensor:
        """`w` without what would be dropped now: grids need not span it."""
        return torch.where(self._choose(first, w), w, 0.0) if self.sparse else w

    def apply(self, row: int, ahead: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        """`code` of a row, 8 where it is dropped; `ahead`: the values from this row on."""
        if not self.sparse:
            return code
        if row % CHUNK == 0:
            self.kept = self._choose(row, ahead[:CHUNK])
        return torch.where(self.kept[row % CHUNK], code, float(SYMMETRIC_ZERO))


def quantize_gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    options: GptqOptions,
    mask: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> tuple[QuantizedWeight, float]:
    """Quantise `weight` [N, K] for inputs whose second moments are `hessian` float32 [K, K].

    mask: with sparsity, bool [N, K] of the values that stay; None chooses them in the sweep, by
    what dropping them would cost, on weights that carry the errors so far. Either way later rows
    make up for what is dropped, and zeros stay zero. output: float32 [N, N], what `refine` couples
    the columns by.

    Returns the codes and GPTQ's loss (expected squared output error, summed over outputs, per
    token). Extra memory: about 4 K*K + 5 K*N floats. Errors: ValueError / TypeError.
    """
    n, k = weight.shape
    groups = check_group_size(options.group_size, k)
    if tuple(hessian.shape) != (k, k):
        raise ValueError(f"hessian has shape {tuple(hessian.shape)}; [{k}, {k}] is required")
    check_sparsity(options.sparsity, k, options.group_size, options.symmetric, options.act_order)
    size = k // groups
    w = weight.detach().t().float().contiguous()  # [K, N]
    hessian = hessian.to(w.device, torch.float32).clone()
    _silence_dead(hessian)
    grids = _Grids(groups, n, options, w.device)
    order = None
    if options.act_order:
        diagonal = torch.diagonal(hessian)
        order = torch.argsort(diagonal, descending=True, stable=True)
        if options.act_order == "static":
            _static_grids(grids, w, diagonal, size)
        w, hessian = w[order], hessian[order][:, order]
    factor, damped = damped_factor(hessian, options.percdamp)
    row_group = torch.arange(k, device=w.device) // size
    if options.act_order == "static":
        row_group = order // size
    fours = _Fours(options, None if mask is None else mask.t(), factor)
    wanted = w.clone()  # the sweep spreads its errors over w
    q, loss = _sweep(w, factor, grids, row_group, size, options, fours)
    del factor, fours, w
    if options.refine:
        loss = _refined(wanted, damped, q, grids, row_group, options, output)
    return _assemble(q, grids, order, row_group, options), loss


def _refined(wanted, damped, q, grids: _Grids, row_group, options, output) -> float:
    """`refine` on q [K, N] and the scales, in place; returns the loss."""
    codes = q
    if options.act_order == "static":  # rows of a group must be neighbours
        rows = torch.argsort(row_group, stable=True)
        wanted, damped, codes = wanted[rows], damped[rows][:, rows], q[rows]
    error = refine(
        wanted,
        damped,
        codes,
        grids.scales,
        grids.zeros,
        passes=options.refine,
        scale_dtype=options.scale_dtype,
        keep_zeros=options.sparsity is not None,
        output=output,
    )
    if codes is not q:
        q[rows] = codes
    return error / 2  # H holds 2 x x^T


def _silence_dead(hessian: torch.Tensor) -> None:
    """Inputs that were always 0 carry no error: unit diagonal, so that the factor exists.

    NOTE: their weights are kept and rounded to nearest (GPTQ's code zeroes them): calibration may
    have missed inputs that matter later. They do not influence any other row.
    """
    dead = torch.diagonal(hessian) <= 0
    if bool(dead.all()):
        raise ValueError("calibration inputs are all zero: nothing to weigh the errors with")
    hessian[dead, dead] = torch.diagonal(hessian)[~dead].mean()


def _sweep(w, factor, grids: _Grids, row_group, size: int, options: GptqOptions, fours: _Fours):
    """GPTQ's column sweep: returns codes uint8 [K, N] in processing order and the loss."""
    k = w.shape[0]
    groups = row_group.tolist()  # on the host: no wait for the device in the loop
    q = torch.empty_like(w, dtype=torch.uint8)
    loss = torch.zeros((), dtype=torch.float64, device=w.device)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        block, errors = w[start:stop], torch.empty_like(w[start:stop])
        for i in range(stop - start):
            row = start + i
            group = groups[row]
            if options.act_order != "static" and row % size == 0:
                # Groups longer than a block start at block borders, where w is up to date.
                rows = slice(row, row + size)
                grids.choose(group, fours.pruned(row, w[rows]), factor[rows, rows])
            scale, zero = grids.scales[group], grids.zeros[group]
            code = fours.apply(row, block[i:], quantize_codes(block[i], scale, zero))
            q[row] = code.to(torch.uint8)
            error = (block[i] - (code - zero) * scale) / factor[row, row]
            errors[i] = error
            if i + 1 < stop - start:
                block[i + 1 :].addr_(factor[row, row + 1 : stop], error, alpha=-1.0)
        loss += errors.double().square().sum() / 2  # H holds 2 x x^T
        if stop < k:
            w[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1.0)
    return q, float(loss)


def _assemble(q, grids: _Grids, order, row_group, options: GptqOptions) -> QuantizedWeight:
    g_idx = None
    if order is not None:
        natural = torch.empty_like(q)
        natural[order] = q
        q = natural
        if options.act_order is True and grids.scales.shape[0] > 1:
            index = torch.empty_like(row_group)
            index[order] = row_group
            g_idx = index.int()
    zeros = None if options.symmetric else grids.zeros.to(torch.uint8)
    sparse = options.sparsity is not None
    return QuantizedWeight(q, grids.scales, zeros, options.group_size, g_idx, sparse)
