"""Quantisers: one weight (`quantize`), one layer's codes (`quantize_weight`), a model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable

import torch

from ..formats.weight import QuantizedWeight
from ..prune import METHODS as PRUNE_METHODS
from ..prune import check_sparsity, magnitude_mask, prune_2_4
from .gptq import GptqOptions, check_search, quantize_gptq
from .hessian import Moments
from .model import quantize_model
from .report import LayerReport, ModelReport
from .rtn import all_finite, quantize_rtn

METHODS = ("rtn", "gptq")

__all__ = [
    "GptqOptions",
    "Moments",
    "LayerReport",
    "METHODS",
    "ModelReport",
    "quantize",
    "quantize_gptq",
    "quantize_model",
    "quantize_rtn",
    "quantize_weight",
]


def check_weight(weight: torch.Tensor, name: str = "weight") -> None:
    """Refuse anything but a finite floating [N, K] matrix."""
    if not isinstance(weight, torch.Tensor) or not weight.dtype.is_floating_point:
        found = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"{name} is {found}; a floating point tensor is required")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; [out, in] is required")
    if not all_finite(weight):
        raise ValueError(f"{name} holds NaN or infinity")


def _hessian_of(inputs, k: int) -> torch.Tensor:
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs is {type(inputs).__name__}; tensors [..., {k}] are required")
    samples = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for x in samples:
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            found = "a scalar" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"inputs holds {found}; tensors [..., {k}] are required")
    hessian = Moments(k, samples[0].device if samples else "cpu")
    for x in samples:
        hessian.add(x)
    if not hessian.tokens:
        raise ValueError("inputs holds no calibration tokens")
    return hessian.matrix


def needed_hessian(method: str, k: int, inputs, hessian) -> torch.Tensor:
    """The Hessian [K, K] that was given or that follows from `inputs`; exactly one is needed."""
    if (hessian is None) == (inputs is None):
        raise ValueError(f"method={method!r} needs exactly one of inputs= and hessian=")
    if hessian is None:
        return _hessian_of(inputs, k)
    if not isinstance(hessian, torch.Tensor):
        raise TypeError(f"hessian is {type(hessian).__name__}; a tensor [{k}, {k}] is required")
    if tuple(hessian.shape) != (k, k):
        raise ValueError(f"hessian has shape {tuple(hessian.shape)}; [{k}, {k}] is required")
    return hessian


def quantize_weight(
    weight: torch.Tensor,
    method: str = "rtn",
    *,
    group_size: int = 128,
    symmetric: bool = True,
    clip: str | bool | None = "auto",
    inputs: torch.Tensor | list[torch.Tensor] | None = None,
    hessian: torch.Tensor | None = None,
    percdamp: float = 0.1,
    act_order: bool | str = False,
    scale_dtype: torch.dtype = torch.float16,
    sparsity: str | None = None,
    prune: str | None = None,
    refine: int = 4,
    signed_scales: bool = True,
) -> QuantizedWeight:
    """Quantise `weight` [N, K] (torch's out, in) to codes; arguments as in `quantize`."""
    check_weight(weight)
    weight = weight.detach()  # a Parameter too
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: one of {', '.join(METHODS)}")
    k = weight.shape[1]
    check_sparsity(sparsity, k, group_size, symmetric, act_order)
    check_search(refine, signed_scales)
    if prune is not None and (sparsity is None or prune not in PRUNE_METHODS):
        raise ValueError(
            f"prune={prune!r} with sparsity={sparsity!r}: it is one of {', '.join(PRUNE_METHODS)},"
            " and says how to get sparsity='2:4'"
        )
    data = {"inputs": inputs, "hessian": hessian}
    if method == "rtn":
        if act_order:
            raise ValueError("act_order needs method='gptq': rounding to nearest has no order")
        if sparsity is not None:
            weight = prune_2_4(weight, prune or "magnitude", **data)
        clip = "mse" if clip in ("mse", True) else None if clip in ("auto", None, False) else clip
        form = {"symmetric": symmetric, "scale_dtype": scale_dtype, "sparse": sparsity is not None}
        return quantize_rtn(weight, group_size, clip=clip, signed_scales=signed_scales, **form)
    if clip not in ("auto", None, True, False):
        raise ValueError(f"clip={clip!r} is unknown for gptq: True, False or 'auto' (True)")
    search = clip in ("auto", True)
    order = (act_order, scale_dtype, sparsity, refine, signed_scales)
    options = GptqOptions(group_size, symmetric, search, percdamp, *order)
    mask = magnitude_mask(weight) if prune == "magnitude" else None
    return quantize_gptq(weight, needed_hessian(method, k, **data), options, mask)[0]


def quantize(weight: torch.Tensor, method: str = "rtn", **options):
    """Quantise one weight [N, K] (as in `nn.Linear.weight`) to a `PackedWeight`.

    method: "rtn" (round to nearest, no data) or "gptq" (needs `inputs`, activations [..., K] or a
    list of them, or `hessian` [K, K]).
    group_size: 32, 64, multiples of 128, or -1. symmetric: False adds integer zero points.
    clip: rtn: "mse" or None (default); gptq: True (default, by GPTQ-weighted error) or False.
    percdamp: damping as a fraction of the mean diagonal (gptq). act_order: True reorders rows by
    input energy (activations are gathered at run time), "static" only orders the work (no gather).
    refine: passes of coordinate descent over codes and scales after GPTQ, 0 for none.
    signed_scales: the clip search tries symmetric scales of either sign, which serves groups whose
    largest weight is positive.
    scale_dtype: significand that scales are rounded to; use torch.bfloat16 for bf16 models.
    sparsity: "2:4" drops two of each four weights along K and packs for sparse tensor cores
    (symmetric, group sizes 64, multiples of 128, -1, no act_order). prune: which two; "magnitude"
    (the smaller ones: keeps the zeros of a weight that has 2:4 sparsity already; default for rtn)
    or "sparsegpt" (those that cost least output error; default for gptq, which chooses them while
    it rounds; needs `inputs` or `hessian` for rtn, too). With gptq later weights make up for what
    is dropped and rounded; zeros stay zero.

    Errors: ValueError / TypeError naming argument, value and rule.
    """
    return quantize_weight(weight, method, **options).to_packed()


class _Callable(types.ModuleType):
    """`marlin_cutlass.quantize` is this module and the function of that name at once."""

    def __call__(self, weight: torch.Tensor, method: str = "rtn", **options):
        return quantize(weight, method, **options)


# Python binds the submodule to the package's attribute whenever it is imported first.
sys.modules[__name__].__class__ = _Callable
