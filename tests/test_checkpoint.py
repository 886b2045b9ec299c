"""Whole checkpoints: folders converted, refused, verified; memory and atomicity."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import marlin_cutlass as mc
from marlin_cutlass.checkpoint import CheckpointError, convert_checkpoint
from marlin_cutlass.checkpoint_verify import verify_checkpoint
from marlin_cutlass.formats.bits import AWQ_ORDER, pack_nibbles

K, N, G = 256, 128, 64


def codes(seed: int, k: int = K, n: int = N, g: int = G, sym: bool = True):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (k, n), generator=gen, dtype=torch.uint8)
    z = torch.randint(1, 16, (k // g, n), generator=gen, dtype=torch.uint8)
    z = torch.full_like(z, 8) if sym else z
    s = (torch.rand(k // g, n, generator=gen) * 0.05 + 0.001).half()
    return q, z, s


def dense(q, z, s, g: int = G):
    rows = torch.arange(q.shape[0]) // g
    return (q.float() - z.float()[rows]) * s.float()[rows]


def gptq_layer(name: str, seed: int, sym: bool = True, k: int = K, n: int = N) -> dict:
    q, z, s = codes(seed, k, n, sym=sym)
    return {
        f"{name}.qweight": pack_nibbles(q, 0),
        f"{name}.qzeros": pack_nibbles(z - 1, 1),
        f"{name}.scales": s,
        f"{name}.g_idx": (torch.arange(k) // G).int(),
    }


def folder(path: Path, tensors: dict, quant: dict | None, shards: int = 1, **config) -> Path:
    """A Hugging Face folder with `tensors` spread over `shards` files."""
    path.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files, weight_map = {}, {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        files[file] = {n: tensors[n] for n in names[i::shards]}
        weight_map |= dict.fromkeys(files[file], file)
    for file, part in files.items():
        save_file(part, path / file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["X"], **config}
    if quant is not None:
        config["quantization_config"] = quant
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": G, "desc_act": False, "sym": True}


def gptq_tensors() -> dict:
    gen = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(32, K, generator=gen).half()}
    for i in range(2):
        tensors |= gptq_layer(f"model.layers.{i}.q_proj", 10 + i)
        tensors[f"model.layers.{i}.q_proj.bias"] = torch.randn(N, generator=gen).half()
        tensors[f"model.layers.{i}.norm.weight"] = torch.randn(K + 1, generator=gen).half()
    return tensors


def test_sharded_gptq_folder(tmp_path):
    src = folder(tmp_path / "in", gptq_tensors(), GPTQ, shards=3)
    report = convert_checkpoint(src, tmp_path / "out", workers=2)
    assert sorted(report.layers) == ["model.layers.0.q_proj", "model.layers.1.q_proj"]
    assert report.source_format == "gptq"
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in out.glob("*.safetensors"):
        part = load_file(file)
        assert all(index[name] == file.name for name in part)
        with safe_open(file, "pt") as f:
            assert f.metadata()["quant_format"] == "marlin_cutlass"
            assert f.metadata()["format_version"] == "1"
        tensors |= part
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "marlin_cutlass" and config["format_version"] == 1
    assert (out / "tokenizer.json").is_file()
    for i in range(2):
        name = f"model.layers.{i}.q_proj"
        state = {r: tensors[f"{name}.{r}"] for r in ("packed", "col_scale")}
        weight = mc.PackedWeight.from_state({**state, "metadata": config["layers"][name]})
        expected = dense(*codes(10 + i))
        assert torch.allclose(mc.dequantize(weight, torch.float32), expected, rtol=1e-6, atol=0)
        bias = f"{name}.bias"
        assert torch.equal(tensors[bias], gptq_tensors_bias(src, bias))
    assert max(verify_checkpoint(src, out).values()) < 1e-6


def gptq_tensors_bias(src: Path, name: str):
    for file in src.glob("*.safetensors"):
        part = load_file(file)
        if name in part:
            return part[name]
    raise AssertionError(name)


def test_awq_and_marlin_folders(tmp_path):
    q, z, s = codes(3, sym=False)
    awq = {
        "a.qweight": pack_nibbles(q, 1, AWQ_ORDER),
        "a.qzeros": pack_nibbles(z, 1, AWQ_ORDER),
        "a.scales": s,
    }
    quant = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": G,
        "zero_point": True,
        "version": "gemm",
    }
    src = folder(tmp_path / "awq", awq, quant)
    report = convert_checkpoint(src, tmp_path / "awq_out")
    assert report.layers["a"]["has_zeros"] is True
    assert max(verify_checkpoint(src, tmp_path / "awq_out").values()) < 1e-6
    marlin = load_file(Path(__file__).parent / "fixtures" / "marlin_g128.safetensors")
    tensors = {
        "m.B": marlin["file.B"],
        "m.s": marlin["file.s"],
        "m.workspace": torch.zeros(16, dtype=torch.int32),
    }
    src = folder(
        tmp_path / "marlin",
        tensors,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "sym": True,
            "is_marlin_format": True,
        },
    )
    report = convert_checkpoint(src, tmp_path / "marlin_out")
    assert report.source_format == "marlin" and list(report.layers) == ["m"]
    assert max(verify_checkpoint(src, tmp_path / "marlin_out").values()) < 1e-6


def ct_config(**weights) -> dict:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 64,
        **weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def ct_layer(name: str, fixture: str) -> dict:
    tensors = load_file(Path(__file__).parent / "fixtures" / f"{fixture}.safetensors")
    return {f"{name}.{key[5:]}": t for key, t in tensors.items() if key.startswith("file.")}


def test_compressed_tensors_experts_stay_stacked(tmp_path):
    src = folder(
        tmp_path / "in",
        ct_layer("mlp.experts.up_proj", "ct_experts_asym_g64"),
        ct_config(symmetric=False),
    )
    report = convert_checkpoint(src, tmp_path / "out")
    form = report.layers["mlp.experts.up_proj"]
    assert form["experts"] == 3 and (form["k"], form["n"]) == (128, 64)
    packed = load_file(tmp_path / "out" / "model.safetensors")["mlp.experts.up_proj.packed"]
    assert packed.shape[0] == 3
    assert max(verify_checkpoint(src, tmp_path / "out").values()) < 1e-6


@pytest.mark.parametrize("actorder", [None, "static", "weight", "group"])
def test_only_actorder_group_uses_the_index(tmp_path, actorder):
    src = folder(
        tmp_path / "in", ct_layer("x", "ct_sym_g64_actorder"), ct_config(actorder=actorder)
    )
    report = convert_checkpoint(src, tmp_path / "out")
    assert report.layers["x"]["act_order"] == (actorder == "group")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert ("x.perm" in names) == (actorder == "group")


def test_all_problems_are_reported_at_once_and_nothing_is_written(tmp_path):
    tensors = gptq_tensors()
    del tensors["model.layers.0.q_proj.scales"]
    tensors |= gptq_layer("model.layers.1.odd", 5, k=64 * 3)
    tensors["model.layers.1.odd.qweight"] = torch.zeros(200 // 8, N, dtype=torch.int32)
    tensors["model.layers.1.odd.g_idx"] = (torch.arange(200) // 64).int()
    tensors |= gptq_layer("model.embed_tokens", 6)
    src = folder(tmp_path / "in", tensors, GPTQ)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(src, tmp_path / "out")
    text = str(error.value)
    assert "model.layers.0.q_proj.scales is missing" in text
    assert "model.layers.1.odd: K=200, N=128: K=200 is not a multiple of group_size=64" in text
    assert "model.embed_tokens: a quantised embedding" in text
    assert len(error.value.problems) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_layer_of_other_bits_is_seen_in_the_headers(tmp_path):
    tensors = gptq_tensors()
    name = "model.layers.1.q_proj"
    tensors[f"{name}.qweight"] = torch.zeros(K // 4, N, dtype=torch.int32)  # 8 bits
    tensors[f"{name}.scales"] = torch.zeros(1, N).half()
    src = folder(tmp_path / "in", tensors, {**GPTQ, "group_size": -1, "dynamic": {"-:x": {}}})
    with pytest.raises(CheckpointError, match=r"1\.q_proj: g_idx has shape \[256\]; \[512\]"):
        convert_checkpoint(src, tmp_path / "out")


def test_missing_codes_are_named_and_unused_tensors_warned(tmp_path):
    tensors = gptq_tensors()
    del tensors["model.layers.1.q_proj.qweight"]
    src = folder(tmp_path / "a", tensors, GPTQ)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.q_proj\.qweight is missing"):
        convert_checkpoint(src, tmp_path / "out")
    tensors = gptq_tensors() | {"model.layers.0.q_proj.leftover": torch.zeros(3)}
    src = folder(tmp_path / "b", tensors, GPTQ)
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.q_proj\.leftover is not used"):
        report = convert_checkpoint(src, tmp_path / "out")
    assert report.unused == ["model.layers.0.q_proj.leftover"]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path):
    tensors = gptq_tensors()
    tensors["model.layers.1.q_proj.scales"][0, 3] = float("nan")  # only the data shows it
    src = folder(tmp_path / "in", tensors, GPTQ)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.q_proj: .*nan"):
        convert_checkpoint(src, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_existing_output_is_kept_unless_overwritten(tmp_path):
    src = folder(tmp_path / "in", gptq_tensors(), GPTQ)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="overwrite"):
        convert_checkpoint(src, out)
    assert (out / "precious").read_text() == "x"
    convert_checkpoint(src, out, overwrite=True)
    assert not (out / "precious").exists()
    with pytest.raises(ValueError, match="already"):
        convert_checkpoint(out, tmp_path / "again")


def test_tied_embedding_with_quantised_head(tmp_path):
    # 83: the embedding stays floating point, the head is converted and untied, and both are said.
    tensors = gptq_tensors() | gptq_layer("lm_head", 7)
    src = folder(tmp_path / "in", tensors, GPTQ, tie_word_embeddings=True)
    report = convert_checkpoint(src, tmp_path / "out")
    assert "lm_head" in report.layers
    assert any("tie_word_embeddings" in note for note in report.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.float16


def test_floating_point_folder_is_quantised_by_rtn(tmp_path):
    names = ["model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj"]
    tensors = {f"{n}.weight": torch.randn(96, 256).bfloat16() for n in names}
    tensors |= {
        "model.embed_tokens.weight": torch.randn(64, 256).bfloat16(),
        "lm_head.weight": torch.randn(64, 256).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 256).bfloat16(),
        "model.layers.0.input_layernorm.weight": torch.randn(256).bfloat16(),
    }
    src = folder(tmp_path / "in", tensors, None)
    report = convert_checkpoint(src, tmp_path / "out", group_size=64, clip="mse")
    assert sorted(report.layers) == names and report.passed == 4
    errors = verify_checkpoint(src, tmp_path / "out")
    assert all(0.01 < e < 0.2 for e in errors.values())


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({**GPTQ, "bits": 8}, "bits=8"),
        ({**GPTQ, "group_size": 16}, "group_size=16"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic override .* sets bits=8"),
        ({**GPTQ, "checkpoint_format": "gptq_p"}, "gptq_p"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8"}, "fp8"),
        (ct_config() | {"format": "sparse-bitmask"}, "sparse-bitmask"),
        (ct_config(type="float"), "float"),
    ],
)
def test_unsupported_configs_are_refused_with_the_reason(tmp_path, quant, message):
    src = folder(tmp_path / "in", gptq_tensors(), quant)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(src, tmp_path / "out")


def test_damaged_file_is_named(tmp_path):
    src = folder(tmp_path / "in", gptq_tensors(), GPTQ)
    data = (src / "model.safetensors").read_bytes()
    (src / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut short"):
        convert_checkpoint(src, tmp_path / "out")


PEAK = """
    import resource, sys, torch
    torch.set_num_threads(1)
    from marlin_cutlass.checkpoint import convert_checkpoint
    import marlin_cutlass.nn
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert_checkpoint(sys.argv[1], sys.argv[2], workers=1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_shard(tmp_path):
    """One shard of 16 layers takes hardly more memory than one of 2."""
    assert resource.getpagesize()
    peaks = []
    for count in (2, 16):
        tensors = {}
        for i in range(count):
            tensors |= gptq_layer(f"layers.{i}.proj", i, k=2048, n=2048)
        src = folder(tmp_path / f"in{count}", tensors, GPTQ)
        command = [sys.executable, "-c", textwrap.dedent(PEAK), src, tmp_path / f"out{count}"]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks.append(int(out.stdout) * 1024)
    layer = 2048 * 2048 // 2
    assert peaks[1] - peaks[0] < 4 * layer, peaks  # 14 more layers are 14 * layer


def test_stacked_experts_in_floating_point_are_copied_and_named(tmp_path):
    experts = torch.randn(4, 128, 256).half()
    tensors = {
        "layers.0.mlp.down_proj.weight": torch.randn(128, 256).half(),
        "layers.0.mlp.experts.gate_up_proj": experts,
        "layers.0.conv.weight": torch.randn(128, 1, 4).half(),
    }
    source = folder(tmp_path / "in", tensors, None)
    report = convert_checkpoint(source, tmp_path / "out")
    assert list(report.layers) == ["layers.0.mlp.down_proj"]
    note = (
        "layers.0.mlp.experts.gate_up_proj: [4, 128, 256] stays floating point (three dimensions)"
    )
    assert report.notes == [note]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["layers.0.mlp.experts.gate_up_proj"], experts)
