"""Kernel tables: reading build/<arch>/manifest.json, and the choice of a kernel for a shape.

`Table.select` chooses what the launcher library chooses; a test compares them. Nothing here needs a
GPU, a compiler or the generator.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import TableError, UnsupportedArchError
from .json_file import read_object
from .layout import BLOCK_COLUMNS, BLOCK_DEPTH, LAYOUT_VERSION, ceil_div, stored_group_size

MANIFEST_FORMAT = 1
BUILDABLE = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")  # build.py --arch
FAMILIES = ("ampere", "hopper", "sparse", "hopper_sparse")
SPARSE_FAMILIES = ("sparse", "hopper_sparse")  # for 2:4-sparse weights
SPARSE_PREFIXES = tuple(f"w4a16_{family}_m" for family in SPARSE_FAMILIES)  # of geometries
DTYPES = ("f16", "bf16")
DECOMPOSITIONS = ("data_parallel", "striped", "split_k", "stream_k", "hybrid")
GROUPS = (32, 64, 128, -1)
FORMATS = 24  # dense: 2 dtypes x zero points x 4 group sizes; sparse: 2 dtypes x 4 group sizes
OPEN = 2**31 - 1  # upper bound of a range that the manifest leaves open
RASTER = 8  # row tiles that are neighbours in the order of tiles, as in the launcher
# Beyond these no GPU runs a kernel, and the launcher's arithmetic is checked up to here.
LARGEST = {
    "m_tile": 1024,
    "n_sm": 1024,
    "k_sm": 4096,
    "warps_n": 32,
    "warps_k": 32,
    "stages": 64,
    "split": 64,
    "ctas_per_sm": 32,
    "threads": 1024,
    "shared_bytes": 1 << 18,
    "cluster": 16,
    "multicast": 16,
}
INVARIANT_ROWS = 64  # batch-invariant calls take the largest row tile up to this
_DECOMPOSITION_TAGS = {
    "data_parallel": "dp",
    "striped": "striped",
    "stream_k": "streamk",
    "hybrid": "hybrid",
}
_TEXT_FIELDS = ("name", "family", "dtype", "decomposition", "file", "sha256")
_NUMBER_FIELDS = (
    "group_size",
    "m_tile",
    "n_sm",
    "k_sm",
    "warps_n",
    "warps_k",
    "stages",
    "split",
    "ctas_per_sm",
    "threads",
    "shared_bytes",
    "cluster",
)


@dataclass(frozen=True)
class Kernel:
    """One built variant: an entry of the manifest."""

    name: str
    family: str
    dtype: str
    zeros: bool
    group_size: int
    m_tile: int
    n_sm: int
    k_sm: int
    warps_n: int
    warps_k: int
    stages: int
    decomposition: str
    split: int
    ctas_per_sm: int
    threads: int
    shared_bytes: int
    cluster: int
    file: str
    sha256: str
    multicast: int = 1

    @property
    def geometry(self) -> str:
        """The name without the format."""
        return re.sub(rf"_{self.dtype}z?_g(col|\d+)_", "_", self.name, count=1)

    @property
    def format(self) -> int:
        """Index of (dtype, zeros, group_size) in a row's list of kernels."""
        return format_index(self.dtype, self.zeros, self.group_size, self.sparse)

    @property
    def sparse(self) -> bool:
        """Whether it is for 2:4-sparse weights."""
        return self.family in SPARSE_FAMILIES

    @property
    def format_text(self) -> str:
        """The format in words, for messages."""
        return _format_text(self.dtype, self.zeros, self.group_size, self.sparse)

    def fields(self) -> list[int]:
        """The numbers that the launcher takes, in its order."""
        return [
            FAMILIES.index(self.family),
            DTYPES.index(self.dtype),
            int(self.zeros),
            self.group_size,
            self.m_tile,
            self.n_sm,
            self.k_sm,
            self.warps_n,
            self.warps_k,
            self.stages,
            DECOMPOSITIONS.index(self.decomposition),
            self.split,
            self.ctas_per_sm,
            self.multicast,
            self.threads,
            self.shared_bytes,
            self.cluster,
        ]


