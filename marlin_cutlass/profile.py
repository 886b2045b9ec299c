"""`marlin-cutlass profile MxNxK`: one kernel under Nsight Compute, and what its counters mean.

    marlin-cutlass profile 16x4096x4096
    marlin-cutlass profile 16x4096x4096 --kernel w4a16_hopper_m16_n128k128_w2x1_p8_dp_c2

Nsight Compute (ncu) runs this module again as the program that it measures.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from marlin_cutlass.explore import full_names
from marlin_cutlass.explore_measure import Format
from marlin_cutlass.explore_shapes import parse_problem

KERNEL_PREFIX = "w4a16_"  # of our kernels' names, by which ncu finds them
WARM_UP = 2  # calls before the one that is measured
out = Console(soft_wrap=True, highlight=False)
MISSING = (
    "ncu (Nsight Compute) was not found: install it (package nsight-compute of the CUDA "
    "repository) or put it on PATH; without it, 'marlin-cutlass explore' shows time, GB/s and the "
    "share of the limit"
)
NO_PERMISSION = (
    "the driver does not let this user read counters (ERR_NVGPUCTRPERM): run as root, or load the "
    "nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
)


@dataclass(frozen=True)
class Counter:
    """A metric of ncu and how to read it."""

    metric: str
    title: str
    meaning: str


COUNTERS = (
    Counter("gpu__time_duration.sum", "time", "under ncu: clocks are locked, caches flushed"),
    Counter("dram__bytes_read.sum", "read from memory", "the packed weight, once, if all is well"),
    Counter(
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "memory",
        "near 90 %: bound by memory, nothing left to gain but fewer bytes",
    ),
    Counter(
        "lts__t_sector_hit_rate.pct",
        "L2 hits",
        "activations and partial sums hit, the weight's first read does not",
    ),
    Counter(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "tensor cores",
        "the bound at large M",
    ),
    Counter(
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "issue slots",
        "above 70 %: dequantisation instructions are the bound",
    ),
    Counter(
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "warps resident",
        "low is normal: few warps with deep pipelines hide latency",
    ),
    Counter(
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "wait for memory",
        "warps that wait for global memory, for each instruction issued",
    ),
    Counter(
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
        "wait at barriers",
        "high: stages too few, or k groups unbalanced",
    ),
    Counter(
        "l1tex__data_bank_conflicts_pipe_lsu.sum",
        "bank conflicts",
        "should be near nothing: the layout avoids them",
    ),
    Counter("launch__registers_per_thread", "registers", "of a thread"),
    Counter("launch__waves_per_multiprocessor", "waves", "just above a whole number is bad"),
)


def find_ncu(which: Callable[[str], str | None] = shutil.which) -> str:
    """Path of ncu; FileNotFoundError with what to do."""
    found = which("ncu")
    if found is None:
        raise FileNotFoundError(MISSING)
    return found


def command(ncu: str, child: Sequence[str]) -> list[str]:
    """ncu on this module's child, for the third call of one of our kernels."""
    return [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--kernel-name",
        f"regex:^{KERNEL_PREFIX}",
        "--launch-skip",
        str(WARM_UP),
        "--launch-count",
        "1",
        "--metrics",
        ",".join(c.metric for c in COUNTERS),
        sys.executable,
        "-m",
        "marlin_cutlass.profile",
        *child,
    ]


def parse(text: str) -> dict[str, tuple[str, str]]:
    """{metric: (value, unit)} of the one kernel in ncu's CSV; ValueError where there is none."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    rows = list(csv.reader(io.StringIO("\n".join(lines[start:])))) if start is not None else []
    if len(rows) < 3:
        raise ValueError("ncu measured no kernel; its last lines:\n" + "\n".join(lines[-8:]))
    names, units, values = rows[0], rows[1], rows[2]
    return {name: (value, unit) for name, unit, value in zip(names, units, values)}


def show(measured: dict[str, tuple[str, str]]) -> Table:
    """The counters that matter, with how to read them."""
    table = Table(title=measured.get("Kernel Name", ("", ""))[0], title_justify="left", box=None)
    for column, justify in (("counter", "left"), ("value", "right"), ("how to read it", "left")):
        table.add_column(column, justify=justify)
    for counter in COUNTERS:
        value, unit = measured.get(counter.metric, ("not on this GPU", ""))
        table.add_row(counter.title, _readable(value, unit), counter.meaning)
    return table


def _readable(value: str, unit: str) -> str:
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return value or "not on this GPU"
    if unit in ("ns", "nsecond"):
        return f"{number / 1e3:.2f} us"
    if unit == "byte":
        return f"{number / 1e6:.2f} MB"
    return f"{number:,.4g} {unit}".strip()


def run(argv: Sequence[str]) -> str:
    """ncu's output; RuntimeError with the reason where it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text:
        raise RuntimeError(NO_PERMISSION)
    if done.returncode:
        raise RuntimeError(
            f"ncu failed ({done.returncode}):\n" + "\n".join(text.splitlines()[-12:])
        )
    return text


def child(m: int, n: int, k: int, fmt: Format, kernel: str | None) -> None:
    """The measured program: a few cold calls of one kernel."""
    from marlin_cutlass.explore_gpu import GpuTimer
    from marlin_cutlass.library import table_for_capability

    timer = GpuTimer()
    copies = timer.open(n, k, fmt, m)
    if kernel is None:
        table = table_for_capability(*timer.device.capability)
        form = (fmt.group_size, fmt.dtype, fmt.zeros, timer.device.sms, fmt.sparse)
        try:
            kernel = table.select(m, n, k, *form)[0].name
        except LookupError as error:
            raise ValueError(f"{error}: name a kernel with --kernel") from None
    for i in range(WARM_UP + 1):
        timer.call(kernel, m, i % copies)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    problem: Annotated[str, typer.Argument(help="MxNxK, such as 16x4096x4096")],
    kernel: Annotated[
        str | None, typer.Option(help="name or geometry; default: what the table chooses")
    ] = None,
    dtype: Annotated[str, typer.Option(help="f16 or bf16")] = "f16",
    zeros: Annotated[bool, typer.Option("--zeros", help="zero points")] = False,
    group_size: Annotated[int, typer.Option(help="32, 64, 128 or -1")] = 128,
    sparse: Annotated[bool, typer.Option("--sparse", help="a 2:4-sparse weight")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print the counters as JSON")] = False,
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
) -> None:
    """Where the time of one kernel goes, by the GPU's own counters."""
    m, n, k = parse_problem(problem)
    fmt = Format(dtype, zeros, group_size, sparse)
    fmt.problem(m, n, k)  # names what no kernel serves
    if kernel is not None:
        (kernel,) = full_names([kernel], fmt)
    if inside:
        return child(m, n, k, fmt, kernel)
    arguments = [problem, "--inside", "--dtype", dtype, "--group-size", str(group_size)]
    arguments += ["--zeros"] if zeros else []
    arguments += ["--sparse"] if sparse else []
    arguments += ["--kernel", kernel] if kernel else []
    measured = parse(run(command(find_ncu(), arguments)))
    if json_:
        return print(json.dumps({name: list(pair) for name, pair in measured.items()}, indent=1))
    out.print(show(measured))


if __name__ == "__main__":
    from marlin_cutlass.cli import app as whole

    whole(["profile", *sys.argv[1:]], prog_name="python -m marlin_cutlass")
