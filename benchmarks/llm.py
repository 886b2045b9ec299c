"""End to end: decoders of real shape, 64 tokens in and 64 out, FP16 beside INT4 in one harness.

    python benchmarks/llm.py                                          # all models, batches 1..128
    python benchmarks/llm.py --models llama2-7b --batches 1,16,64 --budget 240
    python benchmarks/llm.py --models llama3-70b-half --gpus 2        # tensor parallel
    python benchmarks/llm.py --models llama2-7b --pin-step            # kernels by what a step takes
    python benchmarks/llm.py --models llama2-7b --pdl off --profile   # where the time goes
    python benchmarks/llm.py --replot results/llm.json                # tables and plot, no GPU

Weights are random and made on the GPU. The model is llm_model.py: the same fused small kernels
around cuBLAS (FP16) or our gemm (INT4), a static cache, and one decode step as a CUDA graph that
is replayed for every token; the prefill is a graph as well. Nothing is downloaded.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console

from benchmarks import llm_kernels
from benchmarks.llm_model import Decoder, Model, Shard, swiglu
from benchmarks.llm_parallel import launch, make_reduce
from benchmarks.llm_profile import profile
from benchmarks.llm_tables import Cell, LlmReport, plot, print_tables
from marlin_cutlass import pin_kernels, reference
from marlin_cutlass.bench import Budget, environment

TOKENS_IN = TOKENS_OUT = 64
REPEATS = 5  # the median counts
PIN_STEPS = 24  # that time one candidate of a pinned kernel
KINDS = ("fp16", "int4")
MIN_COSINE = 0.98  # of logits by prefill and by a captured step: random models amplify rounding
MAX_ERROR = 4e-3  # of a layer's product against the dequantised weight, relative to the largest

LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        **LLAMA3,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
    },
    # Half of the 80 layers, so that FP16 fits on one GPU as well.
    "llama3-70b-half": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        **LLAMA3,
    },
}


def configuration(name: str, layers: int | None = None) -> Any:
    """Transformers' configuration of a model in MODELS, by its name."""
    from transformers import LlamaConfig, Qwen3Config

    sizes = dict(MODELS[name])
    theta = sizes.pop("rope_theta", 10000.0)
    if layers:
        sizes["num_hidden_layers"] = layers
    kind = Qwen3Config if name.startswith("qwen3") else LlamaConfig
    rope = {"rope_type": "default", "rope_theta": theta}
    return kind(**sizes, rope_parameters=rope, max_position_embeddings=4096)


def clock(device: torch.device) -> Callable[[], float]:
    """Milliseconds between two calls, on the device's own timeline."""
    if device.type != "cuda":
        import time

        return lambda: time.perf_counter() * 1e3
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()

    def now() -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return zero.elapsed_time(event)

    return now


@torch.no_grad()
def check(model: Model) -> float:
    """Raises RuntimeError unless one layer's products and a decode step are right.

    Returns the cosine between the logits of a token by prefill and by a decode step.
    """
    for name in ("qkv", "gate_up", "down"):
        layer = getattr(model.layers[0], name)
        if not hasattr(layer, "dequantize"):
            continue
        x = torch.randn(4, layer.in_features, device=model.start.device).half()
        expected = x.float() @ layer.dequantize().float().t()
        if name == "gate_up":
            out, expected = swiglu(layer, x), reference.swiglu(expected)
        else:
            out = layer(x)
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        if not error < MAX_ERROR:
            raise RuntimeError(f"{name}: relative error {error:.1e} against the dense weight")
    device = model.start.device
    ids = torch.randint(0, model.config.vocab_size, (2, 9), device=device)
    model.allocate(2, 16)
    whole = model(ids).float()
    model.allocate(2, 16)
    model(ids[:, :8])
    step = model(ids[:, 8:]).float()
    cosine = float(torch.nn.functional.cosine_similarity(whole, step).min())
    if not cosine > MIN_COSINE:
        raise RuntimeError(f"a decode step gives other logits than prefill: cosine {cosine:.3f}")
    return cosine


