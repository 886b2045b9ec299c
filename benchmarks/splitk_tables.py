"""Table, averages and plot of a recorded SplitK run; works without a GPU."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from benchmarks.candidates import OURS
from benchmarks.tables import Key, caption, cells, number, save_figure, us_text
from marlin_cutlass.bench import Report, Result

PAPER = "paper: +65 % on average on A100, +124 % on H100, peak +295 %"  # arXiv 2402.00025
WITHIN = 1.03  # the chosen decomposition should be within 3 % of the best of all


def by_label(cell: dict[str, Result]) -> dict[str, float]:
    """Best time of each of our decompositions in a cell: {'dp': 12.1, 'split2': 9.8, ...}."""
    best: dict[str, float] = {}
    for name, r in cell.items():
        if name.startswith("w4a16_") and r.us is not None:
            best[r.note] = min(best.get(r.note, r.us), r.us)
    return best


def progress_line(report: Report) -> str:
    """The cell measured last, in one line."""
    last = report.results[-1]
    cell = cells(report.results)[(last.n, last.k, last.m)]
    ours = ", ".join(f"{tag} {number(us)}" for tag, us in by_label(cell).items())
    peers = ", ".join(f"{n} {us_text(r)}" for n, r in cell.items() if not n.startswith("w4a16_"))
    return f"n = k = {last.n} m = {last.m}: {peers}; {ours} us"


def splitk_table(report: Report) -> Table:
    """One row per cell: chosen, each decomposition, peers, gain over dp, chosen over the best."""
    grouped = cells(report.results)
    labels = sorted({tag for cell in grouped.values() for tag in by_label(cell)}, key=_label_order)
    names = dict.fromkeys(r.candidate for r in report.results)
    peers = [name for name in names if name != OURS and not name.startswith("w4a16_")]
    table = Table(title=f"{report.title}, us per call", caption=caption(report))
    for head in ("n = k", "m", "chosen", *labels, *peers, "gain over dp", "chosen / best"):
        table.add_column(head, justify="right")
    for (n, _, m), cell in grouped.items():
        ours = by_label(cell)
        gain, ratio = gain_over_dp(cell), chosen_over_best(cell)
        table.add_row(
            str(n),
            str(m),
            us_text(cell.get(OURS)),
            *(number(ours.get(tag)) for tag in labels),
            *(us_text(cell.get(name)) for name in peers),
            "-" if gain is None else f"{100 * gain:+.0f} %",
            number(ratio, 2),
        )
    return table


def _label_order(tag: str) -> tuple[str, int]:
    digits = "".join(filter(str.isdigit, tag))
    return tag.rstrip("0123456789"), int(digits or 0)


def gain_over_dp(cell: dict[str, Result]) -> float | None:
    """Speed of the chosen kernel over our best data-parallel one, minus 1 (the paper's measure)."""
    return _ratio(by_label(cell).get("dp"), _us(cell, OURS), minus_one=True)


def chosen_over_best(cell: dict[str, Result]) -> float | None:
    """Time of the table's choice over the best of all our decompositions; 1 is the best choice."""
    times = by_label(cell).values()
    return _ratio(_us(cell, OURS), min(times, default=None))


def over_triton(cell: dict[str, Result]) -> float | None:
    """How many times faster than the Triton SplitK kernel the chosen kernel is."""
    return _ratio(_us(cell, "Triton SplitK 4"), _us(cell, OURS))


def _us(cell: dict[str, Result], name: str) -> float | None:
    return cell[name].us if name in cell else None


def _ratio(a: float | None, b: float | None, minus_one: bool = False) -> float | None:
    return None if a is None or not b else a / b - minus_one


def averages(report: Report) -> list[str]:
    """The averages the paper reports, and how good the table's choices are."""
    grouped = cells(report.results)
    lines = []
    gains = _values(grouped, gain_over_dp)
    if gains:
        mean, peak = sum(gains.values()) / len(gains), max(gains.values())
        lines.append(
            f"chosen over data-parallel: {100 * mean:+.0f} % on average, at most "
            f"{100 * peak:+.0f} % ({PAPER})"
        )
    ratios = _values(grouped, over_triton)
    if ratios:
        lines.append(
            "chosen against Triton SplitK 16x32x128 split 4: "
            f"{sum(ratios.values()) / len(ratios):.2f}x as fast on average, "
            f"{min(ratios.values()):.2f}x at the worst cell"
        )
    best = _values(grouped, chosen_over_best)
    if best:
        off = [f"{n}, m = {m}: {r:.2f}" for (n, _, m), r in best.items() if r > WITHIN]
        lines.append(
            f"chosen within 3 % of the best on {len(best) - len(off)} of {len(best)} cells"
        )
        lines += [f"  off at n = k = {text}" for text in off]
    lines += [f"skipped {name}: {reason}" for name, reason in report.skipped.items()]
    failed = [r for r in report.results if r.status != "ok"]
    return lines + [f"{r.candidate} at {r.n}, m = {r.m}: {r.status}" for r in failed]


def _values(grouped: dict[Key, dict[str, Result]], measure_cell) -> dict[Key, float]:
    values = {key: measure_cell(cell) for key, cell in grouped.items()}
    return {key: value for key, value in values.items() if value is not None}


def plot_splitk(report: Report, path: str | Path) -> Path:
    """Time against n = k, one panel per m: chosen, data-parallel, best split, peers; PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grouped = cells(report.results)
    if not grouped:
        raise ValueError("report has no results: nothing to plot")
    ms = sorted({m for _, _, m in grouped})
    figure, axes = plt.subplots(
        1, len(ms), figsize=(4.2 * len(ms), 4.4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, m in zip(axes[0], ms, strict=True):
        for name, points in _lines(grouped, m).items():
            xs, ys = zip(*points, strict=True)
            axis.plot(xs, ys, marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", title=f"m = {m}", xlabel="n = k")
    return save_figure(figure, axes[0], report, path)


def _lines(grouped: dict[Key, dict[str, Result]], m: int) -> dict[str, list[tuple[int, float]]]:
    """Points (n, us) of one m: chosen, data-parallel, the best other decomposition, every peer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for (n, _, row_m), cell in grouped.items():
        if row_m != m:
            continue
        ours = by_label(cell)
        splits = [us for tag, us in ours.items() if tag != "dp"]
        points = {"data-parallel": ours.get("dp"), "best split": min(splits, default=None)}
        for name, r in cell.items():
            if not name.startswith("w4a16_"):
                points["chosen" if name == OURS else name] = r.us
        for name, us in points.items():
            if us is not None:
                lines.setdefault(name, []).append((n, us))
    return lines
