"""`marlin-cutlass explore MxNxK`: enumerate, compile, check and time variants for one problem.

    marlin-cutlass explore 16x4096x4096                        on this machine's GPU
    marlin-cutlass explore 16x4096x4096 --set stages=3..5 --html report.html
    marlin-cutlass explore 16x4096x4096 --gpu H200             no GPU: ranked by the cost model
    marlin-cutlass explore --paper --gpu A10                   the MARLIN paper's figures, modelled

What is not built is compiled into the JIT cache. Wrong kernels are named and excluded.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from generator.arch import ARCHS, Arch, Gpu, arch_for_capability, resolve_arch
from generator.collective import CollectiveVariant
from generator.cost import reference_gpu
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass import dispatch
from marlin_cutlass.collective import full_name, is_collective
from marlin_cutlass.explore_candidates import gpu_for, gpu_named
from marlin_cutlass.explore_measure import Format, Timer
from marlin_cutlass.explore_rows import Exploration, print_table
from marlin_cutlass.explore_shapes import parse_problem
from marlin_cutlass.explore_space import parse_overrides
from marlin_cutlass.explorer import COUNT, Explorer, err

PREFIX = "w4a16_"  # of every name; the ranking leaves it out
out = Console(soft_wrap=True, highlight=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def parse_seconds(text: str) -> float:
    """Seconds from '60', '60s' or '2m'; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"budget {text!r} is not a time such as 60s or 2m")
    return float(match[1]) * (1 if match[2] in (None, "s") else 60)


def find_timer() -> Timer | None:
    """The timer of this machine's GPU, or None where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return None
    from marlin_cutlass.explore_gpu import GpuTimer

    return GpuTimer()


def target(timer: Timer | None, arch: str | None, gpu: str | None) -> tuple[Arch, Gpu]:
    """Architecture and modelled GPU; ValueError where nothing says which."""
    if timer is not None:
        own = arch_for_capability(*timer.device.capability)
        return own, gpu_for(timer.device.name, own, timer.device.sms)
    if gpu is not None:
        found = gpu_named(gpu)
        named = resolve_arch(arch)[0] if arch not in (None, "native") else ARCHS[found.arch]
        if named.name != found.arch:
            raise ValueError(f"--gpu {gpu} is {found.arch}, not {named.name}")
        return named, found
    if arch in ("native", "all"):
        raise ValueError(f"--arch {arch}: no GPU here says which; name one, such as sm_86")
    if arch is not None:
        named = resolve_arch(arch)[0]
        return named, reference_gpu(named)
    raise ValueError("no GPU here: name one with --gpu, such as --gpu H200, to rank by the model")


def full_names(texts: Iterable[str], fmt: Format) -> tuple[str, ...]:
    """Names of variants from names, geometries, or geometries as the ranking shows them."""
    found = []
    for text in texts:
        name = text if text.startswith(PREFIX) else f"{PREFIX}{text}"
        if is_collective(name):
            name = full_name(name, fmt.dtype)
            CollectiveVariant.parse(name)
        else:
            if "_g" not in name:
                name = dispatch.with_format(name, fmt.dtype, fmt.zeros, fmt.group_size)
            Variant.parse(name)
        found.append(name)
    return tuple(found)


def check_writable(*paths: Path | None) -> None:
    """OSError for a file that cannot be written: said before the work is done, not after."""
    for path in filter(None, paths):
        place = next((p for p in path.absolute().parents if p.exists()), Path("/"))
        if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
            raise OSError(f"{path} cannot be written: it is a folder, or lies where none can be")


@app.command()
def main(
    problem: Annotated[str | None, typer.Argument(help="MxNxK, such as 16x4096x4096")] = None,
    arch: Annotated[str | None, typer.Option(help="without a GPU: such as sm_86")] = None,
    gpu: Annotated[str | None, typer.Option(help="rank by the model for A10, H200, ...")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KNOB=VALUES such as n_sm=128,256 or stages=3..5; repeatable"),
    ] = None,
    budget: Annotated[str, typer.Option(help="time for measuring, such as 60s or 2m")] = "60s",
    count: Annotated[int, typer.Option(min=1, help="variants to look at")] = COUNT,
    compile_: Annotated[
        int | None,
        typer.Option("--compile", min=0, help="compile at most so many of those not built"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="parallel compilations")] = None,
    dtype: Annotated[str, typer.Option(help="f16 or bf16")] = "f16",
    zeros: Annotated[bool, typer.Option("--zeros", help="zero points")] = False,
    group_size: Annotated[int, typer.Option(help="32, 64, 128 or -1")] = 128,
    sparse: Annotated[bool, typer.Option("--sparse", help="a 2:4-sparse weight")] = False,
    sweep: Annotated[bool, typer.Option(help="time against M of the best three")] = True,
    json_: Annotated[Path | None, typer.Option("--json", help="write everything as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="write one self-contained page")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="leave this variant out, by name; repeatable")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="print at most so many rows")] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="figures of the MARLIN paper from the model (A10)")
    ] = False,
) -> None:
    """Compile, check and time kernel variants for one shape."""
    if paper:
        from marlin_cutlass.explore_paper import figures

        return out.print(figures(gpu or "A10"), markup=False)
    if problem is None:
        raise ValueError("a problem MxNxK is needed, such as 16x4096x4096")
    shape = ProblemShape(*parse_problem(problem), group_size, dtype, zeros, sparse)
    seconds, overrides = parse_seconds(budget), parse_overrides(set_ or [])
    left_out = full_names(skip or (), Format.of(shape))
    check_writable(json_, html)
    timer = find_timer() if gpu is None else None
    where, model = target(timer, arch, gpu)
    explorer = Explorer(
        shape,
        where,
        model,
        overrides,
        timer,
        count,
        compile_,
        jobs,
        sweep,
    )
    explorer.skip, explorer.watched = left_out, True
    if model.arch != where.name:
        text = f"no GPU of {where.name} is modelled: the figures are of {model.name}"
        explorer.notes.append(text)
    started = time.monotonic()
    explorer.spent = lambda: time.monotonic() - started > seconds
    found = explorer.run()
    report(found, top, json_, html)
    err.print(f"{time.monotonic() - started:.1f} s")


def report(found: Exploration, top: int | None, json_: Path | None, html: Path | None) -> None:
    """The ranking, the near misses and the files."""
    print_table(found, out, top)
    space = found.space
    out.print(
        f"{space['legal']} legal variants on {found.arch}, {space['illegal']} combinations are not;"
        " beside the best prediction there is"
    )
    for miss in found.near_misses:
        out.print(f"  no {miss['knob']}={miss['value']}: {miss['reason']}", markup=False)
    best = next((row for row in found.rows if not row.refused), None)
    if best is not None:
        name = f"{PREFIX}{best.geometry}"
        out.print(f'to run one of them: marlin_cutlass.gemm(a, w, kernel="{name}")', markup=False)
    for note in found.notes:
        out.print(f"note: {note}", markup=False)
    if json_ is not None:
        found.save_json(json_)
        out.print(f"wrote {json_}")
    if html is not None:
        from marlin_cutlass.explore_page import save_page

        save_page(found, html)
        out.print(f"wrote {html}")


if __name__ == "__main__":
    from marlin_cutlass.cli import app as whole

    whole(["explore", *sys.argv[1:]], prog_name="python -m marlin_cutlass")