@dataclass(frozen=True)
class Row:
    """One dispatch row: ranges of a shape (both ends included), and the geometry that serves it."""

    m: tuple[int, int]
    n: tuple[int, int]
    k: tuple[int, int]
    sms: int | None
    group_size: int | None
    dtype: str | None
    zeros: bool | None
    geometry: str
    source: str
    kernels: tuple[int, ...]  # index of the kernel for each format; -1: not built or excluded

    def matches(self, m: int, n: int, k: int, sms: int) -> bool:
        """Whether the shape lies in the ranges and the device is meant."""
        inside = all(
            low <= value <= high for value, (low, high) in zip((m, n, k), (self.m, self.n, self.k))
        )
        return inside and self.sms in (None, sms)

    def covers(self, dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> bool:
        """Whether the row speaks of this format at all."""
        return (
            self.geometry.startswith(SPARSE_PREFIXES) == sparse
            and self.dtype in (None, dtype)
            and self.zeros in (None, zeros)
            and self.group_size in (None, group_size)
        )


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
                f"this call has {_format_text(dtype, zeros, group, sparse)}"
            )
        return index


def _format_text(dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> str:
    kind = "2:4 sparse" if sparse else "zero points" if zeros else "symmetric"
    return f"{dtype}, {kind}, group_size={group_size}"


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


def format_index(dtype: str, zeros: bool, group_size: int, sparse: bool = False) -> int:
    """Place of a format in the launcher's lists: 2 dtypes x zero points x 4 group sizes, then 2:4
    sparsity with 2 dtypes x 4 group sizes."""
    if sparse:
        return 16 + DTYPES.index(dtype) * 4 + GROUPS.index(group_size)
    return DTYPES.index(dtype) * 8 + (4 if zeros else 0) + GROUPS.index(group_size)


def with_format(geometry: str, dtype: str, zeros: bool, group_size: int) -> str:
    """Name of the variant of `geometry` for a format; raises ValueError for a malformed
    geometry."""
    match = re.fullmatch(r"(w4a16_[a-z]+(?:_[a-z]+)?)_(m[1-9]\w*)", geometry)
    if match is None:
        raise ValueError(
            f"kernel={geometry!r} is malformed: give a variant's name or its geometry, such as "
            "w4a16_ampere_m16_n128k128_w2x2_p4_striped_c1"
        )
    group = "col" if group_size < 0 else group_size
    return f"{match[1]}_{dtype}{'z' if zeros else ''}_g{group}_{match[2]}"


def kernel_name(fields: dict[str, Any]) -> str:
    """The name that the fields of a manifest entry spell."""
    tag = _DECOMPOSITION_TAGS.get(fields["decomposition"], f"split{fields['split']}")
    geometry = (
        f"w4a16_{fields['family']}_m{fields['m_tile']}_n{fields['n_sm']}k{fields['k_sm']}"
        f"_w{fields['warps_n']}x{fields['warps_k']}_p{fields['stages']}_{tag}"
        f"_c{fields['ctas_per_sm']}"
    )
    if fields.get("multicast", 1) > 1:
        geometry += f"_mc{fields['multicast']}"
    return with_format(geometry, fields["dtype"], fields["zeros"], fields["group_size"])


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
        partials, flags = grid * tile_floats, grid * kernel.warps_n
    if kernel.decomposition == "hybrid":
        flags = m_tiles * _hybrid_passes(kernel, n_blocks, grid) * grid
        partials = 2 * flags * kernel.m_tile * BLOCK_COLUMNS
    raster = max(1, min(m_tiles, RASTER))
    return Schedule(m_tiles, n_tiles, k_steps, raster, grid, kernel.cluster, partials, flags)


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
    for key, want in (("format", MANIFEST_FORMAT), ("layout_version", LAYOUT_VERSION)):
        if manifest[key] != want:
            raise ValueError(f"{key}={manifest[key]!r}, this release reads {want}")
    if re.fullmatch(r"sm_\d{2,3}[a-z]?", manifest["arch"]) is None:
        raise ValueError(f"arch={manifest['arch']!r} is malformed")
    kernels = tuple(_kernel(entry) for entry in manifest["variants"])
    names = {kernel.name: index for index, kernel in enumerate(kernels)}
    if len(names) != len(kernels):
        raise ValueError("a variant is listed twice")
    patterns = os.environ.get("MARLIN_CUTLASS_EXCLUDE", "") if exclude is None else exclude
    excluded = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for name in list(names):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in excluded):
            del names[name]
    rows = tuple(_row(entry, names) for entry in manifest["dispatch"])
    return Table(manifest["arch"], Path(folder), kernels, rows)


