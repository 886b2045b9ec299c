"""`marlin-cutlass`: quantise, convert, inspect and verify models; build and measure kernels.

Exit codes: 0 done, 1 a check failed (verify), 2 the request cannot be carried out.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_print import layer_table, out, print_json, print_report

app = typer.Typer(
    name="marlin-cutlass",
    help="INT4-weight GEMM kernels: quantise, convert, inspect and verify models; build kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
err = Console(stderr=True)

CHECK_FAILED, USER_ERROR = 1, 2
# Conversions keep values: only the fp16 rounding of unusual scales is left. Quantising a weight
# moves it by 1/15 of the largest one, and by more where clipping pays.
TOLERANCE, DENSE_TOLERANCE = 1e-3, 0.5
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError)
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Method(str, Enum):
    """Quantisers."""

    rtn = "rtn"
    gptq = "gptq"


class Sparsity(str, Enum):
    """Pruning before or while rounding."""

    none = "none"
    two_of_four = "2:4"


class ActOrder(str, Enum):
    """Row order of gptq."""

    off = "off"
    on = "on"
    static = "static"


Source = Annotated[Path, typer.Argument(help="model folder (config.json and safetensors)")]
Target = Annotated[Path, typer.Argument(help="folder to write; appears whole or not at all")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing target folder")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress bar")]
GroupSize = Annotated[
    int, typer.Option("--group-size", "-g", help="32, 64, multiples of 128, or -1")
]
Workers = Annotated[int, typer.Option(min=1, help="layers packed at the same time")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


def _friendly(command: Callable) -> Callable:
    """User errors: one line on stderr, exit code 2; MARLIN_CUTLASS_DEBUG=1 shows the trace."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                command(*args, **kwargs)
        except typer.Exit:  # itself a RuntimeError
            raise
        except USER_ERRORS as error:
            if os.environ.get("MARLIN_CUTLASS_DEBUG") == "1":
                raise
            err.print("[red]error:[/red]", end=" ")
            err.print(
                str(error) or type(error).__name__, markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(USER_ERROR) from None

    return run


def _show_warning(message, *_args, **_kwargs) -> None:
    err.print("[yellow]warning:[/yellow]", end=" ")
    err.print(str(message), markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: marlin-cutlass quantize ./model ./model-int4 -g 128 --clip mse")
@_friendly
def quantize(
    source: Source,
    target: Target,
    method: Annotated[
        Method, typer.Option(help="rtn needs no data and streams; gptq needs texts")
    ] = Method.rtn,
    group_size: GroupSize = 128,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="gptq: text file, a sample per line, or .jsonl with 'text'; 'vocabulary': texts "
            "made of the tokenizer's words"
        ),
    ] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="integer zero points")] = False,
    clip: Annotated[str, typer.Option(help="auto, mse (rtn) or none")] = "auto",
    act_order: Annotated[ActOrder, typer.Option(help="gptq row order")] = ActOrder.off,
    refine: Annotated[
        int, typer.Option(min=0, help="gptq: passes over codes and scales after the sweep")
    ] = 4,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="gptq: weigh errors by what the model's output feels"),
    ] = False,
    reconstruct: Annotated[
        int,
        typer.Option(min=0, help="gptq: steps of learning each block's codes, scales and biases"),
    ] = 0,
    sparsity: Annotated[
        Sparsity, typer.Option(help="2:4 prunes half of the weights, for sparse kernels")
    ] = Sparsity.none,
    resume: Annotated[
        Path | None, typer.Option(help="gptq: folder that keeps finished layers")
    ] = None,
    workers: Workers = 2,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Quantise a floating-point model folder to INT4."""
    if clip not in ("auto", "mse", "none"):
        raise ValueError(f"--clip {clip}: auto, mse or none is required")
    pruned = None if sparsity is Sparsity.none else sparsity.value
    if method is Method.rtn:
        _no_gptq_options(
            calibration=calibration,
            resume=resume,
            act_order=act_order is not ActOrder.off,
            sensitivity=sensitivity,
            reconstruct=reconstruct,
        )
        from .checkpoint import convert_checkpoint

        report = convert_checkpoint(
            source,
            target,
            workers=workers,
            overwrite=overwrite,
            progress=not quiet,
            group_size=group_size,
            symmetric=not asymmetric,
            clip="mse" if clip == "mse" else None,
            sparsity=pruned,
        )
        return print_report(report, target, as_json)
    if calibration is None:
        raise ValueError("--method gptq needs --calibration FILE")
    from .quantize.folder import VOCABULARY, quantize_folder, read_texts

    made = str(calibration) == VOCABULARY and not calibration.exists()

    order = {"off": False, "on": True, "static": "static"}[act_order.value]
    result = quantize_folder(
        source,
        target,
        VOCABULARY if made else read_texts(calibration),
        overwrite=overwrite,
        group_size=group_size,
        symmetric=not asymmetric,
        clip=False if clip == "none" else "auto",
        act_order=order,
        refine=refine,
        sensitivity=sensitivity,
        reconstruct=reconstruct,
        sparsity=pruned,
        resume=None if resume is None else str(resume),
        progress=not quiet,
    )
    if as_json:
        return print_json(result.to_json())
    out.print(str(result), markup=False, highlight=False, soft_wrap=True)
    out.print(f"wrote {target}", highlight=False)


def _no_gptq_options(**given: Any) -> None:
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if named:
        raise ValueError(f"{', '.join(named)} only makes sense with --method gptq")


@app.command(epilog="Example: marlin-cutlass convert ./llama-gptq ./llama-mc --workers 4")
@_friendly
def convert(
    source: Source,
    target: Target,
    workers: Workers = 2,
    zero_rule: Annotated[
        str,
        typer.Option(help="how a GPTQ v1 zero point stored as 15 is read: word, nibble, sixteen"),
    ] = "word",
    sparsity: Annotated[
        Sparsity, typer.Option(help="2:4 packs layers that have it for sparse kernels")
    ] = Sparsity.none,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert a GPTQ, AWQ, compressed-tensors, MARLIN or Sparse-Marlin folder; the weights keep
    their values."""
    from .checkpoint import convert_checkpoint
    from .checkpoint_plan import make_plan

    if make_plan(source).scheme.name == "dense":
        raise ValueError(f"{source} is not quantised: use 'marlin-cutlass quantize'")
    report = convert_checkpoint(
        source,
        target,
        workers=workers,
        overwrite=overwrite,
        progress=not quiet,
        zero_rule=zero_rule,
        sparsity=None if sparsity is Sparsity.none else sparsity.value,
    )
    print_report(report, target, as_json)


