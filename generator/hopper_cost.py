"""Time of a Hopper launch on the busiest SM: the fitted part of the cost model.

Constants: least squares (soft L1 on the log ratio) over 2300 timings of 70 geometries, weights from
1024 x 1024 to 57344 x 8192, M = 8..2048, NVIDIA H200, 2026-11-29, mean of times with and without
dependent launch. Median error 5 %. Choosing by it costs 3.5 % on average and 30 % at worst against
the best measured geometry; 0.4 % on average if the first three are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from generator.arch import Gpu
from generator.problem import BLOCK_COLUMNS, ProblemShape, ceil_div
from generator.variant import Variant

START_US = 2.6  # gap between kernels and first data
OVERLAP_LOSS = 0.0134  # share of the shorter of (memory, compute) that does not hide
STREAM_EFFICIENCY = 0.99  # of the measured bandwidth, inside the main loop
# Cycles of one 64 x 64 piece of weights per SM, dequantisation and four wgmma, by m_tile.
PIECE_CYCLES = {
    8: 100.0,
    16: 114.6,
    24: 121.0,
    32: 127.4,
    48: 165.0,
    64: 190.1,
    96: 273.9,
    128: 320.8,
    192: 458.5,
    256: 626.0,
}
L2_BYTES_PER_CLOCK = 39.4  # into one SM: weights, and activations once per tile of columns
PIECE_WEIGHT_BYTES = 2112
# Sparse: a piece is 64 x 128, with as many codes and as many instructions of the same length, each
# over twice as many activations, and the places of the kept values (not yet fitted).
SPARSE_PIECE_CYCLES = 1.06
SPARSE_PIECE_BYTES = 3200
LONE_WARPGROUP, TWO_WARPGROUPS = 1.32, 1.06  # too few warps to hide latency; fades above m_tile 64
CLUSTER_US = 1.32  # sum over a cluster
RANGES_US, RANGES_PER_FLOAT = 2.92, 4e-5  # stream-K: partial tiles through L2, for each sharer
HYBRID_US = 1.33
# Hybrid without whole blocks: nothing hides the sum over the CTAs that share a block.
LONE_PASS_US, LONE_PASS_PER_ROW_AND_SHARER = 2.11, 0.0052
CLUSTERS_OF_FOUR = 30 / 33  # of the clusters that fit by count; GPCs have odd numbers of SMs


@dataclass(frozen=True)
class Work:
    """What the busiest SM does: pieces of weights (64 x 64, sparse 64 x 128), tiles or passes,
    warpgroups at work.
    """

    pieces: float
    rounds: float
    warpgroups: float
    fix_up: float


def hopper_compute_us(variant: Variant, work: Work, gpu: Gpu, format_factor: float) -> float:
    """Main loop of the busiest SM. Other formats dequantise slower, which shows at small tiles."""
    slow = LONE_WARPGROUP if work.warpgroups < 1.5 else TWO_WARPGROUPS
    factor = slow if work.warpgroups < 2.5 else 1.0
    if variant.m_tile >= 96:
        factor = 1 + (factor - 1) * (0.35 if work.warpgroups < 1.5 else 0.0)
    dequantisation = 40.0 * (format_factor - 1) if variant.m_tile <= 64 else 0.0
    row_bytes = 2 * piece_depth(variant)
    activations = variant.m_tile * row_bytes * BLOCK_COLUMNS // variant.n_sm / variant.multicast
    weights = SPARSE_PIECE_BYTES if variant.sparse else PIECE_WEIGHT_BYTES
    traffic = (activations + weights) / L2_BYTES_PER_CLOCK
    piece = PIECE_CYCLES[variant.m_tile] * (SPARSE_PIECE_CYCLES if variant.sparse else 1.0)
    cycles = max(piece * factor + dequantisation, traffic)
    return work.pieces * cycles / gpu.clock * 1e6


def piece_depth(variant: Variant) -> int:
    """Depth of what four tensor instructions of a warpgroup multiply."""
    return 128 if variant.sparse else 64


def hopper_work(problem: ProblemShape, v: Variant, gpu: Gpu) -> Work:
    """The busiest SM's share of `problem` and the reductions that follow."""
    blocks, slots = ceil_div(problem.n, BLOCK_COLUMNS), v.n_sm // BLOCK_COLUMNS
    m_tiles, k_steps = ceil_div(problem.m, v.m_tile), ceil_div(problem.k, v.k_sm)
    tile_pieces = slots * k_steps * v.k_sm / piece_depth(v)
    tiles = ceil_div(blocks, slots * v.multicast) * v.multicast * m_tiles
    warpgroups = v.warps_n * v.warps_k
    if v.decomposition == "hybrid":
        return _hybrid(v, blocks, slots, m_tiles, k_steps, gpu)
    if v.decomposition == "stream_k":
        rounds = max(1.0, tiles / gpu.sms)
        sharers = max(1.0, gpu.sms / tiles)
        fix_up = RANGES_US + RANGES_PER_FLOAT * v.m_tile * v.n_sm * sharers
        return Work(tiles * tile_pieces / gpu.sms, rounds, warpgroups, fix_up)
    if v.decomposition == "split_k":
        clusters = gpu.sms * v.ctas_per_sm // v.split
        clusters = int(clusters * CLUSTERS_OF_FOUR) if v.split == 4 else clusters
        rounds = ceil_div(tiles, max(1, clusters))
        return Work(rounds * tile_pieces / v.split, rounds, warpgroups, rounds * CLUSTER_US)
    ctas = gpu.sms * v.ctas_per_sm // v.multicast * v.multicast
    rounds = ceil_div(tiles, ctas)
    return Work(rounds * tile_pieces * v.ctas_per_sm, rounds, warpgroups, 0.0)


def _hybrid(v: Variant, blocks: int, slots: int, m_tiles: int, k_steps: int, gpu: Gpu) -> Work:
    grid = gpu.sms // v.multicast * v.multicast
    full = blocks // (grid * slots)
    whole, left = divmod(blocks - full * grid * slots, grid)
    share = ceil_div(left, v.multicast) * k_steps / (grid // v.multicast)  # k steps of a CTA
    pieces = ((full * slots + whole) * k_steps + share) * v.k_sm / piece_depth(v)
    passes = full + (whole + left > 0)
    if full or whole:
        busy = slots if full else min(slots, whole + share / k_steps)
        return Work(m_tiles * pieces, m_tiles * passes, busy, HYBRID_US)
    sharers = grid / max(1, left)
    lone = LONE_PASS_US + LONE_PASS_PER_ROW_AND_SHARER * v.m_tile * sharers
    return Work(m_tiles * pieces, m_tiles * passes, 1.0, HYBRID_US + m_tiles * lone)
