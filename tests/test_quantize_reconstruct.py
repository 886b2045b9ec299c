"""Block reconstruction: what is learnt stays packable, helps on other data, and can be resumed."""

from __future__ import annotations

import copy

import pytest
import torch
from test_quantize_model import (
    assert_same_layers,
    error,
    interrupted_after,
    model,
    quantised,
    samples,
)
from torch import nn
from typer.testing import CliRunner

from marlin_cutlass.cli import app
from marlin_cutlass.nn import QuantLinear
from marlin_cutlass.quantize import GptqOptions, Moments, quantize_gptq
from marlin_cutlass.quantize.calibration import Calls
from marlin_cutlass.quantize.grid import round_mantissa
from marlin_cutlass.quantize.reconstruct import LearntLayer, _Rounded, reconstruct_block
from marlin_cutlass.sparse import check_2_4

K, N = 128, 64
CASES = [
    {"group_size": 32},
    {"group_size": 64, "symmetric": False},
    {"group_size": 32, "act_order": True},
    {"group_size": 64, "sparsity": "2:4"},
    {"group_size": -1},
]


def learnt(bias: bool = True, **options) -> LearntLayer:
    gen = torch.Generator().manual_seed(0)
    layer = nn.Linear(K, N, bias)
    moments = Moments(K)
    moments.add(torch.randn(600, K, generator=gen) * torch.linspace(1, 0.1, K))
    original = layer.weight.detach().clone()
    weight, _ = quantize_gptq(original, moments.matrix, GptqOptions(**options))
    layer.weight.data.copy_(weight.dequantize().t())
    return LearntLayer(layer, weight, original, torch.float16)


@pytest.mark.parametrize("options", CASES)
def test_learning_begins_at_the_quantised_weights(options):
    item = learnt(**options)
    weight, bias = item.dense()
    assert torch.equal(weight, item.weight.dequantize().t())
    assert torch.equal(bias, item.layer.bias)
    found, _ = item.result()
    assert torch.equal(found.q, item.weight.q) and torch.equal(found.scales, item.weight.scales)


@pytest.mark.parametrize("options", CASES)
def test_what_is_learnt_can_be_packed_and_is_what_was_computed(options):
    item = learnt(**options)
    item.v += torch.randn(item.v.shape, generator=torch.Generator().manual_seed(1)) * 3
    item.scale *= 1.0123
    found, _ = item.result()
    dense = found.dequantize().t()
    assert torch.equal(dense, item.dense()[0].detach())
    assert float((found.q != item.weight.q).float().mean()) > 0.3
    assert int(found.q.max()) <= 15 and torch.equal(
        found.scales, round_mantissa(found.scales, torch.float16)
    )
    layer = QuantLinear.from_packed(found.to_packed(), None)
    assert torch.allclose(layer.dequantize(torch.float32), dense, rtol=1e-3, atol=1e-6)
    if item.weight.sparse:
        check_2_4(layer.dequantize(torch.float32))


def test_gradients_pass_the_rounding_and_the_scale_gets_its_own():
    v = torch.tensor([[[0.4], [2.6], [-9.7]]], requires_grad=True)
    scale = torch.tensor([[[0.5]]], requires_grad=True)
    low, high = torch.full((1, 3, 1), -8.0), torch.full((1, 3, 1), 7.0)
    out = _Rounded.apply(v, scale, low, high, torch.float16)
    assert out.flatten().tolist() == [0, 1.5, -4]
    out.backward(torch.tensor([[[1.0], [2.0], [3.0]]]))
    assert v.grad.flatten().tolist() == [0.5, 1.0, 1.5]
    assert scale.grad.flatten().tolist() == [0 * 1 + 3 * 2 - 8 * 3]


def test_groups_of_zeros_stay_zero():
    layer = nn.Linear(64, 8)
    layer.weight.data[:, :32] = 0
    moments = Moments(64)
    moments.add(torch.randn(200, 64))
    original = layer.weight.detach().clone()
    weight, _ = quantize_gptq(original, moments.matrix, GptqOptions(group_size=32))
    item = LearntLayer(layer, weight, original, torch.float16)
    item.v += 3
    assert not item.result()[0].dequantize()[:32].any()


def chain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, N, bias=False)).eval()


