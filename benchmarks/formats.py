"""Weight formats beside fp16 in groups of 128: what the table's kernels take for each.

    python benchmarks/formats.py                                   # five weights, M = 1..1024
    python benchmarks/formats.py --formats f16.s.64,bf16.z.32 --ms 1,16
    python benchmarks/formats.py --replot results/formats.json

A format is dtype.zeros.group: `f16` or `bf16`, `s` (symmetric) or `z` (zero points), and 32, 64,
128 or -1 (one scale a column). Zero points are 8, as if the weight were symmetric: one reference
serves both, and a kernel cannot know.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.candidates import our_call, poisoned
from benchmarks.shapes import parse_ms, parse_shapes
from benchmarks.tables import Key, cells, geometric_mean, number
from marlin_cutlass import explain, pack
from marlin_cutlass.bench import (
    Budget,
    Candidate,
    Problem,
    Report,
    Result,
    copies_for,
    environment,
    make_problem,
    make_weight,
    measure,
    method,
)
from marlin_cutlass.limits import limit

SHAPES = "28672x4096,5120x8192,4096x4096,8192x8192,6144x4096"
MS = "1,8,16,32,64,96,128,256,1024"
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
ZEROS = {"s": False, "z": True}
GROUPS = (32, 64, 128, -1)
PDL_SUFFIX = " PDL"  # of the candidate's name
METHOD = method().replace(
    "candidates interleaved in one process",
    "the formats of a cell one after the other, without and with PDL interleaved",
)


@dataclass(frozen=True)
class Format:
    dtype: str
    zeros: bool
    group_size: int

    @property
    def name(self) -> str:
        return f"{self.dtype}.{'z' if self.zeros else 's'}.{self.group_size}"


BASE = Format("f16", False, 128)
DEFAULT = "f16.s.64,f16.s.32,f16.s.-1,f16.z.128,f16.z.64,f16.z.32,f16.z.-1,bf16.s.128,bf16.s.64"


def parse_formats(text: str) -> list[Format]:
    """Formats from 'f16.s.64,bf16.z.32'. Raises ValueError naming the one that is none."""
    found = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        dtype, _, rest = name.partition(".")
        kind, _, group = rest.partition(".")
        if dtype not in DTYPES or kind not in ZEROS or group not in map(str, GROUPS):
            raise ValueError(
                f"formats: {name!r} is not dtype.zeros.group, with {' or '.join(DTYPES)}, "
                f"s or z, and one of {', '.join(map(str, GROUPS))}"
            )
        found.append(Format(dtype, ZEROS[kind], int(group)))
    if not found:
        raise ValueError("formats: at least one is needed")
    return [f for f in dict.fromkeys(found) if f != BASE]


def candidates(problem: Problem, weights: list, fmt: Format) -> list[Candidate]:
    """The table's choice for `fmt`, without and with dependent launch."""
    answer = explain(
        problem.m, problem.n, problem.k, fmt.group_size, problem.dtype, zeros=fmt.zeros
    )
    out = poisoned(problem)
    return [
        Candidate(
            fmt.name + (PDL_SUFFIX if pdl else ""),
            [our_call(problem.a, w, out, pdl, None) for w in weights],
            pdl,
            note=answer.kernel or answer.why,
        )
        for pdl in (False, True)
    ]