def _kernel(entry: dict[str, Any]) -> Kernel:
    fields: dict[str, Any] = {name: _typed(entry, name, str) for name in _TEXT_FIELDS}
    fields |= {name: _typed(entry, name, int) for name in _NUMBER_FIELDS}
    fields["zeros"] = _typed(entry, "zeros", bool)
    fields["multicast"] = _typed({"multicast": 1, **entry}, "multicast", int)
    for name, allowed in (
        ("family", FAMILIES),
        ("dtype", DTYPES),
        ("group_size", GROUPS),
        ("decomposition", DECOMPOSITIONS),
    ):
        if fields[name] not in allowed:
            raise ValueError(f"{fields['name']}: {name}={fields[name]!r} is not one of {allowed}")
    if kernel_name(fields) != fields["name"]:
        raise ValueError(f"{fields['name']}: its fields spell {kernel_name(fields)}")
    positive = (*_NUMBER_FIELDS[1:], "multicast")
    if min(fields[name] for name in positive) < 1 or fields["n_sm"] % BLOCK_COLUMNS:
        raise ValueError(f"{fields['name']}: a size is not positive or not whole blocks")
    for name, largest in LARGEST.items():
        if fields[name] > largest:
            raise ValueError(f"{fields['name']}: {name}={fields[name]} is larger than {largest}")
    if re.fullmatch(r"[0-9a-f]{64}", fields["sha256"]) is None:
        raise ValueError(f"{fields['name']}: sha256={fields['sha256'][:80]!r} is malformed")
    if re.fullmatch(r"\w[\w.-]*", fields["file"], re.ASCII) is None:
        raise ValueError(f"{fields['name']}: file={fields['file']!r} is not a plain file name")
    return Kernel(**fields)


def _typed(entry: dict[str, Any], name: str, kind: type) -> Any:
    value = entry[name]
    if type(value) is not kind:
        owner = entry.get("name", "a variant")
        raise ValueError(f"{owner}: {name}={value!r} is not {kind.__name__}")
    return value


def _row(entry: dict[str, Any], names: dict[str, int]) -> Row:
    ranges = {axis: _range(entry, axis) for axis in "mnk"}
    _check_conditions(entry)
    row = Row(
        **ranges,
        sms=entry.get("sms"),
        group_size=entry.get("group_size"),
        dtype=entry.get("dtype"),
        zeros=entry.get("zeros"),
        geometry=entry["geometry"],
        source=str(entry.get("source", "")),
        kernels=(),
    )
    kernels = [-1] * FORMATS
    kinds = ((False, False), (True, False), (False, True))  # zeros, sparse
    for dtype, (zeros, sparse), group in itertools.product(DTYPES, kinds, GROUPS):
        if row.covers(dtype, zeros, group, sparse):
            name = with_format(row.geometry, dtype, zeros, group)
            kernels[format_index(dtype, zeros, group, sparse)] = names.get(name, -1)
    return Row(**{**vars(row), "kernels": tuple(kernels)})


def _check_conditions(entry: dict[str, Any]) -> None:
    sms = entry.get("sms")
    if sms is not None and (type(sms) is not int or not 0 < sms < 1 << 16):
        raise ValueError(f"a dispatch row has sms={sms!r}")
    for name, allowed in (("group_size", GROUPS), ("dtype", DTYPES), ("zeros", (False, True))):
        value = entry.get(name)
        if value is not None and not (value in allowed and type(value) is type(allowed[0])):
            raise ValueError(f"a dispatch row has {name}={value!r}: null or one of {allowed}")


def _range(entry: dict[str, Any], axis: str) -> tuple[int, int]:
    low, high = entry[axis]
    low, high = 0 if low is None else low, OPEN if high is None else high
    if type(low) is not int or type(high) is not int or not 0 <= low <= high:
        raise ValueError(f"a dispatch row has {axis}={entry[axis]}")
    return min(low, OPEN), min(high, OPEN)
