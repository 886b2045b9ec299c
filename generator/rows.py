"""Where dispatch rows come from: measurements (generator/tuning/*.json), then the cost model."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from generator import cost
from generator.arch import GPUS, Arch
from generator.cost import reference_gpu
from generator.dispatch import DispatchRow, DispatchTable, Range
from generator.problem import BLOCK_COLUMNS, BLOCK_DEPTH, ProblemShape, round_up
from generator.space import Format
from generator.variant import Geometry, Variant

TUNING = Path(__file__).parent / "tuning"
MODEL = "model"
DEFAULT_FORMAT: Format = ("f16", False, 128)

# ---- rows from measurements ----------------------------------------------------------------------

# A launch alone takes a microsecond, and nobody tunes with calls of minutes.
LEAST_US, MOST_US = 1e-3, 1e9

# How far from a measured shape a measurement still decides. Along n hardly at all, since a tile
# more can be a wave more; along k little changes.
REACH_N = 1.02
REACH_K = 1.5
REACH_M = 2  # a measurement at m decides for m / 2 < rows <= m, down to the next measured m; of a
# Hopper kernel, down to the next step of M_STEPS_HOPPER, where another row tile may do better
SMALLEST_TILE = 8  # rows


@dataclass(frozen=True)
class Measurement:
    """One timed call: microseconds of `geometry` at a shape on a device with `sms` SMs."""

    sms: int
    n: int
    k: int
    m: int
    geometry: str
    us: float
    source: str
    group_size: int = 128
    dtype: str = "f16"
    zeros: bool = False
    sparse: bool = False  # 2:4-sparse weights, which only geometries of a sparse family serve
    us_pdl: float | None = None  # in a chain with programmatic dependent launch
    cubin: str = ""  # first digits of the sha256 of what was timed
    step: str = ""  # what it gains in a decode step, where it decides although others burst faster

    @property
    def format(self) -> Format:
        return self.dtype, self.zeros, self.group_size

    def check(self) -> None:
        """Raises ValueError unless every field is of its kind: a file may come from anywhere."""
        for name in ("sms", "n", "k", "m"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive whole number")
        for name in ("us", "us_pdl"):
            value = getattr(self, name)
            number = type(value) in (int, float) and LEAST_US <= value <= MOST_US
            if not number and not (name == "us_pdl" and value is None):
                raise ValueError(f"{name}={value!r} is no time from {LEAST_US} to {MOST_US:g} us")
        if type(self.step) is not str:
            raise ValueError(f"step={self.step!r} is no text")
        for name in ("zeros", "sparse"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r} is not true or false")
        if self.group_size > 0 and self.k % self.group_size:
            raise ValueError(f"k={self.k} is not a multiple of group_size={self.group_size}")
        if Geometry.parse(self.geometry).with_format(*self.format).sparse != self.sparse:
            raise ValueError(f"sparse={self.sparse}: {self.geometry} is for other weights")

    @property
    def decisive_us(self) -> float:
        """A call in a model lies between a chain with dependent launch and one without."""
        return self.us if self.us_pdl is None else (self.us + self.us_pdl) / 2


def read_measurements(arch: Arch, folder: Path = TUNING) -> list[Measurement]:
    """All measurements of `arch`, in file and declaration order.

    A file is {"arch", "gpu", "date", "entries": [{"sms", "n", "k", "m", "geometry", "us"}]}; an
    entry may have the other fields of Measurement and a date of its own. `marlin-cutlass tune`
    writes it. Raises ValueError naming file and entry for anything malformed.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            if data.get("arch") != arch.name:
                continue
            gpu, entries = str(data["gpu"]).removeprefix("NVIDIA "), list(data["entries"])
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is not a tuning file: {error!r}") from error
        for i, entry in enumerate(entries):
            try:
                fields = {key: value for key, value in entry.items() if key != "date"}
                date = str(entry.get("date", data["date"]))[:10]
                found.append(Measurement(**fields, source=f"measured {gpu} {date}"))
                found[-1].check()
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"{path.name}, entry {i}: {error}") from error
    return found


