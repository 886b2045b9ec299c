"""The torch operators: schemas, checks, CPU and fake implementations, gradients.

`marlin_cutlass::gemm`, `gemm_swiglu` and `gemm_out` are what engines call; `gemm_compact` is `gemm`
with fewer arguments, each of which costs an eager call 0.1-0.3 us. Their CUDA
implementation lives in the launcher library (`csrc/`), which registers itself when the first CUDA
call loads it. They carry no gradient, so that an inference call never enters Python;
`gemm_autograd` is `gemm` with a gradient for a and bias, and `marlin_cutlass.gemm` picks it when a
gradient is needed.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

from .errors import short_dtype, sizes
from .layout import SPARSE_GROUP_SIZES, check_sizes, packed_bytes, sizes_of, stored_group_size
from .packed_weight import PackedWeight
from .reference import (
    column_chunks,
    gemm_reference,
    in_fp32,
    natural_order,
    normalised_weights,
    swiglu,
)

NAMESPACE = "marlin_cutlass"
AUTO = -1  # the dispatch table chooses the kernel
BATCH_INVARIANT = -2  # the kernel does not depend on the number of rows
_WEIGHT = "Tensor packed, Tensor col_scale"
_FORM = "int n, int k, int group_size, bool has_zeros"
_ARGUMENTS = f"Tensor a, {_WEIGHT}, Tensor? bias, Tensor? perm, {_FORM}"
SCHEMAS = (
    f"gemm({_ARGUMENTS}, int variant=-1) -> Tensor",
    f"gemm_autograd({_ARGUMENTS}, int variant=-1) -> Tensor",
    f"gemm_swiglu({_ARGUMENTS}, int variant=-1) -> Tensor",
    f"gemm_out({_ARGUMENTS}, Tensor(a!) out, int variant=-1) -> ()",
    f"gemm_compact(Tensor a, {_WEIGHT}, int form, Tensor? bias=None, Tensor? perm=None, "
    "int variant=-1) -> Tensor",
    f"grad_input(Tensor grad, {_WEIGHT}, Tensor? perm, {_FORM}) -> Tensor",
)
# Name of a variant that every CUDA call must use; read once.
FORCED_KERNEL = os.environ.get("MARLIN_CUTLASS_KERNEL") or None
_REGISTRY = "_marlin_cutlass_registration"


def check_activations(a: Tensor, n: int, k: int, group_size: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless `a` can be multiplied by a K x N weight on `device`."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"a has dtype {short_dtype(a.dtype)}: activations must be float16 or bfloat16 "
            "(the INT4 weight serves both; convert a, the result has its dtype)"
        )
    where = sizes(k, n, group_size)
    if a.dim() < 1 or a.shape[-1] != k:
        raise ValueError(
            f"a has shape {tuple(a.shape)}: the last dimension must be K={k} ({where})"
        )
    if a.device != device:
        raise ValueError(f"a is on {a.device} and the weight on {device}: move one of them")


def is_sparse(total: int, n: int, k: int, group_size: int, has_zeros: bool) -> bool:
    """Whether a packed weight of `total` bytes is 2:4-sparse. The operators take no flag for it:
    the sizes of the two layouts differ for every K x N."""
    if has_zeros or stored_group_size(group_size) not in SPARSE_GROUP_SIZES:
        return False
    return total == packed_bytes(k, n, group_size, False, sparse=True)


def check_bias(bias: Tensor | None, a: Tensor, n: int) -> None:
    """Raises TypeError or ValueError unless bias is None or a floating [N] tensor on a's device."""
    if bias is None:
        return
    if not bias.is_floating_point():
        raise TypeError(f"bias has dtype {short_dtype(bias.dtype)}: it must be floating point")
    if tuple(bias.shape) != (n,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be [N] = ({n},)")
    if bias.device != a.device:
        raise ValueError(f"bias is on {bias.device} and a on {a.device}: move one of them")


def check_out(out: Tensor, a: Tensor, n: int) -> None:
    """Raises TypeError or ValueError unless `out` can take the product in place."""
    if out.dtype != a.dtype:
        raise TypeError(
            f"out has dtype {short_dtype(out.dtype)} and a {short_dtype(a.dtype)}: "
            "they must be equal"
        )
    if tuple(out.shape) != (*a.shape[:-1], n):
        raise ValueError(f"out has shape {tuple(out.shape)}: it must be {(*a.shape[:-1], n)}")
    if out.device != a.device:
        raise ValueError(f"out is on {out.device} and a on {a.device}: move one of them")
    if n > 1 and out.stride(-1) != 1:
        raise ValueError(f"out has column stride {out.stride(-1)}: its rows must be contiguous")


def check_swiglu(n: int) -> None:
    """Raises ValueError unless N columns can be pairs of a gate beside pairs of up."""
    if n % 4:
        raise ValueError(
            f"N={n} must be a multiple of 4 for swiglu: two columns of the gate beside two of up"
        )


def forced_code(kernel: str, batch_invariant: bool, a: Tensor, w: PackedWeight) -> int:
    """The operators' `variant` argument for a named kernel. Raises TypeError for what is no name,
    ValueError for a kernel that cannot run this call."""
    if not isinstance(kernel, str):
        raise TypeError(f"kernel={kernel!r} must be the name of a variant, or None")
    from . import library

    return library.forced_kernel(kernel, batch_invariant, a, w)


def _weight(packed: Tensor, col_scale: Tensor, perm: Tensor | None, *form: int) -> PackedWeight:
    n, k, group_size, has_zeros = form
    check_sizes(k, n, group_size)
    sparse = is_sparse(packed.numel(), n, k, group_size, bool(has_zeros))
    weight = PackedWeight(packed, col_scale, perm, n, k, group_size, bool(has_zeros), sparse=sparse)
    weight.check_shapes()
    return weight


def _gemm_cpu(a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, variant=AUTO):
    weight = _weight(packed, col_scale, perm, n, k, group_size, has_zeros)
    check_activations(a, n, k, group_size, packed.device)
    check_bias(bias, a, n)
    if variant >= 0:
        raise ValueError(f"variant={variant} is a CUDA kernel: the tensors are on {a.device}")
    if variant < BATCH_INVARIANT:
        raise ValueError(f"variant={variant} is neither an index nor {AUTO} or {BATCH_INVARIANT}")
    bias = None if bias is None else bias.to(a.dtype)
    return gemm_reference(a, weight, bias, row_by_row=variant == BATCH_INVARIANT)


def _sizes_of_compact(form: int) -> tuple[int, int, int, bool]:
    """n, k, group_size, has_zeros: as the other operators take them."""
    k, n, group_size, has_zeros = sizes_of(form)
    check_sizes(k, n, group_size)
    return n, k, group_size, has_zeros


def _gemm_compact_cpu(a, packed, col_scale, form, bias=None, perm=None, variant=AUTO):
    return _gemm_cpu(a, packed, col_scale, bias, perm, *_sizes_of_compact(form), variant)


def _gemm_compact_fake(a, packed, col_scale, form, bias=None, perm=None, variant=AUTO):
    return _gemm_fake(a, packed, col_scale, bias, perm, *_sizes_of_compact(form), variant)


def _gemm_swiglu_cpu(a, packed, col_scale, bias, perm, n, *form):
    check_swiglu(n)
    return swiglu(_gemm_cpu(a, packed, col_scale, bias, perm, n, *form))


def _gemm_out_cpu(a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, out, variant=AUTO):
    check_activations(a, n, k, group_size, packed.device)
    check_out(out, a, n)
    out.copy_(_gemm_cpu(a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, variant))


def _gemm_fake(a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, variant=AUTO):
    check_activations(a, n, k, group_size, packed.device)
    check_bias(bias, a, n)
    return a.new_empty((*a.shape[:-1], n))


def _gemm_swiglu_fake(a, packed, col_scale, bias, perm, n, *form):
    check_swiglu(n)
    whole = _gemm_fake(a, packed, col_scale, bias, perm, n, *form)
    return a.new_empty((*whole.shape[:-1], n // 2))


def _gemm_out_fake(
    a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, out, variant=AUTO
):
    check_activations(a, n, k, group_size, packed.device)
    check_bias(bias, a, n)
    check_out(out, a, n)


def _grad_input(grad, packed, col_scale, perm, n, k, group_size, has_zeros):
    """grad [..., N] @ W^T -> [..., K] in grad's dtype, one chunk of columns at a time, sums in
    fp32."""
    weight = _weight(packed, col_scale, perm, n, k, group_size, has_zeros)
    rows = grad.reshape(-1, n)
    total = torch.zeros(rows.shape[0], k, dtype=torch.float32, device=grad.device)
    for first, last in column_chunks(weight):
        columns = slice(first * 64, min(last * 64, n))
        values = normalised_weights(weight, grad.dtype, first, last)[
            :, : columns.stop - columns.start
        ]
        values = (values * col_scale[columns]).to(grad.dtype).float()
        with in_fp32(rows):
            total += rows[:, columns].float() @ values.T
    return natural_order(weight, total.T).T.to(grad.dtype).reshape(*grad.shape[:-1], k)


def _grad_input_fake(grad, packed, col_scale, perm, n, k, group_size, has_zeros):
    return grad.new_empty((*grad.shape[:-1], k))


def _setup_context(ctx, inputs, output) -> None:
    _, packed, col_scale, _, perm, *form, _ = inputs
    ctx.save_for_backward(packed, col_scale, perm)
    ctx.form = form


def _backward(ctx, grad):
    packed, col_scale, perm = ctx.saved_tensors
    grad_a = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.marlin_cutlass.grad_input(grad, packed, col_scale, perm, *ctx.form)
    if ctx.needs_input_grad[3]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).float().sum(0).to(grad.dtype)
    return grad_a, None, None, grad_bias, *(None,) * 6


def _first_call(name: str):
    """The implementation for every device without one of its own.

    That is CUDA until the launcher library is loaded: it registers the real one, which is called
    from then on.
    """

    def call(*args):
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        other = [t for t in tensors if t.layout != torch.strided or t.is_quantized]
        if other:  # never dispatched to the CUDA implementation: loading it would lead back here
            kind = "quantized" if other[0].is_quantized else str(other[0].layout)
            raise TypeError(f"an operand is {kind}: marlin_cutlass takes plain strided tensors")
        devices = {arg.device.type for arg in args if hasattr(arg, "device")}
        if "cuda" not in devices:
            found = ", ".join(sorted(devices))
            raise NotImplementedError(
                f"operands are on {found}: marlin_cutlass runs on CUDA and CPU"
            )
        from . import library

        library.load()
        return getattr(torch.ops.marlin_cutlass, name).default(*args)

    return call


def _register() -> types.ModuleType:
    """Defines the operators once per process, whatever the number of imports of this file."""
    here = str(Path(__file__).resolve())
    known = sys.modules.get(_REGISTRY)
    if known is not None:
        if known.path != here:
            raise ImportError(
                f"marlin_cutlass is already loaded from {known.path}: the copy at {here} cannot "
                "register the same torch operators; keep one of them on sys.path"
            )
        return known
    registry = types.ModuleType(_REGISTRY)
    registry.path = here
    registry.library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS:
        registry.library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _implement(registry)
    sys.modules[_REGISTRY] = registry
    return registry


def _implement(registry: types.ModuleType) -> None:
    library = registry.library
    for name, cpu, fake in (
        ("gemm", _gemm_cpu, _gemm_fake),
        ("gemm_autograd", _gemm_cpu, _gemm_fake),
        ("gemm_swiglu", _gemm_swiglu_cpu, _gemm_swiglu_fake),
        ("gemm_out", _gemm_out_cpu, _gemm_out_fake),
        ("gemm_compact", _gemm_compact_cpu, _gemm_compact_fake),
    ):
        library.impl(name, cpu, "CPU")
        library.impl(name, _first_call(name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    library.impl("grad_input", _grad_input, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::grad_input", _grad_input_fake, lib=library)
    torch.library.register_autograd(
        f"{NAMESPACE}::gemm_autograd", _backward, setup_context=_setup_context, lib=library
    )


_register()

# Overloads, which cost less to call than the packets they belong to.
GEMM = torch.ops.marlin_cutlass.gemm.default
GEMM_AUTOGRAD = torch.ops.marlin_cutlass.gemm_autograd.default
GEMM_SWIGLU = torch.ops.marlin_cutlass.gemm_swiglu.default
GEMM_OUT = torch.ops.marlin_cutlass.gemm_out.default
GEMM_COMPACT = torch.ops.marlin_cutlass.gemm_compact.default
