"""2:4-sparse checkpoint formats against files that real packers wrote, and whole folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from integration_weights import random_layer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import marlin_cutlass as mc
from marlin_cutlass import formats
from marlin_cutlass.checkpoint import CheckpointError, convert_checkpoint
from marlin_cutlass.checkpoint_verify import verify_checkpoint
from marlin_cutlass.cli import app
from marlin_cutlass.inspecting import add_kernels, inspect_path, packed_size
from marlin_cutlass.sparse import check_2_4

FIXTURES = Path(__file__).parent / "fixtures"
CASES = ("g128", "g128_k256", "gcol")
SPARSE_MARLIN = [f"{packer}_{case}" for packer in ("torchao", "sparse-marlin") for case in CASES]


def load(name: str) -> tuple[dict, dict, int]:
    """(what was packed, the packer's tensors, group size)."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        group_size = json.loads(f.metadata()["settings"])["group_size"]
    want = {key[5:]: t for key, t in tensors.items() if key.startswith("want.")}
    return want, {k[5:]: t for k, t in tensors.items() if k.startswith("file.")}, group_size


def expected(want: dict) -> torch.Tensor:
    """float32 [K, N]; exact, because a code times an fp16 scale fits."""
    return (want["q"].float() - 8) * want["scales"].float()[want["g_idx"].long()]


def check(weight: formats.QuantizedWeight, want: dict) -> None:
    assert torch.equal(weight.q, want["q"])
    assert torch.equal(weight.scales, want["scales"]) and weight.zeros is None
    assert torch.equal(weight.dequantize(), expected(want))
    packed = weight.to_packed()
    assert packed.sparse and packed.shape == tuple(want["q"].shape)
    packed.check()
    assert torch.allclose(mc.dequantize(packed, torch.float32), expected(want), rtol=2e-7, atol=0)
    check_2_4(mc.dequantize(packed, torch.float32).t())


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_marlin_24(case):
    want, file, group_size = load(f"ct_marlin24_{case}")
    assert tuple(file["meta"].shape) == (want["q"].shape[0] // 32, 2 * want["q"].shape[1])
    check(formats.read_marlin_24(**file, group_size=group_size), want)
    packed = mc.from_compressed_tensors(**file, group_size=group_size)
    assert packed == mc.pack_sparse(want["q"], want["scales"], group_size=group_size)


@pytest.mark.parametrize("name", [*SPARSE_MARLIN, "torchao_g64"])
def test_sparse_marlin(name):
    want, file, group_size = load(name)
    check(formats.read_sparse_marlin(**file, group_size=group_size), want)
    packed = formats.from_sparse_marlin(**file, group_size=group_size)
    assert packed == mc.pack_sparse(want["q"], want["scales"], group_size=group_size)


def test_the_two_formats_differ_for_two_groups_only():
    _, file, group_size = load("ct_marlin24_g128")
    as_marlin = {"B": file["weight_packed"], "s": file["scale_packed"], "meta": file["meta"]}
    one = formats.read_marlin_24(**file, group_size=group_size)
    other = formats.read_sparse_marlin(**as_marlin, group_size=group_size)
    assert torch.equal(one.scales, other.scales) and torch.equal(one.q, other.q)
    want, file, group_size = load("ct_marlin24_g128_k256")
    as_marlin = {"B": file["weight_packed"], "s": file["scale_packed"], "meta": file["meta"]}
    other = formats.read_sparse_marlin(**as_marlin, group_size=group_size)
    assert torch.equal(other.q, want["q"]) and not torch.equal(other.scales, want["scales"])


def test_places_must_rise():
    _, file, group_size = load("ct_marlin24_gcol")
    file["meta"] = file["meta"].clone()
    file["meta"][0, 0] = 0
    with pytest.raises(ValueError, match=r"rows 0:4 of column 0 the places 0 and 0: they must"):
        formats.read_marlin_24(**file, group_size=group_size)


def test_wrong_tensors_are_named():
    _, file, group_size = load("ct_marlin24_g128")
    with pytest.raises(ValueError, match="required for 4 bits"):
        bits8 = torch.cat((file["weight_packed"],) * 2, dim=1)
        formats.read_marlin_24(bits8, file["scale_packed"], file["meta"], group_size=group_size)
    with pytest.raises(ValueError, match=r"meta have shape .*of torch.int16 are required"):
        formats.read_marlin_24(
            file["weight_packed"], file["scale_packed"], file["meta"].int(), group_size=128
        )
    with pytest.raises(ValueError, match="group_size=96"):
        formats.read_marlin_24(**file, group_size=96)
    with pytest.raises(ValueError, match=r"scales has shape \(4, 64\); \[8, 64\] is required"):
        formats.read_marlin_24(**file, group_size=64)
    with pytest.raises(ValueError, match="and nothing else"):
        mc.from_compressed_tensors(**file, weight_scale=file["scale_packed"], group_size=128)
    with pytest.raises(ValueError, match="and nothing else"):
        mc.from_compressed_tensors(file["weight_packed"], meta=file["meta"], group_size=128)
    with pytest.raises(ValueError, match="weight_scale is missing"):
        mc.from_compressed_tensors(file["weight_packed"], group_size=128)
    with pytest.raises(ValueError, match="no zero points"):
        mc.from_compressed_tensors(**file, group_size=128, symmetric=False)
    with pytest.raises(ValueError, match=r"actorder='group': .* no activation order"):
        mc.from_compressed_tensors(**file, group_size=128, actorder="group")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"B": None}, TypeError, "codes are NoneType: a tensor is required"),
        ({"s": [1.0]}, TypeError, "scales are list"),
        ({"meta": None}, TypeError, "meta are NoneType"),
        ({"s": torch.tensor(1.0)}, ValueError, r"scales have shape \(\)"),
        ({"meta": torch.zeros(16, 64, dtype=torch.int16, device="meta")}, ValueError, "on meta"),
        ({"group_size": 32}, ValueError, "group_size=32 is not supported with 2:4 sparsity"),
        ({"group_size": "128"}, TypeError, "group_size='128' must be an int"),
    ],
)
def test_what_is_no_sparse_weight_is_refused_by_name(changes, error, message):
    whole = {
        "B": torch.zeros(8, 128, dtype=torch.int32),
        "s": torch.ones(2, 64).half(),
        "meta": torch.full((16, 64), 0x4444, dtype=torch.int16),
        "group_size": 128,
    }
    assert mc.formats.from_sparse_marlin(**whole).sparse
    with pytest.raises(error, match=message):
        mc.formats.from_sparse_marlin(**{**whole, **changes})


