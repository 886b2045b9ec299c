"""gemm on the CPU: the reference path against the oracle, for every form of a call."""

from __future__ import annotations

import pytest
import reference
import torch

from marlin_cutlass import dequantize, gemm, ops, pack

DTYPES = (torch.float16, torch.bfloat16)


def weight(k=256, n=96, group_size=128, zeros=False, act_order=False, dtype=torch.float16):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k)] if act_order else None
    scales = (torch.rand(rows, n) * 0.1 + 0.01).to(dtype)
    dense = reference.weights(q, reference.to_numpy(scales), z, group_size=group_size, g_idx=g_idx)
    return pack(q, scales, z, group_size=group_size, g_idx=g_idx), dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_random_activations_match_the_oracle(group_size, zeros, dtype):
    w, dense = weight(512, 96, group_size, zeros)
    for m in (1, 16, 100):
        a, bias = torch.randn(m, 512).to(dtype), torch.randn(96)
        reference.check(gemm(a, w, bias), a, dequantize(w, dtype), bias.to(dtype))
        # Against the unrounded weight the weight's own rounding shows, one unit in the last place.
        found = reference.complaints(
            reference.to_numpy(gemm(a, w)), reference.to_numpy(a), dense, dtype="bfloat16"
        )
        assert not found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_order", [False, True])
def test_identity_activations_give_the_dequantized_weight(dtype, act_order):
    w, _ = weight(256, 72, 64, True, act_order)
    assert torch.equal(gemm(torch.eye(256, dtype=dtype), w), dequantize(w, dtype))


def test_leading_shapes():
    w, _ = weight()
    a = torch.randn(2, 3, 256).half()
    flat = gemm(a.view(6, 256), w)
    assert torch.equal(gemm(a, w), flat.view(2, 3, 96))
    assert torch.equal(gemm(a[0, 0], w), gemm(a[:1, 0], w)[0]) and gemm(a[0, 0], w).shape == (96,)
    assert gemm(torch.empty(0, 256).half(), w).shape == (0, 96)
    assert gemm(torch.empty(2, 0, 256).bfloat16(), w).dtype == torch.bfloat16


def test_views_of_every_kind():
    w, _ = weight()
    big = torch.randn(8, 1024).half()
    tall = torch.randn(256, 8).half()
    flat = torch.randn(1 + 8 * 256).half()
    views = [big[:, 128:384], tall.t(), torch.randn(16, 256).half()[::2], flat[1:].view(8, 256)]
    views.append(torch.randn(1, 256).half().expand(4, 256))
    for a in views:
        assert torch.equal(gemm(a, w), gemm(a.contiguous(), w))


def test_bias_is_added_in_natural_order_after_the_sum():
    q = torch.full((256, 192), 8, dtype=torch.uint8)
    w = pack(q, torch.ones(2, 192).half(), group_size=128)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = gemm(torch.randn(3, 256).half(), w, torch.arange(192).to(dtype))
        want = torch.arange(192).to(dtype).half().expand(3, 192)
        assert torch.equal(out, want)


def test_out_is_written_and_returned():
    w, _ = weight()
    a = torch.randn(4, 256).half()
    big = torch.full((6, 128), 7.0).half()
    out = big[1:5, 16:112]
    assert gemm(a, w, out=out) is out
    assert torch.equal(out, gemm(a, w))
    guard = big.clone()
    guard[1:5, 16:112] = 7
    assert (guard == 7).all(), "nothing outside of out changes"


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (torch.empty(4, 96), TypeError, "out has dtype float32 and a float16"),
        (torch.empty(4, 95).half(), ValueError, r"out has shape \(4, 95\)"),
        (torch.empty(96, 4).half().t(), ValueError, "column stride 4"),
    ],
)
def test_bad_out_is_refused(out, error, text):
    w, _ = weight()
    with pytest.raises(error, match=text):
        gemm(torch.randn(4, 256).half(), w, out=out)


@pytest.mark.parametrize(
    ("a", "error", "text"),
    [
        (torch.randn(4, 256), TypeError, "a has dtype float32.*float16 or bfloat16"),
        (torch.ones(4, 256, dtype=torch.int32), TypeError, "a has dtype int32"),
        (torch.randn(4, 255).half(), ValueError, "must be K=256"),
        (torch.randn(()).half(), ValueError, "must be K=256"),
        (
            torch.empty(4, 256, device="meta").half(),
            ValueError,
            "a is on meta and the weight on cpu",
        ),
    ],
)
def test_bad_activations_are_refused(a, error, text):
    w, _ = weight()
    with pytest.raises(error, match=text):
        gemm(a, w)


