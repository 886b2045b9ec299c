"""2:4-sparse weights on a GPU: every built sparse kernel bit for bit, ragged rows, graphs.

`python -m pytest tests/gpu/test_sparse_gpu.py`; the kernels are those of the device's table
(python build.py --arch native --family sparse).
"""

from __future__ import annotations

import functools

import pytest
import torch
from test_sparse import scales_for, sparse_codes

import marlin_cutlass as mc
from marlin_cutlass import dispatch, library
from marlin_cutlass.errors import UnsupportedArchError
from marlin_cutlass.sparse import pack_sparse

pytestmark = pytest.mark.gpu
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def built_kernels() -> list[dispatch.Kernel]:
    if not torch.cuda.is_available():
        return []
    try:
        table = library.table_for_capability(*torch.cuda.get_device_capability())
    except UnsupportedArchError:
        return []
    return [kernel for kernel in table.kernels if kernel.sparse]


KERNELS = built_kernels()
every_kernel = pytest.mark.parametrize(
    "kernel", KERNELS or [None], ids=lambda k: k.name if k else "none built"
)


@functools.cache
def weight(k: int, n: int, group_size: int) -> mc.PackedWeight:
    codes, scales = sparse_codes(k, n), scales_for(k, n, group_size)
    return pack_sparse(codes, scales, group_size=group_size).to("cuda")


def skip_unless_built(kernel: dispatch.Kernel | None) -> None:
    if kernel is None:
        pytest.skip("no sparse kernel is built: python build.py --arch native --family sparse")


@every_kernel
def test_identity_gives_the_dequantised_weight_bit_for_bit(kernel) -> None:
    skip_unless_built(kernel)
    w = weight(640, 200, kernel.group_size)
    eye = torch.eye(640, dtype=DTYPES[kernel.dtype], device="cuda")
    assert torch.equal(mc.gemm(eye, w, kernel=kernel.name), mc.dequantize(w, eye.dtype))


@every_kernel
def test_long_sums_use_every_place(kernel) -> None:
    """One 1 a row, at random depths of a long sum, all SMs busy: every place of a kept value that
    is taken from a wrong step, or that changes before its instruction has read it, shows.
    """
    skip_unless_built(kernel)
    k, n, m = 8192, 8192, max(64, kernel.m_tile)
    w = weight(k, n, kernel.group_size)
    dense = mc.dequantize(w, DTYPES[kernel.dtype])
    g = torch.Generator(device="cuda").manual_seed(k)
    for _ in range(5):
        depth = torch.randint(0, k, (m,), generator=g, device="cuda")
        a = torch.zeros(m, k, dtype=dense.dtype, device="cuda")
        a[torch.arange(m, device="cuda"), depth] = 1
        assert torch.equal(mc.gemm(a, w, kernel=kernel.name), dense[depth])


@every_kernel
@pytest.mark.parametrize("m", [1, 7, 33, 130, 300])
def test_ragged_rows(kernel, m: int) -> None:
    skip_unless_built(kernel)
    k, n = 4224, 1032
    w = weight(k, n, kernel.group_size)
    dtype = DTYPES[kernel.dtype]
    g = torch.Generator(device="cuda").manual_seed(m)
    a = torch.randn(m, k, generator=g, device="cuda").to(dtype)
    bias = torch.randn(n, generator=g, device="cuda").to(dtype)
    exact = a.double() @ mc.dequantize(w, torch.float32).double() + bias.double()
    first = mc.gemm(a, w, bias, kernel=kernel.name)
    assert float((first.double() - exact).norm() / exact.norm()) < TOLERANCE[dtype]
    for _ in range(20):
        assert torch.equal(mc.gemm(a, w, bias, kernel=kernel.name), first)


@pytest.mark.parametrize("group_size", [64, 128, -1])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_the_table_serves_sparse_weights(m: int, dtype: torch.dtype, group_size: int) -> None:
    skip_unless_built(KERNELS[0] if KERNELS else None)
    w = weight(1024, 2048, group_size)
    a = torch.randn(m, 1024, device="cuda").to(dtype)
    answer = mc.explain(m, 2048, 1024, group_size, dtype, sparse=True)
    chosen = next(k for k in KERNELS if k.name == answer.kernel)
    preferred = {k.family for k in KERNELS if k.format == chosen.format} & {"hopper_sparse"}
    assert chosen.family in (preferred or {"sparse"}) or "measured" in answer.source
    exact = a.double() @ mc.dequantize(w, torch.float32).double()
    error = float((mc.gemm(a, w).double() - exact).norm() / exact.norm())
    assert error < TOLERANCE[dtype]
    layer = mc.QuantLinear.from_packed(w)
    assert torch.equal(layer(a), mc.gemm(a, w))


def test_in_a_graph() -> None:
    skip_unless_built(KERNELS[0] if KERNELS else None)
    w = weight(1024, 2048, 128)
    a = torch.randn(16, 1024, device="cuda").half()
    eager = mc.gemm(a, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mc.gemm(a, w)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)
