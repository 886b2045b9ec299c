"""save and load: single weights, mappings, models; versions; atomicity."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import marlin_cutlass as mc
from marlin_cutlass.files import load_model, load_with_metadata
from marlin_cutlass.nn import QuantLinear
from tests.test_nn import activations, layer, weight


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"zeros": True},
        {"act_order": True},
        {"g": -1},
        {"g": 256},
        {"k": 128, "g": 128, "n": 64},
        {"k": 64, "g": 64, "n": 8},
        {"k": 200, "g": -1, "n": 40},
    ],
    ids=str,
)
def test_single_weight_round_trip(tmp_path, kind):
    w = weight(**kind)
    mc.save(w, tmp_path / "w.safetensors")
    loaded = mc.load(tmp_path / "w.safetensors")
    assert loaded == w and loaded.shape == w.shape and loaded.dtype == w.dtype
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_new_process_reads_the_same_weight(tmp_path):
    w = weight(zeros=True, act_order=True)
    mc.save(w, tmp_path / "w.safetensors")
    torch.save(mc.dequantize(w), tmp_path / "dense.pt")
    code = (
        "import sys, torch, marlin_cutlass as mc\n"
        "w = mc.load(sys.argv[1])\n"
        "assert torch.equal(mc.dequantize(w), torch.load(sys.argv[2]))\n"
    )
    files = [tmp_path / "w.safetensors", tmp_path / "dense.pt"]
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=120)


def test_metadata_names_format_and_versions(tmp_path):
    path = tmp_path / "w.safetensors"
    mc.save(weight(), path, metadata={"note": "x"})
    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    assert metadata["quant_format"] == "marlin_cutlass"
    assert metadata["format_version"] == "1" and metadata["layout_version"] == "1"
    assert load_with_metadata(path)[1]["note"] == "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": "2"}, "format_version=2: this release reads version 1"),
        ({"layout_version": "7"}, "layout_version=7"),
        ({"quant_format": "other"}, "not a marlin_cutlass file"),
    ],
)
def test_unknown_versions_are_refused(tmp_path, change, message):
    path = tmp_path / "w.safetensors"
    mc.save(weight(), path)
    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    save_file(load_file(path), path, {**metadata, **change})
    with pytest.raises(ValueError, match=message):
        mc.load(path)


def test_missing_and_damaged_tensors_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    mc.save({"a": weight(), "b": weight(seed=1)}, path)
    with safe_open(path, "pt") as f:
        metadata = f.metadata()
    tensors = load_file(path)
    del tensors["b.col_scale"]
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"layer b: state lacks col_scale"):
        mc.load(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"w\.safetensors is not a readable safetensors file"):
        mc.load(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        mc.load(tmp_path / "absent")


def test_mappings_and_views(tmp_path):
    base = torch.arange(12.0)
    content = {
        "w": weight(),
        "q": layer(),
        "view": base[2:5],
        "whole": base,
        "t": base.view(3, 4).t(),
    }
    mc.save(content, tmp_path / "m.safetensors")
    loaded = mc.load(tmp_path / "m.safetensors")
    assert loaded["w"] == content["w"] and loaded["q"] == content["q"].weight_packed
    assert torch.equal(loaded["q.bias"], content["q"].bias)
    assert torch.equal(loaded["view"], base[2:5])
    assert torch.equal(loaded["t"], base.view(3, 4).t())
    with pytest.raises(TypeError, match="x is int"):
        mc.save({"x": 3}, tmp_path / "n.safetensors")


class Tiny(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 256)
        self.up = nn.Linear(256, 96)
        self.down = nn.Linear(96, 256, bias=False)
        self.head = nn.Linear(256, 16, bias=False)
        self._tied_weights_keys = ["head.weight"] if tie else []
        if tie:
            self.tie_weights()

    def tie_weights(self) -> None:
        if self._tied_weights_keys:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(self.up(self.embed(ids)).relu()))


@pytest.mark.parametrize("tie", [False, True])
def test_models_with_tied_weights(tmp_path, tie):
    model = Tiny(tie).half()
    model.up = QuantLinear.from_linear(model.up, group_size=64)
    ids = torch.arange(5)
    mc.save(model, tmp_path / "m.safetensors")
    names = load_file(tmp_path / "m.safetensors").keys()
    assert ("head.weight" in names) != tie
    with torch.device("meta"):
        empty = Tiny(tie)
    loaded = load_model(empty, tmp_path / "m.safetensors")
    assert isinstance(loaded.up, QuantLinear) and loaded.up.bias is not None
    assert torch.equal(loaded(ids), model(ids))
    assert (loaded.head.weight is loaded.embed.weight) == tie


def test_models_of_another_shape_are_refused(tmp_path):
    model = Tiny().half()
    model.up = QuantLinear.from_linear(model.up, group_size=64)
    mc.save(model, tmp_path / "m.safetensors")
    other = Tiny()
    other.up = nn.Linear(256, 64)
    with pytest.raises(ValueError, match=r"layer up is \(256, 64\).*\(256, 96\)"):
        load_model(other, tmp_path / "m.safetensors")
    other = Tiny()
    del other.up
    with pytest.raises(ValueError, match="no layer up"):
        load_model(other, tmp_path / "m.safetensors")
    other = Tiny()
    other.extra = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"missing \['extra"):
        load_model(other, tmp_path / "m.safetensors")


def test_unused_tensors_are_warned_about(tmp_path):
    model = Tiny().half()
    state = dict(model.state_dict(), leftover=torch.zeros(2))
    mc.save(state, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="not used: leftover"):
        load_model(Tiny(), tmp_path / "m.safetensors")
    # A buffer that old files hold and the model computes itself is no news.
    other = Tiny()
    other.register_buffer("leftover", torch.ones(2), persistent=False)
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other.leftover, torch.ones(2))


def test_buffers_without_values_are_refused(tmp_path):
    class WithTable(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4), persistent=False)

    model = WithTable().half()
    mc.save(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        empty = WithTable()
    with pytest.raises(ValueError, match=r"no values for table"):
        load_model(empty, tmp_path / "m.safetensors")


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    w = weight()
    mc.save(w, path)

    def fail(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("marlin_cutlass.files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        mc.save(weight(seed=5), path)
    assert mc.load(path) == w
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_missing_folder_is_named(tmp_path):
    path = tmp_path / "absent" / "w.safetensors"
    with pytest.raises(FileNotFoundError, match=r"w\.safetensors: .*absent is not a folder"):
        mc.save(weight(), path)


def test_loaded_weight_multiplies(tmp_path):
    w = weight(act_order=True)
    mc.save(w, tmp_path / "w.safetensors")
    x = activations(5, 256)
    assert torch.equal(mc.gemm(x, mc.load(tmp_path / "w.safetensors")), mc.gemm(x, w))
    copied = copy.deepcopy(w)
    assert copied == w
