"""`marlin-cutlass tune`: measure built kernels for many shapes into a tuning file.

    marlin-cutlass tune --models llama3-8b --tp 1,2 --budget 240
    marlin-cutlass tune --check --shapes 4096x4096    how far the table's choice is from the best
    marlin-cutlass tune --report generator/tuning/nvidia_h200.json    the cost model's error, no GPU

`python build.py` turns the files of generator/tuning/ into rows of the dispatch table.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

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
from marlin_cutlass.explore_shapes import (
    DEFAULT_MS,
    WeightShape,
    join,
    parse_numbers,
    plan_shapes,
)
from marlin_cutlass.explore_tuning import CUBIN_DIGITS, TuningFile, geometry_of, score
from marlin_cutlass.explore_watch import HANG_S, HUNG, Watchdog

ANCHORS = 2  # known candidates measured again beside new ones, so that both saw the same clock
CHECKED = 3  # rivals of the table's choice that --check measures
SAVE_S = 2.0
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
            f"{shape} m={m}: {_short(best.kernel, self.fmt)} {_figures(best)}; {behind}; "
            f"{len(order)} candidates, {seconds:.1f} s"
        )
        notes = [f"\n  EXCLUDED {_short(r.kernel, self.fmt)}: {r.refused}" for r in refused]
        return text + "".join(notes)


def _short(kernel: str, fmt: Format) -> str:
    return geometry_of(kernel, fmt).removeprefix("w4a16_")


def _figures(found: Measured) -> str:
    parts = [f"{found.us:.2f} us"] if found.us is not None else []
    parts += [f"PDL {found.us_pdl:.2f}"] if found.us_pdl is not None else []
    return ", ".join(parts)


def say(text: str) -> None:
    print(text, flush=True)


# ---- a whole run ---------------------------------------------------------------------------------


def tune(
    tuner: Tuner, shapes: list[WeightShape], ms: list[int], out: Path, budget: float | None
) -> bool:
    """Measures every shape into `out`; returns whether nothing is left to do.

    Stops cleanly at the end of the budget or on an interrupt. What was measured is saved.
    """
    started = saved = time.monotonic()
    tuner.spent = lambda: budget is not None and time.monotonic() - started > budget
    cells = 0
    try:
        for shape in shapes:
            cells += tuner.tune_shape(shape, ms)
            if time.monotonic() - saved > SAVE_S:
                tuner.file.save(out)
                saved = time.monotonic()
            if tuner.spent():
                break
    except KeyboardInterrupt:
        say("interrupted: what was measured is kept")
    finally:
        tuner.watch("saving")
        tuner.file.save(out)
    left = sum(bool(tuner.missing(shape, m)) for shape in shapes for m in ms)
    took = time.monotonic() - started
    say(
        f"{cells} cells measured in {took:.0f} s, {left} left; {len(tuner.file.entries)} entries "
        f"and {len(tuner.file.excluded)} excluded in {out}"
        + ("; run the same command again for the rest" if left else "")
    )
    return left == 0


@dataclass
class CheckedCell:
    """How far the table's choice is from the best of those measured beside it."""

    n: int
    k: int
    m: int
    choice: str
    us: float
    us_pdl: float | None
    best: str
    best_us: float
    best_us_pdl: float | None
    behind: float  # 0.03: the choice takes 3 % longer
    source: str
    predicted_us: float


def check(
    tuner: Tuner, shapes: list[WeightShape], ms: list[int], budget: float | None
) -> tuple[list[CheckedCell], list[str]]:
    """Measures the table's choice and its CHECKED likeliest rivals in every cell.

    Returns the cells and lines about candidates that were wrong.
    """
    started = time.monotonic()
    tuner.spent = lambda: budget is not None and time.monotonic() - started > budget
    cells: list[CheckedCell] = []
    wrong: list[str] = []
    try:
        for shape in shapes:
            if tuner.spent():
                break
            tuner.watch(f"{shape}: packing")
            copies = tuner.timer.open(shape.n, shape.k, tuner.fmt, max(ms))
            for m in ms:
                if tuner.spent():
                    break
                results = tuner.run(shape, m, copies, rivals(tuner, shape, m))
                wrong += [f"{shape} m={m} {r.kernel}: {r.refused}" for r in results if r.refused]
                cells += _checked(tuner, shape, m, results)
            tuner.timer.close()
    except KeyboardInterrupt:
        say("interrupted: the summary is of what was measured")
    return cells, wrong