def prepared(n: int, k: int, fmt: Format, l2_bytes: int) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Codes and scales of a weight in `fmt`, and as many packed copies as twice the L2 cache."""
    q, scales = make_weight(n, k, group_size=fmt.group_size, dtype=DTYPES[fmt.dtype])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if fmt.zeros else None
    packed = pack(q, scales, zeros, group_size=fmt.group_size)
    count = copies_for(packed.packed.numel(), l2_bytes)
    return q, scales, [packed] + [packed.clone() for _ in range(count - 1)]


def measured(problem: Problem, weights: list, fmt: Format) -> list[Result]:
    """The results of one format at one cell, with the limit of its bytes."""
    results = measure(candidates(problem, weights, fmt), problem)
    device = torch.cuda.get_device_properties(0).name
    for r in results:
        group, zeros, pdl = fmt.group_size, fmt.zeros, bool(r.pdl)
        r.limit_us = limit(r.m, r.n, r.k, group_size=group, has_zeros=zeros, pdl=pdl, device=device)
    return results


def run(
    shapes: Iterable[tuple[int, int]],
    ms: list[int],
    formats: list[Format],
    report: Report,
    budget: Budget,
    done: Callable[[Report], None] = lambda report: None,
) -> None:
    """Measure whole cells, the base and each format, until the budget is spent; `done` is called
    after each.
    """
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for n, k in shapes:
        weights = {fmt: prepared(n, k, fmt, l2_bytes) for fmt in (BASE, *formats)}
        for m in ms:
            if budget.spent():
                report.finished = False
                return
            for fmt, (q, scales, copies) in weights.items():
                problem = make_problem(m, q, scales, fmt.group_size)
                report.results += measured(problem, copies, fmt)
            done(report)
        del weights
        torch.cuda.empty_cache()


def ratios(report: Report) -> dict[str, dict[Key, float]]:
    """By candidate (a format, with or without PDL) and cell: its time over the base's."""
    found: dict[str, dict[Key, float]] = {}
    for key, cell in cells(report.results).items():
        for name, result in cell.items():
            base = cell.get(BASE.name + (PDL_SUFFIX if name.endswith(PDL_SUFFIX) else ""))
            if base is not None and base.us and result.us and result is not base:
                found.setdefault(name, {})[key] = result.us / base.us
    return found


def table_of(report: Report) -> Table:
    """The base's time and each format's over it, without dependent launch."""
    found = {name: r for name, r in ratios(report).items() if not name.endswith(PDL_SUFFIX)}
    table = Table(title="without PDL, cold L2: over f16.s.128", box=None, pad_edge=False)
    for name in ("N x K", "M", "f16.s.128, us", *found):
        table.add_column(name, justify="right")
    for (n, k, m), cell in cells(report.results).items():
        base = cell.get(BASE.name)
        values = [number(r.get((n, k, m)), 2) for r in found.values()]
        table.add_row(f"{n} x {k}", str(m), number(base.us if base else None), *values)
    return table


def summary(report: Report) -> Iterator[str]:
    """A line for each candidate: means, and how many cells are within 5 and 12 %."""
    for name, of_cells in ratios(report).items():
        values = list(of_cells.values())
        near = [sum(v <= bound for v in values) for bound in (1.05, 1.12)]
        yield (
            f"{name}: geometric mean {geometric_mean(values):.3f}, "
            f"median {statistics.median(values):.3f}, worst {max(values):.2f}; "
            f"{near[0]} of {len(values)} cells within 5 %, {near[1]} within 12 %"
        )


def show(report: Report, console: Console | None = None) -> None:
    console = console or Console(width=None if sys.stdout.isatty() else 220)
    console.print(table_of(report))
    for r in report.results:
        if r.status != "ok":
            text = f"{r.n} x {r.k} M = {r.m}: {r.candidate}: {r.status}"
            console.print(text, highlight=False, markup=False)
    for line in summary(report):
        console.print(line, highlight=False)
    if not report.finished:
        console.print("the time budget ended the run", highlight=False)


def main(
    shapes: Annotated[str, typer.Option(help="NxK or set names, by commas")] = SHAPES,
    ms: Annotated[str, typer.Option(help="batch sizes, by commas")] = MS,
    formats: Annotated[str, typer.Option(help="dtype.zeros.group, by commas")] = DEFAULT,
    budget: Annotated[float | None, typer.Option(help="seconds; stops cleanly")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="record")] = Path(
        "results/formats.json"
    ),
    replot: Annotated[
        Path | None, typer.Option(exists=True, help="a recorded JSON; measures nothing")
    ] = None,
) -> None:
    """Time the table's kernels of every format on this GPU, or show a recorded run again."""
    try:
        shape_list, m_list, chosen = parse_shapes(shapes), parse_ms(ms), parse_formats(formats)
        allowance = Budget(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if replot is not None:
        show(Report.load(replot))
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here; use --replot with a recorded JSON")
    report = Report("Weight formats", environment(), method=METHOD)

    def record(partial: Report) -> None:
        partial.save(json_path)
        last = partial.results[-1]
        key = last.n, last.k, last.m
        text = ", ".join(f"{name} {r[key]:.2f}" for name, r in ratios(partial).items() if key in r)
        print(f"{last.n} x {last.k} M = {last.m}: {text}", flush=True)

    run(shape_list, m_list, chosen, report, allowance, record)
    report.save(json_path)
    show(report)


if __name__ == "__main__":
    typer.run(main)
