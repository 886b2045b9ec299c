"""`marlin-cutlass tune --check`: how far the table's choice is from the best measured beside it."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from marlin_cutlass.explore_measure import Measured, ranked
from marlin_cutlass.explore_shapes import WeightShape
from marlin_cutlass.explore_tuning import geometry_of, score
from marlin_cutlass.tuner import Tuner, figures, say, short

CHECKED = 3  # rivals of the table's choice that --check measures


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
        f"{shape} m={m}: {short(choice, f)} {figures(mine)}, {cell.behind:+.1%}"
        + (f" behind {short(best.kernel, f)} {figures(best)}" if cell.behind else "")
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


def check_and_report(tuner: Tuner, shapes, ms, budget: float | None, path: Path | None) -> None:
    """Checks, prints what is wrong and the summary, and writes the cells as JSON to `path`."""
    cells, wrong = check(tuner, shapes, ms, budget)
    for text in wrong:
        say(f"EXCLUDED {text}")
    say(check_summary(cells))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"device": asdict(tuner.timer.device), "cells": [asdict(c) for c in cells]}
        path.write_text(json.dumps({**data, "wrong": wrong}, indent=1) + "\n")