def rivals(tuner: Tuner, shape: WeightShape, m: int) -> dict[str, float]:
    """The table's choice, then the best that the file knows, then the best that the model
    predicts."""
    choice, wanted = tuner.choice(shape, m), tuner.wanted(shape, m)
    names = {geometry_of(name, tuner.fmt): name for name in wanted}
    known = tuner.file.known(shape.n, shape.k, m, tuner.fmt)
    measured = sorted((score(known[g]), g) for g in names if g in known and "us" in known[g])
    order = dict.fromkeys([choice, *(names[g] for _, g in measured), *wanted])
    return {name: wanted[name] for name in list(order)[: CHECKED + 1]}


def _checked(tuner: Tuner, shape: WeightShape, m: int, results: list[Measured]):
    order, choice = ranked(results), tuner.choice(shape, m)
    mine = next((r for r in order if r.kernel == choice), None)
    if mine is None or len(order) < 2:
        return
    f, best, row = tuner.fmt, order[0], tuner.select(shape, m)[1]
    cell = CheckedCell(
        shape.n,
        shape.k,
        m,
        choice,
        mine.us or mine.score,
        mine.us_pdl,
        best.kernel,
        best.us or best.score,
        best.us_pdl,
        mine.score / best.score - 1,
        row.source,
        tuner.wanted(shape, m)[choice],
    )
    say(
        f"{shape} m={m}: {_short(choice, f)} {_figures(mine)}, {cell.behind:+.1%}"
        + (f" behind {_short(best.kernel, f)} {_figures(best)}" if cell.behind else "")
        + f" [{row.source}]"
    )
    yield cell


def check_summary(cells: list[CheckedCell]) -> str:
    """Share of cells within 5 and 10 % of the best, the median and the worst."""
    if not cells:
        return "nothing was compared"
    behind = sorted(cell.behind for cell in cells)
    within = {limit: sum(b <= limit for b in behind) / len(behind) for limit in (0.05, 0.10)}
    worst = max(cells, key=lambda cell: cell.behind)
    model = statistics.median(abs(c.predicted_us / c.us - 1) for c in cells)
    return (
        f"{len(cells)} cells: the table's choice is within 5 % of the best in {within[0.05]:.0%}, "
        f"within 10 % in {within[0.10]:.0%}; median {statistics.median(behind):.1%}, worst "
        f"{worst.behind:.1%} ({worst.n}x{worst.k} m={worst.m}); "
        f"cost model: median error {model:.0%}"
    )


# ---- a hanging kernel ----------------------------------------------------------------------------


def hang_handler(tuner: Tuner, out: Path | None) -> Callable[[str], None]:
    """Records the kernel that hangs as excluded, saves, and leaves the process."""

    def handle(what: str) -> None:
        say(f"HANG: no progress for {HANG_S:.0f} s in {what}")
        if out is not None:
            exclude_hung(tuner, what)
            tuner.file.save(out)
        sys.stdout.flush()
        os._exit(HUNG)

    return handle


def exclude_hung(tuner: Tuner, what: str) -> None:
    """Reads '<NxK> <kernel> m=<m>...' and excludes that kernel from the cell."""
    words = what.replace(":", "").split()
    if len(words) < 3 or words[1] not in tuner.kernels:
        return
    n, k = map(int, words[0].split("x"))
    found = Measured(words[1], refused=f"hung for {HANG_S:.0f} s")
    cubin = tuner.cubins[geometry_of(words[1], tuner.fmt)]
    tuner.file.add(n, k, int(words[2].removeprefix("m=")), tuner.fmt, found, cubin)


