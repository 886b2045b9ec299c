"""Problem shapes, variant names, and the numbers that follow from a variant."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from generator import legality, space
from generator.arch import ARCHS
from generator.problem import ProblemShape, block_bytes, kernel_group_size
from generator.variant import FAMILIES, Geometry, Variant

EXAMPLES = {
    "w4a16_ampere_f16_g128_m64_n256k128_w4x2_p4_striped_c1": Variant(
        "ampere", "f16", False, 128, 64, 256, 128, 4, 2, 4, "striped", 1, 1
    ),
    "w4a16_hopper_bf16z_gcol_m16_n256k128_w4x1_p5_dp_c2": Variant(
        "hopper", "bf16", True, -1, 16, 256, 128, 4, 1, 5, "data_parallel", 1, 2
    ),
    "w4a16_hopper_f16_g32_m8_n64k256_w1x4_p8_split2_c1": Variant(
        "hopper", "f16", False, 32, 8, 64, 256, 1, 4, 8, "split_k", 2, 1
    ),
    "w4a16_hopper_f16z_g64_m128_n256k128_w2x1_p4_streamk_c1": Variant(
        "hopper", "f16", True, 64, 128, 256, 128, 2, 1, 4, "stream_k", 1, 1
    ),
}


@pytest.fixture(scope="module")
def full_space() -> list[Variant]:
    """Of the two architectures with the most shared memory: it holds the others'."""
    both = (space.full_space(ARCHS[a]) for a in ("sm_80", "sm_90a"))
    return list(dict.fromkeys(e.variant for e in itertools.chain(*both)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_of_examples(name):
    assert EXAMPLES[name].name == name == EXAMPLES[name].symbol
    assert Variant.parse(name) == EXAMPLES[name]


def test_names_are_bijective_over_the_full_space(full_space):
    names = {}
    for v in full_space:
        assert names.setdefault(v.name, v) == v, "two variants share a name"
    sample = random.Random(1).sample(sorted(names), 3000)
    for name in sample:
        assert Variant.parse(name) == names[name]
        assert name.isidentifier() and "cutlass" not in name


def test_geometry_and_format_take_a_variant_apart(full_space):
    for v in random.Random(2).sample(full_space, 2000):
        g = v.geometry()
        assert Geometry.parse(g.name) == g
        assert g.with_format(v.dtype, v.zeros, v.group_size) == v
        assert v.with_format("f16", False, 128).geometry() == g


def test_geometry_name_is_the_variant_name_without_the_format():
    v = EXAMPLES["w4a16_hopper_bf16z_gcol_m16_n256k128_w4x1_p5_dp_c2"]
    assert v.geometry().name == "w4a16_hopper_m16_n256k128_w4x1_p5_dp_c2"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "w4a16_hopper_m16_n256k128_w4x1_p5_dp_c2",  # a geometry
        "w4a16_hopper_f16_g128_m016_n256k128_w4x1_p5_dp_c2",
        "w4a16_hopper_f16_g128_m16_n256k128_w4x1_p5_dp2_c2",
        "w4a16_hopper_f16_g128_m16_n256k128_w4x1_p5_split_c2",
        "w4a16_hopper_f16_g-1_m16_n256k128_w4x1_p5_dp_c2",
        "w4a16_volta_f16_g128_m16_n256k128_w4x1_p5_dp_c2",
        "w4a16_hopper_f32_g128_m16_n256k128_w4x1_p5_dp_c2",
        "w4a16_hopper_f16_g128_m16_n256k128_w4x1_p5_dp_c2 ",
    ],
)
def test_malformed_names_are_refused(name):
    with pytest.raises(ValueError, match="malformed"):
        Variant.parse(name)


@pytest.mark.parametrize(
    "change, text",
    [
        (("striped", "stripped"), "at 'stripped_c1' it should go on with dp, striped, "),
        (("ampere", "amper"), "family amper is not one of ampere, hopper"),
        (("f16_g128_", ""), "it has no format such as f16_g128"),
        (("f16", "f17"), "at 'f17_g128_m64_.* it should go on with a format such as f16_g128 or"),
        (("_c1", "_c1_mc"), "at '_mc' it should go on with nothing more, or _mc and a number"),
        (("_c1", "_c1\n"), "it ends in a line break"),
    ],
)
def test_the_refusal_of_a_name_says_where_it_goes_wrong(change, text):
    name = "w4a16_ampere_f16_g128_m64_n256k128_w4x2_p4_striped_c1".replace(*change)
    with pytest.raises(ValueError, match=text):
        Variant.parse(name)
    with pytest.raises(ValueError, match="it has a format"):
        Geometry.parse("w4a16_ampere_f16_g128_m64_n256k128_w4x2_p4_striped_c1")


