"""Every kernel of the default tables, executed on the CPU: ragged shapes, both types, zero points,
every decomposition."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from emulator_cases import DTYPES, make_case, ragged_shapes, unit_rows
from emulator_packing import make_weight
from reference import has_running_scale, nearest, to_numpy

from emulator import gemm
from emulator.__main__ import main
from emulator.build import ROOT
from generator import legality
from generator.arch import ARCHS
from generator.space import default_space
from generator.variant import Variant
from marlin_cutlass.pack import pack
from marlin_cutlass.reference import dequantize


def declared(family: str) -> list[str]:
    """Names in the default tables of every architecture that has the family."""
    archs = [arch for arch in ARCHS.values() if family in arch.families]
    entries = [entry for arch in archs for entry in default_space(arch, (family,))]
    return list(dict.fromkeys(entry.variant.name for entry in entries))


AMPERE, HOPPER = declared("ampere"), declared("hopper")
FORMATS = [
    (dtype, zeros, group)
    for dtype in DTYPES
    for zeros in (False, True)
    for group in (32, 64, 128, -1)
]
CONFLICT_KINDS = ("shared_load", "shared_store", "ldmatrix_access", "cp_async_access")


def seed_of(name: str) -> int:
    """A schedule of its own for each variant, the same in every run."""
    return 1 + sum(map(ord, name)) % 1000


@pytest.mark.parametrize("name", AMPERE + HOPPER)
def test_ragged_shapes(name: str) -> None:
    """The plain schedule and a random one; no shared memory instruction takes more passes than its
    bytes need."""
    variant = Variant.parse(name)
    for i, (m, n, k) in enumerate(ragged_shapes(variant)):
        case = make_case(variant, m, n, k, seed=i, bias=i == 0)
        statistics = case.check(sms=3 + i, seed=i * seed_of(name)).statistics
        for kind in CONFLICT_KINDS:
            assert statistics[f"{kind}_waves"] == statistics[f"{kind}_ideal"], kind


@pytest.mark.parametrize("name", AMPERE + HOPPER)
def test_unit_activations_give_the_dequantised_weight_bit_for_bit(name: str) -> None:
    """With a running scale: the number nearest to the exact product."""
    variant = Variant.parse(name)
    m, n, k = 9, variant.n_sm + 20, 256
    case = make_case(variant, m, n, k, seed=5, bias=False)
    a, depth = unit_rows(m, k, DTYPES[variant.dtype], seed=6)
    result = gemm(a, case.weight, variant, sms=2, seed=seed_of(name) + 1)
    if has_running_scale(variant):
        exact = case.source.dense(variant.dtype, rounded=False)[depth.numpy()]
        assert nearest(to_numpy(result.c), exact).all()
        return
    expected = torch.from_numpy(case.source.dense(variant.dtype)).to(a.dtype)[depth]
    assert torch.equal(result.c, expected)


@pytest.mark.parametrize("dtype, zeros, group_size", FORMATS)
def test_numpy_packing_agrees_with_pack(dtype: str, zeros: bool, group_size: int) -> None:
    """The two independent implementations of the layout and of its arithmetic."""
    k, n = (200 if group_size == -1 else 384), 150
    source = make_weight(k, n, group_size, zeros, seed=3)
    zero_points = None if source.zeros is None else torch.from_numpy(source.zeros)
    weight = pack(
        torch.from_numpy(source.codes),
        torch.from_numpy(source.scales),
        zero_points,
        group_size=group_size,
    )
    assert np.array_equal(weight.packed.numpy(), source.packed)
    assert np.array_equal(weight.col_scale.numpy(), source.col_scale)
    expected = torch.from_numpy(source.dense(dtype)).to(DTYPES[dtype])
    assert torch.equal(dequantize(weight, DTYPES[dtype]), expected)


# Geometries whose decompositions and tile shapes the default tables leave out.
MORE = [
    "w4a16_ampere_f16_g64_m16_n128k256_w2x2_p3_split2_c1",
    "w4a16_ampere_bf16z_g128_m32_n64k512_w1x8_p2_split4_c1",
    "w4a16_ampere_f16z_g32_m48_n256k128_w4x2_p2_dp_c2",
    "w4a16_hopper_f16z_g32_m24_n128k256_w2x2_p4_split4_c1",
    "w4a16_hopper_bf16_g64_m96_n128k128_w2x1_p3_streamk_c2",
    "w4a16_hopper_bf16z_gcol_m16_n64k512_w1x2_p4_dp_c1",
    "w4a16_hopper_f16_g128_m16_n256k128_w4x1_p4_hybrid_c1",
    "w4a16_hopper_bf16z_g64_m8_n128k256_w2x1_p4_hybrid_c2",
    "w4a16_hopper_f16_g128_m32_n128k128_w2x1_p4_dp_c1_mc2",
    "w4a16_hopper_bf16_g32_m16_n256k256_w4x1_p3_hybrid_c1_mc4",
    "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_dp_c1_mc4",  # four CTAs, stages in halves
    "w4a16_hopper_f16_g128_m256_n64k128_w1x2_p2_dp_c1",  # two k groups: no running scale
    "w4a16_hopper_f16_g64_m8_n64k128_w1x4_p4_dp_c1",  # sums of activations: one producer of each
    "w4a16_hopper_bf16_g64_m40_n64k128_w1x4_p8_split2_c1",  # two of each, four k groups
]


@pytest.mark.parametrize("name", MORE)
def test_variants_outside_the_tables(name: str) -> None:
    variant = Variant.parse(name)
    for i, (m, n, k) in enumerate(
        [(2 * variant.m_tile + 1, 2 * variant.n_sm + 8, 1152), (3, 70, 640)]
    ):
        for seed in range(3):
            make_case(variant, m, n, k, seed=i).check(sms=5, seed=seed)


LAYOUTS = [
    "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1",
    "w4a16_hopper_f16_g128_m16_n256k128_w2x1_p4_dp_c2",
]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("group_size", [128, 256, 640])
def test_groups_above_128_are_stored_as_128(name: str, group_size: int) -> None:
    make_case(Variant.parse(name), 7, 136, 1280, group_size=group_size).check(seed=1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "n, changes",
    [(72, {"ldc": 76}), (72, {"c_offset": 2}), (73, {}), (72, {"ldc": 79, "lda": 520})],
)
def test_any_alignment_of_c_and_strides(name: str, n: int, changes: dict) -> None:
    """Odd bases, odd row strides and odd n take the scalar stores; nothing outside [m, n] is
    touched (bounds check)."""
    make_case(Variant.parse(name), 5, n, 512).check(**changes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_act_order(name: str) -> None:
    variant = Variant.parse(name)
    generator = torch.Generator().manual_seed(0)
    k, n = 384, 80
    q = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(k // 128, n, generator=generator) + 0.5).half() * 0.01
    order = torch.randperm(k, generator=generator)
    weight = pack(q, scales, group_size=128, g_idx=(torch.arange(k) // 128)[order].int())
    a = torch.randn(6, k, generator=generator).half()
    expected = a.double() @ dequantize(weight, torch.float16).double()
    error = (gemm(a, weight, variant).c.double() - expected).norm() / expected.norm()
    assert error < 6e-4


def test_sums_do_not_depend_on_the_schedule() -> None:
    """Reductions across CTAs run in a fixed order: the same bits under every interleaving."""
    for name in (
        "w4a16_ampere_f16_g128_m16_n64k256_w1x4_p4_striped_c1",
        "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1",
    ):
        case = make_case(Variant.parse(name), 20, 200, 1536)
        results = [case.run(sms=5, seed=seed).c for seed in range(6)]
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "name",
    [
        "w4a16_hopper_f16_g128_m16_n128k256_w2x2_p8_streamk_c1",
        "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_streamk_c1",
        "w4a16_hopper_f16_g128_m48_n128k128_w2x2_p8_streamk_c1",
        "w4a16_hopper_bf16z_g128_m8_n128k256_w2x2_p8_streamk_c1",
        "w4a16_hopper_f16_g128_m128_n128k128_w2x1_p5_streamk_c1_mc2",
        "w4a16_hopper_f16_g128_m64_n128k256_w2x1_p4_streamk_c1_mc2",
    ],
)
def test_stream_k_of_whole_tiles_and_ranges(name: str) -> None:
    """Nine tiles for one CTA, or cluster, to nine: whole passes and what is cut behind them, ranges
    shorter and longer than a tile, and no rest at all."""
    variant = Variant.parse(name)
    columns = 2 * variant.n_sm * variant.multicast + 8
    case = make_case(variant, 2 * variant.m_tile + 3, columns, 1280)
    seen = set()
    for workers in (2, 3, 4, 5, 7, 8, 9):
        schedule = case.check(sms=workers * variant.multicast, seed=workers).schedule
        assert (schedule.tiles, schedule.workers) == (9, workers)
        seen.add((schedule.whole_passes, schedule.tiles - schedule.whole_passes * workers))
    assert seen == {(3, 3), (3, 0), (1, 5), (0, 9), (1, 0)}


@pytest.mark.parametrize("multicast", (1, 2))
@pytest.mark.parametrize("tile", ("m24_n256k128_w4x1", "m32_n64k128_w1x1", "m16_n192k128_w3x1"))
def test_partial_sums_that_take_several_stages_or_part_of_one(tile: str, multicast: int) -> None:
    """Also of more columns than activations or weights of a stage have room for."""
    name = f"w4a16_hopper_f16_g128_{tile}_p4_streamk_c1" + f"_mc{multicast}" * (multicast > 1)
    variant = Variant.parse(name)
    assert legality.why_not(variant, ARCHS["sm_90a"]) is None
    case = make_case(variant, variant.m_tile + 1, 3 * variant.n_sm * multicast, 640)
    for workers in (4, 5, 11):
        case.check(sms=workers * multicast, seed=workers)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "w4a16_hopper_bf16z_g64_m16_n256k128_w2x1_p4_dp_c2"
    assert main([name, "5", "70", "192", "--seeds", "2", "--statistics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed 0: relative error") and lines[1].startswith("seed 1:")
    assert any(line.split() == ["bulk_bytes", str(4 * 2 * 4608)] for line in lines)


def test_portable_fibers() -> None:
    """The runtime on the C library's contexts, as on CPUs other than x86-64."""
    name = "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1"
    environment = os.environ | {"EMULATOR_RUNTIME_FLAGS": "-DEMU_UCONTEXT"}
    command = [sys.executable, "-m", "emulator", name, "5", "70", "256", "--seeds", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("relative error") == 2