def folder(path: Path, tensors: dict, quant: dict) -> Path:
    path.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "m.safetensors"
    )
    config = {"architectures": ["X"], "quantization_config": quant}
    (path / "config.json").write_text(json.dumps(config))
    return path


def ct_config(**weights) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def ct_tensors(name: str, case: str) -> tuple[dict, dict]:
    want, file, _ = load(f"ct_marlin24_{case}")
    return want, {f"{name}.{role}": tensor for role, tensor in file.items()}


@pytest.mark.parametrize("case", CASES)
def test_marlin_24_folder(tmp_path, case):
    want, tensors = ct_tensors("model.up_proj", case)
    tensors["model.up_proj.bias"] = torch.randn(want["q"].shape[1]).half()
    strategy = {"strategy": "channel"}
    if case != "gcol":
        strategy = {"strategy": "group", "group_size": 128}
    src = folder(tmp_path / "in", tensors, ct_config(**strategy))
    report = convert_checkpoint(src, tmp_path / "out")
    form = report.layers["model.up_proj"]
    assert report.source_format == "marlin-24" and form["sparse"] is True
    assert max(verify_checkpoint(src, tmp_path / "out").values()) < 1e-6
    out = load_file(tmp_path / "out" / "m.safetensors")
    assert torch.equal(out["model.up_proj.bias"], tensors["model.up_proj.bias"])
    weight = mc.load(tmp_path / "out" / "m.safetensors")["model.up_proj"]
    group_size = -1 if case == "gcol" else 128
    assert weight == mc.pack_sparse(want["q"], want["scales"], group_size=group_size)
    for path in (src, tmp_path / "out"):
        found = inspect_path(path)
        add_kernels(found, "sm_90a", [16])
        (layer,) = found.layers
        assert layer.sparse and (layer.k, layer.n) == tuple(want["q"].shape)
        # a sparse kernel, or why there is none here
        said = layer.kernels[16]
        assert "sparse" in said or "no row" in said or "kernels built for" in said
        assert packed_size(layer) == weight.packed.numel()


