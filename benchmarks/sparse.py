"""2:4-sparse INT4 beside dense INT4 and fp16, in one run on the same pruned weight.

    python benchmarks/sparse.py                                    # three shapes, M = 1 .. 256
    python benchmarks/sparse.py --shapes llama3-70b --ms 1,16,64 --budget 300

Columns: ours dense (without and with PDL), the best dense kernel of the Ampere family (of AMPERE:
python -m marlin_cutlass.jit NAME --arch sm_90a compiles one ahead), ours sparse (the table's
choice, without and with PDL, and the best of the built kernels of each sparse family), torch's
semi-structured fp16 weight, cuBLAS fp16.
How it measures: marlin_cutlass/bench.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.candidates import Cublas, Ours, Weight, our_call, poisoned
from benchmarks.peers import DTYPES
from benchmarks.shapes import parse_ms, parse_shapes
from marlin_cutlass import explain
from marlin_cutlass.bench import (
    METHOD,
    Budget,
    Candidate,
    Problem,
    Report,
    Result,
    dense_weight,
    environment,
    make_problem,
    make_weight,
    measure,
    pruned,
)
from marlin_cutlass.dispatch import Kernel, with_format
from marlin_cutlass.library import table_for_capability
from marlin_cutlass.sparse import pack_sparse

MS = "1,8,16,32,64,128,256"
SHAPES = "8192x8192,28672x8192,8192x28672"  # 27 to 120 MB of dense INT4
DTYPE_KEYS = {torch.float16: "f16", torch.bfloat16: "bf16"}
SPARSE, SPARSE_PDL, SEMI = "sparse", "sparse PDL", "torch 2:4 fp16"
BEST = {"best ampere": "ampere", "best mma.sp": "sparse", "best wgmma.sp": "hopper_sparse"}
# Geometries of the dense Ampere family that sparse kernels are held against (fp16, group 128).
AMPERE = (
    "m8_n128k256_w2x4_p4_striped_c2",
    "m16_n128k256_w2x4_p4_striped_c2",
    "m32_n128k128_w2x2_p4_striped_c2",
    "m64_n128k128_w2x2_p4_striped_c2",
    "m64_n256k128_w4x2_p6_striped_c1",
    "m128_n128k128_w4x2_p4_striped_c1",
    "m128_n256k128_w8x1_p4_striped_c1",
)
FASTEST = "best sparse"  # of both sparse families
RATIOS = {
    "sparse / ours": (SPARSE, "ours"),
    "both PDL": (SPARSE_PDL, "ours PDL"),
    "best / ours": (FASTEST, "ours"),
    "best / ampere": (FASTEST, "best ampere"),
}
COLUMNS = ("ours", "ours PDL", SPARSE, SPARSE_PDL, *BEST, SEMI, "cuBLAS fp16")


class Sparse:
    """The weight in the sparse layout."""

    def __init__(self, weight: Weight) -> None:
        packed = pack_sparse(weight.q, weight.scales, group_size=weight.group_size)
        count = weight.copies(packed.packed.numel())
        self.weights = [packed] + [packed.clone() for _ in range(count - 1)]

    def candidate(self, problem: Problem, pdl: bool, kernel: str | None = None) -> Candidate:
        """The calls of one PDL setting; `kernel` forces a variant by name."""
        out = poisoned(problem)
        calls = [our_call(problem.a, w, out, pdl, kernel) for w in self.weights]
        answer = explain(
            problem.m, problem.n, problem.k, problem.group_size, problem.dtype, sparse=True
        )
        name = kernel or (SPARSE_PDL if pdl else SPARSE)
        return Candidate(name, calls, pdl, note=kernel or answer.kernel or answer.why)


class SemiStructured:
    """`torch.sparse.to_sparse_semi_structured` of the dequantised weight: cuSPARSELt where torch
    has it, else CUTLASS."""

    def __init__(self, weight: Weight) -> None:
        from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

        SparseSemiStructuredTensor._FORCE_CUTLASS = not torch.backends.cusparselt.is_available()
        dense = dense_weight(weight.q, weight.scales).to(weight.scales.dtype)
        count = weight.copies(dense.numel() * 9 // 8)  # half the values and 2 bits for each
        self.weights = [to_sparse_semi_structured(dense) for _ in range(count)]
        self.backend = "CUTLASS" if SparseSemiStructuredTensor._FORCE_CUTLASS else "cuSPARSELt"

    def candidate(self, problem: Problem) -> Candidate:
        def call(w) -> Callable[[], torch.Tensor]:
            return lambda: torch.nn.functional.linear(problem.a, w)

        return Candidate(SEMI, [call(w) for w in self.weights], note=self.backend)


def near(m_tile: int, m: int) -> bool:
    """Whether a row tile is worth timing for m rows."""
    return min(m, 64) / 2 <= m_tile <= max(16, 2 * m)


def sparse_names(kernels: Iterable[Kernel], problem: Problem) -> Iterator[str]:
    """Built sparse kernels to time at one cell."""
    form = (DTYPE_KEYS[problem.dtype], problem.group_size, True)
    for kernel in kernels:
        if (kernel.dtype, kernel.group_size, kernel.sparse) == form and near(
            kernel.m_tile, problem.m
        ):
            yield kernel.name


def ampere_names(problem: Problem) -> Iterator[str]:
    """Dense Ampere kernels to time at one cell."""
    for geometry in AMPERE:
        name = with_format(
            f"w4a16_ampere_{geometry}", DTYPE_KEYS[problem.dtype], False, problem.group_size
        )
        if near(int(geometry.split("_")[0][1:]), problem.m):
            yield name


def cell(problem: Problem, dense: Ours, sparse: Sparse, others: list) -> list[Result]:
    """Everything timed at one (shape, M)."""
    kernels = table_for_capability(*torch.cuda.get_device_capability()).kernels
    candidates = [*dense.candidates(problem)]
    candidates += [sparse.candidate(problem, pdl) for pdl in (False, True)]
    candidates += [dense.candidate(problem, False, name) for name in ampere_names(problem)]
    names = sparse_names(kernels, problem)
    candidates += [sparse.candidate(problem, False, name) for name in names]
    for other in others:
        found = other.candidates(problem) if isinstance(other, Cublas) else other.candidate(problem)
        candidates += found if isinstance(found, list) else [found]
    return measure(candidates, problem)


def best(results: list[Result], family: str) -> Result | None:
    """The fastest of the kernels of `family` that were timed by name."""
    name = re.compile(rf"w4a16_{family}_(bf16|f16)_")
    timed = [r for r in results if name.match(r.candidate) and r.us]
    return min(timed, key=lambda r: r.us, default=None)


def columns(results: list[Result]) -> dict[str, Result | None]:
    """The results of one cell by column of the table."""
    named = {r.candidate: r for r in results if r.us}
    return {n: best(results, BEST[n]) if n in BEST else named.get(n) for n in COLUMNS}


def cells(results: list[Result]) -> dict[tuple[int, int, int], list[Result]]:
    grouped: dict[tuple[int, int, int], list[Result]] = {}
    for r in results:
        grouped.setdefault((r.n, r.k, r.m), []).append(r)
    return grouped


def table_of(report: Report) -> Table:
    """Microseconds by column, the best sparse kernel against dense, and its name."""
    table = Table(title="us per call, cold L2", box=None, pad_edge=False)
    for name in ("N x K", "M", *COLUMNS, *RATIOS):
        table.add_column(name, justify="right")
    table.add_column("best sparse kernel")
    for (n, k, m), results in cells(report.results).items():
        found = columns(results)
        timed = [r for r in (found["best mma.sp"], found["best wgmma.sp"]) if r]
        fastest = min(timed, key=lambda r: r.us, default=None)
        times = {name: r.us if r else None for name, r in found.items()}
        times[FASTEST] = fastest.us if fastest else None
        line = [f"{n} x {k}", str(m), *(_us(times[name]) for name in COLUMNS)]
        line += [_ratio(times[a], times[b]) for a, b in RATIOS.values()]
        table.add_row(*line, fastest.candidate if fastest else "-")
    return table


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else f"{value / base:.2f}"


def show(report: Report, console: Console | None = None) -> None:
    console = console or Console(width=None if sys.stdout.isatty() else 260)
    console.print(table_of(report))
    for r in report.results:
        if r.status != "ok":
            console.print(f"{r.n} x {r.k} M = {r.m}: {r.candidate}: {r.status}", highlight=False)
    for name, reason in report.skipped.items():
        console.print(f"skipped {name}: {reason}", highlight=False)


def _others(weight: Weight, report: Report) -> list:
    """The peers that can hold this weight; the others get a line in report.skipped."""
    found: list = []
    makers = {SEMI: lambda: SemiStructured(weight), Cublas.name: lambda: _cublas(weight)}
    for name, make in makers.items():
        try:
            found.append(make())
        except Exception as error:  # whatever a peer raises must not end the run
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            report.skipped[f"{name} at {weight.n} x {weight.k}"] = text
    return found


def _cublas(weight: Weight) -> Cublas:
    peer = Cublas()
    peer.prepare(weight)
    return peer


def run(shapes, ms, report: Report, budget: Budget, group_size: int, dtype, done) -> None:
    """Measure every cell until the budget is spent; `done` is called after each."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for n, k in shapes:
        codes, scales = make_weight(n, k, group_size=group_size, dtype=dtype)
        codes = pruned(codes)
        weight = Weight(codes, scales, group_size, l2_bytes)
        dense, sparse = Ours(), Sparse(weight)
        dense.prepare(weight)
        others = _others(weight, report)
        for m in ms:
            if budget.spent():
                report.finished = False
                return
            problem = make_problem(m, codes, scales, group_size)
            report.results += cell(problem, dense, sparse, others)
            done(report)
        del dense, sparse, others
        torch.cuda.empty_cache()


