"""Quantisers: one weight (`quantize`), one layer's codes (`quantize_weight`), a model."""

from __future__ import annotations

import sys
import types

import torch

from ..formats.weight import QuantizedWeight
from .gptq import GptqOptions, quantize_gptq
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
    samples = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    hessian = Moments(k, samples[0].device if samples else "cpu")
    for x in samples:
        hessian.add(x)
    if not hessian.tokens:
        raise ValueError("inputs holds no calibration tokens")
    return hessian.matrix


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
) -> QuantizedWeight:
    """Quantise `weight` [N, K] (torch's out, in) to codes; arguments as in `quantize`."""
    check_weight(weight)
    weight = weight.detach()  # a Parameter too
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: one of {', '.join(METHODS)}")
    if method == "rtn":
        if act_order:
            raise ValueError("act_order needs method='gptq': rounding to nearest has no order")
        clip = "mse" if clip in ("mse", True) else None if clip in ("auto", None, False) else clip
        return quantize_rtn(
            weight, group_size, symmetric=symmetric, clip=clip, scale_dtype=scale_dtype
        )
    if (hessian is None) == (inputs is None):
        raise ValueError("method='gptq' needs exactly one of inputs= and hessian=")
    if hessian is None:
        hessian = _hessian_of(inputs, weight.shape[1])
    if clip not in ("auto", None, True, False):
        raise ValueError(f"clip={clip!r} is unknown for gptq: True, False or 'auto' (True)")
    options = GptqOptions(
        group_size, symmetric, clip in ("auto", True), percdamp, act_order, scale_dtype
    )
    return quantize_gptq(weight, hessian, options)[0]


def quantize(
    weight: torch.Tensor,
    method: str = "rtn",
    *,
    sparsity: str | None = None,
    prune: str = "magnitude",
    **options,
):
    """Quantise one weight [N, K] (as in `nn.Linear.weight`) to a `PackedWeight`.

    method: "rtn" (round to nearest, no data) or "gptq" (needs `inputs`, activations [..., K] or a
    list of them, or `hessian` [K, K]).
    group_size: 32, 64, multiples of 128, or -1. symmetric: False adds integer zero points.
    clip: rtn: "mse" or None (default); gptq: True (default, by GPTQ-weighted error) or False.
    percdamp: damping as a fraction of the mean diagonal (gptq). act_order: True reorders rows by
    input energy (activations are gathered at run time), "static" only orders the work (no gather).
    scale_dtype: significand that scales are rounded to; use torch.bfloat16 for bf16 models.
    sparsity: "2:4" prunes two of each four weights along K before they are rounded to nearest and
    packs for sparse tensor cores (symmetric, group sizes 64, multiples of 128, -1). prune:
    "magnitude" or "sparsegpt" (which needs `inputs` or `hessian`), see `prune_2_4`.

    Errors: ValueError / TypeError naming argument, value and rule.
    """
    if sparsity is not None:
        return _quantize_sparse(weight, method, sparsity, prune, options)
    return quantize_weight(weight, method, **options).to_packed()


def _quantize_sparse(weight, method: str, sparsity: str, prune: str, options: dict):
    from ..prune import prune_2_4
    from ..sparse import pack_sparse

    if sparsity != "2:4":
        raise ValueError(f"sparsity={sparsity!r} is unknown: '2:4' or None")
    if method != "rtn":
        raise ValueError(f"sparsity='2:4' needs method='rtn', not {method!r}")
    if not options.get("symmetric", True):
        raise ValueError("sparsity='2:4' needs symmetric=True: a zero must have the code 8")
    data = {key: options.pop(key) for key in ("inputs", "hessian") if key in options}
    codes = quantize_weight(prune_2_4(weight, prune, **data), "rtn", **options)
    return pack_sparse(codes.q, codes.scales, group_size=codes.group_size)


class _Callable(types.ModuleType):
    """`marlin_cutlass.quantize` is this module and the function of that name at once."""

    def __call__(self, weight: torch.Tensor, method: str = "rtn", **options):
        return quantize(weight, method, **options)


# Python binds the submodule to the package's attribute whenever it is imported first.
sys.modules[__name__].__class__ = _Callable