def test_sparse_marlin_folder(tmp_path):
    want, file, _ = load("sparse-marlin_g128")
    roles = {"B": "B_24", "s": "s", "meta": "B_meta"}
    tensors = {f"x.{roles[role]}": tensor for role, tensor in file.items()}
    k, n = want["q"].shape
    tensors["x.B_meta"] = tensors["x.B_meta"].view(k // 32, 2 * n)  # as vLLM's layer has it
    tensors["x.workspace"] = torch.zeros(16, dtype=torch.int32)
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    src = folder(tmp_path / "in", tensors, {**quant, "checkpoint_format": "marlin_24"})
    report = convert_checkpoint(src, tmp_path / "out")
    assert report.source_format == "sparse-marlin" and not report.unused
    assert max(verify_checkpoint(src, tmp_path / "out").values()) < 1e-6


def test_problems_of_a_marlin_24_folder_are_named_before_anything_is_written(tmp_path):
    _, tensors = ct_tensors("a", "g128")
    _, more = ct_tensors("b", "g128")
    del tensors["a.meta"], more["b.weight_packed"]
    src = folder(tmp_path / "in", tensors | more, ct_config(strategy="group", group_size=128))
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(src, tmp_path / "out")
    assert "tensor a.meta is missing" in str(error.value)
    assert "tensor b.weight_packed is missing" in str(error.value)
    assert not (tmp_path / "out").exists()
    for changes, reason in (
        ({"symmetric": False, "strategy": "channel"}, "no zero points"),
        ({"strategy": "group", "group_size": 32}, "group_size=32"),
        ({"strategy": "channel", "num_bits": 8}, "bits=8"),
    ):
        text = json.dumps({"quantization_config": ct_config(**changes)})
        (src / "config.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            convert_checkpoint(src, tmp_path / "out")


def test_a_floating_point_folder_is_pruned_and_verified(tmp_path):
    torch.manual_seed(0)
    tensors = {f"model.{name}.weight": torch.randn(96, 256).half() for name in ("q_proj", "k_proj")}
    tensors["model.embed_tokens.weight"] = torch.randn(32, 256).half()
    src = folder(tmp_path / "in", tensors, {})
    report = convert_checkpoint(src, tmp_path / "out", sparsity="2:4", clip="mse")
    assert all(form["sparse"] for form in report.layers.values()) and len(report.layers) == 2
    assert 0.01 < max(verify_checkpoint(src, tmp_path / "out").values()) < 0.2
    code = CliRunner().invoke(
        app, ["quantize", str(src), str(tmp_path / "cli"), "--sparsity", "2:4"]
    )
    assert code.exit_code == 0, code.output
    assert inspect_path(tmp_path / "cli").layers[0].sparse
    tensors["model.odd.weight"] = torch.randn(32, 130).half()
    odd = folder(tmp_path / "odd", tensors, {})
    with pytest.raises(CheckpointError, match=r"model\.odd: K=130, .* needs a multiple of 4"):
        convert_checkpoint(odd, tmp_path / "no", sparsity="2:4", group_size=-1)
    with pytest.raises(ValueError, match="symmetric=True"):
        convert_checkpoint(src, tmp_path / "no", sparsity="2:4", symmetric=False)


def test_pruned_layers_of_dense_formats_are_recognised_when_asked_for(tmp_path):
    pruned, dense = (random_layer(256, 128, 64, seed=1, sparse=s) for s in (True, False))
    tensors = {f"a.{role}": t for role, t in pruned.gptq().items()}
    tensors |= {f"b.{role}": t for role, t in dense.gptq().items()}
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    src = folder(tmp_path / "in", tensors, quant)
    report = convert_checkpoint(src, tmp_path / "plain")
    assert not any(form.get("sparse") for form in report.layers.values()) and not report.notes
    code = CliRunner().invoke(
        app, ["convert", str(src), str(tmp_path / "out"), "--sparsity", "2:4", "--json", "-q"]
    )
    report = json.loads(code.stdout)
    assert report["layers"]["a"]["sparse"] and "sparse" not in report["layers"]["b"]
    assert report["notes"] == ["1 of 2 layers have 2:4 sparsity"]
    assert max(verify_checkpoint(src, tmp_path / "out").values()) < 1e-6
    loaded = mc.load(tmp_path / "out" / "m.safetensors")["a"]
    assert loaded == mc.pack_sparse(pruned.q, pruned.scales, group_size=64)
    with pytest.raises(ValueError, match="sparsity='1:4' is unknown"):
        convert_checkpoint(src, tmp_path / "no", sparsity="1:4")


@pytest.mark.parametrize("changes", [{"zeros": True}, {"act_order": True}, {"group_size": 32}])
def test_what_the_sparse_layout_cannot_hold_stays_dense(changes):
    layer = random_layer(256, 64, **{"group_size": 64, "sparse": True, **changes})
    index = layer.g_idx.int() if "act_order" in changes else None
    zeros = layer.zeros
    weight = formats.QuantizedWeight(layer.q, layer.scales, zeros, layer.group_size, index)
    assert weight.recognised() is weight


@pytest.mark.parametrize("k, n, group_size", [(128, 64, 64), (384, 192, 128), (256, 64, -1)])
def test_random_layers(k, n, group_size):
    layer = random_layer(k, n, group_size, seed=k, sparse=True)
    weight = formats.read_marlin_24(**layer.marlin_24(), group_size=group_size)
    assert torch.equal(weight.q, layer.q) and torch.equal(weight.scales, layer.scales)
