"""The cost model against measurements: its error, and what its choice costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from generator.arch import ARCHS
from generator.cost import estimate
from generator.problem import ProblemShape
from generator.variant import Geometry
from marlin_cutlass.explore_candidates import gpu_for
from marlin_cutlass.explore_tuning import TuningFile, cells, score

WORST = 8  # cells that the report names


@dataclass(frozen=True)
class ModelCell:
    """One shape: the model's choice among what was measured, and the best."""

    n: int
    k: int
    m: int
    choice: str
    best: str
    behind: float  # the choice takes this much longer than the best
    errors: tuple[float, ...]  # predicted / measured - 1 of every candidate
    best_error: float


def model_cells(file: TuningFile, figure: Callable[[dict], float] = score) -> list[ModelCell]:
    """Every measured shape against the model. figure: which of an entry's times is meant."""
    gpu = gpu_for(file.gpu, ARCHS[file.arch], file.sms)
    found = []
    for (n, k, m, dtype, zeros, group, sparse), entries in cells(file.entries.values()).items():
        problem = ProblemShape(m, n, k, group, dtype, zeros, sparse)
        predicted = {
            e["geometry"]: estimate(
                problem, Geometry.parse(e["geometry"]).with_format(dtype, zeros, group), gpu
            ).total
            for e in entries
        }
        measured = {e["geometry"]: figure(e) for e in entries}
        choice, best = min(predicted, key=predicted.get), min(measured, key=measured.get)
        errors = {g: predicted[g] / measured[g] - 1 for g in measured}
        behind = measured[choice] / measured[best] - 1
        found.append(ModelCell(n, k, m, choice, best, behind, tuple(errors.values()), errors[best]))
    return found


def model_report(file: TuningFile) -> str:
    """Median error and the cost of the model's choices, for both settings of PDL."""
    if not file.entries:
        return "no measurements"
    first = next(iter(file.entries.values()))
    figures = {"mean of both": score, "no PDL": lambda e: e["us"]}
    if "us_pdl" in first:
        figures["PDL"] = lambda e: e.get("us_pdl", e["us"])
    lines = [f"{file.gpu}: {len(file.entries)} measurements"]
    lines += [f"{name}: {summary(model_cells(file, f))}" for name, f in figures.items()]
    worst = sorted(model_cells(file), key=lambda c: -c.behind)[:WORST]
    lines += [
        f"  {c.n}x{c.k} m={c.m}: {c.choice} is {c.behind:.0%} behind {c.best}"
        for c in worst
        if c.behind > 0
    ]
    return "\n".join(lines)


def summary(found: list[ModelCell]) -> str:
    """One line: error of the prediction, share of good choices."""
    errors = [abs(e) for cell in found for e in cell.errors]
    best = [abs(cell.best_error) for cell in found]
    within = sum(cell.behind <= 0.10 for cell in found) / len(found)
    bias = statistics.median(e for cell in found for e in cell.errors)
    return (
        f"median error {statistics.median(errors):.1%} (of the fastest kernels "
        f"{statistics.median(best):.1%}; bias {bias:+.1%}); the model's choice is within 10 % of "
        f"the best in {within:.0%} of {len(found)} cells, worst "
        f"{max(cell.behind for cell in found):.0%}"
    )
