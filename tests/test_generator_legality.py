"""why_not: each rule refuses what breaks it, by name, and the declared table breaks none."""

from __future__ import annotations

import dataclasses

import pytest

from generator import legality, space
from generator.arch import ARCHS, GPUS, arch_for_capability, resolve_arch
from generator.problem import DTYPES, KERNEL_GROUP_SIZES, ProblemShape
from generator.variant import Variant

AMPERE = Variant.parse("w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1")
HOPPER = Variant.parse("w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1")


@pytest.mark.parametrize(
    "base, arch, change, reason",
    [
        (HOPPER, "sm_86", {}, "family=hopper does not run on sm_86"),
        (AMPERE, "sm_86", {"family": "volta"}, "family='volta'"),
        (AMPERE, "sm_86", {"dtype": "f32"}, "dtype=f32"),
        (AMPERE, "sm_86", {"group_size": 256}, "group_size=256"),
        (AMPERE, "sm_86", {"m_tile": 24}, "m_tile=24"),
        (HOPPER, "sm_90a", {"m_tile": 100}, "m_tile=100"),
        (AMPERE, "sm_86", {"n_sm": 96}, "n_sm=96"),
        (AMPERE, "sm_86", {"k_sm": 64}, "k_sm=64"),
        (AMPERE, "sm_86", {"stages": 1}, r"stages=1 is not one of 2\.\.16"),
        (AMPERE, "sm_86", {"ctas_per_sm": 5}, "ctas_per_sm=5"),
        (AMPERE, "sm_86", {"decomposition": "stream_k"}, "decomposition=stream_k"),
        (HOPPER, "sm_90a", {"decomposition": "striped"}, "decomposition=striped"),
        (AMPERE, "sm_86", {"split": 2}, "split=2 needs decomposition=split_k"),
        (HOPPER, "sm_90a", {"decomposition": "split_k", "split": 3}, "split=3"),
        (AMPERE, "sm_86", {"warps_n": 4}, "warps_n=4 gives a warp 32 of n_sm=128"),
        (AMPERE, "sm_86", {"warps_k": 1}, "2 is not 4 or 8 warps"),
        (AMPERE, "sm_86", {"warps_k": 4}, "k_sm=128 over warps_k=4"),
        (HOPPER, "sm_90a", {"n_sm": 128}, "n_sm=128 is not a multiple of 64"),
        (HOPPER, "sm_90a", {"warps_k": 2}, "8 consumer warpgroups"),
        (HOPPER, "sm_90a", {"warps_n": 2, "warps_k": 2}, "stages=5 is not a multiple of warps_k=2"),
        (AMPERE, "sm_86", {"stages": 9}, "shared_bytes=112896 exceeds 101376"),
        (AMPERE, "sm_86", {"ctas_per_sm": 3}, "ctas_per_sm=3 needs 153600 bytes"),
        (HOPPER, "sm_90a", {"m_tile": 128, "stages": 2}, "registers a thread"),
    ],
)
def test_each_rule_names_what_it_refuses(base, arch, change, reason):
    with pytest.raises(AssertionError, match=reason):
        refused = legality.why_not(dataclasses.replace(base, **change), ARCHS[arch])
        assert refused is None, refused


def test_the_bases_are_legal():
    assert legality.why_not(AMPERE, ARCHS["sm_86"]) is None
    assert legality.why_not(AMPERE, ARCHS["sm_90a"]) is None
    assert legality.why_not(HOPPER, ARCHS["sm_90a"]) is None


def test_limits_are_exact_at_the_edge():
    """The largest pipeline that fits is legal, one byte of shared memory less is not."""
    arch = ARCHS["sm_86"]
    fits = dataclasses.replace(AMPERE, stages=8)
    assert (
        fits.shared_bytes
        <= arch.shared_per_block
        < dataclasses.replace(fits, stages=9).shared_bytes
    )
    assert legality.why_not(fits, arch) is None
    tight = dataclasses.replace(arch, shared_per_block=fits.shared_bytes - 1)
    assert "shared_bytes" in legality.why_not(fits, tight)


@pytest.mark.parametrize("arch", ARCHS)
def test_default_table_is_legal_and_unique(arch):
    for families in (None, ARCHS[arch].families):
        names = [e.variant.name for e in space.default_space(ARCHS[arch], families)]
        assert len(names) == len(set(names))


def test_default_tables_have_the_promised_size():
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert len(space.default_space(ARCHS[arch])) >= 60
    assert 60 <= len(space.default_space(ARCHS["sm_90a"])) <= 720  # ten minutes on two cores (docs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_default_table_serves_every_format(arch):
    have = {
        (e.variant.dtype, e.variant.zeros, e.variant.group_size)
        for e in space.default_space(ARCHS[arch])
    }
    assert have == {(d, z, g) for d in DTYPES for z in (False, True) for g in KERNEL_GROUP_SIZES}


def test_every_row_has_its_own_reason():
    for rows in (space.HOPPER, space.AMPERE, space.AMPERE_LARGE):
        reasons = [r.reason for r in rows]
        assert all(reasons) and len(set(reasons)) == len(reasons)


def test_why_not_for_names_the_format():
    assert legality.why_not_for(AMPERE, ProblemShape(1, 64, 256, 256)) is None
    assert "group_size=64" in legality.why_not_for(AMPERE, ProblemShape(1, 64, 64, 64))
    assert "zeros=True" in legality.why_not_for(AMPERE, ProblemShape(1, 64, 128, zeros=True))


def test_registers_and_occupancy():
    arch = ARCHS["sm_90a"]
    assert legality.max_registers(HOPPER, arch) == 96  # 65536 / 640 threads, in units of 8
    assert legality.registers_available(HOPPER, arch) == 112  # after setmaxnreg
    assert legality.occupancy(HOPPER, arch, 96) == 1
    small = dataclasses.replace(AMPERE, m_tile=8)
    assert legality.occupancy(small, ARCHS["sm_80"], 128) == 3  # shared memory decides
    assert legality.occupancy(small, ARCHS["sm_80"], 255) == 2  # registers decide


# ---- architectures and GPUs ----------------------------------------------------------------------


def test_arch_names():
    assert resolve_arch("sm_86") == (ARCHS["sm_86"], None)
    assert resolve_arch("80")[0].name == "sm_80"
    for text in ("90", "sm_90"):
        arch, notice = resolve_arch(text)
        assert arch.name == "sm_90a" and "sm_90a" in notice
    with pytest.raises(ValueError, match="arch='sm_75' is not one of sm_80"):
        resolve_arch("sm_75")


def test_arch_of_a_capability():
    assert arch_for_capability(8, 0).name == "sm_80"
    assert arch_for_capability(8, 6).name == "sm_86"
    assert arch_for_capability(8, 7).name == "sm_86"
    assert arch_for_capability(9, 0).name == "sm_90a"
    assert arch_for_capability(12, 1).name == "sm_120"
    with pytest.raises(ValueError, match=r"7\.5"):
        arch_for_capability(7, 5)


def test_named_gpus():
    wanted = {"A100", "A10", "RTX 3090", "A6000", "RTX 4090", "L40S", "H100", "H200"}
    assert set(GPUS) == wanted
    assert GPUS["A10"].bandwidth == 600e9 and GPUS["H200"].bandwidth == 4300e9
    assert {g.arch for g in GPUS.values()} <= set(ARCHS)
