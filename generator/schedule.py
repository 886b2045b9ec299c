"""Schedule: everything that is fixed when a kernel is launched, and the host mirror of what each
CTA does.

A pure function of (ProblemShape, Variant, number of SMs). The launcher computes the same numbers in
C++; the order of tiles and the share of a CTA mirror
templates/include/marlin_cutlass/tile_order.cuh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from generator.problem import BLOCK_COLUMNS, BLOCK_DEPTH, ProblemShape, ceil_div
from generator.variant import Variant

MAX_UNITS = 2**31 - 1  # kernels count tiles x k steps in int32
# Row tiles that are neighbours in the order of tiles. Eight tiles of 128 rows beside 132 / 8 tiles
# of 256 columns read about as many bytes of activations as of weights, which is where a wave's
# traffic from L2 is smallest.
RASTER = 8


@dataclass(frozen=True)
class Schedule:
    """Launch-time numbers; grid == 0 means that there is nothing to launch."""

    m_tiles: int
    n_tiles: int
    k_steps: int
    raster: int
    grid: int
    cluster: int
    partials: int  # fp32 elements of workspace
    flags: int  # uint32 words of workspace, zero before and after every launch
    decomposition: str
    split: int

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles


@dataclass(frozen=True)
class Segment:
    """A run of k steps of one tile, done by one CTA."""

    m_index: int
    n_index: int
    k_begin: int
    k_end: int


def make_schedule(problem: ProblemShape, variant: Variant, sms: int) -> Schedule:
    """Schedule of one launch on a device with `sms` SMs.

    Raises ValueError where the kernel's int32 counters would overflow.
    """
    if sms < 1:
        raise ValueError(f"sms={sms} is not positive")
    m_tiles = ceil_div(problem.m, variant.m_tile)
    n_tiles = ceil_div(problem.n_blocks, variant.n_sm // BLOCK_COLUMNS)
    k_steps = ceil_div(problem.k_blocks * BLOCK_DEPTH, variant.k_sm)
    tiles = m_tiles * n_tiles
    if tiles * k_steps > MAX_UNITS:
        raise ValueError(
            f"m={problem.m}: {tiles} tiles x {k_steps} k steps exceed {MAX_UNITS}; split the rows"
        )
    grid = _grid(variant, tiles, k_steps, sms * variant.ctas_per_sm)
    partials, flags = _workspace(variant, grid, tiles)
    return Schedule(
        m_tiles=m_tiles,
        n_tiles=n_tiles,
        k_steps=k_steps,
        raster=max(1, min(m_tiles, RASTER)),
        grid=grid,
        cluster=variant.cluster,
        partials=partials,
        flags=flags,
        decomposition=variant.decomposition,
        split=variant.split,
    )


def _grid(variant: Variant, tiles: int, k_steps: int, slots: int) -> int:
    if variant.decomposition == "split_k":
        return tiles * variant.split
    if variant.decomposition == "data_parallel":
        return min(tiles, slots)
    return min(
        tiles * k_steps, slots
    )  # every CTA of the grid is resident: they wait for each other


def _workspace(variant: Variant, grid: int, tiles: int) -> tuple[int, int]:
    """A CTA of contiguous ranges hands over at most one partial tile: the one its range begins
    inside.
    """
    tile_floats = variant.m_tile * variant.n_sm
    if variant.decomposition in ("striped", "stream_k"):
        return grid * tile_floats, grid * variant.warps_n
    if variant.decomposition == "split_k" and variant.cluster == 1:
        return grid * tile_floats, grid
    return 0, 0


# ---- host mirror ---------------------------------------------------------------------------------


def tile_index(schedule: Schedule, tile: int) -> tuple[int, int]:
    """(m index, n index) of a tile: m fastest inside groups of `raster` row tiles."""
    group, local = divmod(tile, schedule.raster * schedule.n_tiles)
    first = group * schedule.raster
    rows = min(schedule.raster, schedule.m_tiles - first)
    n, m = divmod(local, rows)
    return first + m, n


def range_begin(total: int, cta: int, ctas: int) -> int:
    return total * cta // ctas


def work(schedule: Schedule, cta: int) -> Iterator[Segment]:
    """The segments of CTA `cta` in the order in which the kernel does them."""
    if schedule.decomposition == "split_k":
        yield from _split(schedule, cta)
    elif schedule.decomposition == "data_parallel":
        for tile in range(cta, schedule.tiles, schedule.grid):
            yield Segment(*tile_index(schedule, tile), 0, schedule.k_steps)
    else:
        yield from _ranges(schedule, cta)


def _split(schedule: Schedule, cta: int) -> Iterator[Segment]:
    tile, rank = divmod(cta, schedule.split)
    begin = schedule.k_steps * rank // schedule.split
    end = schedule.k_steps * (rank + 1) // schedule.split
    yield Segment(*tile_index(schedule, tile), begin, end)


def _ranges(schedule: Schedule, cta: int) -> Iterator[Segment]:
    total = schedule.tiles * schedule.k_steps
    position, end = (range_begin(total, c, schedule.grid) for c in (cta, cta + 1))
    while position < end:
        tile, k_begin = divmod(position, schedule.k_steps)
        k_end = min(schedule.k_steps, k_begin + end - position)
        yield Segment(*tile_index(schedule, tile), k_begin, k_end)
        position += k_end - k_begin