@app.command(epilog="Example: marlin-cutlass inspect ./llama-mc --gpu H200 --m 1 --m 64")
@_friendly
def inspect(
    path: Annotated[Path, typer.Argument(help="model folder, or a file written by save()")],
    gpu: Annotated[
        str | None, typer.Option(help="show each layer's kernel on this GPU: H200, A100, sm_86 ...")
    ] = None,
    m: Annotated[
        list[int] | None, typer.Option(help="activation rows; repeatable (1, 16, 64)")
    ] = None,
    dtype: Annotated[str, typer.Option(help="activations: f16 or bf16")] = "f16",
    as_json: Json = False,
) -> None:
    """Show format, shapes and, for a GPU, the kernel of every layer. Reads headers only."""
    from .inspecting import add_kernels, inspect_path, to_json

    found = inspect_path(path)
    if gpu is not None:
        add_kernels(found, gpu, m or [1, 16, 64], dtype)
    if as_json:
        return print_json(to_json(found))
    out.print(
        f"{found.path}: {found.format}, {found.bytes / 1e6:.1f} MB, {len(found.layers)}"
        f" quantised layers, {found.other_tensors} other tensors",
        highlight=False,
        soft_wrap=True,
    )
    if found.layers:
        out.print(layer_table(found.layers))
    for problem in (*found.problems, *found.notes):
        out.print(problem, markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: marlin-cutlass verify ./llama-gptq ./llama-mc")
@_friendly
def verify(
    source: Source,
    target: Annotated[Path, typer.Argument(help="converted folder")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="largest difference allowed, relative to the layer's largest weight"
            " (default 1e-3; 0.5 where the source is floating point)"
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Dequantise both folders and compare, layer by layer; exit code 1 if any differs too much."""
    from .checkpoint_verify import verify_checkpoint
    from .inspecting import DENSE, inspect_path
    from .progress import progress_bar

    if tolerance is None:
        tolerance = DENSE_TOLERANCE if inspect_path(source).format == DENSE else TOLERANCE
    with progress_bar(not quiet, len(inspect_path(target).layers), "verify") as tick:
        errors = verify_checkpoint(source, target, tick)
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    worst = max(errors.values(), default=0.0)
    if as_json:
        print_json({"layers": errors, "worst": worst, "tolerance": tolerance, "ok": not bad})
    else:
        for name, error in bad.items():
            out.print(f"{name}: {error:.3e}", markup=False, highlight=False)
        out.print(
            f"{len(errors)} layers compared, worst relative difference {worst:.3e}"
            f" ({'FAILED' if bad else 'ok'}, tolerance {tolerance:g})",
            highlight=False,
        )
    if bad:
        raise typer.Exit(CHECK_FAILED)


@app.command(epilog="Example: marlin-cutlass info --json")
@_friendly
def info(as_json: Json = False) -> None:
    """Show versions, kernel tables, compilers and GPUs of this installation."""
    from .explain import build_info

    data = build_info()
    if as_json:
        return print_json(json.dumps(data, indent=1, default=str))
    for key, value in data.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        out.print(f"{key:<22} {text}", markup=False, highlight=False, soft_wrap=True)


def _forward(name: str, module: str, arguments: list[str]) -> None:
    """Hand the arguments to another part's own command line (`app` or `main`)."""
    part = _import_part(name, module)
    if hasattr(part, "app"):
        return part.app(arguments, prog_name=f"marlin-cutlass {name}")
    if hasattr(part, "main"):
        code = part.main(arguments)
        raise typer.Exit(code if isinstance(code, int) else 0)
    raise ValueError(f"'{name}' has no command line in this installation: use its Python functions")


def _import_part(name: str, module: str):
    try:
        return importlib.import_module(f"marlin_cutlass.{module}")
    except ModuleNotFoundError as error:
        raise ValueError(f"'{name}' is not available in this installation: {error}") from None


def _forwarding_command(name: str, summary: str, module: str | None = None) -> None:
    @_friendly
    def command(ctx: typer.Context) -> None:
        _forward(name, module or name, ctx.args)

    command.__doc__ = summary
    app.command(name, context_settings=FORWARDED, help=summary)(command)


_forwarding_command("bench", "Time kernels against FP16 on this machine's GPU.", "cli_bench")
_forwarding_command("explore", "Compile, check and time kernel variants for one shape.")
_forwarding_command("tune", "Find the best kernel for a model's shapes and extend the table.")
_forwarding_command("profile", "Where the time of one kernel goes.")


@app.command(context_settings=FORWARDED)
@_friendly
def build(ctx: typer.Context) -> None:
    """Compile kernels: build.py with the same options (needs a source checkout and nvcc)."""
    script = Path(__file__).resolve().parent.parent / "build.py"
    if not script.is_file():
        raise ValueError(f"{script} does not exist: kernels are built from a source checkout")
    raise typer.Exit(subprocess.call([sys.executable, str(script), *ctx.args]))


if __name__ == "__main__":
    app()
