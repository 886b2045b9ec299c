"""A time model of one launch, to rank variants where nothing was measured.

time = launch + fill + max(memory, tensor cores with dequantisation) on the busiest SM + a share of
the shorter of the two + fix-up. The constants were fitted to H200 measurements of 2026-11-29
(docs/performance.md); for other GPUs they are a guess that keeps the order of variants plausible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from generator import hopper_cost
from generator.arch import GPUS, Arch, Gpu
from generator.problem import BLOCK_COLUMNS, BLOCK_DEPTH, ProblemShape, ceil_div
from generator.schedule import Schedule, make_schedule
from generator.variant import Variant

# Measured H200 2026-11-29: gap between kernels without dependent launch 2.9 us, first full stage
# 1.3-2.3 us after the start.
LAUNCH_US = 2.0
FILL_US = 1.3
STREAM_K_FIX_UP_US = 1.4  # partial tile through L2: 1.2-1.5 us in the loop, 1-1.3 us at the end
K_GROUP_FIX_UP_US = 0.3
TILE_US = 0.5  # epilogue and restart of a tile that nothing overlaps
# An SM alone draws more than its share of bandwidth: bytes in flight over the latency of memory.
LATENCY_US = 0.9
L2_BYTES_PER_CLOCK = 32  # per SM, sustained by all SMs together

SHARED_TIME = 0.25  # share of the shorter of (memory, compute) that does not hide behind the longer
# Ampere and Ada: one 64 x 64 step is 144 warp instructions of dequantisation and 32 row fragments
# over four schedulers.
MMA_DEQUANT_CYCLES = 44.0
MMA_EXPOSED = 0.35  # share of the shorter of (tensor, dequantisation) that does not overlap
FORMAT_FACTOR = {
    ("f16", False): 1.0,
    ("f16", True): 1.25,
    ("bf16", False): 1.15,
    ("bf16", True): 1.45,
}

SMALL_TILE = 16  # a tile of 16 rows is sensible even for one row: it reads the same weights
MAX_ROW_TILES = 4  # more small tiles than this dequantise the weight too often ...
LARGE_TILE = 64  # ... unless the tile is this large anyway


@dataclass(frozen=True)
class Cost:
    """Microseconds; `total` is what ranks."""

    launch: float
    memory: float
    compute: float
    fix_up: float
    waves: float
    overlap_loss: float = (
        SHARED_TIME  # share of the shorter of (memory, compute) that is not hidden
    )

    @property
    def total(self) -> float:
        shorter = min(self.memory, self.compute)
        longer = max(self.memory, self.compute)
        return self.launch + longer + self.overlap_loss * shorter + self.fix_up

    @property
    def bound(self) -> str:
        return "memory" if self.memory >= self.compute else "compute"


def reference_gpu(arch: Arch, sms: int | None = None) -> Gpu:
    """The named GPU of `arch` that stands for devices with `sms` SMs (the last one named, if none
    has as many).
    """
    named = [g for g in GPUS.values() if g.arch == arch.name] or list(GPUS.values())
    return next((g for g in reversed(named) if g.sms == sms), named[-1])


def sensible_rows(m: int, m_tile: int, large_tile: int = LARGE_TILE) -> bool:
    """Whether a row tile suits m rows: at most twice the rows are computed, in few tiles."""
    tiles = ceil_div(m, m_tile)
    return tiles * m_tile <= max(SMALL_TILE, 2 * m) and (
        tiles <= MAX_ROW_TILES or m_tile >= large_tile
    )


def estimate(problem: ProblemShape, variant: Variant, gpu: Gpu) -> Cost:
    """Modelled cost of one cold call on `gpu`."""
    if variant.hopper:
        return _estimate_hopper(problem, variant, gpu)
    schedule = make_schedule(problem, variant, gpu.sms)
    busiest, waves = _busiest_steps(variant, schedule, gpu)
    return Cost(
        launch=LAUNCH_US + FILL_US,
        memory=_memory_us(problem, variant, schedule, busiest, gpu),
        compute=busiest * _step_us(variant, gpu),
        fix_up=_fix_up_us(variant, schedule, waves),
        waves=waves,
    )


def totals(
    variants: Sequence[Variant], problems: Sequence[ProblemShape], gpu: Gpu
) -> numpy.ndarray:
    """`estimate(p, v, gpu).total` as [variants, problems]."""
    if not all(v.hopper for v in variants):
        return numpy.array([[estimate(p, v, gpu).total for p in problems] for v in variants])
    sizes = hopper_cost.Sizes.of(problems)
    memory = numpy.array([_hopper_memory_us(p, gpu) for p in problems])
    start, loss = hopper_cost.START_US, hopper_cost.OVERLAP_LOSS
    rows = []
    for v in variants:
        time = _hopper_model(v, gpu).time(sizes)
        longer, shorter = numpy.maximum(memory, time.compute), numpy.minimum(memory, time.compute)
        rows.append(start + longer + loss * shorter + time.fix_up)
    return numpy.array(rows)


def _hopper_model(variant: Variant, gpu: Gpu) -> hopper_cost.HopperModel:
    return hopper_cost.hopper_model(variant, gpu, FORMAT_FACTOR[variant.dtype, variant.zeros])


def _hopper_memory_us(problem: ProblemShape, gpu: Gpu) -> float:
    traffic = problem.weight_bytes + 2 * problem.m * (problem.k + problem.n)
    rate = gpu.bandwidth * hopper_cost.STREAM_EFFICIENCY
    return traffic / (rate * (hopper_cost.SPARSE_STREAM if problem.sparse else 1.0)) * 1e6


def _estimate_hopper(problem: ProblemShape, variant: Variant, gpu: Gpu) -> Cost:
    time = _hopper_model(variant, gpu).time(hopper_cost.Sizes.of([problem]))
    return Cost(
        launch=hopper_cost.START_US,
        memory=_hopper_memory_us(problem, gpu),
        compute=time.compute.item(),
        fix_up=time.fix_up.item(),
        waves=time.rounds.item(),
        overlap_loss=hopper_cost.OVERLAP_LOSS,
    )


def _busiest_steps(variant: Variant, schedule: Schedule, gpu: Gpu) -> tuple[float, float]:
    """(pipeline stages that the busiest SM works through, tiles per CTA)."""
    slots = gpu.sms * variant.ctas_per_sm
    units = schedule.tiles * schedule.k_steps
    if variant.decomposition == "striped":
        return ceil_div(units, min(units, slots)) * _ctas_on_busiest(
            schedule.grid, gpu, variant
        ), units / slots
    per_cta = schedule.k_steps / schedule.split
    ctas = schedule.tiles * schedule.split
    if ctas <= slots:
        return per_cta * _ctas_on_busiest(ctas, gpu, variant), 1.0
    rounds = ceil_div(ctas, slots)
    return per_cta * rounds * variant.ctas_per_sm, float(rounds)


def _ctas_on_busiest(ctas: int, gpu: Gpu, variant: Variant) -> int:
    return min(variant.ctas_per_sm, max(1, ceil_div(ctas, gpu.sms)))


def _memory_us(
    problem: ProblemShape, v: Variant, schedule: Schedule, busiest: float, gpu: Gpu
) -> float:
    """The longest of: all bytes from memory, the bytes of the busiest SM at its own rate, all bytes
    from L2.
    """
    activations = 2 * problem.m * problem.k + 2 * problem.m * problem.n
    passes = ceil_div(schedule.m_tiles, schedule.raster)
    weights = problem.weight_bytes
    if (
        weights > gpu.l2_bytes / 2
    ):  # groups of row tiles come back to weights that L2 no longer holds
        weights *= passes
    memory = (weights + activations) / gpu.bandwidth
    blocks = v.n_sm // BLOCK_COLUMNS * v.k_sm // BLOCK_DEPTH
    stage = v.m_tile * v.k_sm * 2 + blocks * v.block_bytes
    in_flight = v.stages * stage * v.ctas_per_sm
    rate = min(in_flight / (LATENCY_US * 1e-6), L2_BYTES_PER_CLOCK * gpu.clock)
    return max(memory, busiest * stage / rate) * 1e6


def _step_us(v: Variant, gpu: Gpu) -> float:
    """Time of one stage on one SM: tensor cores and dequantisation, which overlap in part."""
    dequant_factor = FORMAT_FACTOR[v.dtype, v.zeros] * (1.15 if v.group_size == 32 else 1.0)
    # mma.sync on Hopper reaches 62 % of its tensor rate.
    rate = gpu.tensor_flops / (gpu.sms * gpu.clock) * (0.62 if gpu.arch == "sm_90a" else 1.0)
    tensor = 2 * 64 * 64 * max(8, v.m_tile) / rate
    dequant = MMA_DEQUANT_CYCLES * dequant_factor
    if v.sparse:  # half of the codes, half of the products
        tensor, dequant = tensor / 2, dequant / 2
    cycles = max(tensor, dequant) + MMA_EXPOSED * min(tensor, dequant)
    if v.warps_n * v.warps_k * v.ctas_per_sm < 8:
        cycles *= 1.25  # one warp per scheduler cannot hide latency
    steps = v.n_sm // BLOCK_COLUMNS * v.k_sm // 64
    return steps * cycles / gpu.clock * 1e6


def _fix_up_us(v: Variant, schedule: Schedule, waves: float) -> float:
    k_groups = K_GROUP_FIX_UP_US if v.warps_k > 1 else 0.0
    if v.decomposition == "striped":
        aligned = schedule.tiles % schedule.grid == 0
        return max(1.0, waves / schedule.k_steps) * (TILE_US + k_groups) + (
            0.0 if aligned else STREAM_K_FIX_UP_US
        )
    split = STREAM_K_FIX_UP_US if v.split > 1 else 0.0
    return waves * (TILE_US + k_groups + split)
