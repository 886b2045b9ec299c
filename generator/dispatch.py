"""DispatchTable: ordered typed rows from a problem's shape to a geometry; the first row whose
variant exists wins.

Rows come from measurements (generator/tuning/*.json) and, where nothing was measured, from the cost
model. A table is total (every shape and every format that has a variant finds one) and has no row
that can never be the first match.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy

from generator.problem import ProblemShape
from generator.space import ALL, Format
from generator.variant import Geometry, Variant

# ---- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Integers lo..hi, both included; hi None is unbounded."""

    lo: int = 0
    hi: int | None = None

    def __contains__(self, x: int) -> bool:
        return x >= self.lo and (self.hi is None or x <= self.hi)

    def to_json(self) -> list[int | None]:
        return [self.lo, self.hi]


@dataclass(frozen=True)
class DispatchRow:
    """Conditions that must all hold (None: any), and the geometry they lead to."""

    m: Range
    n: Range
    k: Range
    geometry: str
    source: str  # which measurement or model it comes from
    group_size: int | None = None  # as kernels see it: 32, 64, 128, -1
    dtype: str | None = None
    zeros: bool | None = None
    sms: int | None = None

    def matches(self, p: ProblemShape, sms: int) -> bool:
        return (
            p.m in self.m
            and p.n in self.n
            and p.k in self.k
            and self.sms in (None, sms)
            and self.takes((p.dtype, p.zeros, p.kernel_group_size))
        )

    def takes(self, fmt: Format) -> bool:
        return all(
            mine in (None, theirs)
            for mine, theirs in zip((self.dtype, self.zeros, self.group_size), fmt)
        )

    def to_json(self) -> dict:
        return {
            "m": self.m.to_json(),
            "n": self.n.to_json(),
            "k": self.k.to_json(),
            "group_size": self.group_size,
            "dtype": self.dtype,
            "zeros": self.zeros,
            "sms": self.sms,
            "geometry": self.geometry,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, row: dict) -> DispatchRow:
        ranges = {axis: Range(*row[axis]) for axis in "mnk"}
        return cls(**{**row, **ranges})


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DispatchTable:
    """Rows in order over the variants that exist."""

    rows: tuple[DispatchRow, ...]
    variants: frozenset[str]  # names

    def select(self, problem: ProblemShape, sms: int) -> tuple[Variant, DispatchRow]:
        """The variant for a call and the row that chose it; raises LookupError if no row has
        one.
        """
        for row in self.rows:
            if row.matches(problem, sms):
                fmt = (problem.dtype, problem.zeros, problem.kernel_group_size)
                variant = Geometry.parse(row.geometry).with_format(*fmt)
                if variant.name in self.variants:
                    return variant, row
        raise LookupError(f"no variant is built for {problem}")

    def to_json(self) -> list[dict]:
        return [row.to_json() for row in self.rows]

    def formats(self) -> list[Format]:
        """Formats that have at least one variant, in a fixed order."""
        have = {(v.dtype, v.zeros, v.group_size) for v in map(Variant.parse, self.variants)}
        return [f for f in ALL if f in have]

    def gaps(self) -> list[tuple[Format, tuple]]:
        """(format, (sms, m, n, k) at the low corner) of regions where no row gives a variant;
        empty: the table is total.
        """
        return [
            (fmt, axes.corner(cell))
            for fmt, axes, first in self._first_matches()
            for cell in zip(*(first < 0).nonzero())
        ]

    def unreachable(self) -> list[DispatchRow]:
        """Rows that are never the first match for any shape, device and format."""
        used = self._used()
        return [row for i, row in enumerate(self.rows) if i not in used]

    def without_unreachable(self) -> DispatchTable:
        used = self._used()
        return DispatchTable(tuple(r for i, r in enumerate(self.rows) if i in used), self.variants)

    def _used(self) -> set[int]:
        return {int(i) for _, _, first in self._first_matches() for i in set(first.flat)}

    def _first_matches(self) -> Iterator[tuple[Format, _Axes, numpy.ndarray]]:
        """The index of the first row for every cell of the grid that the rows' bounds cut shapes
        into; -1: none. Formats that see the same rows share one pass.
        """
        axes, geometries = _Axes(self.rows), {row.geometry for row in self.rows}
        passes: dict[tuple[int, ...], list[Format]] = {}
        for fmt in self.formats():
            names = {g: Geometry.parse(g).with_format(*fmt).name for g in geometries}
            seen = tuple(
                i
                for i, row in enumerate(self.rows)
                if row.takes(fmt) and names[row.geometry] in self.variants
            )
            passes.setdefault(seen, []).append(fmt)
        boxes = [axes.box(row) for row in self.rows]
        for seen, formats in passes.items():
            first = numpy.full(axes.shape, -1)
            for i in reversed(seen):
                first[boxes[i]] = i
            yield formats[0], axes, first


class _Axes:
    """The grid of cells between the bounds of all rows; inside a cell every row matches everywhere
    or nowhere.
    """

    def __init__(self, rows: Iterable[DispatchRow]) -> None:
        rows = list(rows)
        self.sms = [
            None,
            *sorted({r.sms for r in rows if r.sms is not None}),
        ]  # None: a device no row names
        self.starts = []
        for axis, lowest in (("m", 0), ("n", 1), ("k", 1)):
            ranges = [getattr(r, axis) for r in rows]
            bounds = {
                lowest,
                *(r.lo for r in ranges),
                *(r.hi + 1 for r in ranges if r.hi is not None),
            }
            self.starts.append(sorted(b for b in bounds if b >= lowest))
        self.shape = (len(self.sms), *map(len, self.starts))

    def box(self, row: DispatchRow) -> tuple[slice, ...]:
        """The cells in which `row` matches."""
        sms = slice(None)
        if row.sms is not None:
            at = self.sms.index(row.sms)
            sms = slice(at, at + 1)
        ranges = zip(self.starts, (row.m, row.n, row.k))
        return sms, *(slice(*_places(starts, r)) for starts, r in ranges)

    def corner(self, cell: Iterable[int]) -> tuple:
        """(sms, m, n, k) at the low corner of a cell."""
        sms, *places = cell
        return (self.sms[sms], *(starts[i] for starts, i in zip(self.starts, places)))


def _places(starts: list[int], r: Range) -> tuple[int, int]:
    """From which of `starts` to before which one `r` reaches."""
    end = len(starts) if r.hi is None else bisect.bisect_right(starts, r.hi)
    return bisect.bisect_left(starts, r.lo), end
