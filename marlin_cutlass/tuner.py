"""Measuring what is missing of a weight: the candidates of each cell, into a tuning file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from generator.arch import ARCHS
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass import dispatch
from marlin_cutlass.explore_candidates import MARGIN, candidates, gpu_for
from marlin_cutlass.explore_measure import (
    PDL_OFF,
    PDL_ON,
    Format,
    Measured,
    Settings,
    Timer,
    measure,
    ranked,
)
from marlin_cutlass.explore_shapes import WeightShape
from marlin_cutlass.explore_tuning import CUBIN_DIGITS, TuningFile, geometry_of, score

ANCHORS = 2  # known candidates measured again beside new ones, so that both saw the same clock
PDL_CAPABILITY = (9, 0)


@dataclass
class Tuner:
    """One run over shapes on one timer; figures go into `file`."""

    timer: Timer
    table: dispatch.Table
    file: TuningFile
    fmt: Format = field(default_factory=Format)
    settings: Settings = field(default_factory=Settings)
    margin: float = MARGIN
    top: int | None = None
    keep_stale: bool = False
    watch: Callable[[str], None] = lambda what: None
    spent: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.arch = ARCHS[self.table.arch]
        self.gpu = gpu_for(self.timer.device.name, self.arch, self.timer.device.sms)
        self.kernels = {kernel.name: kernel for kernel in self.table.kernels}
        self.variants = [Variant.parse(name) for name in self.kernels]
        self.cubins = {k.geometry: k.sha256[:CUBIN_DIGITS] for k in self._mine()}

    def _mine(self) -> list[dispatch.Kernel]:
        wanted = (self.fmt.dtype, self.fmt.zeros, self.fmt.group_size)
        kernels = [k for k in self.table.kernels if k.sparse == self.fmt.sparse]
        return [k for k in kernels if (k.dtype, k.zeros, k.group_size) == wanted]

    @property
    def pdl(self) -> tuple[bool, ...]:
        has = self.timer.device.capability >= PDL_CAPABILITY
        return (PDL_OFF, PDL_ON) if has else (PDL_OFF,)

    def problem(self, shape: WeightShape, m: int) -> ProblemShape:
        return self.fmt.problem(m, shape.n, shape.k)

    def select(self, shape: WeightShape, m: int) -> tuple[dispatch.Kernel, dispatch.Row]:
        """The table's choice and its row; LookupError where it has nothing."""
        f, sms = self.fmt, self.timer.device.sms
        form = (f.group_size, f.dtype, f.zeros, sms, f.sparse)
        return self.table.select(m, shape.n, shape.k, *form)

    def choice(self, shape: WeightShape, m: int) -> str:
        """What the table chooses; LookupError where it has nothing."""
        return self.select(shape, m)[0].name

    def wanted(self, shape: WeightShape, m: int) -> dict[str, float]:
        """Candidates of a cell with the predicted us."""
        problem, keep = self.problem(shape, m), [self.choice(shape, m)]
        return candidates(
            problem, self.variants, self.gpu, margin=self.margin, keep=keep, top=self.top
        )

    def missing(self, shape: WeightShape, m: int) -> dict[str, float]:
        """What the file lacks of a cell; with it the best of what it has, to measure again."""
        wanted = self.wanted(shape, m)
        known = {
            geometry: entry
            for geometry, entry in self.file.known(shape.n, shape.k, m, self.fmt).items()
            if self.keep_stale or entry.get("cubin") == self.cubins.get(geometry)
        }
        new = {n: us for n, us in wanted.items() if geometry_of(n, self.fmt) not in known}
        if not new:
            return {}
        rivals = sorted(
            (score(known[g]), n)
            for n in wanted
            if (g := geometry_of(n, self.fmt)) in known and "us" in known[g]
        )
        again = [name for _, name in rivals[:ANCHORS]]
        return {name: wanted[name] for name in (*again, *new)}

    def run(self, shape: WeightShape, m: int, copies: int, names: dict[str, float]):
        """Measures one cell on the open weight."""
        where = f"{shape} "
        return measure(
            self.timer,
            self.fmt,
            m,
            names,
            copies,
            settings=self.settings,
            pdl=self.pdl,
            stop=self.spent,
            watch=lambda what: self.watch(where + what),
        )

    def tune_shape(self, shape: WeightShape, ms: list[int]) -> int:
        """Measures what is missing of one weight; returns the number of cells it touched."""
        todo = {m: names for m in ms if (names := self.missing(shape, m))}
        if not todo or self.spent():
            return 0
        self.watch(f"{shape}: packing")
        copies = self.timer.open(shape.n, shape.k, self.fmt, max(todo))
        done = 0
        for m, names in todo.items():
            if self.spent():
                break
            started = time.perf_counter()
            results = self.run(shape, m, copies, names)
            for found in results:
                geometry = geometry_of(found.kernel, self.fmt)
                self.file.add(shape.n, shape.k, m, self.fmt, found, self.cubins[geometry])
            say(self.line(shape, m, results, time.perf_counter() - started))
            done += 1
        self.timer.close()
        return done

    def line(self, shape: WeightShape, m: int, results: list[Measured], seconds: float) -> str:
        """One line about a measured cell."""
        order = ranked(results)
        refused = [r for r in results if r.refused]
        if not order:
            return f"{shape} m={m}: none of {len(results)} candidates has a figure"
        best, choice = order[0], self.choice(shape, m)
        mine = next((r for r in order if r.kernel == choice), None)
        behind = f"table {mine.score / best.score - 1:+.1%}" if mine else "table's not measured"
        text = (
            f"{shape} m={m}: {short(best.kernel, self.fmt)} {figures(best)}; {behind}; "
            f"{len(order)} candidates, {seconds:.1f} s"
        )
        notes = [f"\n  EXCLUDED {short(r.kernel, self.fmt)}: {r.refused}" for r in refused]
        return text + "".join(notes)


def short(kernel: str, fmt: Format) -> str:
    """Name of a kernel in lines about formats `fmt`."""
    return geometry_of(kernel, fmt).removeprefix("w4a16_")


def figures(found: Measured) -> str:
    """Its times, us, without and with programmatic dependent launch."""
    parts = [f"{found.us:.2f} us"] if found.us is not None else []
    parts += [f"PDL {found.us_pdl:.2f}"] if found.us_pdl is not None else []
    return ", ".join(parts)


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)
