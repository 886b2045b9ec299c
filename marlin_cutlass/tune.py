"""`marlin-cutlass tune`: measure built kernels for many shapes into a tuning file.

    marlin-cutlass tune --models llama3-8b --tp 1,2 --budget 240
    marlin-cutlass tune --check --shapes 4096x4096    how far the table's choice is from the best
    marlin-cutlass tune --report generator/tuning/nvidia_h200.json    the cost model's error, no GPU

`python build.py` turns the files of generator/tuning/ into rows of the dispatch table.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from marlin_cutlass import dispatch
from marlin_cutlass.explore_candidates import MARGIN
from marlin_cutlass.explore_measure import Format, Measured, Settings, Timer
from marlin_cutlass.explore_shapes import (
    DEFAULT_MS,
    WeightShape,
    join,
    parse_numbers,
    plan_shapes,
)
from marlin_cutlass.explore_tuning import TuningFile, geometry_of
from marlin_cutlass.explore_watch import HANG_S, HUNG, Watchdog
from marlin_cutlass.tune_check import (
    CHECKED,
    CheckedCell,
    check,
    check_and_report,
    check_summary,
    rivals,
)
from marlin_cutlass.tuner import ANCHORS, Tuner, say

__all__ = [
    "ANCHORS",
    "CHECKED",
    "CheckedCell",
    "Tuner",
    "Watchdog",
    "app",
    "check",
    "check_summary",
    "default_out",
    "exclude_hung",
    "gpu_timer",
    "hang_handler",
    "main",
    "make_tuner",
    "rivals",
    "terminating",
    "tune",
]
SAVE_S = 2.0


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
            return check_and_report(tuner, plan.shapes, rows, budget, check_json)
        tune(tuner, plan.shapes, rows, out, budget)


if __name__ == "__main__":
    from marlin_cutlass.cli import app as whole

    whole(["tune", *sys.argv[1:]], prog_name="python -m marlin_cutlass")
