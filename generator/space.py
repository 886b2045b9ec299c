"""The declared space: which variants are built, and why each is in.

The default table is an explicit list of geometries; adding a variant is adding a row. The full
space is every legal combination of field values, for exploration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from generator import collective, legality
from generator.arch import Arch
from generator.collective import CollectiveVariant
from generator.problem import DTYPES, KERNEL_GROUP_SIZES
from generator.variant import HOPPER_FAMILIES, Geometry, Variant

Format = tuple[str, bool, int]  # dtype, zeros, group_size

ALL: tuple[Format, ...] = tuple(itertools.product(DTYPES, (False, True), KERNEL_GROUP_SIZES))
SYM128: tuple[Format, ...] = (("f16", False, 128), ("bf16", False, 128))
# What most checkpoints hold: GPTQ's symmetric groups of 128, AWQ's with zero points.
COMMON: tuple[Format, ...] = (*SYM128, ("f16", True, 128), ("bf16", True, 128))
LIGHTEST: Format = ("f16", False, -1)
LIGHTEST128: Format = ("f16", False, 128)
F16_128: tuple[Format, ...] = (LIGHTEST128, ("f16", True, 128))
# Of the other formats (groups of 32 and 64, one scale a column) symmetric weights have more kernels
# than those with zero points, and few writers put zero points on whole columns.
COMMON_OR_SYM: tuple[Format, ...] = tuple(f for f in ALL if f in COMMON or not f[1])
NO_COLUMN_ZEROS: tuple[Format, ...] = tuple(f for f in ALL if f[1:] != (True, -1))
COMMON_SYM_OR_64: tuple[Format, ...] = tuple(f for f in ALL if f in COMMON_OR_SYM or f[2] == 64)
# Symmetric groups of 32 take more shared memory than larger ones: of some rings they lack 1 KB.
COMMON_OR_SYM_64: tuple[Format, ...] = tuple(f for f in COMMON_OR_SYM if f[2] != 32)
# Zero points in groups of 32 take a tenth more shared memory than groups of 128: rings of twelve
# stages, and some others, do not fit.
LARGEST: tuple[Format, ...] = tuple((dtype, True, 32) for dtype in DTYPES)
ROOMY: tuple[Format, ...] = tuple(f for f in ALL if f not in LARGEST)


@dataclass(frozen=True)
class Row:
    """A geometry of the default table, the formats it is built for, and why."""

    geometry: str  # without the prefix w4a16_<family>_
    formats: tuple[Format, ...]
    reason: str
    allowed_spill_bytes: int = 0  # what ptxas may spill before the build fails


@dataclass(frozen=True)
class Entry:
    """One variant of a space."""

    variant: Variant | CollectiveVariant
    reason: str
    allowed_spill_bytes: int = 0


# ---- hopper: sm_90a ------------------------------------------------------------------------------
# Weights stream at 4.3 TB/s only with about 128 KiB of them in flight per SM (H200, 2026-11-29):
# depths that come near it, and no deeper; a tile of 64 columns takes 12 stages for 101 KB.
# "Ragged": a tile count just above a multiple of the SMs, where equal shares of K beat whole tiles.
# Two and three CTAs an SM need tiles for most places: fewer gather on some SMs under dependent
# launch, and the table leaves such shapes to other kernels.
# A few spilled words hold the state of the loop over tiles, read once per tile: harmless (seen in
# SASS, nvcc 13.0).
TILE_LOOP_SPILL = 128

HOPPER = (
    # batch 1..8: weights stream, everything else must stay out of their way
    Row("m8_n256k256_w4x1_p4_dp_c1", ALL, "1-8, wide N, every format"),
    Row("m8_n192k256_w3x1_p6_dp_c1", COMMON, "1-8, one 192-wide tile a SM"),
    Row("m8_n128k256_w2x2_p8_dp_c1", COMMON, "1-8, two k groups, tiles just under a wave"),
    Row(
        "m8_n128k256_w2x2_p8_streamk_c1",
        COMMON,
        "1-8, medium N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m8_n128k256_w2x2_p8_split2_c1", ALL, "1-8, medium N: a cluster splits K"),
    Row("m8_n64k256_w1x4_p12_split2_c1", ALL, "few columns: four k groups in each CTA of two"),
    Row("m8_n64k256_w1x4_p8_split4_c1", COMMON, "1-8, fewer columns: four CTAs split K"),
    Row("m8_n64k256_w1x4_p12_dp_c1", COMMON_SYM_OR_64, "1-8, one 64-wide tile a SM"),
    Row("m8_n64k256_w1x1_p5_dp_c3", COMMON, "1-8, three 64-wide tiles a SM"),
    # batch 9..16
    Row("m16_n256k256_w4x1_p4_dp_c1", ALL, "9-16, wide N, tiles just under one a SM"),
    Row("m16_n256k256_w4x1_p4_streamk_c1", COMMON, "9-16, deep K at less power", TILE_LOOP_SPILL),
    Row("m16_n128k256_w2x2_p8_split2_c1", COMMON, "9-16, medium N: a cluster splits K"),
    Row("m16_n64k256_w1x4_p12_split2_c1", ROOMY, "9-16, few columns"),
    Row("m16_n64k256_w1x4_p8_split2_c1", LARGEST, "few columns, zero points for 32"),
    Row("m16_n64k256_w1x4_p8_split4_c1", COMMON_OR_SYM, "9-16, fewer columns: four CTAs split K"),
    Row("m16_n64k256_w1x4_p12_dp_c1", ROOMY, "9-16, one 64-wide tile a SM"),
    Row("m16_n64k256_w1x4_p8_dp_c1", LARGEST, "64-wide tiles, zero points for 32"),
    Row(
        "m16_n64k256_w1x4_p12_streamk_c1",
        COMMON,
        "9-16, four k groups, equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m16_n64k256_w1x2_p6_dp_c2", NO_COLUMN_ZEROS, "9-16, two 64-wide tiles a SM"),
    Row("m16_n64k256_w1x2_p6_split2_c2", COMMON_OR_SYM, "9-16, two halves of 64-wide tiles a SM"),
    Row("m16_n64k256_w1x1_p4_dp_c3", COMMON, "9-16, three 64-wide tiles a SM"),
    Row("m16_n64k256_w1x1_p4_split2_c3", COMMON, "9-16, three halves of 64-wide tiles a SM"),
    # batch 17..32
    Row("m24_n256k256_w4x1_p4_dp_c1", COMMON_SYM_OR_64, "17-24, wide N, tiles just under one a SM"),
    Row(
        "m24_n128k256_w2x2_p6_dp_c1",
        COMMON,
        "17-24, two k groups, tiles just under a wave",
        TILE_LOOP_SPILL,
    ),
    Row(
        "m24_n128k256_w2x2_p6_streamk_c1",
        ALL,
        "17-24, medium N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m24_n64k256_w1x4_p8_split2_c1", COMMON_SYM_OR_64, "17-24, few columns", TILE_LOOP_SPILL),
    Row("m24_n64k256_w1x4_p8_dp_c1", COMMON, "17-24, one 64-wide tile a SM"),
    Row("m24_n64k256_w1x1_p3_dp_c3", COMMON, "17-24, three 64-wide tiles a SM"),
    Row("m32_n192k256_w3x1_p4_dp_c1", COMMON, "17-32, one 192-wide tile a SM"),
    Row(
        "m32_n256k256_w4x1_p4_streamk_c1",
        (*COMMON, *LARGEST),
        "17-32, wide N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m32_n256k256_w4x1_p4_dp_c1", COMMON_SYM_OR_64, "17-32, wide N, tiles just under one a SM"),
    Row(
        "m32_n128k256_w2x2_p6_dp_c1",
        COMMON,
        "17-32, two k groups, tiles just under a wave",
        TILE_LOOP_SPILL,
    ),
    Row(
        "m32_n128k256_w2x2_p6_split2_c1",
        COMMON_OR_SYM_64,
        "17-32, medium N: a cluster splits K",
        TILE_LOOP_SPILL,
    ),
    Row("m32_n64k256_w1x4_p8_split2_c1", COMMON_OR_SYM_64, "17-32, few columns", TILE_LOOP_SPILL),
    Row("m32_n64k256_w1x4_p8_dp_c1", ROOMY, "17-32, one 64-wide tile a SM"),
    Row("m32_n64k256_w1x2_p8_dp_c1", LARGEST, "two k groups, zero points for 32"),
    Row(
        "m32_n128k256_w2x2_p6_streamk_c1",
        ROOMY,
        "17-32, deep K: two k groups, equal shares of K",
        TILE_LOOP_SPILL,
    ),
    # batch 33..64
    Row(
        "m40_n256k256_w4x1_p4_streamk_c1_mc2",
        COMMON,
        "33-40, wide N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m40_n128k256_w2x1_p4_streamk_c1_mc2", COMMON, "33-40, medium N: equal shares of K"),
    Row("m40_n128k256_w2x1_p4_split2_c1", COMMON, "33-40, medium N: a cluster splits K"),
    Row("m40_n64k256_w1x2_p6_split2_c1", COMMON_OR_SYM, "33-40, few columns"),
    Row("m40_n192k128_w3x1_p8_split4_c1", COMMON, "33-40, 20 to 30 tiles of 192 columns"),
    Row(
        "m48_n256k256_w4x1_p3_streamk_c1_mc2",
        (LIGHTEST128,),  # the others lack registers for four instructions a group
        "41-48, wide N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m48_n192k128_w3x1_p6_split2_c1", COMMON, "33-48, 64 tiles of 192 columns: two CTAs each"),
    Row("m48_n128k256_w2x1_p4_streamk_c1_mc2", ALL, "41-48, medium N: equal shares of K"),
    Row("m48_n128k256_w2x1_p4_split2_c1", COMMON, "41-48, medium N: a cluster splits K"),
    Row("m48_n64k256_w1x2_p6_split2_c1", ALL, "41-48, few columns"),
    Row("m56_n128k256_w2x1_p4_streamk_c1_mc2", COMMON, "49-56, medium N: equal shares of K"),
    Row("m56_n128k256_w2x1_p4_split2_c1", COMMON, "49-56, medium N: a cluster splits K"),
    Row("m56_n64k128_w1x2_p10_split2_c1", COMMON, "49-56, few columns"),
    Row("m56_n192k128_w3x1_p7_split4_c1", COMMON, "41-56, 20 to 30 tiles of 192 columns"),
    Row(
        "m64_n256k256_w4x1_p3_streamk_c1_mc2",
        COMMON,
        "49-64, wide N: equal shares of K",
        TILE_LOOP_SPILL,
    ),
    Row("m64_n192k256_w3x1_p3_dp_c1", COMMON, "33-64 and 256, one 192-wide tile a SM"),
    Row("m64_n192k128_w3x1_p5_split2_c1", ROOMY, "64 tiles of 192 columns: two CTAs each"),
    Row("m64_n192k128_w3x1_p6_split4_c1", COMMON, "57-64, 20 to 30 tiles of 192 columns"),
    Row("m64_n128k256_w2x1_p4_streamk_c1_mc2", ALL, "49-64, medium N: equal shares of K"),
    Row("m64_n128k128_w2x2_p6_dp_c1", NO_COLUMN_ZEROS, "one 128-wide tile a SM"),
    Row("m64_n128k128_w2x2_p6_split2_c1", ALL, "medium N, every format", TILE_LOOP_SPILL),
    Row("m64_n64k128_w1x2_p8_split2_c1", ALL, "few columns"),
    # batch 65 and more: tensor cores
    Row("m72_n128k256_w2x1_p4_streamk_c1_mc2", COMMON, "65-72, medium N: equal shares of K"),
    Row("m80_n192k128_w3x1_p5_split2_c1", COMMON, "65-80, 64 tiles of 192 columns: two CTAs each"),
    Row("m80_n192k128_w3x1_p5_split4_c1", COMMON, "65-80, 20 to 30 tiles of 192 columns"),
    Row("m80_n128k256_w2x1_p3_streamk_c1_mc2", ALL, "73-80, medium N: equal shares of K"),
    Row("m80_n128k256_w2x1_p3_split2_c1", COMMON, "65-80, medium N: a cluster splits K"),
    Row("m80_n64k128_w1x2_p8_split2_c1", COMMON_OR_SYM, "65-80, few columns"),
    Row("m96_n192k128_w3x1_p5_split2_c1", F16_128, "81-96, 64 tiles of 192 columns, bf16 spills"),
    Row("m96_n192k128_w3x1_p4_split4_c1", COMMON, "81-96, 20 to 30 tiles of 192 columns"),
    Row("m96_n128k128_w2x1_p6_streamk_c1_mc2", ALL, "81-96, medium N: equal shares of K"),
    Row("m96_n128k128_w2x1_p6_split2_c1", ROOMY, "81-96, medium N: a cluster splits K"),
    Row("m96_n64k128_w1x2_p6_split2_c1", ROOMY, "81-96, few columns"),
    Row("m96_n64k128_w1x2_p4_split2_c1", LARGEST, "81-96, few columns, zero points for 32"),
    Row(
        "m112_n128k128_w2x1_p5_streamk_c1_mc2",
        NO_COLUMN_ZEROS,
        "97-112, medium N: equal shares of K",
    ),
    Row("m112_n128k128_w2x1_p5_split2_c1", COMMON, "97-112, few tiles: a cluster splits K"),
    Row("m128_n192k128_w3x1_p4_dp_c1", COMMON, "97-256, one 192-wide tile a SM"),
    Row("m128_n256k128_w2x1_p4_streamk_c1_mc2", COMMON, "ragged: equal shares of K"),
    Row("m128_n128k128_w2x1_p4_split2_c1", COMMON_OR_SYM, "few tiles: a cluster splits K"),
    Row(
        "m128_n128k128_w2x1_p5_dp_c1_mc2", COMMON_OR_SYM, "a wave that large tiles leave half empty"
    ),
    Row("m128_n128k128_w2x1_p5_streamk_c1_mc2", ALL, "113-128, medium N: equal shares of K"),
    Row(
        "m144_n128k128_w2x1_p4_streamk_c1_mc2",
        COMMON_OR_SYM,
        "129-144, medium N: equal shares of K",
    ),
    Row("m144_n128k128_w2x1_p4_split2_c1", COMMON, "129-144, few tiles: a cluster splits K"),
    Row(
        "m160_n128k128_w2x1_p4_streamk_c1_mc2",
        COMMON_OR_SYM,
        "145-160, medium N: equal shares of K",
    ),
    Row("m176_n128k128_w2x1_p4_streamk_c1_mc2", COMMON, "161-176, medium N: equal shares of K"),
    Row("m192_n128k128_w2x1_p3_dp_c1_mc2", COMMON, "row counts that 256 wastes"),
    Row(
        "m192_n128k128_w2x1_p3_streamk_c1_mc2",
        NO_COLUMN_ZEROS,
        "177-192, medium N: equal shares of K",
    ),
    Row("m208_n128k128_w2x1_p3_streamk_c1_mc2", COMMON, "193-208, equal shares of K"),
    Row("m224_n128k128_w2x1_p3_streamk_c1_mc2", COMMON, "209-224, equal shares of K"),
    Row(
        "m256_n128k128_w2x1_p3_dp_c1_mc2",
        ALL,
        "prefill, every format: dequantises once per 256 rows",
    ),
    Row(
        "m256_n128k128_w2x1_p3_streamk_c1_mc2",
        COMMON,
        "ragged prefill: equal shares of K",
        TILE_LOOP_SPILL,
    ),
)

# ---- ampere: sm_80, sm_86, sm_89, sm_120 ---------------------------------------------------------
# MARLIN's shapes: 256 threads, four stages (paper: hides latency, is even, fits at M = 64), plus
# smaller tiles for small N. Depths fit 99 KiB, so one table serves all of them.
AMPERE = (
    Row("m8_n128k128_w2x2_p4_striped_c2", SYM128, "batch 1-8, two CTAs of four warps"),
    Row("m16_n128k128_w2x2_p4_striped_c1", ALL, "batch 1-16, every format"),
    Row("m16_n128k128_w2x2_p4_striped_c2", SYM128, "batch 9-16, two CTAs of four warps"),
    Row("m16_n64k256_w1x4_p4_striped_c1", SYM128, "batch 1-16, few columns"),
    Row("m16_n64k256_w1x4_p4_dp_c1", SYM128, "batch 1-16, whole 64-wide tiles"),
    Row("m16_n256k128_w4x2_p4_striped_c1", SYM128, "batch 1-16, wide N, eight warps"),
    Row("m32_n128k128_w2x2_p4_striped_c1", SYM128, "batch 17-32"),
    Row("m32_n256k128_w4x2_p3_striped_c1", SYM128, "batch 17-32, wide N"),
    Row("m48_n128k128_w2x2_p4_striped_c1", SYM128, "batch 33-48"),
    Row("m64_n128k128_w2x2_p3_striped_c1", ALL, "batch 33-64, every format"),
    Row("m64_n256k128_w4x2_p3_striped_c1", SYM128, "batch 49-64, wide N"),
    Row("m128_n128k128_w4x2_p2_striped_c1", ALL, "batch 65 and more, every format"),
    Row("m128_n256k128_w8x1_p2_striped_c1", SYM128, "batch 65 and more, wide N"),
)

# ---- ampere kernels where a block may take 227 KiB: sm_90a, sm_100 -------------------------------
# Faster memory wants more bytes in flight: deeper pipelines, or two CTAs per SM.
AMPERE_LARGE = (
    Row("m8_n128k256_w2x4_p4_striped_c2", SYM128, "batch 1-8"),
    Row("m16_n128k256_w2x4_p4_striped_c2", ALL, "batch 1-16, every format"),
    Row("m16_n128k256_w2x4_p4_dp_c2", SYM128, "batch 1-16, whole 128-wide tiles"),
    Row("m16_n256k128_w4x2_p5_striped_c2", SYM128, "batch 9-16, wide N"),
    Row("m16_n64k256_w1x4_p4_striped_c3", SYM128, "batch 1-16, few columns, three CTAs per SM"),
    Row("m16_n64k256_w1x4_p4_split4_c2", SYM128, "batch 1-16, so few columns that K is split"),
    Row("m32_n128k128_w2x2_p4_striped_c2", SYM128, "batch 17-32"),
    Row("m32_n256k128_w4x2_p8_striped_c1", SYM128, "batch 17-32, wide N"),
    Row("m48_n256k128_w4x2_p6_striped_c1", SYM128, "batch 33-48"),
    Row("m64_n128k128_w2x2_p4_striped_c2", ALL, "batch 33-64, every format"),
    Row("m64_n256k128_w4x2_p6_striped_c1", SYM128, "batch 49-64, wide N"),
    Row("m128_n128k128_w4x2_p4_striped_c1", ALL, "batch 65 and more, every format"),
    Row("m128_n256k128_w8x1_p4_striped_c1", SYM128, "batch 65 and more, wide N"),
)

# ---- sparse: the ampere kernel over 2:4-sparse weights, every architecture -----------------------
SPARSE_ALL: tuple[Format, ...] = tuple(itertools.product(DTYPES, (False,), (64, 128, -1)))
SPARSE = (
    Row("m8_n256k128_w4x1_p3_striped_c2", SYM128, "batch 1-8, two CTAs of four warps"),
    Row("m16_n256k128_w4x1_p4_striped_c1", SPARSE_ALL, "batch 1-16, every format"),
    Row("m16_n128k256_w2x2_p4_dp_c1", SYM128, "batch 1-16, whole tiles"),
    Row("m32_n256k128_w4x1_p4_striped_c1", SYM128, "batch 17-32"),
    Row("m64_n256k128_w4x1_p3_striped_c1", SPARSE_ALL, "batch 33-64", TILE_LOOP_SPILL),
    Row("m128_n128k128_w4x1_p2_striped_c1", SPARSE_ALL, "batch 65 and more", TILE_LOOP_SPILL),
)
SPARSE_LARGE = (
    Row("m8_n128k512_w2x4_p3_striped_c2", SYM128, "batch 1-8, two CTAs of eight warps"),
    Row("m8_n128k256_w2x2_p4_striped_c3", SYM128, "batch 1-8, three CTAs of four warps"),
    Row("m16_n128k256_w2x2_p3_striped_c3", SPARSE_ALL, "batch 1-16, every format"),
    Row("m16_n128k512_w2x4_p4_dp_c1", SYM128, "batch 1-16, whole tiles"),
    Row("m16_n256k256_w4x2_p3_striped_c2", SYM128, "batch 9-16, wide N"),
    Row("m32_n256k128_w4x1_p4_striped_c2", SYM128, "batch 17-32"),
    Row("m64_n256k128_w4x1_p3_striped_c2", SPARSE_ALL, "batch 33-64", TILE_LOOP_SPILL),
    Row("m128_n128k128_w4x1_p2_striped_c2", SPARSE_ALL, "batch 65 and more", TILE_LOOP_SPILL),
    Row("m128_n256k128_w8x1_p4_striped_c1", SYM128, "65 and more, wide N", TILE_LOOP_SPILL),
)

# ---- sparse weights on Hopper's own instruction: sm_90a ------------------------------------------
# A block is three quarters of the dense bytes and half of the instructions: more stages, or deeper
# ones, keep as much in flight.
HOPPER_SPARSE = (
    # batch 1..8
    Row("m8_n256k256_w4x1_p6_dp_c1", SYM128, "1-8, wide N, tiles just under one a SM"),
    Row("m8_n256k512_w4x1_p3_dp_c1", SYM128, "the same in stages twice as deep"),
    Row("m8_n256k256_w4x1_p7_hybrid_c1", SYM128, "wide N: equal columns", TILE_LOOP_SPILL),
    Row("m8_n128k256_w2x2_p8_dp_c1", SYM128, "1-8, two k groups, tiles just under a wave"),
    Row("m8_n128k256_w2x2_p8_streamk_c1", SYM128, "1-8, medium N: equal shares of K"),
    Row("m8_n128k512_w2x2_p6_split2_c1", SYM128, "1-8, medium N: a cluster splits K"),
    Row("m8_n64k256_w1x4_p12_split2_c1", SYM128, "few columns: four k groups in each CTA of two"),
    Row("m8_n64k512_w1x4_p8_split2_c1", SYM128, "the same, stages twice as deep", TILE_LOOP_SPILL),
    Row("m8_n64k256_w1x4_p12_split4_c1", SYM128, "1-8, fewer columns: four CTAs split K"),
    Row("m8_n64k512_w1x4_p8_dp_c1", SYM128, "1-8, one 64-wide tile a SM"),
    # batch 9..16
    Row("m16_n256k256_w4x1_p6_dp_c1", SYM128, "9-16, wide N, tiles just under one a SM"),
    Row("m16_n256k256_w4x1_p6_hybrid_c1", SPARSE_ALL, "wide N, every format", TILE_LOOP_SPILL),
    Row("m16_n256k512_w4x1_p3_hybrid_c1", SYM128, "stages twice as deep", TILE_LOOP_SPILL),
    Row("m16_n128k256_w2x2_p8_dp_c1", SYM128, "9-16, two k groups, tiles just under a wave"),
    Row("m16_n128k256_w2x2_p8_streamk_c1", SYM128, "9-16, medium N: equal shares of K"),
    Row("m16_n128k256_w2x2_p8_split2_c1", SYM128, "9-16, medium N: a cluster splits K"),
    Row("m16_n64k256_w1x4_p12_split2_c1", SPARSE_ALL, "few columns, every format"),
    Row("m16_n64k256_w1x4_p12_split4_c1", SYM128, "9-16, fewer columns: four CTAs split K"),
    Row("m16_n64k256_w1x4_p12_dp_c1", SYM128, "9-16, one 64-wide tile a SM"),
    # batch 17..32
    Row("m32_n256k256_w4x1_p5_dp_c1", SYM128, "17-32, wide N, tiles just under one a SM"),
    Row("m32_n256k256_w4x1_p5_hybrid_c1", SPARSE_ALL, "wide N, every format", TILE_LOOP_SPILL),
    Row("m32_n128k256_w2x2_p6_dp_c1", SYM128, "17-32, two k groups, tiles just under a wave"),
    Row("m32_n128k256_w2x2_p6_split2_c1", SYM128, "17-32, medium N: a cluster splits K"),
    Row("m32_n64k256_w1x4_p8_split2_c1", SYM128, "few columns", TILE_LOOP_SPILL),
    Row("m32_n64k256_w1x4_p8_dp_c1", SYM128, "17-32, one 64-wide tile a SM"),
    # batch 33..64
    Row("m48_n256k256_w4x1_p4_hybrid_c1", SYM128, "33-48, wide N", TILE_LOOP_SPILL),
    Row("m48_n128k128_w2x2_p8_split2_c1", SYM128, "33-48, medium N"),
    Row("m64_n256k256_w4x1_p3_hybrid_c1", SPARSE_ALL, "wide N, every format", TILE_LOOP_SPILL),
    Row("m64_n256k256_w4x1_p3_hybrid_c1_mc2", SYM128, "wide N: half the L2 reads", TILE_LOOP_SPILL),
    Row("m64_n128k256_w2x1_p4_hybrid_c1_mc2", SYM128, "medium N: equal columns"),
    Row("m64_n128k128_w2x2_p6_dp_c1", SYM128, "one 128-wide tile a SM"),
    Row("m64_n128k128_w2x2_p6_split2_c1", SPARSE_ALL, "medium N, every format", TILE_LOOP_SPILL),
    Row("m64_n64k128_w1x2_p8_split2_c1", SYM128, "few columns"),
    # batch 65 and more: tensor cores, which read twice as many activations as for dense weights
    Row("m96_n256k128_w2x1_p5_dp_c1", SYM128, "65-96, tiles just under one a SM"),
    Row("m96_n128k128_w2x1_p6_hybrid_c1_mc2", SYM128, "65-96, equal columns"),
    Row("m96_n64k128_w1x2_p6_split2_c1", SYM128, "65-96, few columns"),
    Row("m128_n256k128_w2x1_p4_dp_c1", SYM128, "97-128, tiles just under one a SM"),
    Row("m128_n256k128_w2x1_p4_streamk_c1", SYM128, "ragged: equal K", TILE_LOOP_SPILL),
    Row("m128_n128k128_w2x1_p4_split2_c1", SYM128, "few tiles: a cluster splits K"),
    Row("m128_n128k128_w2x1_p5_dp_c1_mc2", SYM128, "a wave that large tiles leave half empty"),
    Row("m128_n128k128_w2x1_p5_hybrid_c1_mc2", SPARSE_ALL, "equal columns, every format"),
    Row("m192_n128k128_w2x1_p4_hybrid_c1_mc2", SYM128, "129-192, equal columns"),
    Row("m256_n128k128_w2x1_p3_dp_c1_mc2", SPARSE_ALL, "prefill, every format"),
    Row("m256_n128k128_w2x1_p3_hybrid_c1_mc2", SYM128, "193-512, equal columns"),
    Row(
        "m256_n128k128_w2x1_p3_streamk_c1",
        SYM128,
        "ragged prefill: equal shares of K",
        TILE_LOOP_SPILL,
    ),
)

LARGE_SHARED_BYTES = 200 * 1024


def declared_rows(arch: Arch, family: str) -> tuple[Row, ...]:
    """The rows of `family` for `arch`."""
    if family in HOPPER_FAMILIES:
        return HOPPER if family == "hopper" else HOPPER_SPARSE
    small, large = (SPARSE, SPARSE_LARGE) if family == "sparse" else (AMPERE, AMPERE_LARGE)
    return large if arch.shared_per_block > LARGE_SHARED_BYTES else small


def default_families(arch: Arch) -> tuple[str, ...]:
    """Families of the default table: the preferred one; others are there when asked for."""
    return arch.families[:1]


def default_space(arch: Arch, families: tuple[str, ...] | None = None) -> list[Entry]:
    """The default table of `arch` in declaration order.

    Raises ValueError if a declared row is illegal there: the table has no silent gaps.
    """
    entries = []
    for family in families or default_families(arch):
        if family == collective.FAMILY:
            entries += [Entry(v, reason) for v, reason in collective.declared(arch)]
            continue
        for row in declared_rows(arch, family):
            geometry = Geometry.parse(f"w4a16_{family}_{row.geometry}")
            for fmt in row.formats:
                variant = geometry.with_format(*fmt)
                reason = legality.why_not(variant, arch)
                if reason is not None:
                    raise ValueError(
                        f"default table of {arch.name}: {variant.name} is illegal: {reason}"
                    )
                entries.append(Entry(variant, row.reason, row.allowed_spill_bytes))
    return entries


def full_space(arch: Arch, families: tuple[str, ...] | None = None) -> Iterator[Entry]:
    """Every legal variant of `arch` in a fixed order (thousands; combine with a filter)."""
    for family in families or arch.families:
        if family == collective.FAMILY:
            yield from (Entry(v, "full space: every legal unit") for v in collective.every(arch))
            continue
        for geometry in _geometries(family):
            if legality.why_not(geometry.with_format(*LIGHTEST), arch) is not None:
                continue  # a heavier format only needs more shared memory
            for fmt in ALL:
                variant = geometry.with_format(*fmt)
                if legality.why_not(variant, arch) is None:
                    yield Entry(variant, "full space: every legal combination")


# decomposition, split, multicast
DECOMPOSITIONS = {
    "sparse": (("data_parallel", 1, 1), ("striped", 1, 1), ("split_k", 2, 1), ("split_k", 4, 1)),
    "ampere": (("data_parallel", 1, 1), ("striped", 1, 1), ("split_k", 2, 1), ("split_k", 4, 1)),
    "hopper": (
        ("data_parallel", 1, 1),
        ("data_parallel", 1, 2),
        ("stream_k", 1, 1),
        ("stream_k", 1, 2),
        ("hybrid", 1, 1),
        ("hybrid", 1, 2),
        ("split_k", 2, 1),
        ("split_k", 4, 1),
    ),
}
DECOMPOSITIONS["hopper_sparse"] = DECOMPOSITIONS["hopper"]


def _geometries(family: str) -> Iterator[Geometry]:
    axes = (
        legality.M_TILES[family],
        legality.N_SMS,
        legality.K_SMS[family],
        legality.WARPS_N[family],
        legality.WARPS_K[family],
        range(legality.MIN_STAGES, 9),
        DECOMPOSITIONS[family],
        (1, 2),
    )
    for *tile, (decomposition, split, multicast), ctas in itertools.product(*axes):
        yield Geometry(family, *tile, decomposition, split, ctas, multicast)
