"""`gemm(..., swiglu=True)`: the CPU operator, the launcher over host memory, and every geometry's
store in the emulator."""

from __future__ import annotations

import pytest
import runtime_cases
import torch
from runtime_cases import SHAPES, weight
from test_emulator_variants import AMPERE, HOPPER, seed_of
from torch.nn import functional

import emulator
from generator.variant import Variant
from marlin_cutlass import fuse_gate_up, gemm, pack_sparse, prune_2_4
from marlin_cutlass.reference import swiglu
from marlin_cutlass.sharding import interleave_pairs

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def close(out, expected):
    """Up to the rounding of silu(gate), which is computed from an approximate exponential, and the
    one behind it."""
    unit = 2.0**-10 if expected.dtype == torch.float16 else 2.0**-7
    assert out.dtype == expected.dtype and out.shape == expected.shape
    # Below 2^-14 fp16 numbers are 2^-24 apart.
    assert torch.allclose(out.float(), expected.float(), rtol=2 * unit, atol=2.0**-23)


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
    for dtype in DTYPES.values():
        a, biases = torch.randn(2, 3, 256).to(dtype), (torch.randn(n), torch.randn(n))
        parts = gemm(a, gate, biases[0]), gemm(a, up, biases[1])
        out = gemm(a, both, interleave_pairs(*biases), swiglu=True)
        assert torch.equal(out, functional.silu(parts[0]) * parts[1])
        empty = gemm(a[:0], both, swiglu=True)
        assert empty.shape == (0, 3, n) and empty.dtype == dtype


def test_sparse_projections_fuse():
    parts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        codes = torch.randint(0, 16, (256, 64), dtype=torch.uint8)
        kept = prune_2_4(torch.rand(64, 256)).t() != 0
        codes = torch.where(kept, codes, 8)
        parts.append(pack_sparse(codes, torch.rand(2, 64).half() * 0.1, group_size=128))
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
    close(whole[3:4], gemm(a[3:4], both, batch_invariant=batch_invariant, swiglu=True))
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
        close(launched(a, both, bias), swiglu(runtime_cases.gemm(a, both, bias)))
        launched(a, both, bias)
        assert (fake.record.n, fake.record.ldc) == (n, n // 2)
    with pytest.raises(ValueError, match="N=98 must be a multiple of 4 for swiglu"):
        launched(torch.randn(1, 256).half(), weight(256, 98))


def test_rows_in_several_launches_lie_behind_each_other(fake, kernels):
    kernels("streamk")
    both, a = weight(256, 96), torch.randn(150, 256).half()
    out = launched(a, both, variant=-2)
    assert fake.record.launches > 1
    close(out, swiglu(runtime_cases.gemm(a, both, variant=-2)))


# ---- the kernels ----


def sparse_names():
    from generator.arch import ARCHS
    from generator.space import default_space

    arch = ARCHS["sm_90a"]
    families = [f for f in arch.families if "sparse" in f]
    return [e.variant.name for f in families for e in default_space(arch, (f,))]


# One format each: the store is the same code in all.
NAMES = [name for name in AMPERE + HOPPER if "_f16_g128_" in name or "_bf16_g64z_" in name]


@pytest.mark.parametrize("name", NAMES + sparse_names()[::3])
def test_every_geometry_stores_what_the_two_steps_give(name):
    variant = Variant.parse(name)
    m, n, k = variant.m_tile // 2 + 3, variant.n_sm + 20, 256
    torch.manual_seed(seed_of(name))
    if variant.sparse:
        codes = torch.where(prune_2_4(torch.rand(n, k)).t() != 0, torch.randint(0, 16, (k, n)), 8)
        scales = torch.rand(k // variant.group_size if variant.group_size > 0 else 1, n).half()
        w = pack_sparse(codes.to(torch.uint8), scales * 0.1, group_size=variant.group_size)
    else:
        w = weight(k, n, variant.group_size, variant.zeros)
    a = (torch.randn(m, k) / 4).to(DTYPES[variant.dtype])
    bias = torch.randn(n)
    options = {"sms": 3, "seed": seed_of(name)}
    plain = emulator.gemm(a, w, name, bias, **options).c
    # C as the launcher allocates it, and rows further apart: aligned to four bytes, no more.
    for ldc, offset in ((None, 0), (n // 2 + 6, 4)):
        close(
            emulator.gemm(a, w, name, bias, swiglu=True, ldc=ldc, c_offset=offset, **options).c,
            swiglu(plain),
        )
