"""Readers against files that the real packers wrote (tests/fixtures, tools/make_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import marlin_cutlass as mc
from marlin_cutlass import formats

FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str):
    """(want, file, settings) of one fixture."""
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as f:
        tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        settings = json.loads(f.metadata()["settings"])
    split = {"want": {}, "file": {}}
    for key, value in tensors.items():
        side, name = key.split(".", 1)
        split[side][name] = value
    return split["want"], split["file"], settings


def expected(want) -> np.ndarray:
    """float64 [K, N] by numpy, from what was given to the packer."""
    q, z, s, group = (want[key].numpy() for key in ("q", "zeros", "scales", "g_idx"))
    return (q.astype(np.int64) - z[group]) * s[group].astype(np.float64)


def check(weight, want) -> None:
    """A reader's result means what was packed, and so does the packed weight."""
    reference = expected(want)
    assert np.array_equal(weight.q.numpy(), want["q"].numpy())
    assert np.array_equal(weight.dequantize().double().numpy(), reference)
    packed = weight.to_packed()
    assert packed.shape == tuple(want["q"].shape)
    assert packed.has_zeros == bool((want["zeros"] != 8).any())
    exact = mc.dequantize(packed, torch.float32).double().numpy()
    assert np.allclose(exact, reference, rtol=2e-7, atol=0)
    half = mc.dequantize(packed, torch.float16).double().numpy()
    assert np.abs(half - reference).max() <= np.abs(reference).max() * 2**-10


GPTQ = [
    "gptq_sym_g64",
    "gptq_sym_g128",
    "gptq_sym_gcol",
    "gptq_sym_g64_actorder",
    "gptq_asym_g64",
    "gptq_asym_g64_zero0",
    "gptq_v2_asym_g64",
    "gptq_v2_asym_g32_actorder",
]


@pytest.mark.filterwarnings("ignore::marlin_cutlass.formats.AmbiguousZeroWarning")
@pytest.mark.parametrize("name", GPTQ)
def test_gptqmodel(name):
    want, file, settings = load(name)
    weight = formats.read_gptq(
        file["qweight"],
        file["qzeros"],
        file["scales"],
        file["g_idx"],
        group_size=settings["group_size"],
        checkpoint_format=settings["checkpoint_format"],
        sym=settings["sym"],
    )
    check(weight, want)
    assert (weight.g_idx is not None) == (settings["desc_act"] and settings["group_size"] != -1)
    assert (weight.zeros is None) == settings["sym"]


def test_gptqmodel_without_index_and_with_inferred_symmetry():
    want, file, _ = load("gptq_sym_gcol")
    # 91: per column, act-order claimed, no g_idx in the file: order is irrelevant.
    packed = mc.from_gptq(file["qweight"], file["qzeros"], file["scales"], group_size=-1)
    assert packed.perm is None and not packed.has_zeros
    assert np.allclose(mc.dequantize(packed, torch.float32).numpy(), expected(want), rtol=1e-6)


def test_zero_point_of_zero_in_version_1_is_read_by_the_stated_rule():
    want, file, settings = load("gptq_asym_g64_zero0")
    assert int((want["zeros"] == 0).sum()) > 10
    args = (file["qweight"], file["qzeros"], file["scales"])
    with pytest.warns(formats.AmbiguousZeroWarning, match=r"stored as 15.*zero_rule='word'"):
        weight = formats.read_gptq(*args, group_size=settings["group_size"])
    assert torch.equal(weight.zeros.int(), want["zeros"])
    with pytest.warns(formats.AmbiguousZeroWarning):
        nibble = formats.read_gptq(*args, group_size=settings["group_size"], zero_rule="nibble")
    assert not torch.equal(nibble.zeros.int(), want["zeros"])


@pytest.mark.parametrize("name", ["awq_g64", "awq_g128"])
def test_autoawq(name):
    want, file, settings = load(name)
    # 74: zero points differ from column to column, so a missing interleave shows.
    assert len(want["zeros"][0].unique()) > 8
    weight = formats.read_awq(
        file["qweight"], file["qzeros"], file["scales"], group_size=settings["group_size"]
    )
    check(weight, want)


@pytest.mark.parametrize("name", ["marlin_g64", "marlin_g128", "marlin_gcol"])
def test_marlin_serialised(name):
    want, file, settings = load(name)
    check(formats.read_marlin(file["B"], file["s"], group_size=settings["group_size"]), want)


CT = ["ct_sym_g64", "ct_asym_g64", "ct_sym_channel", "ct_asym_channel_k36", "ct_sym_g64_actorder"]


@pytest.mark.parametrize("name", CT)
def test_compressed_tensors(name):
    want, file, settings = load(name)
    weight = formats.read_compressed_tensors(**_ct_arguments(file), **settings)
    check(weight, want)
    assert (weight.g_idx is not None) == (settings["actorder"] == "group")


def _ct_arguments(file) -> dict:
    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    return {name: file.get(name) for name in names}


def test_compressed_tensors_experts_are_read_one_by_one():
    want, file, settings = load("ct_experts_asym_g64")
    experts = mc.from_compressed_tensors(**_ct_arguments(file), **settings)
    assert len(experts) == 3
    for i, packed in enumerate(experts):
        one = {key: value[i] for key, value in want.items()}
        assert np.allclose(mc.dequantize(packed, torch.float32).numpy(), expected(one), rtol=1e-6)


def test_hqq_fractional_zeros_are_refused_and_dequantised_exactly():
    want, file, settings = load("hqq_g64")
    options = {"shape": tuple(settings["shape"]), "group_size": 64}
    with pytest.raises(ValueError, match=r"zero point \d+\.\d+ .*not an integer.*not rounded"):
        formats.from_hqq(file["W_q"], file["scale"], file["zero"], **options)
    dense = formats.dequantize_hqq(file["W_q"], file["scale"], file["zero"], **options)
    assert torch.allclose(dense, want["w_hat"].float(), atol=2e-3, rtol=0)
    whole = file["zero"].round().clamp(0, 15)
    packed = formats.from_hqq(file["W_q"], file["scale"], whole, **options)
    again = formats.dequantize_hqq(file["W_q"], file["scale"], whole, **options)
    assert torch.allclose(mc.dequantize(packed, torch.float32), again.t(), rtol=1e-5)
