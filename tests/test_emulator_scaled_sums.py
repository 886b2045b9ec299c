"""Hopper kernels whose scales act on sums, those over a group (few rows) or all so far (tiles of
256 rows): against exact products, on data where one wrong term or one rounding too many
shows.

Not the Frobenius norms of the other emulator tests: bits where sums are exact, and the error of
each element where they are not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulator_cases import DTYPES
from emulator_mutations import Edit, Mutation
from reference import UNIT, unrounded_weights
from test_emulator_mutations import mutated_headers

from emulator import gemm
from generator.variant import Variant
from marlin_cutlass.pack import pack
from marlin_cutlass.packed_weight import PackedWeight
from marlin_cutlass.reference import dequantize

F16 = "w4a16_hopper_f16z_g128_m16_n256k128_w2x1_p4_dp_c1"
BF16 = "w4a16_hopper_bf16z_g64_m16_n128k128_w2x1_p4_dp_c2"
K_GROUPS = "w4a16_hopper_f16z_g64_m8_n64k512_w1x4_p4_dp_c1"
RUNNING = [
    "w4a16_hopper_f16_g128_m256_n128k128_w2x1_p3_dp_c1_mc2",
    "w4a16_hopper_f16z_g128_m256_n128k128_w2x1_p3_dp_c1_mc2",
    "w4a16_hopper_f16_g128_m256_n64k128_w1x1_p3_dp_c1",
]
RAW = [  # fragments are the codes as they lie
    "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_dp_c1",
    "w4a16_hopper_bf16_g128_m16_n256k256_w4x1_p4_hybrid_c1",
    "w4a16_hopper_f16z_g128_m8_n128k256_w2x2_p8_streamk_c1",
    "w4a16_hopper_bf16z_g128_m8_n64k256_w1x4_p8_split2_c1",
    "w4a16_hopper_f16_g64_m8_n256k256_w4x1_p5_hybrid_c1",
]
GEOMETRIES = [
    *RUNNING,
    *RAW,
    F16,
    BF16,
    K_GROUPS,
    "w4a16_hopper_bf16z_g128_m24_n128k256_w2x2_p2_dp_c1",
    "w4a16_hopper_bf16z_g64_m32_n64k256_w1x2_p2_streamk_c1",
    "w4a16_hopper_f16z_g128_m16_n128k256_w2x2_p4_split4_c1",
    "w4a16_hopper_f16z_g64_m8_n128k128_w2x1_p3_hybrid_c1",
    "w4a16_hopper_f16z_g128_m16_n128k256_w2x1_p4_hybrid_c1_mc2",
    "w4a16_hopper_f16z_g64_m24_n256k128_w2x1_p1_dp_c1",
    "w4a16_hopper_bf16z_g64_m16_n256k128_w4x1_p4_dp_c1_mc2",
]


def random_weight(
    name: str, k: int, n: int, scales: np.ndarray | None = None
) -> tuple[PackedWeight, np.ndarray]:
    """(packed, (q - z) * s float64 [k, n] of the stored scales). scales [k / group, n]; default:
    0 or plus or minus 2^-9 .. 2^-6, which every stage of the arithmetic keeps exactly."""
    variant, rng = Variant.parse(name), np.random.default_rng(k + n)
    group = variant.group_size
    if scales is None:
        sign = rng.choice([-1.0, 0.0, 1.0], (k // group, n), p=[0.45, 0.1, 0.45])
        scales = sign * np.exp2(rng.integers(-9, -5, sign.shape))
    q, z = rng.integers(0, 16, (k, n), dtype=np.uint8), rng.integers(0, 17, scales.shape)
    q[::5], q[1::5], z[:, ::3], z[:, 1::3] = 0, 15, 0, 16
    z = z if variant.zeros else None
    zeros = None if z is None else torch.from_numpy(z)
    tensors = (torch.from_numpy(q), torch.from_numpy(scales).float(), zeros)
    dtype = str(DTYPES[variant.dtype]).removeprefix("torch.")
    exact = unrounded_weights(q, scales, z, group_size=group, dtype=dtype)
    return pack(*tensors, group_size=group), exact


def integers(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_exact_sums_come_out_bit_for_bit(name: str) -> None:
    """Several tiles a CTA, one tile, K shorter than a stage, fewer stages than k groups: no group
    is left out, added twice or given another group's scale."""
    v = Variant.parse(name)
    shapes = [(2 * v.m_tile + 3, 3 * v.n_sm + 72, 1152, 2), (v.m_tile, v.n_sm, 640, 4)]
    for seed, (m, n, k, sms) in enumerate([*shapes, (1, 40, 128, 1)]):
        weight, exact = random_weight(name, k, n)
        a = integers(m, k, DTYPES[v.dtype], seed)
        expected = torch.from_numpy(a.double().numpy() @ exact).to(a.dtype)
        assert torch.equal(gemm(a, weight, v, sms=sms, seed=seed).c, expected), (m, n, k)


