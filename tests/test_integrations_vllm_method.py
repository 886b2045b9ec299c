"""Our quantization method with the real vllm package's layers and loaders, on the CPU.

Skipped (never passed) where vllm is not installed.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vllm is imported
pytest.importorskip("vllm", reason="needs the vllm package")

from integration_weights import random_layer
from vllm_support import fill, load_layer, vllm_config  # noqa: F401

from marlin_cutlass import PackedWeight, pack, pack_sparse
from marlin_cutlass.integrations import vllm as plugin

K, N = 256, 128
PREFIX = "model.layers.0.self_attn."
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
pytestmark = pytest.mark.usefixtures("vllm_config")


def safetensors_dtype(dtype):
    from marlin_cutlass.safetensors_stream import NAMES

    return NAMES[dtype]


def foreign(quant: dict, layers: dict[str, dict]):
    """Our configuration for a foreign folder with these layers (name -> tensors)."""
    config = plugin.register_method().from_config(quant)
    config.read_headers(
        {
            f"{name}.{role}": {"dtype": safetensors_dtype(tensor.dtype)}
            for name, tensors in layers.items()
            for role, tensor in tensors.items()
        }
    )
    config.packed_modules_mapping = FUSED
    return config


def quant_config(fmt, group_size, zeros=False, act_order=False):
    if fmt == "gptq":
        return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": not zeros,
                "desc_act": act_order, "checkpoint_format": "gptq"}  # fmt: skip
    if fmt == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
    weights = {"num_bits": 4, "type": "int", "symmetric": not zeros, "strategy": "channel"}
    if group_size > 0:
        weights |= {"strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def tensors_of(fmt, layer):
    made = {"gptq": layer.gptq, "awq": layer.awq if layer.zeros is not None else None}
    return made.get(fmt, layer.compressed_tensors)()


def packed_of(layer) -> PackedWeight:
    index = None if torch.equal(layer.g_idx, layer.g_idx.sort().values) else layer.g_idx
    return pack(layer.q, layer.scales, layer.zeros, group_size=layer.group_size, g_idx=index)


def native(layers: dict):
    """Our configuration for a converted folder (name -> PackedWeight)."""
    forms = {n: w.metadata() | {"act_order": w.perm is not None} for n, w in layers.items()}
    config = plugin.register_method().from_config(
        {"quant_method": "marlin_cutlass", "layers": forms}
    )
    config.packed_modules_mapping = FUSED
    return config


def check(module, x, dense, bias=None):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    expected = x.float() @ dense
    expected = expected if bias is None else expected + bias.float()
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert torch.allclose(out.float(), expected, atol=3e-3 * float(expected.abs().max()))


FORMS = [
    ("gptq", 64, False, False),
    ("gptq", 128, True, False),
    ("gptq", 64, False, True),
    ("gptq", 32, True, True),
    ("gptq", -1, True, False),
    ("awq", 64, True, False),
    ("ct", 64, False, False),
    ("ct", 128, True, False),
    ("ct", -1, False, False),
]


def make(form, seed=0, k=K, n=N, order=None):
    _, group, zeros, act_order = form
    return random_layer(k, n, group, zeros, order if order is not None else act_order, seed)


@pytest.mark.parametrize("kind", ["foreign", "native"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2)])
def test_column_and_row_parallel_layers(form, tp, kind):
    layer, (rank, world) = make(form), tp
    name = f"{PREFIX}o_proj"
    if kind == "native":
        weight = packed_of(layer)
        config, tensors = native({name: weight}), weight.tensors()
    else:
        tensors = tensors_of(form[0], layer)
        config = foreign(quant_config(*form), {name: tensors})
    x = torch.randn(3, K).half()
    column = load_layer("column", config, K, N, {None: tensors}, tp=tp, prefix=name)
    width = N // world
    check(column, x, layer.dense[:, rank * width : (rank + 1) * width])
    row = load_layer("row", config, K, N, {None: tensors}, tp=tp, prefix=name)
    part = slice(rank * K // world, (rank + 1) * K // world)
    check(row, x[:, part], layer.dense[part])


@pytest.mark.parametrize("tp", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_sparse_layers_of_a_converted_folder(group_size, tp):
    layer, (rank, world) = random_layer(K, N, group_size, seed=3, sparse=True), tp
    weight = pack_sparse(layer.q, layer.scales, group_size=group_size)
    name = f"{PREFIX}o_proj"
    config = native({name: weight})
    x = torch.randn(3, K).half()
    column = load_layer("column", config, K, N, {None: weight.tensors()}, tp=tp, prefix=name)
    width = N // world
    check(column, x, layer.dense[:, rank * width : (rank + 1) * width])
    row = load_layer("row", config, K, N, {None: weight.tensors()}, tp=tp, prefix=name)
    part = slice(rank * K // world, (rank + 1) * K // world)
    check(row, x[:, part], layer.dense[part])


@pytest.mark.parametrize("kind", ["foreign", "native"])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3], FORMS[5], FORMS[7]])
@pytest.mark.parametrize("tp", [(0, 1), (1, 2), (3, 4)])
def test_fused_qkv_with_repeated_key_value_heads(form, tp, kind):
    head, heads, kv_heads, (rank, world) = 32, 8, 2, tp
    order = make(form).g_idx
    sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
    layers = {s: make(form, i, n=n, order=order) for i, (s, n) in enumerate(sizes.items())}
    names = {s: f"{PREFIX}{s}_proj" for s in sizes}
    bias = {s: torch.randn(n).half() for s, n in sizes.items()}
    if kind == "native":
        weights = {s: packed_of(layer) for s, layer in layers.items()}
        config = native({names[s]: w for s, w in weights.items()})
        shards = {s: w.tensors() | {"bias": bias[s]} for s, w in weights.items()}
    else:
        shards = {s: tensors_of(form[0], layer) for s, layer in layers.items()}
        config = foreign(quant_config(*form), {names[s]: t for s, t in shards.items()})
        shards = {s: t | {"bias": bias[s]} for s, t in shards.items()}
    module = load_layer(
        "qkv", config, K, (head, heads, kv_heads), shards, tp=tp, prefix=f"{PREFIX}qkv_proj"
    )
    assert len(module.quant_method.forms) == 1  # one product
    columns, biases = [], []
    for s, layer in layers.items():
        ranks = world if s == "q" else min(world, kv_heads)
        width = sizes[s] // ranks
        at = rank * ranks // world * width
        columns.append(layer.dense[:, at : at + width])
        biases.append(bias[s][at : at + width])
    check(module, torch.randn(2, K).half(), torch.cat(columns, 1), torch.cat(biases))


@pytest.mark.parametrize("kind", ["foreign", "native"])
def test_parts_that_cannot_be_fused_are_multiplied_one_by_one(kind):
    """Different act-orders, and zero points in one of them only."""
    form = ("gptq", 64, True, True)
    gate = make(form, 1)
    up = random_layer(K, N, 64, kind == "foreign", True, 2)
    names = [f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up")]
    if kind == "native":
        weights = [packed_of(gate), packed_of(up)]
        config = native(dict(zip(names, weights)))
        shards = dict(enumerate(w.tensors() for w in weights))
    else:
        tensors = [gate.gptq(), up.gptq()]
        config = foreign(quant_config(*form), dict(zip(names, tensors)))
        shards = dict(enumerate(tensors))
    shards = {i: t | {"bias": torch.full((N,), float(i)).half()} for i, t in shards.items()}
    module = load_layer(
        "merged", config, K, [N, N], shards, prefix="model.layers.0.mlp.gate_up_proj"
    )
    assert len(module.quant_method.forms) == 2
    bias = torch.cat([torch.zeros(N), torch.ones(N)])
    check(module, torch.randn(2, K).half(), torch.cat([gate.dense, up.dense], 1), bias)


@pytest.mark.parametrize("tp", [(0, 1), (1, 2)])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]])
@pytest.mark.parametrize("kind", ["foreign", "native"])
def test_a_layer_that_is_fused_on_disk(tp, form, kind):
    layer, (rank, world) = make(form, n=2 * N), tp
    name = "model.layers.0.mlp.gate_up_proj"
    if kind == "native":
        weight = packed_of(layer)
        config, tensors = native({name: weight}), weight.tensors()
    else:
        tensors = layer.gptq()
        config = foreign(quant_config(*form), {name: tensors})
    module = load_layer("merged", config, K, [N, N], {None: tensors}, tp=tp, prefix=name)
    width = N // world
    parts = [layer.dense[:, at + rank * width :][:, :width] for at in (0, N)]
    check(module, torch.randn(2, K).half(), torch.cat(parts, 1))


def test_scales_keep_their_dtype_in_a_bfloat16_model():
    layer = make(FORMS[0])
    name = f"{PREFIX}o_proj"
    config = foreign(quant_config(*FORMS[0]), {name: layer.gptq()})
    module = load_layer(
        "column", config, K, N, {None: layer.gptq()}, dtype=torch.bfloat16, prefix=name
    )
    # the same bits that a float16 model gets
    assert torch.equal(module.mc_packed_0.data, packed_of(layer).packed)
    x = torch.randn(2, K).bfloat16()
    out = module(x)[0]
    expected = x.float() @ layer.dense
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), expected, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["foreign", "native"])
def test_reloading_writes_into_the_memory_that_graphs_have_captured(kind):
    from vllm.model_executor.model_loader.reload import layerwise

    form, name = FORMS[2], f"{PREFIX}o_proj"
    old, new = make(form), make(form, 9, order=make(form).g_idx)

    def tensors(layer):
        return packed_of(layer).tensors() if kind == "native" else layer.gptq()

    if kind == "native":
        config = native({name: packed_of(old)})
    else:
        config = foreign(quant_config(*form), {name: tensors(old)})
    module = load_layer("column", config, K, N, {None: tensors(old)}, prefix=name, process=False)
    layerwise.record_metadata_for_reloading(module)
    module.quant_method.process_weights_after_loading(module)
    addresses = {n: p.data_ptr() for n, p in module.named_parameters()}
    layerwise.initialize_layerwise_reload(module)
    fill(module, {None: tensors(new)})
    layerwise.finalize_layerwise_reload(module, None)
    check(module, torch.randn(2, K).half(), new.dense)
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == addresses


def test_traced_with_any_number_of_rows():
    layer, name = make(FORMS[3]), f"{PREFIX}o_proj"
    config = foreign(quant_config(*FORMS[3]), {name: layer.gptq()})
    for kind, tp in (("column", (0, 1)), ("row", (1, 2))):
        module = load_layer(kind, config, K, N, {None: layer.gptq()}, tp=tp, prefix=name)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
        rows = slice(0, K) if kind == "column" else slice(K // 2, K)
        for m in (1, 3, 17):
            check(compiled, torch.randn(m, K).half()[:, rows], layer.dense[rows])


def test_which_layers_are_taken():
    from vllm.model_executor.layers import linear

    from marlin_cutlass.integrations.vllm_method import MarlinCutlassLinearMethod

    tensors = make(FORMS[0]).gptq()
    layers = {f"{PREFIX}{p}_proj": tensors for p in "qkvo"}
    config = foreign(quant_config(*FORMS[0]), layers)
    dense = load_dense(linear, config, "model.layers.0.mlp.down_proj")
    assert isinstance(dense.quant_method, linear.UnquantizedLinearMethod)
    taken = load_dense(linear, config, f"{PREFIX}o_proj")
    assert isinstance(taken.quant_method, MarlinCutlassLinearMethod)
    assert config.parts_of(f"{PREFIX}qkv_proj") == [f"{PREFIX}{p}_proj" for p in "qkv"]
    del config.roles[f"{PREFIX}k_proj"]
    with pytest.raises(ValueError, match=r"k_proj not quantised, but layers fused"):
        config.parts_of(f"{PREFIX}qkv_proj")


def load_dense(linear, config, prefix):
    return linear.ColumnParallelLinear(
        K, N, bias=False, quant_config=config, params_dtype=torch.float16, prefix=prefix
    )


def test_names_are_those_of_vllms_model():
    from vllm.model_executor.models.utils import WeightsMapper

    config = foreign(quant_config(*FORMS[0]), {"lm.layers.0.o_proj": make(FORMS[0]).gptq()})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"lm.": "language_model.model."}))
    assert config.parts_of("language_model.model.layers.0.o_proj")
    mapper = config.get_checkpoint_weight_mapper()
    assert mapper.map_name("a.g_idx") == "a.g_idx"  # vLLM's default drops it


def test_refusals_name_the_layer_and_the_rule():
    config_class = plugin.register_method()
    for quant, word in (
        ({**quant_config("gptq", 64), "bits": 8}, "bits=8"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "marlin_cutlass", "layers": {}, "layout_version": 7}, "layout_version=7"),
    ):
        with pytest.raises(ValueError, match=word):
            config_class.from_config(quant)
    with pytest.raises(ValueError, match="no tensor named"):
        config_class.from_config(quant_config("gptq", 64)).read_headers({})
    name = f"{PREFIX}o_proj"
    config = foreign(quant_config("gptq", 128), {name: make(FORMS[1]).gptq()})
    with pytest.raises(ValueError, match=r"o_proj.*in_features=64"):
        load_layer("row", config, 256, N, {}, tp=(0, 4), prefix=name)
    ordered = make(("gptq", 64, False, True))
    config = foreign(quant_config("gptq", 64), {name: ordered.gptq()})  # desc_act=False: a lie
    with pytest.raises(ValueError, match="says that there is no"):
        load_layer("row", config, K, N, {None: ordered.gptq()}, tp=(0, 2), prefix=name)


def test_taken_over_only_where_the_user_asks(tmp_path):
    """Through vLLM's own model configuration, on folders of each kind."""
    pytest.importorskip("transformers")
    from integration_models import write_folder
    from vllm.config import ModelConfig

    from marlin_cutlass.checkpoint import convert_checkpoint

    plugin.register()
    plugin.register()  # again: as vLLM does in some processes
    write_folder(tmp_path / "gptq", "llama", "gptq", zeros=True, act_order=True)
    convert_checkpoint(tmp_path / "gptq", tmp_path / "ours")
    raw = json.loads((tmp_path / "gptq" / "config.json").read_text())
    assert raw["quantization_config"]["desc_act"]

    def chosen(folder, quantization=None):
        return ModelConfig(
            str(tmp_path / folder), quantization=quantization, dtype="float16",
            skip_tokenizer_init=True,
        ).quantization  # fmt: skip

    assert chosen("gptq", "marlin_cutlass") == "marlin_cutlass"
    assert chosen("ours") == "marlin_cutlass"
    assert chosen("gptq") != "marlin_cutlass"


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("route", ["method", "converted", "kernel"])
def test_a_whole_model_through_vllms_loader(tmp_path, monkeypatch, name, route):
    """vLLM builds its own model and loads the folder; its layers multiply as the dense ones do."""
    pytest.importorskip("transformers")
    from integration_models import write_folder
    from vllm.config import (
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import PlatformEnum

    from marlin_cutlass.checkpoint import convert_checkpoint

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none to empty
    plugin.register()
    known = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, list(known))
    kernel = plugin.register_kernel(first=True, platform=PlatformEnum.CPU)
    hard = {} if route == "kernel" else {"zeros": True, "act_order": True}
    reference = write_folder(tmp_path / "a", name, "gptq", shards=2, **hard)
    folder, quantization = tmp_path / "a", "marlin_cutlass" if route == "method" else None
    if route == "converted":
        convert_checkpoint(folder, tmp_path / "b")
        folder = tmp_path / "b"
    model_config = ModelConfig(
        str(folder), quantization=quantization, dtype="float16", skip_tokenizer_init=True,
        enforce_eager=True,
    )  # fmt: skip
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(use_tqdm_on_load=False),
    )
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    for mine, theirs in zip(model.model.layers, reference.model.layers):
        method = mine.self_attn.qkv_proj.quant_method
        if route == "kernel":
            assert type(method.kernel) is kernel
        else:
            assert len(method.forms) == 1
        x = torch.randn(3, 128).half()
        attention = theirs.self_attn
        expected = [getattr(attention, f"{p}_proj")(x) for p in "qkv"]
        close(mine.self_attn.qkv_proj(x)[0], torch.cat(expected, -1))
        close(mine.self_attn.o_proj(x)[0], attention.o_proj(x))
        close(
            mine.mlp.gate_up_proj(x)[0],
            torch.cat([theirs.mlp.gate_proj(x), theirs.mlp.up_proj(x)], -1),
        )
        y = torch.randn(3, 256).half()
        close(mine.mlp.down_proj(y)[0], theirs.mlp.down_proj(y))


def close(actual, expected):
    error = float((actual.float() - expected.float()).abs().max())
    assert error < 3e-3 * float(expected.abs().max()), error