def main(
    shapes: Annotated[str, typer.Option(help="NxK or set names, by commas")] = SHAPES,
    ms: Annotated[str, typer.Option(help="batch sizes, by commas")] = MS,
    budget: Annotated[float | None, typer.Option(help="seconds; stops cleanly")] = None,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16")] = "fp16",
    group_size: Annotated[int, typer.Option(help="64, 128 or -1")] = 128,
    json_path: Annotated[Path, typer.Option("--json", help="record")] = Path("results/sparse.json"),
    replot: Annotated[
        Path | None, typer.Option(exists=True, help="a recorded JSON; measures nothing")
    ] = None,
) -> None:
    """Time dense and 2:4-sparse INT4 and torch's sparse fp16 on this GPU."""
    try:
        shape_list, m_list, allowance = parse_shapes(shapes), parse_ms(ms), Budget(budget)
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if replot is not None:
        show(Report.load(replot))
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here; use --replot with a recorded JSON")
    report = Report("2:4-sparse INT4 and its peers", environment(), method=METHOD)

    def record(partial: Report) -> None:
        partial.save(json_path)
        last = partial.results[-1]
        found = columns(cells(partial.results)[(last.n, last.k, last.m)])
        times = ", ".join(f"{name} {_us(r.us)}" for name, r in found.items() if r)
        print(f"{last.n} x {last.k} M = {last.m}: {times} us", flush=True)

    run(shape_list, m_list, report, allowance, group_size, DTYPES[dtype], record)
    report.save(json_path)
    show(report)


if __name__ == "__main__":
    typer.run(main)
