"""Time on the host of one eager call: what a caller pays when the GPU is not the bottleneck.

    python benchmarks/host.py [--shape 4096x4096] [--m 1]

The operators, the Python function and the layer beside torch.nn.functional.linear and
torch.nn.Linear on the fp16 weight, in the same process; best of five loops. A host differs from
another, so read the ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.shapes import parse_shapes
from marlin_cutlass.bench import dense_weight, environment, host_time_us, make_weight

LINEAR = "torch.nn.functional.linear, fp16"


def calls(n: int, k: int, m: int, device: str = "cuda") -> dict[str, Callable[[], object]]:
    """What is timed, by name, on one random [k, n] weight and m rows."""
    from marlin_cutlass import QuantLinear, gemm, pack

    q, scales = make_weight(n, k, device=device)
    weight, dense = pack(q, scales, group_size=128), dense_weight(q, scales).half()
    a = torch.randn(m, k, device=device, dtype=torch.float16)
    form = (a, weight.packed, weight.col_scale, None, None, n, k, 128, False)
    operators = torch.ops.marlin_cutlass
    op, compact = operators.gemm.default, operators.gemm_compact.default
    compact_form = (a, weight.packed, weight.col_scale, weight.form)
    layer = QuantLinear.from_packed(weight)
    dense_layer = torch.nn.Linear(k, n, bias=False, device="meta")
    dense_layer.weight = torch.nn.Parameter(dense)
    return {
        LINEAR: lambda: torch.nn.functional.linear(a, dense),
        "torch.ops.marlin_cutlass.gemm": lambda: op(*form),
        "torch.ops.marlin_cutlass.gemm_compact": lambda: compact(*compact_form),
        "marlin_cutlass.gemm": lambda: gemm(a, weight),
        "torch.nn.Linear, fp16": lambda: dense_layer(a),
        "marlin_cutlass.QuantLinear": lambda: layer(a),
        "torch.empty": lambda: torch.empty(m, n, device=device, dtype=torch.float16),
    }


def table(times: dict[str, float], title: str) -> Table:
    """Microseconds and the ratio to F.linear."""
    shown = Table(title=title)
    for head, justify in (("call", "left"), ("us", "right"), ("of F.linear", "right")):
        shown.add_column(head, justify=justify)
    for name, us in times.items():
        shown.add_row(name, f"{us:.1f}", f"{us / times[LINEAR]:.2f}")
    return shown


def main(
    shape: Annotated[str, typer.Option(help="NxK")] = "4096x4096",
    m: Annotated[int, typer.Option(min=1, help="rows")] = 1,
) -> None:
    """Time eager calls on the host."""
    try:
        ((n, k),) = parse_shapes(shape)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here")
    with torch.inference_mode():
        times = {name: host_time_us(call) for name, call in calls(n, k, m).items()}
    env = environment()
    title = f"host time, {n} x {k}, M = {m}; {env['gpu']}, torch {env['torch']}, {env['date']}"
    Console(width=100).print(table(times, title))


if __name__ == "__main__":
    typer.run(main)
