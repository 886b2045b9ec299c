"""`gemm(..., swiglu=True)`: the CPU operator, the launcher over host memory, and every geometry's
store in the emulator."""

from __future__ import annotations

import pytest
import runtime_cases
import torch
from emulator_cases import make_case
from reference import check_swiglu
from runtime_cases import SHAPES, weight
from test_emulator_variants import AMPERE, HOPPER, declared, seed_of
from test_sparse import scales_for, sparse_codes
from torch.nn import functional

from generator.variant import Variant
from marlin_cutlass import fuse_gate_up, gemm, pack_sparse
from marlin_cutlass.reference import swiglu
from marlin_cutlass.sharding import interleave_pairs

DTYPES = (torch.float16, torch.bfloat16)


def projections(k=256, n=48, **kind):
    """A gate and an up projection of one form; with act-order, of one order."""
    gate = weight(k, n, **kind)
    up = weight(k, n, **kind)
    up.perm = gate.perm
    return gate, up


# ---- the function ----


@pytest.mark.parametrize("n", [2, 48, 192])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_two_projections_and_their_product_in_one_call(group_size, zeros, n):
    gate, up = projections(n=n, group_size=group_size, zeros=zeros, act_order=group_size == 128)
    both = fuse_gate_up(gate, up)
    assert both.shape == (256, 2 * n)
    for dtype in DTYPES:
        a, biases = torch.randn(2, 3, 256).to(dtype), (torch.randn(n), torch.randn(n))
        parts = gemm(a, gate, biases[0]), gemm(a, up, biases[1])
        out = gemm(a, both, interleave_pairs(*biases), swiglu=True)
        assert torch.equal(out, functional.silu(parts[0]) * parts[1])
        empty = gemm(a[:0], both, swiglu=True)
        assert empty.shape == (0, 3, n) and empty.dtype == dtype


def test_sparse_projections_fuse():
    codes, scales = (sparse_codes(256, 64, seed) for seed in (1, 2)), scales_for(256, 64, 128)
    parts = [pack_sparse(q, scales, group_size=128) for q in codes]
    a = torch.randn(5, 256).half()
    expected = functional.silu(gemm(a, parts[0])) * gemm(a, parts[1])
    assert torch.equal(gemm(a, fuse_gate_up(*parts), swiglu=True), expected)


def test_gradients_are_those_of_the_two_steps():
    gate, up = projections()
    a = torch.randn(4, 256).half()
    grads = []
    for fused in (True, False):
        x, bias = a.clone().requires_grad_(), torch.randn(96, generator=torch.manual_seed(3))
        bias.requires_grad_()
        both = fuse_gate_up(gate, up)
        out = gemm(x, both, bias, swiglu=True) if fused else swiglu(gemm(x, both, bias))
        out.float().pow(2).sum().backward()
        grads.append((x.grad, bias.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads))
    assert grads[0][0].abs().sum() > 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_it_is_what_batch_invariance_promises(batch_invariant):
    both = fuse_gate_up(*projections())
    a = torch.randn(9, 256).half()
    whole = gemm(a, both, batch_invariant=batch_invariant, swiglu=True)
    check_swiglu(whole[3:4], gemm(a[3:4], both, batch_invariant=batch_invariant, swiglu=True))
    if batch_invariant:
        assert torch.equal(whole[3:4], gemm(a[3:4], both, batch_invariant=True, swiglu=True))


def test_what_does_not_fit_is_refused():
    a = torch.randn(1, 256).half()
    with pytest.raises(ValueError, match="N=50 must be a multiple of 4 for swiglu"):
        gemm(a, weight(256, 50), swiglu=True)
    with pytest.raises(ValueError, match="out= is not taken with swiglu=True"):
        gemm(a, weight(256, 96), out=torch.empty(1, 48).half(), swiglu=True)
    with pytest.raises(ValueError, match="gate has N=48 and up N=64: they must be equal and even"):
        fuse_gate_up(weight(256, 48), weight(256, 64))
    with pytest.raises(ValueError, match="equal and even"):
        fuse_gate_up(weight(256, 33), weight(256, 33))
    with pytest.raises(ValueError, match="cannot be fused: group_size differs"):
        fuse_gate_up(weight(256, 48, 64), weight(256, 48, 128))


