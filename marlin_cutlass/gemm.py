"""`gemm`: the function users call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import collective, ops, reference
from .packed_weight import PackedWeight


def gemm(
    a: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str | None = None,
    batch_invariant: bool = False,
    swiglu: bool = False,
) -> Tensor:
    """C = a @ W + bias with W[k, n] = (q[k, n] - z) * s, sums in fp32, one rounding.

    a: float16 or bfloat16 [..., K] with any leading shape, also [K] and no rows at all; strided and
    misaligned views are copied where a kernel needs it. Under autocast a is converted to the
    autocast dtype. bias: [N] of any floating dtype. out: [..., N] of a's dtype and contiguous rows,
    written in place and returned; it takes no gradient. kernel: name or geometry of a variant to
    use instead of the table's choice (also MARLIN_CUTLASS_KERNEL); in a checkout with nvcc one that
    is not built is compiled at the first call and cached (MARLIN_CUTLASS_JIT=0: never). Kernels of
    the opt-in family `collective` run on a repacked copy of w (docs/collective.md).
    batch_invariant: the bits of a row do not depend on the other rows or on their number.
    swiglu: w is a gate and an up projection with columns as `fuse_gate_up` lays them; the kernel
    stores silu(gate) * up, each step rounded as in torch, whose silu may differ by a rounding. N
    must be a multiple of 4; out is not taken; where a gradient is needed SwiGLU is a step of its
    own.

    Returns [..., N] (swiglu: [..., N/2]) in a's dtype. Differentiable in a and bias. On the CPU a
    slow reference with the same arithmetic. Raises TypeError or ValueError for operands that do not
    fit, RuntimeError where no kernel is built for the device; a kernel that is named but
    cannot be had, or is not legal for the call, is refused, never replaced.
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(
            f"w must be a PackedWeight (see marlin_cutlass.pack), not {type(w).__name__}"
        )
    if not isinstance(a, Tensor):
        raise _not_a_tensor("a", a)
    # None first: asking whether it is a tensor goes through the metaclass, which takes longer.
    if bias is not None and not isinstance(bias, Tensor):
        raise _not_a_tensor("bias", bias)
    if out is not None and not isinstance(out, Tensor):
        raise _not_a_tensor("out", out)
    on_gpu = a.is_cuda
    device = "cuda" if on_gpu else "cpu"
    if torch.is_autocast_enabled(device) and not a.is_meta:
        a = a.to(torch.get_autocast_dtype(device))
    named = ops.FORCED_KERNEL if kernel is None and on_gpu else kernel
    if swiglu:
        ops.check_swiglu(w.n)
        if out is not None:
            raise ValueError("out= is not taken with swiglu=True: the result is [..., N/2]")
    code = ops.BATCH_INVARIANT if batch_invariant else ops.AUTO
    if named is not None:
        if collective.is_collective(named):
            result = collective.gemm(a, w, named, bias, out, batch_invariant)
            return reference.swiglu(result) if swiglu else result
        code = ops.forced_code(named, batch_invariant, a, w)
    if torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad)):
        if out is not None:
            raise ValueError(
                "out= takes no gradient: call gemm without out, or under torch.no_grad()"
            )
        result = ops.GEMM_AUTOGRAD(*_operands(a, w, bias), code)
        return reference.swiglu(result) if swiglu else result
    if swiglu:
        return ops.GEMM_SWIGLU(*_operands(a, w, bias), code)
    if out is not None:
        ops.GEMM_OUT(*_operands(a, w, bias), out, code)
        return out
    form = w.form
    if form is None:  # sizes of another weight: this operator says which
        return ops.GEMM(*_operands(a, w, bias), code)
    # Arguments that are left out cost nothing.
    if bias is None and w.perm is None and code == ops.AUTO:
        return ops.GEMM_COMPACT(a, w.packed, w.col_scale, form)
    return ops.GEMM_COMPACT(a, w.packed, w.col_scale, form, bias, w.perm, code)


def _operands(a: Tensor, w: PackedWeight, bias: Tensor | None) -> tuple[object, ...]:
    """The first arguments of the operators, but for those of `gemm_compact`."""
    return (a, w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros)


def _not_a_tensor(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
