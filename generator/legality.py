"""why_not: the only statement of what variants are legal. build.py, explore, dispatch and tests
call it.
"""

from __future__ import annotations

from collections.abc import Iterator

from generator.arch import RESERVED_SHARED_BYTES, Arch
from generator.problem import DTYPES, KERNEL_GROUP_SIZES, ProblemShape
from generator.variant import DECOMPOSITIONS, FAMILIES, Variant

M_TILES = {
    "ampere": (8, 16, 32, 48, 64, 128),
    "hopper": (*range(8, 96, 8), *range(96, 257, 16)),  # n of wgmma m64nNk16, of the multiples of 8
    "sparse": (8, 16, 32, 48, 64, 128),
}
K_SMS = {"ampere": (128, 256, 512), "hopper": (128, 256, 512), "sparse": (128, 256, 512)}
N_SMS = (64, 128, 192, 256)
WARPS_N = {"ampere": (1, 2, 4, 8), "hopper": (1, 2, 3, 4), "sparse": (1, 2, 4, 8)}
WARPS_K = {"ampere": (1, 2, 4, 8), "hopper": (1, 2, 4), "sparse": (1, 2, 4, 8)}
MIN_STAGES, MAX_STAGES = 2, 16

# Registers a thread needs beside its accumulators: fragments, scales, addresses. From ptxas on
# built kernels (nvcc 13.0).
BASE_REGISTERS = {"ampere": 72, "hopper": 56, "sparse": 72}
# Registers of a consumer thread after setmaxnreg, by consumer warpgroups (measured H200 2026-11-29:
# 120 hangs with 4).
MOVED_REGISTERS = {2: 232, 4: 112}
for _table in (M_TILES, K_SMS, WARPS_N, WARPS_K, BASE_REGISTERS):
    _table["hopper_sparse"] = _table["hopper"]


def why_not(variant: Variant, arch: Arch) -> str | None:
    """Why `variant` cannot exist on `arch`, or None if it can."""
    for check in (_fields, _decomposition, _tile, _resources):
        for reason in check(variant, arch):
            return reason
    return None


def why_not_for(variant: Variant, problem: ProblemShape) -> str | None:
    """Why a legal `variant` cannot serve `problem`, or None: only the formats matter."""
    if variant.sparse != problem.sparse:
        kinds = {True: "2:4-sparse", False: "dense"}
        return f"is for {kinds[variant.sparse]} weights; the call has {kinds[problem.sparse]} ones"
    wanted = (problem.dtype, problem.zeros, problem.kernel_group_size)
    if (variant.dtype, variant.zeros, variant.group_size) != wanted:
        return (
            f"is for dtype={variant.dtype}, zeros={variant.zeros}, "
            f"group_size={variant.group_size}; the call has "
            f"dtype={wanted[0]}, zeros={wanted[1]}, group_size={wanted[2]}"
        )
    return None