def measured_rows(measurements: list[Measurement], variants: frozenset[str]) -> list[DispatchRow]:
    """For each measured shape the fastest geometry that is built, valid up to half way to the next
    measured shape. A format's own figures decide where the default format's choice is among them:
    older ones know nothing of the kernels that came since.
    """
    best = _fastest(measurements, variants)
    choices = {_cell(x): x.geometry for x in best if x.format == DEFAULT_FORMAT}
    timed = {(_cell(x), x.format, x.geometry) for x in measurements}

    def comparable(x: Measurement) -> bool:
        choice = choices.get(_cell(x), x.geometry)
        built = _parsed(choice, x.format).name in variants
        return not built or (_cell(x), x.format, choice) in timed

    return _rows_of([x for x in best if comparable(x)])


def _rows_of(best: list[Measurement]) -> list[DispatchRow]:
    """Rows of one measurement for each shape and format. Where a format was not measured at a
    number of rows and the default one was, that decides.
    """
    rows = []
    # The default format decides for all formats, so rows for one format come before it.
    keys = sorted({(x.format == DEFAULT_FORMAT, x.sms, x.format) for x in best})
    for _, sms, fmt in keys:
        mine = [x for x in best if (x.sms, x.format) == (sms, fmt)]
        defaults = [x for x in best if (x.sms, x.format) == (sms, DEFAULT_FORMAT)]
        for n in (ns := sorted({x.n for x in mine})):
            for k in (ks := sorted({x.k for x in mine if x.n == n})):
                here = sorted((x for x in mine if (x.n, x.k) == (n, k)), key=lambda x: x.m)
                known = {x.m for x in defaults if (x.n, x.k) == (n, k)}
                rows += _shape_rows(here, known, _around(n, ns, REACH_N), _around(k, ks, REACH_K))
    return rows


def rows_of_fewer(
    arch: Arch,
    measurements: list[Measurement],
    variants: frozenset[str],
    geometries: list[Geometry],
    formats: Sequence[Format] = (DEFAULT_FORMAT,),
) -> list[DispatchRow]:
    """For formats that lack some of the default format's Hopper kernels and have only these
    `geometries`: at each shape measured in the default format the best of them there. What was not
    timed takes what the model says, scaled by what the fastest kernel took over what the model says
    of it. The rows hold for `formats`; the default one stands for all that have the geometry.
    """
    chosen = []
    mine = [g.with_format(*DEFAULT_FORMAT) for g in geometries if g.family == "hopper"]
    mine_names = {v.name for v in mine}
    weights = _timed_weights(measurements, variants) if mine else {}
    for (sms, n, k), timed in weights.items():
        by_m = {m: [x for x in timed if x.m == m] for m in sorted({x.m for x in timed})}
        fastest_of = {m: min(here, key=lambda x: x.decisive_us) for m, here in by_m.items()}
        asked = list(dict.fromkeys([*mine, *map(_variant, fastest_of.values())]))
        problems = [ProblemShape(m, n, k) for m in by_m]
        told = cost.totals(asked, problems, reference_gpu(arch, sms)).T.tolist()
        for (m, here), costs in zip(by_m.items(), told):
            fastest, model = fastest_of[m], dict(zip(asked, costs))
            near = [v for v in mine if cost.sensible_rows(m, v.m_tile, LARGE_TILE)] or mine
            scale = fastest.decisive_us, model[_variant(fastest)]
            us = {v.name: model[v] * scale[0] / scale[1] for v in near}
            timed_here = {_variant(x).name: x for x in here if _variant(x).name in mine_names}
            us |= {name: x.decisive_us for name, x in timed_here.items()}
            best = min(us, key=lambda name: us[name])
            geometry = Variant.parse(best).geometry().name
            source = f"{fastest.source}, of fewer kernels by the model"
            if best in timed_here:
                source = f"{timed_here[best].source}, of fewer kernels"
            chosen += [
                Measurement(sms, n, k, m, geometry, us[best], source, group, dtype, zeros)
                for dtype, zeros, group in formats
            ]
    return _rows_of(chosen)


