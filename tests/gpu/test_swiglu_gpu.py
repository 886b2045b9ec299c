"""gemm(..., swiglu=True) on a GPU: every built kernel against its own product in two steps, then
what the store does with extreme gates, rows in several launches, streams and graphs."""

from __future__ import annotations

import pytest
import test_sparse_gpu
import torch
from reference import check_swiglu
from test_gemm_gpu import DEVICE, DTYPES, KERNELS, weight

import marlin_cutlass as mc
from marlin_cutlass import reference
from marlin_cutlass.layout import stored_group_size

pytestmark = pytest.mark.gpu


def sparse_weight(kernel) -> mc.PackedWeight:
    return test_sparse_gpu.weight(640, 204, kernel.group_size)


@pytest.mark.parametrize(
    "kernel",
    KERNELS + test_sparse_gpu.KERNELS or [None],
    ids=lambda k: k.name if k else "none built",
)
def test_every_kernel_stores_what_the_two_steps_give(kernel):
    if kernel is None:
        pytest.skip("no table for this device: run build.py")
    w = (
        sparse_weight(kernel)
        if kernel.sparse
        else weight(640, 204, kernel.group_size, kernel.zeros)
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    for m in {1, kernel.m_tile, 2 * kernel.m_tile + 3}:
        a = torch.randn(m, 640, device=DEVICE, generator=generator).to(DTYPES[kernel.dtype]) / 4
        bias = torch.randn(204, device=DEVICE, generator=generator)
        expected = reference.swiglu(mc.gemm(a, w, bias, kernel=kernel.name))
        poison = torch.full_like(expected, float("nan"))  # the allocator hands its memory on
        del poison
        check_swiglu(mc.gemm(a, w, bias, kernel=kernel.name, swiglu=True), expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_the_tables_choice_is_right(m, dtype):
    w = weight(1024, 1408)
    a = (torch.randn(m, 1024, device=DEVICE) / 8).to(dtype)
    check_swiglu(mc.gemm(a, w, swiglu=True), reference.swiglu(mc.gemm(a, w)))
    invariant = mc.gemm(a, w, batch_invariant=True, swiglu=True)
    assert torch.equal(invariant[:1], mc.gemm(a[:1], w, batch_invariant=True, swiglu=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_extreme_gates_give_what_torch_gives(dtype):
    """Gates from the bias alone: zeros, the ends of both ranges, infinities and NaN."""
    values = [0.0, -0.0, 1e-6, -1e-6, 9.0, -9.0, 30.0, -30.0, 88.0, -88.0, 6e4, -6e4]
    gates = torch.tensor([*values, float("inf"), float("-inf"), float("nan"), 1.0], device=DEVICE)
    ups = torch.linspace(-3, 3, 16, device=DEVICE)
    bias = torch.stack((gates.view(-1, 2), ups.view(-1, 2)), 1).flatten().to(dtype)
    w = mc.pack(
        torch.full((128, 32), 8, dtype=torch.uint8), torch.ones(1, 32).half(), group_size=128
    ).to(DEVICE)
    a = torch.ones(3, 128, dtype=dtype, device=DEVICE)
    out = mc.gemm(a, w, bias, swiglu=True)
    expected = torch.nn.functional.silu(gates.to(dtype)) * ups.to(dtype)
    unit = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    # 1 + exp(88) exceeds 2^126, where the kernel's quotient is zero: silu(-88), -5e-37, is lost in
    # bf16.
    assert torch.allclose(
        out.float(), expected.expand(3, -1).float(), rtol=2 * unit, atol=1e-6, equal_nan=True
    )


def test_a_captured_graph_and_another_stream_give_the_same_bits():
    w, a = weight(1024, 1408), torch.randn(16, 1024, device=DEVICE).half()
    expected = mc.gemm(a, w, swiglu=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        assert torch.equal(mc.gemm(a, w, swiglu=True), expected)
        with torch.cuda.graph(graph, stream=stream):
            out = mc.gemm(a, w, swiglu=True)
    out.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_compiled_models_keep_the_operator():
    w, a = weight(1024, 1408), torch.randn(16, 1024, device=DEVICE).half()
    compiled = torch.compile(lambda x: mc.gemm(x, w, swiglu=True) + 1, fullgraph=True)
    assert torch.equal(compiled(a), mc.gemm(a, w, swiglu=True) + 1)


def test_the_launcher_refuses_columns_that_are_no_pairs():
    w, a = weight(640, 202), torch.randn(1, 640, device=DEVICE).half()
    form = (w.packed, w.col_scale, None, w.perm, w.n, w.k, stored_group_size(128), False)
    with pytest.raises(ValueError, match="N=202 must be a multiple of 4 for swiglu"):
        torch.ops.marlin_cutlass.gemm_swiglu(a, *form)