def test_under_autocast_the_result_has_its_dtype():
    both = fuse_gate_up(*projections())
    a = torch.randn(3, 256)
    with torch.autocast("cpu", torch.bfloat16):
        out = gemm(a, both, swiglu=True)
    assert torch.equal(out, gemm(a.bfloat16(), both, swiglu=True))


def test_a_collective_kernel_is_followed_by_the_second_step(monkeypatch):
    from marlin_cutlass import collective

    product = torch.randn(3, 96).half()
    monkeypatch.setattr(collective, "is_collective", lambda name: name == "collective")
    monkeypatch.setattr(collective, "gemm", lambda *args: product)
    out = gemm(torch.randn(3, 256).half(), weight(256, 96), kernel="collective", swiglu=True)
    assert torch.equal(out, swiglu(product))


def test_the_operator_passes_torchs_own_checks():
    both = fuse_gate_up(*projections())
    form = (both.packed, both.col_scale, None, None, both.n, both.k, 128, False)
    op = torch.ops.marlin_cutlass.gemm_swiglu.default
    torch.library.opcheck(op, (torch.randn(2, 4, 256).half(), *form))
    compiled = torch.compile(lambda a: gemm(a, both, swiglu=True), backend="eager", fullgraph=True)
    a = torch.randn(3, 256).half()
    assert torch.equal(compiled(a), gemm(a, both, swiglu=True))
    meta = gemm(a.to("meta"), both.to("meta"), swiglu=True)
    assert meta.shape == (3, 48)


# ---- the launcher ----


def launched(a, w, bias=None, variant=-1):
    form = (a, w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros)
    return torch.ops.marlin_cutlass_host.gemm_swiglu(*form, variant)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_launch_stores_half_of_the_columns(fake, kernels, shape):
    kernels(shape)
    for n, m in ((96, 5), (4, 1), (260, 3)):
        both, bias = weight(256, n), torch.randn(n)
        a = torch.randn(m, 256).half()
        plain = runtime_cases.gemm(a, both, bias)
        check_swiglu(launched(a, both, bias), swiglu(plain))
        assert (fake.record.n, fake.record.ldc) == (n, n // 2)
    with pytest.raises(ValueError, match="N=98 must be a multiple of 4 for swiglu"):
        launched(torch.randn(1, 256).half(), weight(256, 98))


def test_rows_in_several_launches_lie_behind_each_other(fake, kernels):
    kernels("streamk")
    both, a = weight(256, 96), torch.randn(150, 256).half()
    out = launched(a, both, variant=-2)
    assert fake.record.launches > 1
    check_swiglu(out, swiglu(runtime_cases.gemm(a, both, variant=-2)))


# ---- the kernels ----


# A format or two each: the store is the same code in all.
NAMES = [name for name in AMPERE + HOPPER if "_f16_g128_" in name or "_bf16z_g64_" in name]
SPARSE = declared("sparse") + declared("hopper_sparse")


@pytest.mark.parametrize("name", NAMES + SPARSE[::3])
def test_every_geometry_stores_what_the_two_steps_give(name):
    variant = Variant.parse(name)
    n, seed = variant.n_sm + 20, seed_of(name)
    case = make_case(variant, variant.m_tile // 2 + 3, n, 256, seed)
    plain = case.run(sms=3, seed=seed).c
    assert plain.isfinite().all()
    # C as the launcher allocates it, and rows further apart: aligned to four bytes, no more.
    for ldc, offset in ((None, 0), (n // 2 + 6, 4)):
        options = {"ldc": ldc, "c_offset": offset, "sms": 3, "seed": seed}
        check_swiglu(case.run(swiglu=True, **options).c, swiglu(plain))