# A measurement at so many rows says what large products take.
MANY_ROWS = 1024
# Beyond the most rows measured: bounds of the steps in which the model is asked, the last for all
# that is larger. Of 4096 columns a wave of tiles of 256 rows holds 1024 rows; 3840 keeps what is
# just above 3072 from deciding for 4096.
MANY_ROWS_STEPS = (3072, 3840, 4096, 5120, 6144, 8192, 16384)


def rows_beyond(
    arch: Arch, measurements: list[Measurement], variants: frozenset[str]
) -> list[DispatchRow]:
    """For each measured weight with many rows, what to do with more of them: the model's choice
    among the geometries that were timed at the largest number, each scaled to what was measured.
    Of weights measured beyond the last step nothing more is said.
    """
    rows = []
    weights = _timed_at_most_rows(measurements, variants)
    for (sms, n, k), timed in weights.items():
        last, here = timed[0].m, [_variant(x) for x in timed]
        gpu = reference_gpu(arch, sms)
        told = cost.totals(here, [ProblemShape(last, n, k)], gpu)
        scale = numpy.array([[x.decisive_us] for x in timed]) / told
        ns = sorted({b for a, b, _ in weights if a == sms})
        ks = sorted({c for a, b, c in weights if (a, b) == (sms, n)})
        reach = (_around(n, ns, REACH_N), _around(k, ks, REACH_K))
        steps = [m for m in MANY_ROWS_STEPS if m > last]
        for low, high in itertools.pairwise((last, *steps)):
            end = None if high == steps[-1] else high
            # As in _corners: the first of the last step says nothing about all that is larger.
            points = [ProblemShape(m, n, k) for m in ((low + 1, high) if end else (high,))]
            choice = here[_cheapest(cost.totals(here, points, gpu) * scale)].geometry().name
            source = f"{timed[0].source} at m={last}, beyond it the model"
            rows.append(DispatchRow(Range(low + 1, end), *reach, choice, source, sms=sms))
    return _merge(rows, "m")


def _timed_at_most_rows(
    measurements: list[Measurement], variants: frozenset[str]
) -> dict[tuple[int, int, int], list[Measurement]]:
    """By (SMs, n, k): what was timed in the default format at the most rows, if these are many."""
    weights = _timed_weights(measurements, variants)
    most = {key: max(x.m for x in timed) for key, timed in weights.items()}
    return {
        key: [x for x in timed if x.m == most[key]]
        for key, timed in weights.items()
        if most[key] >= MANY_ROWS
    }


def _timed_weights(
    measurements: list[Measurement], variants: frozenset[str]
) -> dict[tuple[int, int, int], list[Measurement]]:
    """By (SMs, n, k): what was timed in the default format.

    NOTE: Hopper's kernels only, whose waves are large; what others would gain was not measured.
    """
    weights: dict[tuple[int, int, int], list[Measurement]] = {}
    for x in measurements:
        if x.format != DEFAULT_FORMAT:
            continue
        variant = _variant(x)
        if variant.family == "hopper" and variant.name in variants:
            weights.setdefault((x.sms, x.n, x.k), []).append(x)
    return weights


def _cell(x: Measurement) -> tuple[int, int, int, int]:
    return x.sms, x.n, x.k, x.m


def _variant(x: Measurement) -> Variant:
    return _parsed(x.geometry, x.format)


@functools.cache
def _parsed(geometry: str, fmt: Format) -> Variant:
    return Geometry.parse(geometry).with_format(*fmt)