def test_a_variant_name_is_no_geometry():
    with pytest.raises(ValueError, match="geometry name"):
        Geometry.parse(next(iter(EXAMPLES)))


def test_shared_bytes_by_hand():
    ampere = EXAMPLES["w4a16_ampere_f16_g128_m64_n256k128_w4x2_p4_striped_c1"]
    assert ampere.shared_bytes == 4 * (4 * 4224 + 64 * 128 * 2)
    assert ampere.threads == 256
    hopper = Variant.parse("w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split2_c1")
    stage = 16 * 256 * 2 + 2 * 4224
    k_groups, cluster, barriers = 3 * 64 * 16 * 4, 1 * 2048, 256
    assert hopper.shared_bytes == 8 * stage + k_groups + cluster + barriers
    assert hopper.threads == 640 and hopper.cluster == 2


def test_threads_of_hopper_count_the_producer():
    def threads(warps: str, ctas: int) -> int:
        name = f"w4a16_hopper_f16_g128_m16_n256k128_w{warps}_p4_dp_c{ctas}"
        return Variant.parse(name).threads

    assert threads("4x1", 1) == 512 + 128  # a whole producer warpgroup gives registers away
    assert threads("2x1", 1) == 256 + 128
    assert threads("2x1", 2) == 256 + 64
    assert threads("1x1", 1) == 128 + 64


def test_block_bytes_of_the_layout():
    symmetric = {128: 4224, 64: 4352, 32: 4608, -1: 4096}
    zeros = {128: 4352, 64: 4608, 32: 5120, -1: 4224}
    for group, want in symmetric.items():
        assert block_bytes(group, False) == want
    for group, want in zeros.items():
        assert block_bytes(group, True) == want


def test_every_stage_keeps_sixteen_byte_alignment(full_space):
    for v in full_space:
        assert v.stage_bytes % 16 == 0
        if v.family == "hopper":
            assert v.m_tile * v.k_sm * 2 % 1024 == 0, "the 128-byte swizzle wants 1024-byte bases"


def test_problem_shape_checks_its_fields():
    assert ProblemShape(0, 1, 128).n_blocks == 1
    assert ProblemShape(1, 65, 129, -1).k_blocks == 2
    for bad, message in (
        ({"m": -1, "n": 1, "k": 128}, "m=-1"),
        ({"m": 1, "n": 0, "k": 128}, "n=0"),
        ({"m": 1, "n": 1, "k": 4100}, "k=4100 is not a multiple of group_size=128"),
        ({"m": 1, "n": 1, "k": 128, "dtype": "f32"}, "dtype='f32'"),
        ({"m": 1, "n": 1, "k": 96, "group_size": 48}, "group_size=48"),
    ):
        with pytest.raises(ValueError, match=message):
            ProblemShape(**bad)


def test_large_groups_are_stored_as_128():
    assert [kernel_group_size(g) for g in (32, 64, 128, 256, 1024, -1)] == [
        32,
        64,
        128,
        128,
        128,
        -1,
    ]
    assert ProblemShape(1, 64, 512, 256).weight_bytes == 4 * 4224


def test_field_order_is_name_order():
    names = [f.name for f in dataclasses.fields(Variant)]
    assert names[:4] == ["family", "dtype", "zeros", "group_size"]
    assert names[4:] == [f.name for f in dataclasses.fields(Geometry)][1:]


def test_families_of_the_architectures_are_known():
    assert set(itertools.chain.from_iterable(a.families for a in ARCHS.values())) == set(FAMILIES)


def test_full_space_is_legal_and_repeatable():
    arch = ARCHS["sm_86"]
    first = [e.variant for e in space.full_space(arch)]
    assert first == [e.variant for e in space.full_space(arch)]
    assert all(legality.why_not(v, arch) is None for v in first)