def test_the_error_that_is_reported_is_the_blocks_and_falls():
    original = chain()
    block = copy.deepcopy(original)
    data = [torch.randn(2, 8, K, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    masks = [torch.ones(2, 8, dtype=torch.bool) for _ in data]
    for mask in masks:
        mask[1, 5:] = False
    layers = {}
    for name in ("0", "2"):
        layer, moments = block.get_submodule(name), Moments(block.get_submodule(name).in_features)
        moments.add(torch.randn(500, layer.in_features))
        kept = layer.weight.detach().clone()
        weight, _ = quantize_gptq(kept, moments.matrix, GptqOptions(group_size=32))
        layer.weight.data.copy_(weight.dequantize().t())
        layers[name] = LearntLayer(layer, weight, kept, torch.float16)

    def measured() -> float:
        left = energy = 0.0
        with torch.no_grad():
            for x, mask in zip(data, masks, strict=True):
                wanted = original(x)[mask]
                left += float((block(x)[mask] - wanted).square().sum())
                energy += float(wanted.square().sum())
        return left / energy

    calls = Calls(block, [((x,), {}, m) for x, m in zip(data, masks, strict=True)], "cpu")
    with torch.no_grad():
        outputs = [((original(x),), {}, m) for x, m in zip(data, masks, strict=True)]
    before = measured()
    errors = reconstruct_block(block, calls, Calls(None, outputs, "cpu"), layers, 150)
    assert errors.before == pytest.approx(before, rel=1e-4)
    assert measured() == before  # the block itself is left alone until layers are finished
    for item in layers.values():
        weight, bias = item.result()
        item.layer.weight.data.copy_(weight.dequantize().t())
        if bias is not None:
            item.layer.bias.data.copy_(bias)
    assert measured() == pytest.approx(errors.after, rel=1e-4) and errors.after < 0.9 * before
    assert all(p.grad is None and p.requires_grad for p in block.parameters())


@pytest.mark.parametrize(("options", "share"), [({}, 0.85), ({"sparsity": "2:4"}, 0.7)])
def test_a_reconstructed_model_is_closer_on_other_data(options, share):
    original, data = model(), samples(160)
    options = {"group_size": 64, **options}
    plain = error(quantised(original, data, **options)[0], original)
    work, report = quantised(original, data, reconstruct=60, **options)
    assert error(work, original) < share * plain
    assert all("reconstructed" in x.note for x in report.layers)
    again, _ = quantised(original, data, reconstruct=60, **options)
    assert torch.equal(again.layers[1].up.packed, work.layers[1].up.packed)


def test_worse_results_are_not_kept(monkeypatch):
    monkeypatch.setattr("marlin_cutlass.quantize.reconstruct.CODE_RATE", 1.0)
    original, data = model(blocks=2), samples()
    plain, _ = quantised(original, data)
    wild, _ = quantised(original, data, reconstruct=1)
    first = ("q_proj", "k_proj", "up", "down")
    assert all(
        torch.equal(plain.layers[0].get_submodule(n).packed, wild.layers[0].get_submodule(n).packed)
        for n in first
    )


def test_resume_finishes_block_by_block(tmp_path):
    original, data = model(), samples()
    straight, _ = quantised(original, data, reconstruct=5)
    with interrupted_after(6):  # inside the second block
        quantised(original, data, reconstruct=5, resume=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4  # of the block that was finished
    resumed, report = quantised(original, data, reconstruct=5, resume=tmp_path)
    assert len(report.layers) == 12 and all("reconstructed" in x.note for x in report.layers)
    assert_same_layers(straight, resumed)
    complete, _ = quantised(original, data, reconstruct=5, resume=tmp_path)
    assert_same_layers(straight, complete)
    with pytest.raises(ValueError, match=r"other settings \(reconstruct\)"):
        quantised(original, data, resume=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reconstruct": -1}, "reconstruct=-1"),
        ({"reconstruct": True}, "reconstruct=True"),
        ({"reconstruct": 5, "method": "rtn"}, "needs method='gptq' and compensate=True"),
        ({"reconstruct": 5, "compensate": False}, "needs method='gptq' and compensate=True"),
    ],
)
def test_wrong_requests(options, message):
    with pytest.raises(ValueError, match=message):
        quantised(model(), samples(4), **options)


def test_models_without_blocks_are_refused_before_the_work():
    plain = chain()
    with pytest.raises(ValueError, match="no blocks that feed each other"):
        quantised(plain, [torch.randn(4, K)], reconstruct=5)
    assert isinstance(plain[0], nn.Linear)


def test_the_command_line_hands_it_on(tmp_path, monkeypatch):
    runner, given = CliRunner(), {}
    monkeypatch.setattr(
        "marlin_cutlass.quantize.folder.quantize_folder", lambda *_, **kw: given.update(kw) or "{}"
    )
    (tmp_path / "texts.txt").write_text("a b c\n")
    call = ["quantize", str(tmp_path), str(tmp_path / "out"), "--reconstruct", "7"]
    data = ["--method", "gptq", "--calibration", str(tmp_path / "texts.txt")]
    assert runner.invoke(app, [*call, *data]).exit_code == 0 and given["reconstruct"] == 7
    refused = runner.invoke(app, call)
    assert refused.exit_code == 2 and "--reconstruct only makes sense" in refused.stderr
