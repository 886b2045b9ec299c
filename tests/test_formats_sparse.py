"""2:4-sparse checkpoint formats against files that real packers wrote, and whole folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import marlin_cutlass as mc
from marlin_cutlass import formats
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