def _fastest(measurements: list[Measurement], variants: frozenset[str]) -> list[Measurement]:
    """The best of each cell: what a decode step preferred, else what took least time."""
    best: dict[tuple, Measurement] = {}
    for x in measurements:
        variant = _variant(x)
        key = (x.sms, x.n, x.k, x.m, x.dtype, x.zeros, x.group_size)
        if variant.name in variants and (key not in best or _rank(x) < _rank(best[key])):
            best[key] = x
    return list(best.values())


def _rank(x: Measurement) -> tuple[bool, float]:
    return (not x.step, x.decisive_us)


def _shape_rows(
    here: list[Measurement], known: set[int], n: Range, k: Range
) -> Iterator[DispatchRow]:
    """Rows of one measured (n, k), of which `known` rows were measured in the default format;
    neighbours in m with the same winner become one.
    """
    previous, pending = 0, None
    for x in here:
        # Up to SMALLEST_TILE rows a kernel takes the same time: the format's own figure decides.
        between = max((m for m in known if m < x.m and x.m > SMALLEST_TILE), default=0)
        low = max(previous, between)
        lo = 0 if low == 0 and x.m <= 16 else max(low, _reach_down(x)) + 1
        previous = x.m
        fmt = (
            {"dtype": x.dtype, "zeros": x.zeros, "group_size": x.group_size}
            if x.format != DEFAULT_FORMAT
            else {}
        )
        if pending is not None and pending.geometry == x.geometry and pending.m.hi == lo - 1:
            lo = pending.m.lo
        elif pending is not None:
            yield pending
        source = f"{x.source}, {x.step}" if x.step else x.source
        pending = DispatchRow(Range(lo, x.m), n, k, x.geometry, source, sms=x.sms, **fmt)
    if pending is not None:
        yield pending


def _reach_down(x: Measurement) -> int:
    """The most rows for which `x` says nothing."""
    if not _variant(x).hopper:
        return x.m // REACH_M
    return max(step for step in (0, *M_STEPS_HOPPER) if step < x.m)


def _around(x: int, all_x: list[int], reach: float) -> Range:
    """From half way (geometric mean) below to half way above `x`, at most a factor `reach`."""
    i = all_x.index(x)
    low = max(x / reach, (all_x[i - 1] * x) ** 0.5 if i > 0 else 0)
    high = min(x * reach, (all_x[i + 1] * x) ** 0.5 if i + 1 < len(all_x) else float("inf"))
    return Range(min(x, int(low) + 1), max(x, int(high)))


# ---- rows from the model -------------------------------------------------------------------------

# Upper bounds of the cells for which the model is asked, at their corners. Steps in n follow the
# number of tiles.
M_STEPS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
M_STEPS_HOPPER = (
    *(8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256),
    *(288, 320, 384, 448, 512, 576),
    *(640, 768, 896, 960, 1024, 1152, 1280, 1408, 1536, 1792, 1920, 2048, 2304, 2560, 3072),
    *(4096, 5120),
)
N_STEPS = (256, 512, *range(1024, 6145, 1024), *range(8192, 16385, 2048), 22528, 28672)
# Hopper tiles are large and its SMs many: waves, and with them the choice, change in finer steps.
N_STEPS_HOPPER = (
    *range(128, 2048, 128),
    *range(2048, 8192, 512),
    *range(8192, 16384, 1024),
    *range(16384, 40961, 2048),
    49152,
)
K_STEPS = (1024, 2048, 4096, 8192)
K_STEPS_HOPPER = (*range(1024, 3073, 512), 4096, 5120, 6144, 8192, 11264, 14336, 20480)
BEYOND = {"n": 57344, "k": 28672}  # what stands for everything larger
LARGE_TILE = 128  # in more row tiles than a few only these are asked about, which saves time
TOLERANCE = 1.01  # a cell takes its neighbour's geometry if that costs at most this much more


def _cells(steps: tuple[int, ...], beyond: int, lowest: int) -> list[tuple[Range, int]]:
    bounds = [lowest - 1, *steps]
    cells = [(Range(lo + 1, hi), hi) for lo, hi in itertools.pairwise(bounds)]
    return [*cells, (Range(steps[-1] + 1, None), beyond)]


