"""Transformers: tiny Llama, Qwen2 with biases and Mixtral, from every checkpoint format (CPU)."""

from __future__ import annotations

import json
import logging

import pytest
import torch

pytest.importorskip("transformers", minversion="5.16", reason="needs transformers")

from integration_models import linear_names, quantised, write_folder
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from marlin_cutlass import QuantLinear, hf
from marlin_cutlass.checkpoint import convert_checkpoint

IDS = torch.arange(1, 19).view(2, 9) * 5 % 96


@torch.no_grad()
def close(model, reference, tolerance=1e-2):
    mine, theirs = model(IDS).logits.float(), reference(IDS).logits.float()
    error = float((mine - theirs).abs().max() / theirs.abs().max())
    assert error < tolerance, error


CASES = [
    ("llama", "gptq", {}),
    ("llama", "gptq", {"zeros": True, "group_size": 32}),
    ("llama", "gptq", {"act_order": True}),
    ("llama", "gptq", {"group_size": -1, "shards": 3}),
    ("llama", "awq", {}),
    ("llama", "compressed-tensors", {"group_size": 128}),
    ("llama", "compressed-tensors", {"zeros": True}),
    ("qwen2", "gptq", {}),
    ("qwen2", "awq", {"shards": 2}),
    ("mixtral", "gptq", {}),
    ("mixtral", "compressed-tensors", {"shards": 2}),
    ("llama", "marlin-24", {"group_size": 128}),
    ("llama", "marlin-24", {"group_size": -1}),
]


@pytest.mark.parametrize("name,fmt,options", CASES)
def test_a_foreign_folder_loads_into_quantised_layers(tmp_path, name, fmt, options):
    reference = write_folder(tmp_path / "a", name, fmt, **options)
    model = hf.from_pretrained(tmp_path / "a")
    assert len(quantised(model)) == len(linear_names(name))
    close(model, reference)
    if name == "qwen2":
        assert model.model.layers[0].self_attn.q_proj.bias is not None
        assert model.model.layers[0].self_attn.o_proj.bias is None


@pytest.mark.parametrize("name,fmt,options", [CASES[1], CASES[2], CASES[7], CASES[10], CASES[11]])
def test_saving_and_loading_again_changes_no_bit(tmp_path, name, fmt, options):
    write_folder(tmp_path / "a", name, fmt, **options)
    first = hf.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b", max_shard_size="100KB")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "marlin_cutlass" and "source" not in saved
    assert set(saved["layers"]) == {layer for layer, *_ in linear_names(name)}
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "b")  # the plain loader
    one, two = first.state_dict(), second.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    with torch.no_grad():
        assert torch.equal(first(IDS).logits, second(IDS).logits)


@pytest.mark.parametrize(
    "name, fmt", [("llama", "gptq"), ("qwen2", "gptq"), ("mixtral", "gptq"), ("llama", "marlin-24")]
)
def test_a_converted_folder_loads_with_the_plain_loader(tmp_path, name, fmt):
    sparse = fmt == "marlin-24"
    options = {"group_size": 128} if sparse else {"zeros": True}
    reference = write_folder(tmp_path / "a", name, fmt, **options)
    convert_checkpoint(tmp_path / "a", tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert len(quantised(model)) == len(linear_names(name))
    assert all(model.get_submodule(layer).sparse == sparse for layer in quantised(model))
    close(model, reference)
    direct = hf.from_pretrained(tmp_path / "a").state_dict()
    assert all(torch.equal(tensor, direct[key]) for key, tensor in model.state_dict().items())
    assert hf.from_pretrained(tmp_path / "b").state_dict().keys() == direct.keys()


def test_no_tensor_is_missing_or_unexpected(tmp_path, caplog):
    write_folder(tmp_path / "a", "llama", "gptq", act_order=True)
    logger = logging.getLogger("transformers")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, "transformers"):
        model, info = hf.from_pretrained(tmp_path / "a", output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)