def registers_available(variant: Variant, arch: Arch) -> int:
    """Registers a consumer thread may use, by the launch bounds or by setmaxnreg."""
    if variant.hopper and variant.moves_registers:
        return MOVED_REGISTERS[variant.warps_n * variant.warps_k]
    share = arch.registers_per_sm // (variant.ctas_per_sm * variant.threads)
    return min(arch.max_registers, share // 8 * 8)


def max_registers(variant: Variant, arch: Arch) -> int:
    """The most registers a thread may be compiled to for ctas_per_sm CTAs to fit; a warp takes
    units of 256.
    """
    warps = variant.ctas_per_sm * variant.threads // 32
    return min(arch.max_registers, arch.registers_per_sm // warps // 256 * 256 // 32)


def occupancy(variant: Variant, arch: Arch, registers: int) -> int:
    """CTAs that fit on an SM: shared memory, threads, and registers in units of 256 per warp."""
    per_warp = -(-registers * 32 // 256) * 256
    warps = variant.threads // 32
    return min(
        arch.shared_per_sm // (variant.shared_bytes + RESERVED_SHARED_BYTES),
        arch.threads_per_sm // variant.threads,
        arch.registers_per_sm // max(1, per_warp * warps),
    )


def accumulators(variant: Variant) -> int:
    """fp32 sums a thread holds: m_tile x (columns of its warp or warpgroup) over its threads."""
    threads = 128 if variant.hopper else 32
    return variant.m_tile * variant.n_sm // variant.warps_n // threads


def _fields(v: Variant, arch: Arch) -> Iterator[str]:
    if v.family not in FAMILIES:
        yield f"family={v.family!r} is not one of {', '.join(FAMILIES)}"
    if v.family not in arch.families:
        yield f"family={v.family} does not run on {arch.name} (there: {', '.join(arch.families)})"
    allowed = {
        "dtype": DTYPES,
        "zeros": (False, True),
        "group_size": KERNEL_GROUP_SIZES,
        "m_tile": M_TILES[v.family],
        "n_sm": N_SMS,
        "k_sm": K_SMS[v.family],
        "warps_n": WARPS_N[v.family],
        "warps_k": WARPS_K[v.family],
        "stages": range(MIN_STAGES, MAX_STAGES + 1),
        "decomposition": tuple(DECOMPOSITIONS),
        "ctas_per_sm": (1, 2, 3, 4),
        "multicast": (1, 2, 4),
    }
    for field, values in allowed.items():
        if getattr(v, field) not in values:
            text = (
                f"{values[0]}..{values[-1]}"
                if isinstance(values, range)
                else ", ".join(map(str, values))
            )
            yield f"{field}={getattr(v, field)} is not one of {text}"


def _decomposition(v: Variant, arch: Arch) -> Iterator[str]:
    allowed = {
        "ampere": ("data_parallel", "striped", "split_k"),
        "hopper": ("data_parallel", "stream_k", "split_k", "hybrid"),
        "sparse": ("data_parallel", "striped", "split_k"),
        "hopper_sparse": ("data_parallel", "stream_k", "split_k", "hybrid"),
    }[v.family]
    if v.decomposition not in allowed:
        yield f"decomposition={v.decomposition} is not one of {', '.join(allowed)} ({v.family})"
    if v.decomposition == "split_k":
        splits = (2, 4) if v.hopper else (2, 4, 8)
        if v.split not in splits:
            yield f"split={v.split} is not one of {', '.join(map(str, splits))}"
    elif v.split != 1:
        yield f"split={v.split} needs decomposition=split_k"
    if v.multicast > 1:
        yield from _multicast(v)


def _multicast(v: Variant) -> Iterator[str]:
    if not v.hopper or v.decomposition == "split_k":
        yield f"multicast={v.multicast} needs family=hopper and another decomposition than split_k"
    if v.decomposition == "stream_k" and v.multicast > 2:
        yield (
            f"multicast={v.multicast}: clusters of {v.multicast} do not fill a device, and those of"
            " stream_k wait for each other"
        )
    if v.k_sm // 64 % v.multicast:
        yield f"k_sm={v.k_sm} does not divide by 64 x multicast={v.multicast}"


def _tile(v: Variant, arch: Arch) -> Iterator[str]:
    if v.hopper:
        yield from _hopper_tile(v)
    else:
        yield from _ampere_tile(v)
    if v.sparse and (v.zeros or v.group_size == 32):
        yield (
            f"zeros={v.zeros}, group_size={v.group_size}: 2:4-sparse weights are symmetric with "
            "groups of 64, 128 or -1"
        )


def _ampere_tile(v: Variant) -> Iterator[str]:
    columns, want = v.n_sm // v.warps_n, 32 if v.m_tile == 128 else 64
    if columns != want or v.n_sm % v.warps_n:
        yield (
            f"warps_n={v.warps_n} gives a warp {columns} of n_sm={v.n_sm} columns, "
            f"not {want} (m_tile={v.m_tile})"
        )
    if v.warps_n * v.warps_k not in (4, 8):
        yield f"warps_n * warps_k = {v.warps_n * v.warps_k} is not 4 or 8 warps"
    depth = 128 if v.sparse else 64
    if v.k_sm // v.warps_k % depth:
        yield (
            f"k_sm={v.k_sm} over warps_k={v.warps_k} is not a multiple of {depth}, "
            "the depth of one 16-byte load"
        )


def _hopper_tile(v: Variant) -> Iterator[str]:
    if v.n_sm % (64 * v.warps_n):
        yield f"n_sm={v.n_sm} is not a multiple of 64 rows of wgmma x warps_n={v.warps_n}"
    if v.warps_n * v.warps_k > 4:
        yield f"warps_n * warps_k = {v.warps_n * v.warps_k} consumer warpgroups; at most 4"
    if v.decomposition == "hybrid" and (v.n_sm != 64 * v.warps_n or v.warps_k != 1):
        yield f"hybrid needs one 64-column block per warpgroup: n_sm={v.n_sm}, warps_n={v.warps_n}"
    if v.stages % v.warps_k:
        yield (
            f"stages={v.stages} is not a multiple of warps_k={v.warps_k}: "
            "each k group owns every warps_k-th stage"
        )


def _resources(v: Variant, arch: Arch) -> Iterator[str]:
    if v.shared_bytes > arch.shared_per_block:
        yield f"shared_bytes={v.shared_bytes} exceeds {arch.shared_per_block} of {arch.name}"
    total = v.ctas_per_sm * (v.shared_bytes + RESERVED_SHARED_BYTES)
    if total > arch.shared_per_sm:
        yield (
            f"ctas_per_sm={v.ctas_per_sm} needs {total} bytes of shared memory; "
            f"an SM of {arch.name} has {arch.shared_per_sm}"
        )
    if v.ctas_per_sm * v.threads > arch.threads_per_sm:
        yield (
            f"ctas_per_sm={v.ctas_per_sm} x {v.threads} threads exceed "
            f"{arch.threads_per_sm} of {arch.name}"
        )
    need, have = accumulators(v) + BASE_REGISTERS[v.family], registers_available(v, arch)
    if need > have:
        yield f"about {need} registers a thread (accumulators {accumulators(v)}), {have} available"
