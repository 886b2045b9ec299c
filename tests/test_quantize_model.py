"""quantize_model: blocks and whole models, order of execution, resume, reports, refusals."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from marlin_cutlass.nn import QuantLinear
from marlin_cutlass.quantize import calibration as cal
from marlin_cutlass.quantize import quantize_model
from marlin_cutlass.quantize.worker import LayerWorker
from marlin_cutlass.sparse import check_2_4


class Block(nn.Module):
    def __init__(self, d: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q_proj, self.k_proj = nn.Linear(d, d, bias), nn.Linear(d, d, bias)
        self.up, self.down = nn.Linear(d, 2 * d, bias), nn.Linear(2 * d, d, bias)

    def forward(self, x, mask=None):
        y = self.norm(x)
        y = self.q_proj(y) * torch.sigmoid(self.k_proj(y))
        return (x + self.down(torch.relu(self.up(x + y))),)


class Model(nn.Module):
    """Embedding, blocks that hand their output on, a head."""

    def __init__(self, d: int = 64, blocks: int = 3, skip_link: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(blocks))
        self.lm_head = nn.Linear(d, 40, bias=False)
        self.skip_link = skip_link
        self.calls = 0

    def hidden(self, ids, attention_mask=None):
        self.calls += 1
        x = self.embed(ids)
        first = x
        for block in self.layers:
            x = block(x, mask=attention_mask)[0]
            if self.skip_link:
                x = x + first  # a new tensor: blocks do not feed each other directly
        return x

    def forward(self, ids, attention_mask=None):
        return self.lm_head(self.hidden(ids, attention_mask))


def model(**options) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


def samples(count=24, seed=1, length=None):
    gen = torch.Generator().manual_seed(seed)
    lengths = [length or 3 + i % 9 for i in range(count)]
    return [torch.randint(0, 40, (1, n), generator=gen) for n in lengths]


def error(quantised, original) -> float:
    ids = samples(40, seed=7)
    with torch.no_grad():
        pairs = [(quantised.hidden(i), original.hidden(i)) for i in ids]
    return float(
        torch.cat([(a - b).flatten() for a, b in pairs]).norm()
        / torch.cat([b.flatten() for _, b in pairs]).norm()
    )


def quantised(original, data=None, **options):
    work = copy.deepcopy(original)
    options = {"group_size": 32, "progress": False, **options}
    return work, quantize_model(work, data, **options)


def test_layers_are_replaced_and_the_head_is_skipped():
    original = model()
    work, report = quantised(original, samples())
    kinds = {n: type(m) for n, m in work.named_modules() if isinstance(m, (nn.Linear, QuantLinear))}
    assert kinds.pop("lm_head") is nn.Linear and set(kinds.values()) == {QuantLinear}
    assert len(report.layers) == 12 and report.skipped == {"lm_head": "in the skip list (lm_head)"}
    assert all(x.tokens == sum(s.numel() for s in samples()) for x in report.layers)
    assert all(
        x.method == "gptq" and x.loss > 0 and 0 < x.weight_error < 0.5 for x in report.layers
    )
    assert json.loads(report.to_json())["layers"][0]["name"].startswith("layers.0.")
    assert "layers.2.down" in str(report) and "skipped lm_head" in str(report)


def test_gptq_beats_rtn_and_compensation_helps():
    original = model(blocks=4)
    data = samples(160)
    rtn = error(quantised(original, method="rtn")[0], original)
    plain = error(quantised(original, data, compensate=False)[0], original)
    full = error(quantised(original, data)[0], original)
    assert plain < rtn and full < plain


def test_sparse_models_hold_sparse_layers_and_gptq_makes_up_for_what_is_dropped():
    original, errors = model(blocks=2), {}
    data = samples(160)
    for method in ("rtn", "gptq"):
        work, report = quantised(
            original, data, method=method, sparsity="2:4", group_size=64, on_illegal="skip"
        )
        layers = [m for m in work.modules() if isinstance(m, QuantLinear)]
        assert len(layers) == len(report.layers) > 0 and all(m.sparse for m in layers)
        for layer in layers:
            check_2_4(layer.dequantize(torch.float32))
        errors[method] = error(work, original)
    assert errors["gptq"] < errors["rtn"]
    with pytest.raises(ValueError, match="group_size=32 is not supported with 2:4"):
        quantised(original, data, sparsity="2:4")
    with pytest.raises(ValueError, match="sparsity='1:2' is unknown"):
        quantised(original, data, sparsity="1:2")


def test_blocks_run_alone_and_give_what_whole_forwards_give():
    original = model()
    data = samples(12)
    work, _ = quantised(original, data, compensate=False)
    # One probe and one capture per sample, whatever the number of blocks.
    assert work.calls == 1 + len(data)
    whole = copy.deepcopy(original)
    chained, cal.blocks_are_chained = cal.blocks_are_chained, lambda *_: False
    try:
        quantize_model(whole, data, group_size=32, progress=False, compensate=False)
    finally:
        cal.blocks_are_chained = chained
    assert whole.calls == len(data)  # all layers in one stage: earlier errors are not seen
    first = ("layers.0.q_proj", "layers.0.k_proj")
    for name in first:
        assert torch.equal(work.get_submodule(name).packed, whole.get_submodule(name).packed)
    assert error(work, original) < 0.2 and error(whole, original) < 0.2


def test_blocks_that_are_not_chained_are_run_whole():
    original = model(skip_link=True)
    calls = cal.model_calls(original, samples(2))
    assert not cal.blocks_are_chained(calls, list(original.layers))
    assert (
        cal.blocks_are_chained(cal.model_calls(model(), samples(2)), list(model().layers)) is False
    )
    work, report = quantised(original, samples())
    assert len(report.layers) == 12 and error(work, original) < 0.2


def test_chained_blocks_are_recognised():
    original = model()
    assert cal.blocks_are_chained(cal.model_calls(original, samples(2)), list(original.layers))


def test_layers_are_grouped_by_what_they_read_in_order_of_execution():
    original = model()
    block = original.layers[0]
    calls = cal.capture_block_calls(cal.model_calls(original, samples(2)), block)
    layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
    order = [sorted(group) for group in cal.execution_order(calls, layers)]
    assert order == [["k_proj", "q_proj"], ["up"], ["down"]]


def test_padding_does_not_count():
    original = model()
    lone = samples(8, length=5)
    padded = []
    for ids in lone:
        mask = torch.zeros(1, 9, dtype=torch.long)
        mask[0, :5] = 1
        padded.append({"ids": torch.cat([ids, torch.full((1, 4), 39)], 1), "attention_mask": mask})
    a, report_a = quantised(original, lone)
    b, report_b = quantised(original, padded)
    assert [x.tokens for x in report_a.layers] == [x.tokens for x in report_b.layers] == [40] * 12
    assert torch.equal(a.layers[0].q_proj.packed, b.layers[0].q_proj.packed)


@contextmanager
def interrupted_after(layers: int):
    """The run within is stopped, as by Ctrl-C, when so many layers are quantised."""
    run, count = LayerWorker.run, [0]

    def stop(self, *args):
        count[0] += 1
        if count[0] > layers:
            raise KeyboardInterrupt
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LayerWorker, "run", stop)
        yield


def assert_same_layers(one: nn.Module, other: nn.Module) -> None:
    layers = {n: m for n, m in one.named_modules() if isinstance(m, QuantLinear)}
    assert layers
    for name, layer in layers.items():
        twin = other.get_submodule(name)
        assert torch.equal(layer.packed, twin.packed) and torch.equal(layer.bias, twin.bias)


def test_resume_continues_and_refuses_other_settings(tmp_path, monkeypatch):
    original, data = model(), samples()
    straight, _ = quantised(original, data)
    with interrupted_after(5):
        quantised(original, data, resume=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    run, done = LayerWorker.run, []
    monkeypatch.setattr(LayerWorker, "run", lambda s, n, *a: done.append(n) or run(s, n, *a))
    resumed, report = quantised(original, data, resume=tmp_path)
    assert len(done) == 7 and len(report.layers) == 12
    assert_same_layers(straight, resumed)
    with pytest.raises(ValueError, match=r"other settings \(group_size\)"):
        quantised(original, data, resume=tmp_path, group_size=64)


def test_bad_layers_are_all_named_before_any_work():
    bad = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 72), nn.Linear(72, 64))
    with pytest.raises(ValueError, match=r"2 layers cannot be quantised") as caught:
        quantised(bad, method="rtn")
    assert "0: k=100 is not a multiple of group_size=32" in str(caught.value)
    assert "2: k=72" in str(caught.value)
    assert isinstance(bad[1], nn.Linear)
    work, report = quantised(bad, method="rtn", on_illegal="skip")
    assert isinstance(work[1], QuantLinear) and isinstance(work[0], nn.Linear)
    assert set(report.skipped) == {"0", "2"}


def test_skip_list_and_tied_weights():
    original = model()
    original.lm_head.weight = original.embed.weight
    _, report = quantised(original, method="rtn", skip=["re:layers\\.1\\..*_proj$", "up"])
    assert report.skipped["lm_head"] == "shares its weight with an embedding"
    assert report.skipped["layers.1.q_proj"].startswith("matches re:")
    assert report.skipped["layers.2.up"] == "in the skip list (up)"
    assert len(report.layers) == 12 - 2 - 3


def test_blocks_skipped_as_a_whole_leave_the_others_what_they_are():
    original, data = model(), samples()
    full, _ = quantised(original, data)
    for kept in (0, 2):
        work, report = quantised(original, data, skip=["lm_head", f"re:layers\\.{kept}\\."])
        assert len(report.layers) == 8 and isinstance(work.layers[kept].up, nn.Linear)
        assert torch.equal(work.layers[kept].up.weight, original.layers[kept].up.weight)
    assert torch.equal(work.layers[1].down.packed, full.layers[1].down.packed)


class Experts(nn.Module):
    """Two experts of which the calibration reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        return self.experts[0](x)


