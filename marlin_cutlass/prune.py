"""Pruning to 2:4: which two of each four weights along K stay."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 4
BLOCK = 128  # columns that SparseGPT compensates before it updates the rest at once
METHODS = ("magnitude", "sparsegpt")
SPARSITIES = (None, "2:4")


def prune_2_4(
    weight: Tensor,
    method: str = "magnitude",
    *,
    inputs: Tensor | Iterable[Tensor] | None = None,
    hessian: Tensor | None = None,
    percdamp: float = 0.01,
) -> Tensor:
    """`weight` [N, K] (as in `nn.Linear`) with two of each four values along K set to zero.

    method: "magnitude" keeps the two larger ones, of equal ones the first. "sparsegpt" (Frantar &
    Alistarh 2023) drops those that cost least output error and lets the later columns make up for
    it; it needs exactly one of inputs (activations [..., K]) and hessian (float32 [K, K], 2 x x^T).
    percdamp: damping of the Hessian as a fraction of its mean diagonal.

    Returns a new tensor of the same dtype. Raises TypeError or ValueError naming the argument.
    """
    from .quantize import check_weight, needed_hessian

    check_weight(weight)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: one of {', '.join(METHODS)}")
    if weight.shape[1] % CHUNK:
        raise ValueError(f"K={weight.shape[1]} is not a multiple of 4: 2:4 sparsity counts fours")
    if method == "magnitude":
        if inputs is not None or hessian is not None:
            raise ValueError("method='magnitude' takes neither inputs= nor hessian=")
        return torch.where(magnitude_mask(weight), weight, torch.zeros_like(weight))
    return _sparsegpt(weight, needed_hessian(method, weight.shape[1], inputs, hessian), percdamp)


def check_sparsity(
    sparsity: str | None, k: int, group_size: int, symmetric: bool, act_order: bool | str = False
) -> None:
    """Raises ValueError, or TypeError, unless such a K-deep weight can have the sparsity."""
    from .layout import sparse_block_bytes

    if sparsity not in SPARSITIES:
        raise ValueError(f"sparsity={sparsity!r} is unknown: '2:4' or None")
    if sparsity is None:
        return
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size={group_size!r} must be an int")
    sparse_block_bytes(group_size)
    if not symmetric:
        raise ValueError("sparsity='2:4' needs symmetric=True: a zero must have the code 8")
    if act_order:
        raise ValueError(f"act_order={act_order!r}: sparsity='2:4' needs the natural order")
    if k % CHUNK:
        raise ValueError(f"K={k} is not a multiple of 4: 2:4 sparsity counts fours")


def magnitude_mask(weight: Tensor) -> Tensor:
    """bool of the shape of `weight` [..., K]: the two larger of each four, of equal ones the
    first."""
    return _keep(weight.abs().float())


def saliency_mask(weight: Tensor, diagonal: Tensor) -> Tensor:
    """As `magnitude_mask`, by SparseGPT's cost of dropping a value: its square over that of the
    diagonal [K] of the inverse Hessian's factor."""
    return _keep((weight / diagonal).square())


def _keep(score: Tensor) -> Tensor:
    """Mask of the two largest of each four along the last dimension; ties go to the first."""
    fours = score.view(*score.shape[:-1], -1, CHUNK)
    best = fours.sort(dim=-1, descending=True, stable=True).indices[..., : CHUNK // 2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, best, True).view_as(score)


def _sparsegpt(weight: Tensor, hessian: Tensor, percdamp: float) -> Tensor:
    from .quantize.gptq import _silence_dead
    from .quantize.hessian import inverse_factor

    hessian = hessian.to(weight.device, torch.float32).clone()
    _silence_dead(hessian)
    factor = inverse_factor(hessian, percdamp)  # upper, (H + damp)^-1 = U^T U
    w = weight.detach().float().clone()
    k = w.shape[1]
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = torch.zeros_like(w[:, start:stop])
        for first in range(start, stop, CHUNK):
            four = slice(first, first + CHUNK)
            keep = saliency_mask(w[:, four], torch.diagonal(factor)[four])
            for i in range(first, first + CHUNK):
                dropped = torch.where(keep[:, i - first], 0.0, w[:, i])
                error = dropped / factor[i, i]
                errors[:, i - start] = error
                w[:, i + 1 : stop] -= torch.outer(error, factor[i, i + 1 : stop])
                w[:, i] -= dropped
        w[:, stop:] -= errors @ factor[start:stop, stop:]
    return w.to(weight.dtype)
