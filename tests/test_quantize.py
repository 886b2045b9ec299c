"""Quantisers of single weights: grids, clipping, GPTQ against a literal reference, odd weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import marlin_cutlass as mc
from marlin_cutlass.quantize import GptqOptions, Moments, quantize_gptq, quantize_weight
from marlin_cutlass.quantize.grid import round_mantissa
from marlin_cutlass.quantize.hessian import inverse_factor

K, N = 256, 96


def weight(seed=0, n=N, k=K):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def inputs(seed=1, tokens=600, k=K):
    """Correlated activations with a few strong features, as layers of language models see."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=gen) @ torch.randn(k, k, generator=gen) * 0.05
    x = x + 0.1 * torch.randn(tokens, k, generator=gen)
    x[:, :: k // 8] *= 6
    return x


def output_error(q, w, x) -> float:
    return float((x @ (q.dequantize() - w.t())).norm() / (x @ w.t()).norm())


@pytest.mark.parametrize("g", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rtn_on_held_out_inputs(g, symmetric):
    w, held_out = weight(), inputs(seed=2)
    x = inputs(seed=1, tokens=3000)
    x, held_out = x[:2400], x[2400:]
    options = {"group_size": g, "symmetric": symmetric}
    rtn = output_error(quantize_weight(w, "rtn", **options), w, held_out)
    mse = output_error(quantize_weight(w, "rtn", clip="mse", **options), w, held_out)
    gptq = output_error(quantize_weight(w, "gptq", inputs=x, **options), w, held_out)
    assert gptq < 0.8 * rtn and gptq < mse


def test_clip_search_and_orders_reduce_the_error():
    w, x = weight(), inputs()
    errors = {
        name: output_error(quantize_weight(w, "gptq", inputs=x, group_size=64, **options), w, x)
        for name, options in {
            "plain": {"clip": False},
            "clip": {},
            "order": {"act_order": True},
            "static": {"act_order": "static"},
        }.items()
    }
    assert errors["clip"] < errors["plain"]
    assert errors["order"] < errors["clip"] * 1.05 and errors["static"] < errors["plain"]


def literal_gptq(w: np.ndarray, hessian: np.ndarray, g: int, damp: float) -> np.ndarray:
    """GPTQ column by column with the full inverse, no blocks, no clipping: float64 [N, K]."""
    w, k = w.astype(np.float64).copy(), w.shape[1]
    h = hessian.astype(np.float64) + damp * np.diag(hessian).mean() * np.eye(k)
    out = np.zeros_like(w)
    inverse = np.linalg.inv(h)
    for i in range(k):
        if i % g == 0:
            top = np.abs(w[:, i : i + g]).max(1)
            scale = np.asarray(round_mantissa(torch.tensor(top * 2 / 15).float(), torch.float16))
        q = np.clip(np.rint(w[:, i] / scale) + 8, 0, 15)
        out[:, i] = (q - 8) * scale
        error = (w[:, i] - out[:, i]) / inverse[i, i]
        w[:, i:] -= np.outer(error, inverse[i, i:])
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return out


@pytest.mark.parametrize(("k", "g"), [(64, 32), (256, 64), (192, 64), (256, 128)])
def test_gptq_equals_the_literal_algorithm(k, g):
    w, x = weight(n=24, k=k), inputs(k=k)
    moments = Moments(k)
    moments.add(x)
    options = GptqOptions(group_size=g, clip=False, percdamp=0.05, refine=0)
    found, loss = quantize_gptq(w, moments.matrix, options)
    expected = literal_gptq(w.numpy(), moments.matrix.numpy(), g, 0.05)
    different = np.abs(found.dequantize().t().numpy() - expected) > 1e-6
    assert different.mean() < 0.02  # codes at a rounding tie fall either way in float32
    measured = (x @ (found.dequantize() - w.t())).square().sum() / x.shape[0]
    damped = 0.05 * float(torch.diagonal(moments.matrix).mean()) / 2
    damped *= float((found.dequantize() - w.t()).square().sum())
    assert loss == pytest.approx(float(measured) + damped, rel=0.02)


@pytest.mark.parametrize("g", [32, 128, 256, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_refining_lowers_the_error_pass_by_pass(g, symmetric):
    w, moments = weight(), Moments(K)
    moments.add(inputs())
    losses = []
    for passes in (0, 1, 4):
        options = GptqOptions(group_size=g, symmetric=symmetric, refine=passes)
        found, loss = quantize_gptq(w, moments.matrix, options)
        left = found.dequantize() - w.t()
        damped = moments.matrix + 0.1 * torch.diagonal(moments.matrix).mean() * torch.eye(K)
        assert loss == pytest.approx(float((left * (damped @ left)).sum()) / 2, rel=1e-3)
        losses.append(loss)
    assert losses[1] < 0.99 * losses[0] and losses[2] < losses[1]


@pytest.mark.parametrize("act_order", [True, "static"])
def test_refining_keeps_every_order(act_order):
    w, x = weight(), inputs()
    plain, refined = (
        quantize_weight(w, "gptq", inputs=x, group_size=64, act_order=act_order, refine=passes)
        for passes in (0, 4)
    )
    assert (plain.g_idx is None) == (refined.g_idx is None) == (act_order == "static")
    assert output_error(refined, w, x) < output_error(plain, w, x)


def test_scales_of_either_sign_serve_large_positive_weights():
    w = torch.zeros(4, 64)
    w[:, 0], w[:, 1] = 8.0, -7.0  # whole steps 1, from 8 down to -7: codes mean -8..7 times -1
    w[:, 2:] = torch.arange(62).remainder(8).float()
    w[1] = -w[1]  # the other way round the scale is positive
    signed = quantize_weight(w, "rtn", clip="mse", group_size=64)
    error = (signed.dequantize() - w.t()).abs().amax(0)
    assert bool((error < 0.05).all())
    assert torch.equal(signed.scales[0].sign(), torch.tensor([-1.0, 1, -1, -1]))
    assert torch.equal(mc.dequantize(signed.to_packed(), torch.float32), signed.dequantize())
    plain = quantize_weight(w, "rtn", clip="mse", group_size=64, signed_scales=False)
    assert bool((plain.scales > 0).all())
    assert float((plain.dequantize() - w.t()).abs().max()) > 0.2
    gptq = quantize_weight(weight(), "gptq", inputs=inputs(), signed_scales=False)
    assert bool((gptq.scales > 0).all())


def test_packing_loses_nothing():
    for options in ({"method": "rtn"}, {"method": "gptq", "inputs": inputs()}):
        for g in (32, 128, -1):
            q = quantize_weight(weight(), group_size=g, **options)
            exact = mc.dequantize(q.to_packed(), torch.float32)
            assert torch.equal(exact, q.dequantize())


def test_a_parameter_is_quantised_without_its_graph(recwarn):
    weight = torch.nn.Linear(256, 96).weight
    packed = mc.quantize(weight)
    assert packed == mc.quantize(weight.detach()) and not packed.col_scale.requires_grad
    assert not recwarn.list


def test_all_positive_weights_use_the_whole_range():
    # 36: q in 8..23 clamped to 15 lost half the range.
    w = torch.linspace(0.5, 1.0, 128 * 8).view(8, 128)
    for symmetric in (True, False):
        q = quantize_weight(w, "rtn", group_size=128, symmetric=symmetric)
        assert int(q.q.max()) <= 15
        error = (q.dequantize() - w.t()).abs()
        assert bool((error <= q.scales[0] / 2 * 1.005 + 1e-6).all())
    asymmetric = quantize_weight(w - 0.75, "rtn", group_size=128, symmetric=False)
    assert int(asymmetric.q.min()) == 0 and int(asymmetric.q.max()) == 15


def test_zero_groups_and_zero_columns():
    w = weight()
    w[:, :64] = 0
    w[3] = 0
    for method in ({"method": "rtn"}, {"method": "gptq", "inputs": inputs()}):
        for symmetric in (True, False):
            q = quantize_weight(w, group_size=64, symmetric=symmetric, **method)
            dense = q.dequantize()
            assert torch.isfinite(dense).all() and bool((dense[:, 3] == 0).all())
            if method["method"] == "rtn":
                assert bool((dense[:64] == 0).all())
            packed = q.to_packed()
            assert torch.isfinite(mc.dequantize(packed)).all()


def test_scales_below_fp16_survive():
    w = weight() * 1e-7  # scales near 1e-10, far below fp16's 6e-8
    q = quantize_weight(w, "rtn", group_size=64)
    packed = q.to_packed()
    relative = (mc.dequantize(packed, torch.float32).t() - w).norm() / w.norm()
    assert float(relative) < 0.12
    assert float(packed.col_scale[:N].min()) > 0


def test_dead_inputs_do_not_disturb_the_others():
    w, x = weight(), inputs()
    x[:, 5] = 0
    x[:, 100:130] = 0
    q = quantize_weight(w, "gptq", inputs=x, group_size=64)
    live = output_error(q, w, x)
    rtn = output_error(quantize_weight(w, "rtn", group_size=64), w, x)
    assert live < rtn
    dead = (q.dequantize()[5] - w.t()[5]).norm() / w.t()[5].norm()
    assert float(dead) < 0.3  # kept and rounded, not zeroed
    with pytest.raises(ValueError, match="all zero"):
        quantize_weight(w, "gptq", inputs=x * 0, group_size=64)


def test_few_tokens_are_damped_not_singular():
    q = quantize_weight(weight(), "gptq", inputs=inputs(tokens=3), group_size=64)
    assert torch.isfinite(q.dequantize()).all()


def test_bfloat16_scales_are_exact_for_bf16_kernels():
    q = quantize_weight(weight().bfloat16(), "rtn", group_size=64, scale_dtype=torch.bfloat16)
    assert torch.equal(q.scales, q.scales.bfloat16().float())


def test_moments_do_not_depend_on_lengths_and_leave_padding_out():
    x = inputs(tokens=60)
    whole, parts, padded = Moments(K), Moments(K), Moments(K)
    whole.add(x)
    for piece in x.split([1, 7, 20, 32]):
        parts.add(piece.unsqueeze(0))
    batch = torch.full((2, 40, K), 1e6)
    batch[0, :40], batch[1, :20] = x[:40], x[40:]
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[0], mask[1, :20] = True, True
    padded.add(batch, mask)
    for other in (parts, padded):
        assert other.tokens == 60
        assert torch.allclose(other.matrix, whole.matrix, rtol=1e-4, atol=1e-5)
        assert torch.allclose(other.mean, whole.mean, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="NaN"):
        whole.add(torch.full((1, K), float("nan")))
    with pytest.raises(ValueError, match="has 3 features"):
        whole.add(torch.zeros(1, 3))


def test_inverse_factor_is_the_factor_of_the_damped_inverse():
    moments = Moments(32)
    moments.add(inputs(k=32, tokens=200))
    upper = inverse_factor(moments.matrix, 0.01)
    damped = moments.matrix + 0.01 * torch.diagonal(moments.matrix).mean() * torch.eye(32)
    assert torch.allclose(upper.t() @ upper @ damped, torch.eye(32), atol=1e-3)
    assert torch.equal(upper, upper.triu())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "awq"}, ValueError, "method='awq'"),
        ({"method": "gptq"}, ValueError, "exactly one of inputs= and hessian="),
        ({"group_size": 48}, ValueError, "group_size=48"),
        ({"group_size": 512}, ValueError, "k=256 is not a multiple of group_size=512"),
        ({"clip": "best"}, ValueError, "clip='best'"),
        ({"act_order": True}, ValueError, "act_order needs method='gptq'"),
        ({"scale_dtype": torch.int8}, TypeError, "scale_dtype"),
        ({"method": "gptq", "hessian": torch.eye(3)}, ValueError, r"hessian has shape \(3, 3\)"),
        ({"method": "gptq", "inputs": []}, ValueError, "no calibration tokens"),
        (
            {"method": "gptq", "inputs": torch.ones(2, 256), "refine": -1},
            ValueError,
            "refine=-1: a number of passes",
        ),
        ({"refine": 1.5}, ValueError, "refine=1.5: a number of passes"),
        ({"signed_scales": "yes"}, TypeError, "signed_scales='yes'"),
        ({"method": "gptq", "hessian": "h"}, TypeError, "hessian is str"),
        ({"method": "gptq", "inputs": ["x"]}, TypeError, "inputs holds str"),
        ({"method": "gptq", "inputs": 5}, TypeError, "inputs is int"),
        ({"method": "gptq", "inputs": torch.tensor(1.0)}, TypeError, "inputs holds a scalar"),
        ({"sparsity": "2:4", "group_size": "128"}, TypeError, "group_size='128' must be an int"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        quantize_weight(weight(), **options)


def test_wrong_weights():
    for bad, error, message in (
        (torch.zeros(4, 4, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(4), ValueError, r"shape \(4,\)"),
        (torch.full((8, 64), float("inf")), ValueError, "NaN or infinity"),
        ("w", TypeError, "str"),
    ):
        with pytest.raises(error, match=message):
            mc.quantize(bad, group_size=32)


def test_the_function_and_the_package_share_a_name():
    import marlin_cutlass.quantize as module

    for call in (mc.quantize, module):
        packed = call(weight(), group_size=64)
        assert packed.shape == (K, N)