@contextmanager
def terminating():
    """SIGTERM (of `timeout`) stops a run as Ctrl-C does."""

    def stop(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# ---- command line --------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def gpu_timer() -> Timer:
    """The timer of this machine's GPU; RuntimeError or LibraryError if there is none."""
    from marlin_cutlass.explore_gpu import GpuTimer

    return GpuTimer()


def make_tuner(timer: Timer, fmt: Format, start: Path | None, out: Path | None) -> Tuner:
    """A tuner over the built table; figures that `out`, else `start`, already holds are kept."""
    capability = timer.device.capability
    folder = dispatch.built_archs()[dispatch.arch_for(*capability)]
    table = dispatch.load_table(folder)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    file = TuningFile.for_device(table.arch, timer.device, date)
    source = next((p for p in (out, start) if p is not None and p.is_file()), None)
    if source is not None:
        old = TuningFile.load(source)
        old.check_device(table.arch, timer.device, source)
        file.entries, file.excluded = old.entries, old.excluded
    tuner = Tuner(timer, table, file, fmt)
    if not tuner.cubins:
        family = " --family sparse" if fmt.sparse else ""
        raise ValueError(
            f"no kernel for {fmt} is built for {table.arch}: python build.py --arch "
            f"{table.arch}{family}"
        )
    return tuner


def default_out(device_name: str) -> Path:
    """The file in generator/tuning/ that holds this GPU's figures, or a new one named after it."""
    folder = Path(__file__).resolve().parents[1] / "generator" / "tuning"
    for path in sorted(folder.glob("*.json")):
        if TuningFile.load(path).gpu == device_name:
            return path
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', device_name.lower())}.json"


@app.command()
def main(
    shapes: Annotated[str, typer.Option(help="weights NxK, comma-separated")] = "",
    models: Annotated[
        str, typer.Option(help="llama3-8b, ... or paths of config.json, comma-separated")
    ] = "",
    tp: Annotated[str, typer.Option(help="devices that share a model: 1,2,4,8")] = "1",
    layers: Annotated[str, typer.Option(help="of models: fused, separate or both")] = "fused",
    ms: Annotated[str, typer.Option(help="activation rows")] = join(DEFAULT_MS),
    dtype: Annotated[str, typer.Option(help="f16 or bf16")] = "f16",
    zeros: Annotated[bool, typer.Option("--zeros", help="zero points")] = False,
    group_size: Annotated[int, typer.Option(help="32, 64, 128 or -1")] = 128,
    sparse: Annotated[bool, typer.Option("--sparse", help="2:4-sparse weights")] = False,
    out: Annotated[
        Path | None, typer.Option(help="tuning file; default generator/tuning/<gpu>.json")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="measurements to begin with if OUT is not there")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=1, help="seconds; stops cleanly")] = None,
    margin: Annotated[
        float, typer.Option(min=1, help="candidates within this factor of the best prediction")
    ] = MARGIN,
    top: Annotated[int | None, typer.Option(min=1, help="at most so many of them")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=10, help="interleaved rounds")] = 2,
    pause_ms: Annotated[float, typer.Option(min=0, help="between bursts")] = 12.0,
    keep_stale: Annotated[
        bool, typer.Option("--keep-stale", help="trust figures of kernels rebuilt since")
    ] = False,
    check_: Annotated[
        bool, typer.Option("--check", help="only measure how far the table is from the best")
    ] = False,
    check_json: Annotated[
        Path | None, typer.Option("--json", help="with --check: write the cells here")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="compare the cost model with a tuning file; no GPU")
    ] = None,
) -> None:
    """Find the best built kernel for shapes and extend the dispatch table."""
    if report is not None:
        from marlin_cutlass.explore_model import model_report

        return say(model_report(TuningFile.load(report)))
    fmt = Format(dtype, zeros, group_size, sparse)
    plan = plan_shapes(shapes, models, tp, layers, group_size)
    rows = parse_numbers(ms, "ms")
    fmt.problem(rows[0], plan.shapes[0].n, plan.shapes[0].k)  # names what no kernel serves
    timer = gpu_timer()
    out = out or default_out(timer.device.name)
    tuner = make_tuner(timer, fmt, start, out)
    tuner.settings = Settings(rounds=rounds, pause_s=pause_ms / 1000)
    tuner.margin, tuner.top, tuner.keep_stale = margin, top, keep_stale
    say(
        f"{timer.device.name}, driver {timer.device.driver}, torch {timer.device.torch}: "
        f"{len(plan.shapes)} weights x {len(rows)} batch sizes, {fmt}"
    )
    for text in plan.left_out:
        say(f"left out: {text}")
    tuner.watch = Watchdog(hang_handler(tuner, None if check_ else out))
    with terminating():
        if check_:
            return _check(tuner, plan.shapes, rows, budget, check_json)
        tune(tuner, plan.shapes, rows, out, budget)


def _check(tuner: Tuner, shapes, ms, budget: float | None, path: Path | None) -> None:
    cells, wrong = check(tuner, shapes, ms, budget)
    for text in wrong:
        say(f"EXCLUDED {text}")
    say(check_summary(cells))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"device": asdict(tuner.timer.device), "cells": [asdict(c) for c in cells]}
        path.write_text(json.dumps({**data, "wrong": wrong}, indent=1) + "\n")


if __name__ == "__main__":
    from marlin_cutlass.cli import app as whole

    whole(["tune", *sys.argv[1:]], prog_name="python -m marlin_cutlass")
