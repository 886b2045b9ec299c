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
# Stream-K cuts what is left behind whole passes of tiles, and one pass more: a range is then as
# long as a tile or longer, so that most partial sums are there before anybody needs them. But CTAs
# in ranges are at different k steps: where the activations exceed this many bytes, about half of
# the L2 cache, each would read them from memory. H200, 2026-11-30: docs/performance.md.
SHARED_ACTIVATIONS = 32 << 20
# H200, 2026-11-30: none, one and three cost up to 6 % more (docs/performance.md).
OWNER_STEPS = 2


@dataclass(frozen=True)
class HybridPartition:
    """Hybrid: whole 64-column blocks for every CTA, what is left cut along k (tile_order.cuh)."""

    n_blocks: int
    slots: int  # blocks a CTA works on side by side
    full_passes: int  # passes in which every slot of every CTA holds a whole block
    whole_blocks: int  # whole blocks of a CTA in the pass behind them
    left_over: int  # blocks cut along k in that pass
    share_each: int  # k steps of a cluster's share; the first `share_more` take one more
    share_more: int

    @property
    def passes_per_row(self) -> int:
        return self.full_passes + (self.whole_blocks + self.left_over > 0)


@dataclass(frozen=True)
class Schedule:
    """Launch-time numbers; grid == 0 means that there is nothing to launch."""

    m_tiles: int
    n_tiles: int  # as wide as a cluster that shares activations
    k_steps: int
    raster: int
    grid: int
    cluster: int
    partials: int  # fp32 elements of workspace
    flags: int  # uint32 words of workspace, zero before and after every launch
    decomposition: str
    split: int
    multicast: int = 1
    hybrid: HybridPartition | None = None
    whole_passes: int = 0  # stream-K: passes in which every worker takes a whole tile
    owner_steps: int = 0  # stream-K: k steps that the owner of a cut tile takes beyond its share
    share_each: int = 0  # of a worker, hybrid and stream-K; the first `share_more` take one more
    share_more: int = 0

    @property
    def workers(self) -> int:
        """Stream-K: CTAs, or clusters of those that share activations; each takes a range."""
        return self.grid // self.multicast

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.n_tiles


@dataclass(frozen=True)
class Segment:
    """A run of k steps of one tile by one CTA; n_index counts n_sm columns, or 64 for hybrid."""

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
    columns = variant.n_sm // BLOCK_COLUMNS * variant.multicast
    m_tiles = ceil_div(problem.m, variant.m_tile)
    n_tiles = ceil_div(problem.n_blocks, columns)
    k_steps = ceil_div(problem.k_blocks * BLOCK_DEPTH, variant.k_sm)
    tiles = m_tiles * n_tiles
    if tiles * k_steps > MAX_UNITS:
        raise ValueError(
            f"m={problem.m}: {tiles} tiles x {k_steps} k steps exceed {MAX_UNITS}; split the rows"
        )
    grid = _grid(variant, tiles, k_steps, sms * variant.ctas_per_sm)
    hybrid = None
    whole = owner = each = more = 0
    if variant.decomposition == "hybrid" and grid > 0:
        hybrid = hybrid_partition(problem.n_blocks, k_steps, grid, variant)
        each, more = hybrid.share_each, hybrid.share_more
    if variant.decomposition == "stream_k" and grid > 0:
        workers = grid // variant.multicast
        whole = whole_passes(variant, m_tiles, n_tiles, k_steps, workers)
        cut = tiles - whole * workers
        owner = owner_steps(cut, k_steps, workers)
        each, more = divmod(cut * (k_steps - owner), workers)
    partials, flags = _workspace(variant, grid, m_tiles, hybrid)
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
        multicast=variant.multicast,
        hybrid=hybrid,
        whole_passes=whole,
        owner_steps=owner,
        share_each=each,
        share_more=more,
    )


