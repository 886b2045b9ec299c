"""DispatchTable: ordered typed rows from a problem's shape to a geometry; the first row whose
variant exists wins.

Rows come from measurements (generator/tuning/*.json) and, where nothing was measured, from the cost
model. A table is total (every shape and every format that has a variant finds one) and has no row
that can never be the first match.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
        return [(fmt, cell) for fmt, cell, first in self._first_matches() if first is None]

    def unreachable(self) -> list[DispatchRow]:
        """Rows that are never the first match for any shape, device and format."""
        used = self._used()
        return [row for i, row in enumerate(self.rows) if i not in used]

    def without_unreachable(self) -> DispatchTable:
        used = self._used()
        return DispatchTable(tuple(r for i, r in enumerate(self.rows) if i in used), self.variants)

    def _used(self) -> set[int | None]:
        return {first for _, _, first in self._first_matches()}

    def _first_matches(self) -> Iterator[tuple[Format, tuple, int | None]]:
        """The index of the first row for every cell of the grid that the rows' bounds cut shapes
        into.

        Formats that see the same rows share one pass, so a table of hundreds of rows takes well
        under a second.
        """
        axes = _Axes(self.rows)
        passes: dict[tuple[int, ...], list[Format]] = {}
        for fmt in self.formats():
            seen = tuple(
                i for i, row in enumerate(self.rows) if row.takes(fmt) and self._exists(row, fmt)
            )
            passes.setdefault(seen, []).append(fmt)
        for seen, formats in passes.items():
            owner: dict[tuple, int] = {}
            for i in seen:
                for cell in axes.cells(self.rows[i]):
                    owner.setdefault(cell, i)
            for cell in axes.all_cells():
                yield formats[0], axes.corner(cell), owner.get(cell)

    def _exists(self, row: DispatchRow, fmt: Format) -> bool:
        return Geometry.parse(row.geometry).with_format(*fmt).name in self.variants


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

    def cells(self, row: DispatchRow) -> Iterator[tuple]:
        sms = range(len(self.sms)) if row.sms is None else [self.sms.index(row.sms)]
        spans = [
            [i for i, s in enumerate(starts) if s in r]
            for starts, r in zip(self.starts, (row.m, row.n, row.k))
        ]
        return itertools.product(sms, *spans)

    def all_cells(self) -> Iterator[tuple]:
        return itertools.product(range(len(self.sms)), *(range(len(s)) for s in self.starts))

    def corner(self, cell: tuple) -> tuple:
        return (self.sms[cell[0]], *(starts[i] for starts, i in zip(self.starts, cell[1:])))