def test_repacking_on_a_given_device(tmp_path):
    reference = write_folder(tmp_path / "a", "qwen2", "awq")
    close(hf.from_pretrained(tmp_path / "a", device="cpu"), reference)
    model, info = hf.from_pretrained(tmp_path / "a", device="cpu", output_loading_info=True)
    assert not info["missing_keys"] and len(quantised(model)) == 14
    with pytest.raises(ValueError, match="give one of them"):
        hf.from_pretrained(tmp_path / "a", device="cpu", device_map="cpu")


def test_other_activation_dtypes_keep_the_column_factors(tmp_path):
    reference = write_folder(tmp_path / "a", "llama", "gptq", group_size=-1)
    for dtype, tolerance in ((torch.bfloat16, 6e-2), (torch.float32, 1e-2)):
        model = hf.from_pretrained(tmp_path / "a", dtype=dtype)
        layer = model.model.layers[0].mlp.up_proj
        assert layer.col_scale.dtype == torch.float32
        assert model(IDS).logits.dtype == dtype
        close(model, reference, tolerance)


@torch.no_grad()
def test_generate_with_a_static_cache_gives_the_same_tokens(tmp_path):
    reference = write_folder(tmp_path / "a", "llama", "gptq")
    model = hf.from_pretrained(tmp_path / "a")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(IDS, **options)
    static = model.generate(IDS, cache_implementation="static", **options)
    assert torch.equal(plain, static) and plain.shape == (2, 15)
    assert torch.equal(plain[:, :10], reference.generate(IDS, **options)[:, :10])


@torch.no_grad()
def test_the_model_compiles_as_one_graph(tmp_path):
    write_folder(tmp_path / "a", "llama", "gptq", act_order=True)
    model = hf.from_pretrained(tmp_path / "a")
    assert model.hf_quantizer.is_compileable and model.hf_quantizer.is_trainable
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(IDS, use_cache=False).logits
    assert torch.allclose(out, model(IDS, use_cache=False).logits, atol=2e-3)


def test_dequantize_gives_a_dense_model(tmp_path):
    reference = write_folder(tmp_path / "a", "qwen2", "gptq", act_order=True)
    model = hf.from_pretrained(tmp_path / "a").dequantize()
    assert not quantised(model)
    close(model, reference, 2e-2)
    model.save_pretrained(tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.up_proj.weight" in file.keys()  # noqa: SIM118


def test_gradients_reach_the_inputs(tmp_path):
    write_folder(tmp_path / "a", "llama", "awq")
    model = hf.from_pretrained(tmp_path / "a")
    x = torch.randn(1, 4, 128).half().requires_grad_()
    model(inputs_embeds=x).logits.float().square().mean().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and float(x.grad.abs().max()) > 0


def test_an_old_gptq_folder_with_its_config_in_a_file_of_its_own(tmp_path):
    reference = write_folder(tmp_path / "a", "llama", "gptq")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    old = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    del old["quant_method"], old["checkpoint_format"]
    (tmp_path / "a" / "quantize_config.json").write_text(json.dumps(old))
    close(hf.from_pretrained(tmp_path / "a"), reference)


def test_refusals_say_which_layer_and_why(tmp_path):
    write_folder(tmp_path / "a", "llama", "gptq")
    path = tmp_path / "a" / "config.json"
    good = json.loads(path.read_text())

    def refused(change, word):
        config = json.loads(json.dumps(good))
        change(config)
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=word):
            hf.from_pretrained(tmp_path / "a")

    refused(lambda c: c.pop("quantization_config"), "is not quantised")
    refused(lambda c: c["quantization_config"].update(bits=8), "bits=8")
    refused(lambda c: c["quantization_config"].update(quant_method="hqq"), "hqq")
    refused(lambda c: c["quantization_config"].update(group_size=128), r"model\.layers\.0")
    refused(lambda c: c.update(num_hidden_layers=1), "has no such layer")


def test_a_dense_folder_is_not_quantised_behind_ones_back(tmp_path):
    reference = write_folder(tmp_path / "a", "llama", "gptq")
    reference.save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "b", quantization_config=hf.MarlinCutlassConfig()
        )


def test_registering_twice_is_harmless_and_versions_are_checked():
    hf.register()
    hf.register()
    with pytest.raises(ValueError, match="layout_version=2"):
        hf.MarlinCutlassConfig(layout_version=2)
