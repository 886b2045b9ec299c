"""`marlin-cutlass bench`: the dispatched kernel against torch's FP16 product, on this GPU."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from generator.problem import ProblemShape
from marlin_cutlass.explore_measure import Format

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
out = Console()

L2_FALLBACK = 64 << 20  # bytes; more than the L2 cache of any GPU up to the H200 (50 MB)


@app.command(epilog="Example: marlin-cutlass bench --n 4096 --k 4096 --m 1 --m 16")
def main(
    n: Annotated[int, typer.Option(help="weight columns (out_features)")] = 4096,
    k: Annotated[int, typer.Option(help="weight rows (in_features)")] = 4096,
    m: Annotated[list[int] | None, typer.Option(help="activation rows; repeatable")] = None,
    group_size: Annotated[int, typer.Option("--group-size", "-g")] = 128,
    bf16: Annotated[bool, typer.Option("--bf16", help="bfloat16 activations")] = False,
    sparse: Annotated[bool, typer.Option("--sparse", help="a 2:4-sparse weight")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Time the dispatched kernel against FP16, weights read from memory (method: bench.METHOD)."""
    fmt = Format("bf16" if bf16 else "f16", False, group_size, sparse)
    problems = [fmt.problem(i, n, k) for i in m or [1, 16, 64]]  # names what no kernel serves
    if not torch.cuda.is_available():
        raise ValueError("bench needs an NVIDIA GPU and a CUDA build of torch: none is available")
    rows = [_row(problem) for problem in problems]
    if as_json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1))
        return
    table = Table(title=f"N={n}, K={k}, {fmt} on {torch.cuda.get_device_name()}")
    for title in ("m", "INT4 us", "FP16 us", "speed-up", "relative error", "status"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*(_text(row[key]) for key in row))
    out.print(table)


def _text(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def _row(shape: ProblemShape) -> dict:
    from . import bench
    from .gemm import gemm
    from .pack import pack
    from .sparse import pack_sparse

    n, k, group_size = shape.n, shape.k, shape.group_size
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[shape.dtype]
    q, scales = bench.make_weight(n, k, group_size=group_size, dtype=dtype)
    q = bench.pruned(q) if shape.sparse else q
    problem = bench.make_problem(shape.m, q, scales, group_size)
    l2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", L2_FALLBACK)
    packed = (pack_sparse if shape.sparse else pack)(q, scales, group_size=group_size)
    copies = [packed.clone() for _ in range(bench.copies_for(packed.nbytes, l2))]
    dense = bench.dense_weight(q, scales).to(dtype).t()
    others = [dense.clone() for _ in range(bench.copies_for(2 * n * k, l2))]
    candidates = [
        bench.Candidate("int4", [lambda w=w: gemm(problem.a, w) for w in copies]),
        bench.Candidate("fp16", [lambda w=w: problem.a @ w for w in others]),
    ]
    int4, fp16 = bench.measure(candidates, problem)
    ratio = fp16.us / int4.us if int4.us and fp16.us else None
    return {
        "m": shape.m,
        "int4_us": int4.us,
        "fp16_us": fp16.us,
        "speed_up": ratio,
        "relative_error": int4.rel_error,
        "status": int4.status,
    }
