"""Pruning to 2:4: which two of each four weights along K stay."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 4
BLOCK = 128  # columns that SparseGPT compensates before it updates the rest at once
METHODS = ("magnitude", "sparsegpt")


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
    from .quantize import _hessian_of, check_weight

    check_weight(weight)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: one of {', '.join(METHODS)}")
    if weight.shape[1] % CHUNK:
        raise ValueError(f"K={weight.shape[1]} is not a multiple of 4: 2:4 sparsity counts fours")
    if method == "magnitude":
        if inputs is not None or hessian is not None:
            raise ValueError("method='magnitude' takes neither inputs= nor hessian=")
        return torch.where(_keep(weight.abs().float()), weight, torch.zeros_like(weight))
    if (hessian is None) == (inputs is None):
        raise ValueError("method='sparsegpt' needs exactly one of inputs= and hessian=")
    k = weight.shape[1]
    if hessian is None:
        hessian = _hessian_of(inputs, k)
    if tuple(hessian.shape) != (k, k):
        raise ValueError(f"hessian has shape {tuple(hessian.shape)}; [{k}, {k}] is required")
    return _sparsegpt(weight, hessian, percdamp)


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
            keep = _keep((w[:, four] / torch.diagonal(factor)[four]).square())
            for i in range(first, first + CHUNK):
                dropped = torch.where(keep[:, i - first], 0.0, w[:, i])
                error = dropped / factor[i, i]
                errors[:, i - start] = error
                w[:, i + 1 : stop] -= torch.outer(error, factor[i, i + 1 : stop])
                w[:, i] -= dropped
        w[:, stop:] -= errors @ factor[start:stop, stop:]
    return w.to(weight.dtype)
