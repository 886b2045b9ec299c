"""Ours beside its peers in one process: a table (us, % of limit, ratio to the best), JSON, plot.

    python benchmarks/peers.py                                    # three shapes, all peers
    python benchmarks/peers.py --shapes llama3-8b --ms 1,16,64 --peers cublas,humming --budget 300
    python benchmarks/peers.py --replot results/peers.json        # table and plot again, no GPU

A peer that is not installed is skipped with a line. How it measures: marlin_cutlass/bench.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer

from benchmarks.candidates import PEERS, Ours, Weight, parse_peers
from benchmarks.shapes import DEFAULT_MS, parse_ms, parse_shapes
from benchmarks.tables import cells, peers_table, plot_peers, show, summary, us_text
from marlin_cutlass.bench import (
    PAUSE_S,
    Budget,
    Report,
    environment,
    make_problem,
    make_weight,
    measure,
    method,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def prepare(providers: Iterable[Any], weight: Weight, report: Report, budget: Budget) -> list[Any]:
    """The providers that could pack this weight; the others get a line in report.skipped."""
    ready = []
    for provider in providers:
        if budget.spent():
            break
        try:
            provider.prepare(weight)
            ready.append(provider)
        except Exception as error:  # whatever a peer raises must not end the run
            where = f"{provider.name} at {weight.n} x {weight.k}"
            report.skipped[where] = f"{type(error).__name__}: {str(error)[:200]}"
    return ready


def run(
    shapes: Iterable[tuple[int, int]],
    ms: Iterable[int],
    providers: list[Any],
    report: Report,
    budget: Budget,
    *,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    pause_s: float = PAUSE_S,
    done: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measure every (shape, M) cell until the budget is spent; `done` is called after each cell."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for n, k in shapes:
        q, scales = make_weight(n, k, group_size=group_size, dtype=dtype)
        weight = Weight(q, scales, group_size, l2_bytes)
        ready = prepare(providers, weight, report, budget)
        for m in ms:
            if budget.spent():
                report.finished = False
                return report
            problem = make_problem(m, q, scales, group_size)
            usable = [p for p in ready if p.max_m is None or m <= p.max_m]
            candidates = [c for p in usable for c in p.candidates(problem)]
            report.results += measure(candidates, problem, pause_s=pause_s)
            done(report)
        for provider in ready:
            provider.release()
        torch.cuda.empty_cache()
    return report


def available(keys: list[str], report: Report) -> list[Any]:
    """The named peers that are installed; the others get a line in report.skipped."""
    providers = [PEERS[key]() for key in keys]
    for provider in providers:
        reason = provider.missing()
        if reason:
            report.skipped[provider.name] = reason
    return [p for p in providers if p.name not in report.skipped]


def progress_line(report: Report) -> str:
    """The cell measured last, in one line: a run that is cut short has shown what it had."""
    last = report.results[-1]
    cell = cells(report.results)[(last.n, last.k, last.m)]
    times = ", ".join(f"{name} {us_text(r)}" for name, r in cell.items())
    return f"{last.n} x {last.k} M = {last.m}: {times} us"


def main(
    shapes: Annotated[str, typer.Option(help="NxK or set names, by commas")] = "default",
    ms: Annotated[str, typer.Option(help="batch sizes, by commas")] = ",".join(
        map(str, DEFAULT_MS)
    ),
    peers: Annotated[str, typer.Option(help=f"{', '.join(PEERS)}; all; none")] = "all",
    budget: Annotated[float | None, typer.Option(help="seconds; stops cleanly")] = None,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16")] = "fp16",
    group_size: Annotated[int, typer.Option(help="weight group size")] = 128,
    pause_ms: Annotated[
        float,
        typer.Option(
            min=0, max=60_000, help="before each replay; 0: the GPU may reach its power limit"
        ),
    ] = PAUSE_S * 1e3,
    json_path: Annotated[Path, typer.Option("--json", help="record")] = Path("results/peers.json"),
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG")] = Path("results/peers.png"),
    replot: Annotated[
        Path | None, typer.Option(exists=True, help="a recorded JSON; measures nothing")
    ] = None,
) -> None:
    """Time ours and its peers on this GPU, or show a recorded run again."""
    try:
        shape_list, m_list, keys = parse_shapes(shapes), parse_ms(ms), parse_peers(peers)
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
        allowance = Budget(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if replot is not None:
        recorded = Report.load(replot)
        show(recorded, peers_table(recorded), summary(recorded), plot_peers, plot)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here; use --replot with a recorded JSON")
    pause_s = pause_ms / 1e3
    report = Report("INT4 x 16-bit GEMM and its peers", environment(), method=method(pause_s))
    providers = [Ours(), *available(keys, report)]

    def record(partial: Report) -> None:
        partial.save(json_path)
        print(progress_line(partial), flush=True)

    run(
        shape_list,
        m_list,
        providers,
        report,
        allowance,
        group_size=group_size,
        dtype=DTYPES[dtype],
        pause_s=pause_s,
        done=record,
    )
    report.save(json_path)
    show(report, peers_table(report), summary(report), plot_peers, plot)


if __name__ == "__main__":
    typer.run(main)