def test_unreached_experts_are_rounded_to_nearest_and_reported():
    torch.manual_seed(0)
    _, report = quantised(Experts(), [torch.randn(50, 32)])
    methods = {x.name: (x.method, x.note) for x in report.layers}
    assert methods["experts.0"] == ("gptq", "")
    assert methods["experts.1"] == ("rtn", "no calibration token reached it")


def test_dtype_training_mode_and_cache_setting_are_kept():
    original = model().bfloat16().train()
    original.config = type("Config", (), {"use_cache": True})()
    work, _ = quantised(original, samples())
    assert work.training and work.config.use_cache is True
    assert work.layers[0].up.training and work.layers[0].up.dtype == torch.bfloat16
    assert work.layers[0].up.bias.dtype == torch.bfloat16
    assert not any(h for m in work.modules() for h in (m._forward_hooks, m._forward_pre_hooks))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": None}, "needs calibration"),
        ({"data": []}, "no samples"),
        ({"data": [3]}, "calibration sample is int"),
        ({"method": "awq"}, "method='awq'"),
        ({"on_illegal": "ignore"}, "on_illegal='ignore'"),
        ({"skip": ["layers"]}, "no nn.Linear"),
    ],
)
def test_wrong_requests(options, message):
    data = options.pop("data", samples())
    if "skip" in options:
        options["skip"] = ["layers", "lm_head"]
    with pytest.raises((ValueError, TypeError), match=message):
        quantised(model(), data, **options)
