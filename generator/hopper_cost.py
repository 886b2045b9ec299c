"""Time of a Hopper launch on the busiest SM: the fitted part of the cost model.

Constants: coordinate descent on the mean error (log ratio) and what the model's choice costs, over
6990 dense fp16 timings of generator/tuning/nvidia_h200.json, 47 weights from 512 x 512 to
57344 x 8192, M = 1..4096, NVIDIA H200, 2026-11-30 and 2026-12-01, mean of times with and without
dependent launch; row tiles that were not timed (88, 240) lie between their neighbours.
docs/performance.md has the errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

from generator.arch import Gpu
from generator.problem import BLOCK_COLUMNS, ProblemShape, ceil_div
from generator.schedule import RASTER, whole_passes
from generator.variant import Variant

START_US = 1.92  # gap between kernels and first data
OVERLAP_LOSS = 0.0426  # share of the shorter of (memory, compute) that does not hide
STREAM_EFFICIENCY = 1.056  # of the measured bandwidth, inside the main loop
# Cycles of one 64 x 64 piece of weights per SM, dequantisation and four wgmma, by m_tile. Nominal
# clock: under load it is lower, which is in the figures.
PIECE_CYCLES = {
    8: 90.6,
    16: 100.7,
    24: 106.5,
    32: 118.9,
    40: 136,
    48: 148.4,
    56: 158.6,
    64: 174.5,
    72: 152.7,
    80: 165.3,
    88: 177.5,
    96: 191,
    112: 216,
    128: 257.8,
    144: 276.9,
    160: 310.4,
    176: 337.1,
    192: 375.9,
    208: 399.6,
    224: 430.4,
    240: 463,
    256: 495.5,
}
L2_BYTES_PER_CLOCK = 54.7  # into one SM: weights, and activations once per tile of columns
PIECE_WEIGHT_BYTES = 2112
# One, two, three warpgroups at work hide less latency: with row tiles up to 64, and beyond.
FEW_WARPGROUPS = ((1.36, 1.01, 1.01), (1.35, 1.24, 1.18))
ONE_BLOCK = {96: 1.02, 128: 0.981}  # where a warpgroup has one block of columns, by m_tile
K_GROUPS = {1: 1.0, 2: 1.035, 4: 1.192}  # warpgroups along K take stages in turn
CTAS_PER_SM = {1: 1.0, 2: 0.925, 3: 0.986}  # one starts or stores while another multiplies
RAW_CODES = 0.923  # few rows: codes are multiplied as they lie
# Ranges of stream-K are at different k steps, so that each reads its activations from memory where
# those of neighbouring row tiles exceed what L2 keeps: per so many bytes beyond the first.
RANGES_APART, APART_BYTES = 0.0709, 16 << 20
MULTICAST_ROWS, MULTICAST = 128, 0.974  # activations loaded once for two CTAs: less power
CLUSTER_US = 0.696  # sum over a cluster
RANGES_US, RANGES_PER_VALUE = 2.39, 4.31e-05  # stream-K: partial tiles through L2, for each sharer
HYBRID_US, HYBRID_ROWS = 2.16, 0.0753  # the second: share of time lost with several row tiles
# Sum over the CTAs that share a block of a hybrid pass, and the part of the time in which whole
# blocks run on beside it that hides it.
SHARES_US, SHARES_PER_ROW_AND_SHARER, SHARES_HIDDEN = 1.56, 0.00408, 0.451
ROUND_US = 1.21  # each further tile of a CTA: drain and restart
TILE_US_PER_VALUE = 1.68e-05  # epilogue
CLUSTERS_OF_FOUR = 30 / 33  # of the clusters that fit by count; GPCs have odd numbers of SMs
# Sparse: a piece is 64 x 128, with as many codes and as many instructions of the same length, each
# over twice as many activations, and the places of the kept values. Fitted to 250 timings of twelve
# weights, M = 1..256, of 2026-11-30: the choice is within 10 % of the best in 95 % of the cells.
SPARSE_PIECE_CYCLES = 1.35
SPARSE_PIECE_BYTES = 4024
SPARSE_FOUR_K_GROUPS = 1.08
SPARSE_HYBRID = 1.08
SPARSE_STREAM = 0.908  # of the rate at which dense weights stream


class HopperTime(NamedTuple):
    """compute, fix_up: microseconds on the busiest SM. rounds: tiles or passes of a CTA. Of one
    problem each."""

    compute: numpy.ndarray
    fix_up: numpy.ndarray
    rounds: numpy.ndarray


class Sizes(NamedTuple):
    """Of many problems: rows, columns in blocks of 64, depth."""

    m: numpy.ndarray
    blocks: numpy.ndarray
    k: numpy.ndarray

    @classmethod
    def of(cls, problems: Sequence[ProblemShape]) -> Sizes:
        m, n, k = numpy.array([(p.m, p.n, p.k) for p in problems]).T
        return cls(m, ceil_div(n, BLOCK_COLUMNS), k)


Work = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray | float]


@functools.lru_cache(maxsize=8192)
def hopper_model(variant: Variant, gpu: Gpu, format_factor: float) -> HopperModel:
    """The model of one variant, with what does not depend on the problem computed once."""
    return HopperModel(variant, gpu, format_factor)


class HopperModel:
    """Work of the busiest SM by decomposition: each method returns (cycles, rounds, fix-up us)."""

    def __init__(self, variant: Variant, gpu: Gpu, format_factor: float) -> None:
        v = self.v = variant
        self.sms, self.clock = gpu.sms, gpu.clock
        self.slots = v.n_sm // BLOCK_COLUMNS
        self.step_pieces = v.k_sm / (128 if v.sparse else 64)
        self.cycles = [0.0, *(_cycles(v, busy, format_factor) for busy in range(1, 9))]
        self.busy = min(v.warps_n * v.warps_k * v.ctas_per_sm, 8)
        self.tile_us = TILE_US_PER_VALUE * v.m_tile * v.n_sm
        kinds: dict[str, Callable[..., Work]] = {
            "hybrid": self._hybrid,
            "stream_k": self._stream_k,
            "split_k": self._split_k,
        }
        self.work = kinds.get(v.decomposition, self._data_parallel)

    def time(self, sizes: Sizes) -> HopperTime:
        """The busiest SM's share of each problem and the reductions that follow."""
        v = self.v
        m_tiles, k_steps = ceil_div(sizes.m, v.m_tile), ceil_div(sizes.k, v.k_sm)
        cycles, rounds, fix_up = self.work(sizes.blocks, m_tiles, k_steps)
        fix_up = fix_up + (ROUND_US * (rounds - 1) + self.tile_us * rounds)
        return HopperTime(cycles / self.clock * 1e6, fix_up, rounds)

    def _tiles(self, blocks: numpy.ndarray, m_tiles: numpy.ndarray) -> numpy.ndarray:
        mc = self.v.multicast
        return ceil_div(blocks, self.slots * mc) * mc * m_tiles

    def _tile_cycles(self, k_steps: numpy.ndarray) -> numpy.ndarray:
        return self.slots * k_steps * self.step_pieces * self.cycles[self.busy]

    def _data_parallel(
        self, blocks: numpy.ndarray, m_tiles: numpy.ndarray, k_steps: numpy.ndarray
    ) -> Work:
        v = self.v
        ctas = self.sms * v.ctas_per_sm // v.multicast * v.multicast
        rounds = ceil_div(self._tiles(blocks, m_tiles), ctas)
        return rounds * v.ctas_per_sm * self._tile_cycles(k_steps), rounds, 0.0

    def _split_k(
        self, blocks: numpy.ndarray, m_tiles: numpy.ndarray, k_steps: numpy.ndarray
    ) -> Work:
        v = self.v
        clusters = self.sms * v.ctas_per_sm // v.split
        clusters = int(clusters * CLUSTERS_OF_FOUR) if v.split == 4 else clusters
        rounds = ceil_div(self._tiles(blocks, m_tiles), max(1, clusters))
        cycles = rounds * v.ctas_per_sm * self._tile_cycles(k_steps) / v.split
        return cycles, rounds, rounds * CLUSTER_US

    def _stream_k(
        self, blocks: numpy.ndarray, m_tiles: numpy.ndarray, k_steps: numpy.ndarray
    ) -> Work:
        v, n_tiles = self.v, ceil_div(blocks, self.slots * self.v.multicast)
        tiles = m_tiles * n_tiles
        workers = numpy.minimum(self.sms // v.multicast, tiles * k_steps)
        passes = whole_passes(v, m_tiles, n_tiles, k_steps, workers)
        cut = tiles - passes * workers
        sharers = numpy.maximum(1.0, workers / numpy.maximum(cut, 1))
        adding = RANGES_PER_VALUE * v.m_tile * v.n_sm * sharers
        near = numpy.minimum(m_tiles, RASTER) * v.m_tile * k_steps * v.k_sm * 2  # bytes of rows
        apart = RANGES_APART * numpy.maximum(0.0, near / APART_BYTES - 1)
        steps = cut / workers * (1 + apart)
        cycles = (passes + steps) * self._tile_cycles(k_steps)
        fix_up = numpy.where(cut > 0, RANGES_US + adding, 0.0)
        return cycles, numpy.maximum(1.0, tiles / workers), fix_up

    def _hybrid(
        self, blocks: numpy.ndarray, m_tiles: numpy.ndarray, k_steps: numpy.ndarray
    ) -> Work:
        v, slots = self.v, self.slots
        grid = self.sms // v.multicast * v.multicast
        full = blocks // (grid * slots)
        whole, left = numpy.divmod(blocks - full * grid * slots, grid)
        share = ceil_div(left, v.multicast) * k_steps / (grid // v.multicast)  # k steps of a CTA
        # The last pass: first the share runs beside the whole blocks, then these alone.
        beside = numpy.where(whole > 0, share, 0.0)
        alone = numpy.where(whole > 0, k_steps - share, share)
        cycles = numpy.array(self.cycles)
        steps = full * slots * k_steps * self.cycles[slots]
        steps = steps + (whole + 1) * beside * cycles[whole + 1]
        steps = steps + numpy.maximum(whole, 1) * alone * cycles[numpy.maximum(whole, 1)]
        steps = steps * numpy.where(m_tiles > 1, 1 + HYBRID_ROWS, 1.0)
        if v.sparse:
            steps = steps * SPARSE_HYBRID
        rounds = m_tiles * (full + (whole + left > 0))
        sharers = grid / numpy.maximum(left, 1)
        adding = SHARES_US + SHARES_PER_ROW_AND_SHARER * v.m_tile * sharers
        hiding = alone * whole * cycles[whole] * self.step_pieces / self.clock * 1e6
        shared = m_tiles * numpy.maximum(0.0, adding - SHARES_HIDDEN * hiding)
        return (
            m_tiles * steps * self.step_pieces,
            rounds,
            HYBRID_US + numpy.where(left > 0, shared, 0.0),
        )


def _cycles(v: Variant, busy: int, format_factor: float) -> float:
    """Cycles of a piece with `busy` warpgroups at work. Other formats dequantise slower, seen
    at small tiles only.
    """
    factor = FEW_WARPGROUPS[v.m_tile > 64][busy - 1] if busy <= 3 else 1.0
    factor *= K_GROUPS.get(v.warps_k, 1.0) * CTAS_PER_SM.get(v.ctas_per_sm, 1.0)
    if v.sums_activations:
        factor *= RAW_CODES
    if v.multicast > 1 and v.m_tile >= MULTICAST_ROWS:
        factor *= MULTICAST
    if v.sparse:
        factor *= SPARSE_PIECE_CYCLES * (SPARSE_FOUR_K_GROUPS if v.warps_k == 4 else 1.0)
    if v.n_sm // BLOCK_COLUMNS == v.warps_n:
        factor *= ONE_BLOCK.get(v.m_tile, 1.0)
    slower = v.m_tile <= 64 and not (v.sums_activations and v.dtype == "f16")
    dequantisation = 40.0 * (format_factor - 1) if slower else 0.0
    row_bytes = 256 if v.sparse else 128
    activations = v.m_tile * row_bytes * BLOCK_COLUMNS / v.n_sm / v.multicast
    weights = SPARSE_PIECE_BYTES if v.sparse else PIECE_WEIGHT_BYTES
    traffic = (activations + weights) / L2_BYTES_PER_CLOCK
    return max(PIECE_CYCLES[v.m_tile] * factor + dequantisation, traffic)