def test_bad_bias_and_weight_are_refused():
    w, _ = weight()
    a = torch.randn(4, 256).half()
    with pytest.raises(ValueError, match=r"bias has shape \(95,\)"):
        gemm(a, w, torch.zeros(95))
    with pytest.raises(TypeError, match="bias has dtype int64"):
        gemm(a, w, torch.zeros(96, dtype=torch.int64))
    with pytest.raises(TypeError, match="w must be a PackedWeight"):
        gemm(a, dequantize(w))
    with pytest.raises(TypeError, match="w must be a PackedWeight"):
        dequantize(dequantize(w))


def test_a_forced_kernel_needs_a_gpu():
    w, _ = weight()
    with pytest.raises(ValueError, match="is a CUDA kernel and a is on cpu"):
        gemm(torch.randn(4, 256).half(), w, kernel="w4a16_ampere_m16_n128k128_w4x1_p4_dp_c1")


def test_a_kernel_forced_by_the_environment_is_for_cuda_calls(monkeypatch):
    w, _ = weight()
    a = torch.randn(4, 256).half()
    want = gemm(a, w)
    monkeypatch.setattr(ops, "FORCED_KERNEL", "w4a16_ampere_m16_n128k128_w4x1_p4_dp_c1")
    assert torch.equal(gemm(a, w), want)


def test_sums_are_kept_in_float32():
    # The partial sum reaches 114,688, beyond fp16; the result is 0.
    k = 4096
    q = torch.full((k, 64), 1, dtype=torch.uint8)
    q[: k // 2] = 15
    w = pack(q, torch.full((k // 128, 64), 0.125).half(), group_size=128)
    out = gemm(torch.full((1, k), 64.0).half(), w)
    assert torch.equal(out, torch.zeros_like(out))


def test_batch_invariance():
    w, _ = weight(1024, 64)
    a = torch.randn(64, 1024).half()
    first = gemm(a[:1], w, batch_invariant=True)
    for m in (2, 4, 16, 64):
        assert torch.equal(gemm(a[:m], w, batch_invariant=True)[:1], first)


# ---- gradients ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act_order", [False, True])
def test_gradient_of_activations_and_bias(dtype, act_order):
    w, _ = weight(256, 96, 64, True, act_order)
    a = torch.randn(2, 3, 256).to(dtype).requires_grad_()
    bias = torch.randn(96).requires_grad_()
    out = gemm(a, w, bias)
    grad = torch.randn(2, 3, 96).to(dtype)
    out.backward(grad)
    assert a.grad.shape == (2, 3, 256) and a.grad.dtype == dtype
    reference.check(a.grad, grad, dequantize(w, dtype).t())
    torch.testing.assert_close(bias.grad, grad.float().sum((0, 1)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sums_stay_in_fp32_under_autocast(batch_invariant):
    """Autocast would round the reference's own product: here to infinity."""
    q = torch.full((4096, 64), 15, dtype=torch.uint8)
    w = pack(q, torch.full((32, 64), 2.0**-14), group_size=128)
    a = torch.full((2, 4096), 2000.0).half().requires_grad_()
    plain = gemm(a, w, batch_invariant=batch_invariant)
    with torch.autocast("cpu", dtype=torch.float16):
        out = gemm(a, w, batch_invariant=batch_invariant)
        (grad,) = torch.autograd.grad(out.sum(), a)
    assert torch.equal(out, plain) and bool((out == 3500).all())
    assert torch.equal(grad, torch.autograd.grad(plain.sum(), a)[0])


def test_gradients_under_checkpointing_and_autocast():
    w, _ = weight()
    a = torch.randn(4, 256, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(gemm, a, w, use_reentrant=False)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    want = dequantize(w, torch.bfloat16).float().sum(1).expand(4, 256)
    torch.testing.assert_close(a.grad, want, rtol=2e-2, atol=2e-2)


def test_out_takes_no_gradient():
    w, _ = weight()
    a = torch.randn(4, 256).half().requires_grad_()
    with pytest.raises(ValueError, match="out= takes no gradient"):
        gemm(a, w, out=torch.empty(4, 96).half())
    with torch.no_grad():
        gemm(a, w, out=torch.empty(4, 96).half())
