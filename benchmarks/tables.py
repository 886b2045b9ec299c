"""Tables and plots from a Report; everything here works on a recorded JSON, without a GPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.candidates import OURS
from marlin_cutlass.bench import Report, Result

Key = tuple[int, int, int]  # n, k, m
PDL = f"{OURS} PDL"


def cells(results: Iterable[Result]) -> dict[Key, dict[str, Result]]:
    """Results by (n, k, m), then by candidate, in the order measured."""
    grouped: dict[Key, dict[str, Result]] = {}
    for r in results:
        grouped.setdefault((r.n, r.k, r.m), {})[r.candidate] = r
    return grouped


def is_ours(name: str) -> bool:
    """Our own kernels: `ours`, `ours PDL`, and variants forced by name."""
    return name.startswith((OURS, "w4a16_"))


def best_peer(cell: dict[str, Result]) -> Result | None:
    """The fastest result that is not ours, or None where no peer was measured."""
    timed = [r for name, r in cell.items() if not is_ours(name) and r.us is not None]
    return min(timed, key=lambda r: r.us or math.inf, default=None)


def ratio_to_best(cell: dict[str, Result], name: str = OURS) -> float | None:
    """Time of `name` over that of the best peer: below 1 is faster."""
    mine, peer = cell.get(name), best_peer(cell)
    if mine is None or mine.us is None or peer is None or not peer.us:
        return None
    return mine.us / peer.us


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def number(value: float | None, digits: int = 1, missing: str = "-") -> str:
    """A time or percentage as text: fewer digits for large values."""
    if value is None:
        return missing
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def us_text(result: Result | None) -> str:
    """The time of a cell; '-' if not measured, the first word of the reason if it failed."""
    if result is None:
        return "-"
    return number(result.us) if result.us is not None else result.status.split(":")[0].split()[0]


def peers_table(report: Report) -> Table:
    """One row per (N x K, M): limit, ours, % of limit, every peer, the best, our ratio to it."""
    table = Table(title=f"{report.title}, us per call", caption=caption(report))
    grouped = cells(report.results)
    names = list(dict.fromkeys(r.candidate for r in report.results))
    peers = [name for name in names if not is_ours(name)]
    for head in ("N x K", "M", "limit", OURS, "% limit", PDL, "% limit", *peers):
        table.add_column(head, justify="right")
    table.add_column("best peer")
    table.add_column("ours / best", justify="right")
    table.add_column("variant")
    last = None
    for (n, k, m), cell in grouped.items():
        if last not in (None, (n, k)):
            table.add_section()
        last = (n, k)
        table.add_row(*_peers_row(n, k, m, cell, peers))
    return table


def _peers_row(n: int, k: int, m: int, cell: dict[str, Result], peers: list[str]) -> list[str]:
    mine, chained, best = cell.get(OURS), cell.get(PDL), best_peer(cell)
    anyone = mine or next(iter(cell.values()))
    return [
        f"{n} x {k}",
        str(m),
        number(anyone.limit_us),
        us_text(mine),
        number(mine and mine.percent_of_limit, 0),
        us_text(chained),
        number(chained and chained.percent_of_limit, 0),
        *(us_text(cell.get(name)) for name in peers),
        best.candidate if best else "-",
        number(ratio_to_best(cell), 2),
        mine.note.removeprefix("w4a16_") if mine else "-",
    ]


def caption(report: Report) -> str:
    """GPU, driver, versions and date of a run, in one line."""
    env = report.environment
    parts = [
        str(env.get("gpu") or "no GPU"),
        f"driver {env.get('driver_version', '?')}",
        f"SM clock {env.get('clocks.sm', '?')}",
        f"torch {env.get('torch')}, CUDA {env.get('cuda')}",
        str(env.get("date")),
    ]
    return ", ".join(parts) + ("" if report.finished else "; the time budget ended the run early")


def summary(report: Report) -> list[str]:
    """Lines below the table: geometric means, skipped candidates, failed cells."""
    lines = []
    grouped = cells(report.results)
    for name in (OURS, PDL):
        ratios = [r for cell in grouped.values() if (r := ratio_to_best(cell, name)) is not None]
        mean = geometric_mean(ratios)
        if mean is not None:
            lines.append(
                f"{name} / best peer: geometric mean {mean:.3f}, worst {max(ratios):.2f}, "
                f"over {len(ratios)} cells"
            )
    lines += [f"skipped {name}: {reason}" for name, reason in report.skipped.items()]
    lines += [
        f"{r.candidate} at {r.n} x {r.k}, M = {r.m}: {r.status}"
        for r in report.results
        if r.status != "ok"
    ]
    return lines


def plot_peers(report: Report, path: str | Path) -> Path:
    """Time against M: a panel per shape, a line per candidate, the limit dashed; PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys((r.n, r.k) for r in report.results))
    if not shapes:
        raise ValueError("report has no results: nothing to plot")
    figure, axes = plt.subplots(
        1, len(shapes), figsize=(5.2 * len(shapes), 4.6), squeeze=False, layout="constrained"
    )
    for axis, (n, k) in zip(axes[0], shapes, strict=True):
        rows = [r for r in report.results if (r.n, r.k) == (n, k)]
        for name in dict.fromkeys(r.candidate for r in rows):
            points = [(r.m, r.us) for r in rows if r.candidate == name and r.us is not None]
            width = 2.4 if is_ours(name) else 1.2
            axis.plot(*_columns(points), marker="o", markersize=3, linewidth=width, label=name)
        limits = sorted({(r.m, r.limit_us) for r in rows if r.limit_us is not None and not r.pdl})
        axis.plot(*_columns(limits), linestyle="--", color="black", label="limit")
        axis.set(xscale="log", yscale="log", title=f"N x K = {n} x {k}", xlabel="M")
    return save_figure(figure, axes[0], report, path)


def save_figure(figure: Any, panels: Sequence[Any], report: Report, path: str | Path) -> Path:
    """Writes a figure of times: log axes with a grid, the run in the title; makes the folder."""
    import matplotlib.pyplot as plt

    for axis in panels:
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.25)
    panels[0].set_ylabel("us per call")
    panels[0].legend(fontsize=7)
    figure.suptitle(caption(report), fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def show(
    report: Report,
    table: Table,
    lines: Iterable[str],
    plotter: Callable[[Report, Path], Path],
    plot: Path | None,
) -> None:
    """Prints a table and the lines under it; writes the plot if one is wanted."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False)
    if plot is not None and report.results:
        console.print(f"plot: {plotter(report, plot)}")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points]
