"""The SplitK paper's grid: decompositions of skinny multiplies, beside the paper's own kernel.

    python benchmarks/splitk.py                          # m = 1..16, n = k = 512..16384
    python benchmarks/splitk.py --sizes 4096,8192 --ms 1,16 --budget 300
    python benchmarks/splitk.py --replot results/splitk.json

For each cell: ours data-parallel, ours with K split in each built way, ours as the table chooses,
the Triton kernels of the paper's configuration, gemlite, humming and cuBLAS. arXiv 2402.00025
reports, for SplitK over its data-parallel kernel, +65 % on average on A100 and +124 % on H100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer

from benchmarks.candidates import Ours, Weight, parse_peers
from benchmarks.peers import available, prepare
from benchmarks.shapes import parse_ms
from benchmarks.splitk_tables import averages, plot_splitk, progress_line, splitk_table
from benchmarks.tables import show
from marlin_cutlass.bench import (
    METHOD,
    Budget,
    Candidate,
    Report,
    environment,
    make_problem,
    make_weight,
    measure,
)

MS = (1, 2, 4, 8, 16)
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
PEER_KEYS = "triton-splitk,triton-dp,gemlite,humming,cublas"


def label(row: dict[str, Any]) -> str:
    """How a built variant's decomposition is called in the table: dp, split4, streamk, striped."""
    tags = {"data_parallel": "dp", "stream_k": "streamk", "striped": "striped"}
    return tags.get(row["decomposition"]) or f"split{row['split']}"


def forced_variants(
    built: Iterable[dict[str, Any]], m: int, n: int, group_size: int = 128
) -> list[tuple[str, str]]:
    """(label, name) of the built fp16 variants to time at one cell.

    Of every family and decomposition those with the smallest m_tile that holds m rows; a tile
    wider than the matrix is left out.
    """
    rows = [
        r
        for r in built
        if r["dtype"] == "f16"
        and r["family"] != "sparse"
        and not r["zeros"]
        and r["group_size"] == group_size
        and r["m_tile"] >= m
        and r["n_sm"] <= max(n, 64)
    ]
    smallest: dict[tuple[str, str], int] = {}
    for r in rows:
        key = (r["family"], label(r))
        smallest[key] = min(smallest.get(key, r["m_tile"]), r["m_tile"])
    return [(label(r), r["name"]) for r in rows if r["m_tile"] == smallest[(r["family"], label(r))]]


def our_candidates(ours: Ours, problem, built: list[dict[str, Any]]) -> list[Candidate]:
    """The table's choice and every forced variant; without PDL, so that only the split differs."""
    chosen = ours.candidate(problem, pdl=False)
    forced = []
    for tag, name in forced_variants(built, problem.m, problem.n, problem.group_size):
        candidate = ours.candidate(problem, pdl=False, kernel=name)
        candidate.note = tag
        forced.append(candidate)
    return [chosen, *forced]


def built_variants() -> list[dict[str, Any]]:
    """The variants built for this GPU, as the manifest lists them."""
    from marlin_cutlass.library import table_for_capability

    return [
        asdict(kernel)
        for kernel in table_for_capability(*torch.cuda.get_device_capability()).kernels
    ]


def run(
    sizes: Iterable[int],
    ms: Iterable[int],
    peers: list[Any],
    report: Report,
    budget: Budget,
    built: list[dict[str, Any]],
    json_path: Path,
) -> Report:
    """Measure every cell until the budget is spent, saving after each."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for size in sizes:
        q, scales = make_weight(size, size)
        weight = Weight(q, scales, 128, l2_bytes)
        ours = Ours()
        ready = prepare([ours, *peers], weight, report, budget)
        for m in ms:
            if budget.spent() or ours not in ready:
                report.finished = False
                return report
            problem = make_problem(m, q, scales)
            others = [c for p in ready if p is not ours for c in p.candidates(problem)]
            report.results += measure([*our_candidates(ours, problem, built), *others], problem)
            report.save(json_path)
            print(progress_line(report), flush=True)
        for provider in ready:
            provider.release()
        torch.cuda.empty_cache()
    return report


def main(
    sizes: Annotated[str, typer.Option(help="n = k, by commas")] = ",".join(map(str, SIZES)),
    ms: Annotated[str, typer.Option(help="m, by commas")] = ",".join(map(str, MS)),
    peers: Annotated[str, typer.Option(help="as for peers.py")] = PEER_KEYS,
    budget: Annotated[float | None, typer.Option(help="seconds; stops cleanly")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="record")] = Path("results/splitk.json"),
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG")] = Path("results/splitk.png"),
    replot: Annotated[
        Path | None, typer.Option(exists=True, help="a recorded JSON; measures nothing")
    ] = None,
) -> None:
    """Time our decompositions and their peers on the SplitK paper's grid."""
    try:
        size_list, m_list, keys = parse_ms(sizes), parse_ms(ms), parse_peers(peers)
        if any(size % 128 for size in size_list):
            raise ValueError(f"sizes={sizes!r}: every size must be a multiple of 128")
        allowance = Budget(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if replot is not None:
        recorded = Report.load(replot)
        show(recorded, splitk_table(recorded), averages(recorded), plot_splitk, plot)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here; use --replot with a recorded JSON")
    report = Report("SplitK grid", environment(), method=METHOD)
    run(
        size_list,
        m_list,
        available(keys, report),
        report,
        allowance,
        built_variants(),
        json_path,
    )
    report.save(json_path)
    show(report, splitk_table(report), averages(report), plot_splitk, plot)


if __name__ == "__main__":
    typer.run(main)
