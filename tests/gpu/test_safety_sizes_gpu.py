"""Safety on a GPU: sizes and strides beyond 32 bits."""

from __future__ import annotations

import random

import pytest
import torch
from safety_cases import DEVICE, FROBENIUS, is_right, names_to_try, weight

import marlin_cutlass as mc
from marlin_cutlass.layout import block_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture
def room():
    """Skips where less than 40 GB are free; gives the memory back afterwards."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


def sampled(m: int, limit_row: int) -> torch.Tensor:
    """Rows at both ends, around the row that crosses the limit, and some between."""
    rows = [*range(5), *range(limit_row - 3, limit_row + 4), *range(m - 5, m)]
    rows += random.Random(0).sample(range(m), 200)
    return torch.tensor(sorted(set(rows)), device=DEVICE)


def check_600001_rows(k: int, n: int) -> None:
    """Rows around the one whose activations or outputs, whichever are wider, pass 2^31."""
    m = 600_001
    w = weight(k, n)
    a = torch.randn(m, k, device=DEVICE, dtype=torch.float16)
    rows = sampled(m, 2**31 // max(k, n))
    for name in names_to_try():
        out = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.float16)
        mc.gemm(a, w.packed, out=out, kernel=name)
        assert bool(out.isfinite().all()), name
        assert bool(is_right(out[rows], a[rows], w.dense[torch.float16])), name
        del out


def test_more_than_500000_rows_and_2_to_the_31_activations(room):
    check_600001_rows(k=4096, n=64)


def test_2_to_the_31_outputs(room):
    check_600001_rows(k=128, n=4096)


def test_2_to_the_32_weights(room):
    """K * N = 4.6e9: the packed bytes pass 2^31. Columns repeat, so that the product is known."""
    k, n, copies = 32768, 2048, 68
    base = weight(k, n)
    p = base.packed
    blocks = n // 64 * (k // 128) * block_bytes(128, False)
    body, slack = p.packed[:blocks], p.packed[blocks:]
    packed = torch.cat([body.repeat(copies), slack])
    assert packed.numel() > 2**31
    large = mc.PackedWeight(packed, p.col_scale.repeat(copies), None, n * copies, k, 128, False)
    large.check()
    for name in names_to_try():
        for m in (1, 70):
            a = torch.randn(m, k, device=DEVICE).half()
            out = torch.full((m, n * copies), float("nan"), device=DEVICE, dtype=torch.float16)
            mc.gemm(a, large, out=out, kernel=name)
            want = a.double() @ base.dense[torch.float16]
            error = (out.view(m, copies, n).double() - want[:, None]).norm(dim=(0, 2))
            assert bool((error <= FROBENIUS[torch.float16] * want.norm()).all()), f"{name}, M={m}"


def test_rows_and_outputs_far_apart(room):
    """Row strides of 2^30 elements: the third row starts behind 2^31."""
    stride, k, n = 2**30, 512, 200
    w = weight(k, n)
    memory = torch.zeros(2 * stride + 4096, device=DEVICE, dtype=torch.float16)
    a, out = memory.as_strided((3, k), (stride, 1)), memory.as_strided((3, n), (stride, 1), 1024)
    values = torch.randn(3, k, device=DEVICE).half()
    a.copy_(values)
    for name in names_to_try():
        out.fill_(float("nan"))
        mc.gemm(a, w.packed, out=out, kernel=name)
        assert bool(is_right(out.clone(), values, w.dense[torch.float16])), name
    assert torch.equal(a, values)