SCALES = {
    "ordinary": lambda rng, shape: np.exp2(rng.uniform(-9, -5, shape)),
    "far below the largest of the column": lambda rng, shape: np.exp2(
        rng.uniform(-8, -7, shape) - 20 * rng.integers(0, 2, shape)
    ),
    "large": lambda rng, shape: np.exp2(rng.uniform(0, 1, shape)),
    "of both signs, some 0": lambda rng, shape: (
        np.exp2(rng.uniform(-9, -5, shape)) * rng.integers(-1, 2, shape)
    ),
}


@pytest.mark.parametrize("name", [F16, BF16, *RAW, *RUNNING])
@pytest.mark.parametrize("kind", SCALES)
def test_no_weight_is_rounded_before_the_product(name: str, kind: str) -> None:
    """Each element is the exact sum rounded once, but for what fp32 loses on the way."""
    m, n, k, dtype = 16, 200, 640, DTYPES[Variant.parse(name).dtype]
    groups = k // Variant.parse(name).group_size
    weight, exact = random_weight(
        name, k, n, SCALES[kind](np.random.default_rng(7), (groups, n)).astype(np.float32)
    )
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = a.double().numpy()
    want, magnitude = values @ exact, np.abs(values) @ np.abs(exact)
    unit = UNIT[str(dtype).removeprefix("torch.")]
    error = np.abs(gemm(a, weight, name).c.double().numpy() - want)
    assert (error <= unit * np.abs(want) + 2.0**-18 * magnitude + 2.0**-25).all()


@pytest.mark.parametrize("name", RUNNING)
def test_groups_of_scale_zero_are_nothing(name: str) -> None:
    """All groups of a column, the first, the last: exact zeros, and sums in the unit before."""
    v = Variant.parse(name)
    scales = np.random.default_rng(5).choice([0.5, 1.0, -0.25], (5, 72)) * 2.0**-7
    scales[:, ::4], scales[0, 1::4], scales[-1, 2::4] = 0, 0, 0
    weight, exact = random_weight(name, 640, 72, scales.astype(np.float32))
    a = integers(9, 640, DTYPES[v.dtype], seed=4)
    out = gemm(a, weight, v, sms=2).c
    assert not out[:, ::4].any()
    assert torch.equal(out, torch.from_numpy(a.double().numpy() @ exact).to(a.dtype))