# By ranges of m, n and k: the geometry chosen there.
Choices = dict[tuple[Range, Range, Range], str]


def model_rows(
    arch: Arch,
    geometries: list[Geometry],
    fmt: Format,
    sms: int | None,
    ahead: Sequence[Choices] = (),
) -> tuple[list[DispatchRow], Choices]:
    """The model's choice among `geometries` for every shape, as few rows as neighbours with one
    choice allow, and cell by cell. Where a choice among more geometries stands `ahead` that is one
    of these, too, nothing is left to say.
    """
    gpu, names = reference_gpu(arch, sms), {g.name for g in geometries}
    variants = [g.with_format(*fmt) for g in geometries]
    m_steps, n_steps, k_steps = M_STEPS, N_STEPS, K_STEPS
    if variants[0].hopper:
        waves = (gpu.sms * BLOCK_COLUMNS * i for i in range(1, 7))  # one tile for every SM
        n_steps = tuple(sorted({*N_STEPS_HOPPER, *waves}))
        m_steps, k_steps = M_STEPS_HOPPER, K_STEPS_HOPPER
    choices: Choices = {}
    for m_range, m in _cells(m_steps, 2 * m_steps[-1], 0):
        near = [v for v in variants if cost.sensible_rows(m, v.m_tile, LARGE_TILE)] or variants
        for k_range, k in _cells(k_steps, BEYOND["k"], 1):
            # Both ends in k as well: what a split costs weighs more in shallow weights.
            depths = (k, round_up(max(k_range.lo, k // 4), BLOCK_DEPTH))
            cells = {(m_range, x, k_range): n for x, n in _cells(n_steps, BEYOND["n"], 1)}
            asked = {
                cell: [
                    ProblemShape(x, y, z, fmt[2], fmt[0], fmt[1], variants[0].sparse)
                    for x, y in _corners(m_range, m, cell[1], n)
                    for z in depths
                ]
                for cell, n in cells.items()
                if not any(earlier.get(cell) in names for earlier in ahead)
            }
            if not asked:
                continue
            costs = cost.totals(near, list(itertools.chain(*asked.values())), gpu)
            costs_of = dict(zip(asked, numpy.split(costs, len(asked), axis=1)))
            choice = None  # of the cell before, if it was asked about
            for cell in cells:
                choice = _cheapest(costs_of[cell], choice) if cell in asked else None
                if choice is not None:
                    choices[cell] = near[choice].geometry().name
    rows = [DispatchRow(*cell, geometry, MODEL, sms=sms) for cell, geometry in choices.items()]
    for axis in "nkm":
        rows = _merge(rows, axis)
    return rows, choices


def _corners(m_range: Range, m: int, n_range: Range, n: int) -> list[tuple[int, int]]:
    """Rows and columns at which the model is asked in a cell: the number of tiles, and with it the
    choice, can differ from one end of a cell to the other. Up to 64 rows it does so with n alone.
    """
    low_n = max(n_range.lo, BLOCK_COLUMNS)
    if m <= 64 or m_range.hi is None:
        return [(m, n), (m, low_n)]
    return [(m, n), (m, low_n), (m_range.lo, n), (m_range.lo, low_n)]


def _cheapest(costs: numpy.ndarray, favourite: int | None = None) -> int:
    """Which variant is least behind the best one, on average over the points of a cell: of costs
    [variants, points]. Ties: the first declared, or the favourite.
    """
    behind = sum((point / point.min() for point in costs.T), start=numpy.zeros(len(costs)))
    best = behind.min()
    if favourite is not None and behind[favourite] <= TOLERANCE * best:
        return favourite
    return int(behind.argmin())


def _merge(rows: list[DispatchRow], axis: str) -> list[DispatchRow]:
    """Joins rows that differ only in adjacent ranges along `axis`."""
    merged: list[DispatchRow] = []
    last: dict[tuple, int] = {}
    for row in rows:
        others = (*(getattr(row, a) for a in "mnk" if a != axis), row.geometry, row.sms)
        i = last.get(others)
        r = getattr(row, axis)
        if i is not None and getattr(merged[i], axis).hi == r.lo - 1:
            joined = {**merged[i].__dict__, axis: Range(getattr(merged[i], axis).lo, r.hi)}
            merged[i] = DispatchRow(**joined)
        else:
            last[others] = len(merged)
            merged.append(row)
    return merged


# ---- both ----------------------------------------------------------------------------------------


def build_table(
    arch: Arch, variants: Iterable[Variant], folder: Path = TUNING, sparse: bool = False
) -> DispatchTable:
    """The table over those `variants` that are for dense (sparse) weights: measurements first;
    beyond the most rows measured the model among what was timed there; then the model, for named
    devices and for any device. A measurement is of one format and serves all: those that lack its
    kernel take the best of the Hopper kernels that they have.

    Formats with the same set of geometries share rows; formats with fewer geometries have their own
    rows behind, which the others never reach.
    """
    ordered = [v for v in variants if v.sparse == sparse]
    names = frozenset(v.name for v in ordered)
    classes = _format_classes(ordered)
    measurements = read_measurements(arch, folder)
    rows = measured_rows(measurements, names)
    fewer = [(g, formats) for g, formats in classes if DEFAULT_FORMAT not in formats]
    # Of nested sets the larger one's choice is the smaller one's, too, where it has it. Rows for
    # others name their formats, and stand before.
    for geometries, formats in fewer:
        if not _nested(geometries, classes):
            rows += rows_of_fewer(arch, measurements, names, geometries, formats)
    for geometries, _ in fewer:
        if _nested(geometries, classes):
            rows += rows_of_fewer(arch, measurements, names, geometries)
    rows += rows_beyond(arch, measurements, names)
    sms_known = sorted({g.sms for g in GPUS.values() if g.arch == arch.name})
    for sms in (*(sms_known if len(sms_known) > 1 else ()), None):
        ahead: list[Choices] = []
        for geometries, formats in classes:
            more, choices = model_rows(arch, _preferred(arch, geometries), formats[0], sms, ahead)
            rows += more
            ahead.append(choices)
    return DispatchTable(tuple(rows), names).without_unreachable()


def table_key(arch: Arch, variants: Iterable[Variant], folder: Path = TUNING) -> str:
    """Hash of all that build_table's rows follow from: variants, measurements, the model's code."""
    digest = hashlib.sha256(f"{arch.name} {' '.join(v.name for v in variants)}".encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), *sorted(folder.glob("*.json"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _preferred(arch: Arch, geometries: list[Geometry]) -> list[Geometry]:
    """Those of the family that `arch` names first: the model compares kernels of one family, and
    only measurements decide between families.
    """
    families = {g.family for g in geometries}
    first = next(f for f in arch.families if f in families)
    return [g for g in geometries if g.family == first]


FormatClass = tuple[list[Geometry], list[Format]]


def _nested(geometries: list[Geometry], classes: list[FormatClass]) -> bool:
    """Whether every class with as many geometries or more has all of these."""
    larger = (set(g) for g, _ in classes if len(g) >= len(geometries))
    return all(set(geometries) <= g for g in larger)


def _format_classes(variants: list[Variant]) -> list[FormatClass]:
    """(geometries in declaration order, the formats that have exactly these), most geometries
    first.
    """
    by_format: dict[Format, list[Geometry]] = {}
    for v in variants:
        by_format.setdefault((v.dtype, v.zeros, v.group_size), []).append(v.geometry())
    classes: dict[tuple[Geometry, ...], list[Format]] = {}
    for fmt, geometries in by_format.items():
        classes.setdefault(tuple(geometries), []).append(fmt)
    return sorted(((list(g), f) for g, f in classes.items()), key=lambda c: -len(c[0]))