def _grid(variant: Variant, tiles: int, k_steps: int, slots: int) -> int:
    if variant.decomposition == "split_k":
        return tiles * variant.split
    clusters = max(1, slots // variant.multicast)
    if variant.decomposition == "data_parallel":
        return min(tiles, clusters) * variant.multicast
    # Every CTA of the grid is resident: they wait for each other.
    return min(tiles * k_steps, clusters) * variant.multicast


def whole_passes(variant: Variant, m_tiles: int, n_tiles: int, k_steps: int, workers: int) -> int:
    """Passes of stream-K in which each of `workers` takes a whole tile; it cuts the others. Of
    many problems, if these are arrays.
    """
    passes, rest = divmod(m_tiles * n_tiles, workers)
    activations = m_tiles * variant.m_tile * k_steps * variant.k_sm * 2
    return passes - ((passes > 0) & (rest > 0) & (activations <= SHARED_ACTIVATIONS))


def owner_steps(cut: int, k_steps: int, workers: int) -> int:
    """Stream-K: k steps that the owner of a cut tile takes beyond its share, since what others
    hand over takes time to arrive. Ranges as long as a tile need none: there every worker hands
    over first. Each worker keeps a unit at least.
    """
    waits = cut < workers and k_steps >= 4 * OWNER_STEPS
    return OWNER_STEPS if waits and cut * (k_steps - OWNER_STEPS) >= workers else 0


def _workspace(
    variant: Variant, grid: int, m_tiles: int, hybrid: HybridPartition | None
) -> tuple[int, int]:
    """(partials, flags). A CTA of contiguous ranges hands over at most one partial tile: the one
    its range begins inside; a CTA of a hybrid grid at most two shares of blocks in each pass, the
    end of one and the start of the next.
    """
    tile_floats = variant.m_tile * variant.n_sm
    if variant.decomposition == "striped":
        return grid * tile_floats, grid * variant.warps_n
    if variant.decomposition == "stream_k":
        return grid * tile_floats, grid
    if variant.decomposition == "split_k" and variant.cluster == 1:
        return grid * tile_floats, grid
    if hybrid is not None:
        shares = m_tiles * hybrid.passes_per_row * grid
        return 2 * shares * variant.m_tile * BLOCK_COLUMNS, shares
    return 0, 0


def hybrid_partition(n_blocks: int, k_steps: int, grid: int, variant: Variant) -> HybridPartition:
    """Mirror of set_hybrid_partition in params.h."""
    slots = variant.n_sm // BLOCK_COLUMNS
    full_passes, rest = divmod(n_blocks, grid * slots)
    whole_blocks, left_over = divmod(rest, grid)
    units = ceil_div(left_over, variant.multicast) * k_steps
    share_each, share_more = divmod(units, grid // variant.multicast)
    return HybridPartition(
        n_blocks, slots, full_passes, whole_blocks, left_over, share_each, share_more
    )


# ---- host mirror ---------------------------------------------------------------------------------


def tile_index(schedule: Schedule, tile: int) -> tuple[int, int]:
    """(m index, n index) of a tile: m fastest inside groups of `raster` row tiles."""
    group, local = divmod(tile, schedule.raster * schedule.n_tiles)
    first = group * schedule.raster
    rows = min(schedule.raster, schedule.m_tiles - first)
    n, m = divmod(local, rows)
    return first + m, n


def range_begin(total: int, cta: int, ctas: int) -> int:
    """First unit of a CTA; the first `total % ctas` CTAs take one unit more than the others."""
    each, more = divmod(total, ctas)
    return each * cta + min(cta, more)


def work(schedule: Schedule, cta: int) -> Iterator[Segment]:
    """The segments of CTA `cta` in the order in which the kernel does them."""
    if schedule.decomposition == "split_k":
        yield from _split(schedule, cta)
    elif schedule.decomposition == "data_parallel":
        yield from _whole_tiles(schedule, cta)
    elif schedule.hybrid is not None:
        yield from _hybrid(schedule, schedule.hybrid, cta)
    else:
        yield from _ranges(schedule, cta)


def _whole_tiles(schedule: Schedule, cta: int) -> Iterator[Segment]:
    cluster, rank = divmod(cta, schedule.multicast)
    for tile in range(cluster, schedule.tiles, schedule.workers):
        yield _segment(schedule, tile, rank, 0, schedule.k_steps)


def _segment(schedule: Schedule, tile: int, rank: int, k_begin: int, k_end: int) -> Segment:
    """CTAs of a cluster that share activations stand side by side along n."""
    m, n = tile_index(schedule, tile)
    return Segment(m, n * schedule.multicast + rank, k_begin, k_end)


def _split(schedule: Schedule, cta: int) -> Iterator[Segment]:
    tile, rank = divmod(cta, schedule.split)
    begin = schedule.k_steps * rank // schedule.split
    end = schedule.k_steps * (rank + 1) // schedule.split
    yield Segment(*tile_index(schedule, tile), begin, end)


def _ranges(schedule: Schedule, cta: int) -> Iterator[Segment]:
    """A range of the tiles behind the whole ones, then whole tiles (stream-K)."""
    worker, rank = divmod(cta, schedule.multicast)
    whole, owner = schedule.whole_passes * schedule.workers, schedule.owner_steps
    units = schedule.k_steps - owner  # of a cut tile: the first is its first owner + 1 k steps
    total = (schedule.tiles - whole) * units  # striped and stream-K; what share_each and more say
    position, end = (range_begin(total, w, schedule.workers) for w in (worker, worker + 1))
    while position < end:
        tile, first = divmod(position, units)
        taken = min(units - first, end - position)
        k_begin = first + owner if first else 0
        yield _segment(schedule, whole + tile, rank, k_begin, first + taken + owner)
        position += taken
    for tile in range(worker, whole, schedule.workers):
        yield _segment(schedule, tile, rank, 0, schedule.k_steps)


def _hybrid(schedule: Schedule, h: HybridPartition, cta: int) -> Iterator[Segment]:
    for m in range(schedule.m_tiles):
        for i in range(h.full_passes):
            first = (i * schedule.grid + cta) * h.slots
            yield from (Segment(m, first + s, 0, schedule.k_steps) for s in range(h.slots))
        first = h.n_blocks - h.left_over - (schedule.grid - cta) * h.whole_blocks
        yield from _shares(schedule, h, m, cta)  # before the whole blocks of the pass are done
        yield from (Segment(m, first + s, 0, schedule.k_steps) for s in range(h.whole_blocks))


def _shares(schedule: Schedule, h: HybridPartition, m: int, cta: int) -> Iterator[Segment]:
    """A cluster's share of the left-over blocks: of at most two blocks for each of its CTAs."""
    cluster, rank = divmod(cta, schedule.multicast)
    position, end = (h.share_each * c + min(c, h.share_more) for c in (cluster, cluster + 1))
    while position < end:
        group, k_begin = divmod(position, schedule.k_steps)
        k_end = min(schedule.k_steps, k_begin + end - position)
        block = group * schedule.multicast + rank
        if block < h.left_over:
            yield Segment(m, h.n_blocks - h.left_over + block, k_begin, k_end)
        position += k_end - k_begin