@torch.no_grad()
def measure(model: Model, batch: int, options: dict[str, Any]):
    """(prefill ms, ms of the tokens behind the first), medians over options["repeats"] generations
    of options["tokens"] (in, out), and the profile of a step half-way if options["profile"]."""
    device = model.start.device
    (tokens_in, tokens_out), repeats = options["tokens"], options["repeats"]
    decoder = Decoder(model, batch, tokens_in + tokens_out + 8)
    prompt = torch.randint(0, model.config.vocab_size, (batch, tokens_in), device=device)
    decoder.prefill(prompt)
    if device.type == "cuda":
        decoder.capture(prompt if options.get("prefill_graph") else None)
    prefill, decode = [], []
    for i in range(repeats + 1):
        now = clock(device)
        start = now()
        decoder.prefill(prompt)
        middle = now()
        decoder.decode(tokens_out - 1)
        end = now()
        if i:  # the first one warms up
            prefill.append(middle - start)
            decode.append(end - middle)
    shares = None
    if options.get("profile") and device.type == "cuda":
        decoder.prefill(prompt)
        decoder.decode(tokens_out // 2)
        shares = profile(lambda: decoder.decode(1))  # {} where the profiler sees no kernel
    return statistics.median(prefill), statistics.median(decode), shares


def pin(model: Model, batch: int, tokens: tuple[int, int]) -> list[str]:
    """Pins kernels by what decode steps of `batch` sequences take; says which, and the gain."""
    steps = min(PIN_STEPS, tokens[1] - 1)
    options = {"tokens": (tokens[0], steps + 1), "repeats": 1}

    def seconds() -> float:
        _, milliseconds, _ = measure(model, batch, options)
        return milliseconds / steps / 1e3

    return [
        f"{p.out_features} x {p.in_features}: {p.kernel},"
        f" a step {p.table_seconds * 1e3:.3f} -> {p.seconds * 1e3:.3f} ms"
        for p in pin_kernels(model, batch, seconds)
        if p.kernel
    ]


def free() -> None:
    """Give back the memory of a model that nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run_model(
    name: str,
    config: Any,
    kind: str,
    options: dict[str, Any],
    report: LlmReport,
    budget: Budget,
    shard: Shard,
    device: torch.device,
    done: Callable[[LlmReport], None],
) -> None:
    """Every batch size of one model in one precision; errors become the status of a cell."""
    free()
    try:
        model = Model(config, kind, device, shard)
        cosine = check(model)
    except Exception as error:  # a model that fails must not end the run
        report.skipped[f"{name} {kind}"] = f"{type(error).__name__}: {str(error)[:300]}"
        return
    for batch in options["batches"]:
        if spent(budget, shard):
            report.finished = False
            break
        cell = Cell(name, kind, batch, shard.world, *options["tokens"], cosine=cosine)
        cell.linear_bytes, cell.weight_bytes = model.linear_bytes(), model.weight_bytes()
        cell.read_bytes = cell.linear_bytes + model.head.nbytes
        try:
            if options.get("pin") and kind == "int4" and device.type == "cuda":
                cell.pins = pin(model, batch, options["tokens"])
            cell.prefill_ms, cell.decode_ms, cell.profile = measure(model, batch, options)
        except Exception as error:
            cell.status = f"{type(error).__name__}: {str(error)[:300]}"
        if device.type == "cuda":
            cell.peak_bytes = torch.cuda.max_memory_allocated(device)
        report.cells.append(cell)
        done(report)


def spent(budget: Budget, shard: Shard) -> bool:
    """Whether to stop; every rank gives the same answer, that of rank 0."""
    if shard.world == 1:
        return budget.spent()
    answer = [budget.spent()]
    torch.distributed.broadcast_object_list(answer, 0)
    return answer[0]


def run(rank: int, world: int, options: dict[str, Any]) -> None:
    """One process of a run; only rank 0 prints and writes."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same prompts on every rank
    report = LlmReport(environment() | {"gpus": world})
    llm_kernels.set_pdl(options.get("pdl", "auto"))
    reduce, how = make_reduce(options["all_reduce"], world, device)
    graph = bool(options.get("prefill_graph")) and device.type == "cuda"
    report.environment |= {
        "all_reduce": how,
        "pdl": llm_kernels.pdl_text(),
        "prefill": "graph" if graph else "eager",
        "kernels": "pinned by a step" if options.get("pin") else "the table's",
    }
    budget, shard = Budget(options["budget"]), Shard(rank, world, reduce)
    console = Console(width=None if sys.stdout.isatty() else 160, quiet=rank != 0)

    def done(report: LlmReport) -> None:
        console.print(report.cells[-1].line(), highlight=False)
        if rank == 0:
            report.save(options["json"])

    for name in options["models"]:
        config = configuration(name, options["layers"])
        for kind in options["kinds"]:
            if spent(budget, shard):
                report.finished = False
                break
            run_model(name, config, kind, options, report, budget, shard, device, done)
    if rank == 0:
        report.save(options["json"])
        print_tables(report, console)
        if options["plot"]:
            console.print(f"plot: {plot(report, options['plot'])}")


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names by commas; ValueError for one that is not known."""
    names = list(known) if text == "all" else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{what}={name!r}: one of {', '.join(known)}, or all")
    return names


def main(
    models: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}; all")] = "all",
    batches: Annotated[str, typer.Option(help="batch sizes, by commas")] = "1,2,4,8,16,32,64,128",
    kinds: Annotated[str, typer.Option(help="fp16, int4; all")] = "all",
    budget: Annotated[float | None, typer.Option(help="seconds; stops cleanly")] = None,
    gpus: Annotated[int, typer.Option(help="tensor parallel over this many GPUs")] = 1,
    all_reduce: Annotated[str, typer.Option(help="auto, symm or nccl (several GPUs)")] = "auto",
    tokens_in: Annotated[int, typer.Option(help="prompt tokens")] = TOKENS_IN,
    tokens_out: Annotated[int, typer.Option(help="generated tokens")] = TOKENS_OUT,
    layers: Annotated[int | None, typer.Option(help="fewer layers, to try things out")] = None,
    repeats: Annotated[int, typer.Option(help="generations; the median counts")] = REPEATS,
    pdl: Annotated[
        str, typer.Option(help="when small kernels let the next start: early, late, off; auto")
    ] = "auto",
    prefill_graph: Annotated[bool, typer.Option(help="prefill as a CUDA graph")] = True,
    pin_step: Annotated[
        bool, typer.Option(help="INT4: kernels by what a step takes (pin_kernels)")
    ] = False,
    profile: Annotated[
        bool, typer.Option(help="a step by kind of kernel; may slow later cells down")
    ] = False,
    json: Annotated[Path, typer.Option(help="record, written after every cell")] = Path(
        "results/llm.json"
    ),
    plot_file: Annotated[Path | None, typer.Option("--plot", help="PNG or SVG")] = None,
    replot: Annotated[Path | None, typer.Option(exists=True, help="show a recorded run")] = None,
) -> None:
    """Decoders end to end, FP16 beside INT4."""
    if replot is not None:
        report = LlmReport.load(replot)
        console = Console(width=None if sys.stdout.isatty() else 160)
        print_tables(report, console)
        if plot_file:
            console.print(f"plot: {plot(report, plot_file)}")
        return
    if pin_step and gpus > 1:
        raise typer.BadParameter("--pin-step is for one GPU: ranks would choose different kernels")
    if layers is None and not torch.cuda.is_available():
        raise typer.BadParameter(
            "no GPU here; use --replot with a recorded JSON, or --layers 1 to try it out on the CPU"
        )
    try:
        llm_kernels.set_pdl(pdl)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = {
        "models": chosen(models, list(MODELS), "models"),
        "kinds": chosen(kinds, KINDS, "kinds"),
        "batches": [int(b) for b in batches.split(",")],
        "tokens": (tokens_in, tokens_out),
        "budget": budget,
        "layers": layers,
        "repeats": repeats,
        "json": json,
        "plot": plot_file,
        "all_reduce": all_reduce,
        "pdl": pdl,
        "prefill_graph": prefill_graph,
        "pin": pin_step,
        "profile": profile,
    }
    launch(run, gpus, options)


if __name__ == "__main__":
    typer.run(main)