@pytest.mark.parametrize("name, bits", [(F16, 0), (RUNNING[1], 1)])
def test_partial_sums_beyond_float16(name: str, bits: int) -> None:
    """fp16 activations of 65504: the sums of a group reach 2^26 and those over half of K 2^31. The
    first are exact, the second lose bits of fp32 on the way."""
    k, n = 8192, 72
    q = torch.full((k, n), 15, dtype=torch.uint8)
    q[k // 2 :] = 1
    zeros, scales = torch.full((k // 128, n), 8), torch.full((k // 128, n), 2.0**-7)
    a = torch.full((3, k), 65504.0).half()
    out = gemm(a, pack(q, scales, zeros, group_size=128), name).c.double()
    assert float(out.abs().max()) <= bits * 2.0**-23 * (k // 2 * 65504 * 7 * 2.0**-7)


@pytest.mark.parametrize("name", [F16, BF16, K_GROUPS, *RAW, *RUNNING])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_that_is_not_finite_stays_alone(name: str, value: float) -> None:
    """The row itself is what IEEE arithmetic makes of it: a weight of 0 turns infinity into NaN, as
    does the sum of the activations that is subtracted from the sums over raw codes."""
    v = Variant.parse(name)
    m, n, k = v.m_tile + 3, v.n_sm + 72, 640
    weight, exact = random_weight(name, k, n)
    a = integers(m, k, DTYPES[v.dtype], seed=3)
    clean = gemm(a, weight, v, sms=2, lda=704).c
    for row, depth in ((0, 0), (v.m_tile - 1, 63), (m - 1, k - 1)):
        spoiled = a.clone()
        spoiled[row, depth] = value
        out = gemm(spoiled, weight, v, sms=2, lda=704).c
        others = torch.arange(m) != row
        assert torch.equal(out[others], clean[others])
        with np.errstate(invalid="ignore"):
            want = torch.from_numpy(spoiled[row].double().numpy() @ exact)
        if v.sums_activations:
            want.fill_(float("nan"))
        assert torch.equal(out[row].double().nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("exponent, units", [(-15, 0), (-19, 1), (-22, 1)])
def test_identity_activations(exponent: int, units: int) -> None:
    """dequantize, bit for bit; an fp16 subnormal, which dequantize rounds twice and the kernel
    once, to the last bit."""
    k, n = 128, 1024
    scales = (1 + np.random.default_rng(2).random((1, n))) * 2.0**exponent
    weight, exact = random_weight(F16, k, n, scales.astype(np.float32))
    out = gemm(torch.eye(k).half()[:16], weight, F16).c
    assert torch.equal(out, torch.from_numpy(exact[:16]).half())
    difference = (out.double() - dequantize(weight, torch.float16)[:16].double()).abs()
    assert float(difference.max()) == units * 2.0**-24


LOOP = "hopper_mainloop.cuh"
ROW_BLOCK = "/ kHalves % C::kRowBlocks;\n    float("
FAULTS = {
    "scales of the group before": ("factors_[kGroup % 2].row", "factors_[1 - kGroup % 2].row"),
    "last group of a stage forgotten": (
        "if (b == 0) add_group",
        "if (b == 0 && kQuad > 0) add_group",
    ),
    "group begins with the sums of another": ("step == 0 ? 0 : 1;", "step == 0 ? 1 : 1;"),
    "scales of rows r and r + 8 swapped": (
        "factors_[kGroup % 2].row[i / 2 % 2]",
        "factors_[kGroup % 2].row[1 - i / 2 % 2]",
    ),
    "first row block gets every group": (ROW_BLOCK, "* 0;\n    float("),
}


RUNNING_FAULTS = {
    "unit of a negative scale forgotten": (
        "unit.row[i] = to;",
        "if (to > 0.f) unit.row[i] = to;",
    ),
    "ratio of rows r and r + 8 swapped": ("ratio_.row[i / 2 % 2]", "ratio_.row[1 - i / 2 % 2]"),
    "second half of the rows keeps its unit": ("(kPart + 1) * kSums; ++i", "kSums; ++i"),
    "a part multiplied in every quad": (
        "C::kRunningScale && At::kHalf == 0) {\n      if (b == 0)",
        "C::kRunningScale) {\n      if (b == 0)",
    ),
}  # fmt: skip
PLANTED = [(F16, *x) for x in FAULTS.items()] + [(RUNNING[0], *x) for x in RUNNING_FAULTS.items()]


@pytest.mark.parametrize(
    "name, fault, edit", PLANTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_planted_fault_is_caught(name: str, fault: str, edit: tuple, tmp_path: Path) -> None:
    include = mutated_headers(Mutation(fault, (Edit(LOOP, *edit),), name, ()), tmp_path)
    weight, exact = random_weight(name, 640, 328)
    a = integers(Variant.parse(name).m_tile + 3, 640, torch.float16, seed=0)
    out = gemm(a, weight, name, sms=2, include=include).c
    assert not torch.equal(out, torch.from_numpy(a.double().numpy() @ exact).half())
