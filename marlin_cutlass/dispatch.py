"""Kernel tables: reading build/<arch>/manifest.json, and the choice of a kernel for a shape.

`Table.select` chooses what the launcher library chooses; a test compares them. Nothing here needs a
GPU, a compiler or the generator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import TableError, UnsupportedArchError
from .json_file import read_object
from .kernel import (
    DTYPES,
    FORMATS,
    GROUPS,
    Kernel,
    Row,
    format_index,
    format_text,
    kernel_name,
    with_format,
)
from .layout import BLOCK_COLUMNS, BLOCK_DEPTH, ceil_div, stored_group_size
from .manifest import read_entries

__all__ = [
    "BUILDABLE",
    "DTYPES",
    "GROUPS",
    "Kernel",
    "Row",
    "Schedule",
    "Table",
    "arch_for",
    "arch_names",
    "build_roots",
    "built_archs",
    "current_table",
    "default_roots",
    "format_index",
    "is_invariant",
    "kernel_name",
    "load_table",
    "missing_text",
    "parse_table",
    "schedule",
    "with_format",
]
BUILDABLE = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")  # build.py --arch
RASTER = 8  # row tiles that are neighbours in the order of tiles, as in the launcher
SHARED_ACTIVATIONS = 32 << 20  # bytes; which tiles stream-K leaves whole, as in the launcher
OWNER_STEPS = 2  # k steps that stream-K gives the owner of a cut tile, as in the launcher
INVARIANT_ROWS = 64  # batch-invariant calls take the largest row tile up to this


@dataclass(frozen=True)
class Schedule:
    """Launch-time numbers of one multiply; the launcher computes the same."""

    m_tiles: int
    n_tiles: int
    k_steps: int
    raster: int
    grid: int
    cluster: int
    partials: int
    flags: int
    whole_passes: int
    owner_steps: int


@dataclass(frozen=True)
class Table:
    """The kernels of one architecture and the rows that choose between them."""

    arch: str
    folder: Path
    kernels: tuple[Kernel, ...]
    rows: tuple[Row, ...]
    on_demand: int = 0  # so many kernels at the end were compiled on demand: nothing chooses them

    def index(self, name: str) -> int:
        """Index of a kernel by name, -1 if it is not built."""
        return next((i for i, kernel in enumerate(self.kernels) if kernel.name == name), -1)

    def select(
        self,
        m: int,
        n: int,
        k: int,
        group_size: int,
        dtype: str,
        zeros: bool,
        sms: int,
        sparse: bool = False,
    ) -> tuple[Kernel, Row]:
        """The kernel of the first row that matches and whose kernel exists; LookupError if none."""
        wanted = format_index(dtype, zeros, stored_group_size(group_size), sparse)
        for row in self.rows:
            if row.kernels[wanted] >= 0 and row.matches(m, n, k, sms):
                return self.kernels[row.kernels[wanted]], row
        raise LookupError(f"no kernel of the {self.arch} table serves this shape and format")

    def batch_invariant(self) -> list[int]:
        """For each format the kernel that serves every number of rows, -1 where there is none.

        A row of the product then depends on nothing but itself: the sum over k is cut the same way
        for every m. That holds for data-parallel kernels and for clusters that split k, of which
        the one with the largest row tile up to 64 is taken. Other kernels cut k by the number of
        row tiles: where a format has only those, the launcher gives them one row tile at a time.
        """
        chosen = [-1] * FORMATS
        for index, kernel in enumerate(self.kernels[: len(self.kernels) - self.on_demand]):
            best = chosen[kernel.format]
            if best < 0 or _invariant_rank(kernel) > _invariant_rank(self.kernels[best]):
                chosen[kernel.format] = index
        return chosen

    def full_name(self, name: str, dtype: str, zeros: bool, group_size: int) -> str:
        """The variant that a forced name or geometry means for a format; ValueError for a
        malformed one."""
        if self.index(name) >= 0 or "_g" in name:
            return name
        return with_format(name, dtype, zeros, stored_group_size(group_size))

    def with_kernels(self, kernels: Iterable[Kernel]) -> Table:
        """With kernels that were compiled on demand behind its own; those it has are left out."""
        more = [kernel for kernel in kernels if self.index(kernel.name) < 0]
        return replace(self, kernels=(*self.kernels, *more), on_demand=self.on_demand + len(more))

    def find(
        self, name: str, dtype: str, zeros: bool, group_size: int, sparse: bool = False
    ) -> int:
        """Index of the kernel that a forced name or geometry means for this format.

        Raises ValueError with the reason if there is none; never another kernel.
        """
        group = stored_group_size(group_size)
        wanted = self.full_name(name, dtype, zeros, group_size)
        index = self.index(wanted)
        if index < 0:
            raise ValueError(
                f"kernel={name!r} is not built for {self.arch}: {_nearest(wanted, self)}; "
                f"python build.py --arch {self.arch} --only {wanted}"
            )
        kernel = self.kernels[index]
        if kernel.format != format_index(dtype, zeros, group, sparse):
            raise ValueError(
                f"kernel={name!r} serves {kernel.format_text}: "
                f"this call has {format_text(dtype, zeros, group, sparse)}"
            )
        return index


def _nearest(name: str, table: Table) -> str:
    names = [kernel.name for kernel in table.kernels]
    close = [other for other in names if other.split("_m")[0] == name.split("_m")[0]]
    return f"built are {', '.join((close or names)[:4])}, ..." if names else "nothing is built"


def is_invariant(kernel: Kernel) -> bool:
    """Whether the sum over k is cut the same way for every number of rows."""
    clustered = kernel.decomposition == "split_k" and kernel.cluster > 1
    return kernel.decomposition == "data_parallel" or clustered


def _invariant_rank(kernel: Kernel) -> tuple:
    rows = kernel.m_tile if kernel.m_tile <= INVARIANT_ROWS else -kernel.m_tile
    whole = kernel.decomposition == "data_parallel"
    return (is_invariant(kernel), kernel.family in ("hopper", "hopper_sparse"), whole, rows)


def schedule(kernel: Kernel, m: int, n: int, k: int, sms: int) -> Schedule:
    """Launch-time numbers of one multiply on a device with `sms` SMs."""
    m_tiles = ceil_div(m, kernel.m_tile)
    n_blocks, shared = ceil_div(n, BLOCK_COLUMNS), kernel.multicast
    n_tiles = ceil_div(n_blocks, kernel.n_sm // BLOCK_COLUMNS * shared)
    k_steps = ceil_div(ceil_div(k, BLOCK_DEPTH) * BLOCK_DEPTH, kernel.k_sm)
    tiles, clusters = m_tiles * n_tiles, max(1, sms * kernel.ctas_per_sm // shared)
    tile_floats = kernel.m_tile * kernel.n_sm
    partials = flags = 0
    if kernel.decomposition == "split_k":
        grid = tiles * kernel.split
        if kernel.cluster == 1:
            partials, flags = grid * tile_floats, grid
    elif kernel.decomposition == "data_parallel":
        grid = min(tiles, clusters) * shared
    else:
        grid = min(tiles * k_steps, clusters) * shared
        striped = kernel.decomposition == "striped"
        partials, flags = grid * tile_floats, grid * (kernel.warps_n if striped else 1)
    if kernel.decomposition == "hybrid" and grid > 0:
        flags = m_tiles * _hybrid_passes(kernel, n_blocks, grid) * grid
        partials = 2 * flags * kernel.m_tile * BLOCK_COLUMNS
    workers = grid // shared
    whole = _whole_passes(kernel, m_tiles, n_tiles, k_steps, workers)
    owner = _owner_steps(kernel, tiles - whole * workers, k_steps, workers)
    raster = max(1, min(m_tiles, RASTER))
    numbers = (grid, kernel.cluster, partials, flags, whole, owner)
    return Schedule(m_tiles, n_tiles, k_steps, raster, *numbers)


def _whole_passes(kernel: Kernel, m_tiles: int, n_tiles: int, k_steps: int, workers: int) -> int:
    """Passes of stream-K in which every block, or cluster of blocks, takes a whole tile."""
    if kernel.decomposition != "stream_k" or workers == 0:
        return 0
    passes, rest = divmod(m_tiles * n_tiles, workers)
    activations = m_tiles * kernel.m_tile * k_steps * kernel.k_sm * 2
    if passes and rest and activations <= SHARED_ACTIVATIONS:
        passes -= 1
    return passes


def _owner_steps(kernel: Kernel, cut: int, k_steps: int, workers: int) -> int:
    """Stream-K: k steps that the owner of a cut tile takes beyond its share."""
    if kernel.decomposition != "stream_k" or workers == 0:
        return 0
    waits = cut < workers and k_steps >= 4 * OWNER_STEPS
    return OWNER_STEPS if waits and cut * (k_steps - OWNER_STEPS) >= workers else 0


def _hybrid_passes(kernel: Kernel, n_blocks: int, grid: int) -> int:
    """Passes of a hybrid grid over one row tile."""
    return ceil_div(n_blocks, grid * (kernel.n_sm // BLOCK_COLUMNS))


# ---- where tables are


def build_roots() -> list[Path]:
    """Folders that hold one folder per architecture, in the order in which they are searched."""
    given = os.environ.get("MARLIN_CUTLASS_BUILD")
    return [Path(given)] if given else default_roots()


def default_roots() -> list[Path]:
    """The build folder of a checkout, and the tables that an installed package carries."""
    package = Path(__file__).resolve().parent
    return [package.parent / "build", package / "data"]


def built_archs() -> dict[str, Path]:
    """Folder of each architecture that has a manifest; the first root that has one wins."""
    found: dict[str, Path] = {}
    for root in build_roots():
        for manifest in sorted(root.glob("sm_*/manifest.json")):
            found.setdefault(manifest.parent.name, manifest.parent)
    return found


def arch_names(major: int, minor: int) -> tuple[str, str]:
    """Tables that a device of this compute capability can run: its own, exactly.

    An architecture-specific table (sm_90a) comes first. A table of a neighbour is never taken:
    sm_80 kernels may ask for shared memory that sm_86 does not have, and an untested architecture
    may compute something else.
    """
    return f"sm_{major}{minor}a", f"sm_{major}{minor}"


def arch_for(major: int, minor: int) -> str:
    """Name of the built table for a device; UnsupportedArchError says what is built otherwise."""
    built = built_archs()
    for name in arch_names(major, minor):
        if name in built:
            return name
    raise UnsupportedArchError(missing_text(major, minor, built))


def missing_text(major: int, minor: int, built: dict[str, Path] | None = None) -> str:
    """Why there is no table for a device, and the command that builds it."""
    names = ", ".join(built_archs() if built is None else built) or "nothing"
    device = f"sm_{major}{minor}"
    if (major, minor) < (8, 0):
        return f"needs sm_80 or newer, found {device} (kernels built for [{names}])"
    arch = next((name for name in arch_names(major, minor) if name in BUILDABLE), None)
    if arch is None:
        known = ", ".join(BUILDABLE)
        return f"kernels built for [{names}], device {device}, which is not one of {known}"
    return f"kernels built for [{names}], device {device}; run python build.py --arch {arch}"


# ---- reading -------------------------------------------------------------------------------------


def load_table(folder: Path, exclude: str | None = None) -> Table:
    """Reads and checks `folder`/manifest.json.

    exclude: comma-separated patterns of kernel names that the rows must not choose (default
    $MARLIN_CUTLASS_EXCLUDE). Raises TableError naming the file and the entry that is wrong.
    """
    path = Path(folder) / "manifest.json"
    try:
        manifest = read_object(path)
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}; run build.py again") from error
    try:
        return parse_table(manifest, folder, exclude)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise TableError(f"{path}: {what}; run build.py again") from error


def current_table(folder: Path) -> Table:
    """`load_table`, read again only if the manifest or what is excluded has changed."""
    path = Path(folder) / "manifest.json"
    try:
        status = path.stat()
    except OSError:
        return load_table(folder)  # which says what is wrong
    state = (status.st_mtime_ns, status.st_size, status.st_ino)
    return _read(path.parent, state, os.environ.get("MARLIN_CUTLASS_EXCLUDE", ""))


@functools.lru_cache(maxsize=32)
def _read(folder: Path, state: tuple[int, ...], exclude: str) -> Table:
    return load_table(folder, exclude)


def parse_table(manifest: dict[str, Any], folder: Path | str, exclude: str | None = None) -> Table:
    """The table of a parsed manifest; KeyError, TypeError or ValueError for what it lacks."""
    kernels, rows = read_entries(manifest, exclude)
    return Table(manifest["arch"], Path(folder), kernels, rows)
