"""Record, tables and plot of `llm.py`; works on a recorded JSON without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.llm_profile import profile_table

SCHEMA = 1
BASE, OURS = "fp16", "int4"
# MARLIN paper, Table 1: speed-up over FP16 of vLLM with MARLIN, 64 in / 64 out, Llama-2-7B on A10.
PAPER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PAPER = {
    "Llama-2-7B, A10 (Table 1)": (2.93, 3.19, 3.02, 2.90, 2.74, 2.26, 1.78, 1.20),
    "Llama-2-7B, A10, tokens 2-64 (Fig. 13)": (3.00, 3.05, 2.96, 2.83, 2.61, 2.22, 1.70, 1.19),
    "Llama-2-70B, 2 x A100 (Table 1)": (2.55, 2.59, 2.57, 2.53, 2.42, 2.08, 1.52, 1.19),
}


@dataclass
class Cell:
    """One model in one precision at one batch size. Bytes are those of one GPU."""

    model: str
    kind: str
    batch: int
    gpus: int
    tokens_in: int
    tokens_out: int
    prefill_ms: float | None = None  # the prompt, and with it the first new token
    decode_ms: float | None = None  # all other new tokens
    linear_bytes: int = 0  # linear layers without the output head
    weight_bytes: int = 0  # with embedding and output head
    read_bytes: int = 0  # what a decode step reads: linear layers and output head
    peak_bytes: int = 0
    cosine: float | None = None
    profile: dict[str, Any] | None = None  # of a decode step, as llm_profile.shares
    pins: list[str] | None = None  # kernels pinned by what a step takes, and what that gained
    status: str = "ok"

    @property
    def ms_per_token(self) -> float | None:
        """Time of one decode step."""
        return None if self.decode_ms is None else self.decode_ms / (self.tokens_out - 1)

    @property
    def total_ms(self) -> float | None:
        if self.decode_ms is None or self.prefill_ms is None:
            return None
        return self.prefill_ms + self.decode_ms

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens of all sequences over the whole time, prompt included."""
        return self.total_ms and 1e3 * self.batch * self.tokens_out / self.total_ms

    @property
    def bandwidth(self) -> float | None:
        """Weight bytes over the time of a decode step, in TB/s."""
        return self.ms_per_token and self.read_bytes / self.ms_per_token / 1e9

    def line(self) -> str:
        """One line of progress."""
        head = f"{self.model} {self.kind} batch {self.batch}"
        if self.decode_ms is None:
            return f"{head}: {self.status}"
        return (
            f"{head}: {self.ms_per_token:.3f} ms per token, {self.tokens_per_s:.0f} tokens/s,"
            f" prefill {self.prefill_ms:.2f} ms, {self.bandwidth:.2f} TB/s of weights"
        )


@dataclass
class LlmReport:
    """A whole run."""

    environment: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    finished: bool = True

    def save(self, path: str | Path) -> Path:
        """JSON, written aside and renamed."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        derived = ("ms_per_token", "tokens_per_s", "bandwidth")
        rows = [asdict(c) | {name: getattr(c, name) for name in derived} for c in self.cells]
        data = {
            "schema": SCHEMA,
            "environment": self.environment,
            "finished": self.finished,
            "skipped": self.skipped,
            "cells": rows,
        }
        aside = path.with_suffix(path.suffix + ".part")
        aside.write_text(json.dumps(data, indent=1) + "\n")
        aside.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LlmReport:
        """Read a record; ValueError for another schema."""
        data = json.loads(Path(path).read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema={data.get('schema')} in {path}: this version reads {SCHEMA}")
        names = Cell.__dataclass_fields__
        cells = [Cell(**{k: v for k, v in row.items() if k in names}) for row in data["cells"]]
        return cls(data["environment"], cells, data["skipped"], data["finished"])

    def find(self, model: str, kind: str, batch: int) -> Cell | None:
        """The measured cell, if there is one."""
        for c in self.cells:
            if (c.model, c.kind, c.batch) == (model, kind, batch) and c.decode_ms is not None:
                return c
        return None

    def models(self) -> list[str]:
        return list(dict.fromkeys(c.model for c in self.cells))

    def batches(self, model: str) -> list[int]:
        return sorted({c.batch for c in self.cells if c.model == model})

    def speedup(self, model: str, batch: int, decode: bool = False) -> float | None:
        """FP16's time over ours: of the whole generation, or of the decode steps."""
        base, ours = self.find(model, BASE, batch), self.find(model, OURS, batch)
        if base is None or ours is None:
            return None
        name = "decode_ms" if decode else "total_ms"
        return getattr(base, name) / getattr(ours, name)


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def model_table(report: LlmReport, model: str) -> Table:
    """A row per batch size: time per token, tokens/s, speed-up."""
    env = report.environment
    first = next(c for c in report.cells if c.model == model)
    gpu = f"{env.get('gpus', 1)} x {env.get('gpu') or 'no GPU'}"
    title = f"{model}, {first.tokens_in} tokens in / {first.tokens_out} out, {gpu}"
    table = Table(title=title, caption=f"torch {env.get('torch')}, {env.get('date')}")
    for head in ("batch", "fp16 ms/token", "int4 ms/token", "fp16 tokens/s", "int4 tokens/s"):
        table.add_column(head, justify="right")
    for head in ("speed-up, all", "speed-up, decode", "int4 TB/s"):
        table.add_column(head, justify="right")
    for batch in report.batches(model):
        pair = [report.find(model, kind, batch) for kind in (BASE, OURS)]
        table.add_row(
            str(batch),
            *(_text(c and c.ms_per_token, 3) for c in pair),
            *(_text(c and c.tokens_per_s, 0) for c in pair),
            _text(report.speedup(model, batch)),
            _text(report.speedup(model, batch, decode=True)),
            _text(pair[1] and pair[1].bandwidth),
        )
    return table


def paper_table(report: LlmReport) -> Table:
    """Speed-up of the whole generation by batch size, beside the paper's."""
    table = Table(title="speed-up over FP16, whole generation", caption="paper: vLLM, its GPUs")
    table.add_column("model")
    for batch in PAPER_BATCHES:
        table.add_column(str(batch), justify="right")
    for model in report.models():
        table.add_row(model, *(_text(report.speedup(model, b)) for b in PAPER_BATCHES))
    table.add_section()
    for name, values in PAPER.items():
        table.add_row(name, *(f"{v:.2f}" for v in values))
    return table


def memory_lines(report: LlmReport) -> list[str]:
    """Bytes of the weights of each model, and their ratio."""
    lines = []
    for model in report.models():
        pair = [next((c for c in report.cells if (c.model, c.kind) == (model, k)), None)
                for k in (BASE, OURS)]  # fmt: skip
        known = [c for c in pair if c is not None]
        text = ", ".join(
            f"{c.kind} {c.linear_bytes / 1e9:.2f} GB ({c.weight_bytes / 1e9:.2f} with embedding"
            f" and head, peak {c.peak_bytes / 1e9:.2f})"
            for c in known
        )
        ratio = ""
        if len(known) == 2:
            ratio = f"; linear layers {known[1].linear_bytes / known[0].linear_bytes:.3f}x,"
            ratio += f" all weights {known[1].weight_bytes / known[0].weight_bytes:.3f}x"
        lines.append(f"{model}, one GPU: {text}{ratio}")
    return lines


def print_tables(report: LlmReport, console: Console) -> None:
    """All tables and remarks."""
    for model in report.models():
        console.print(model_table(report, model))
    if report.cells:
        console.print(paper_table(report))
    for c in report.cells:
        if c.profile:
            title = f"{c.model} {c.kind} batch {c.batch}: {1e3 * c.ms_per_token:.0f} us a step"
            console.print(profile_table(title + "; profiled:", c.profile))
    lines = memory_lines(report)
    lines += [f"skipped {name}: {reason}" for name, reason in report.skipped.items()]
    lines += [c.line() for c in report.cells if c.status != "ok"]
    if not report.finished:
        lines.append("the time budget ended the run early")
    for line in lines:
        console.print(line, highlight=False)


def plot(report: LlmReport, path: str | Path) -> Path:
    """Tokens/s and speed-up against batch size, a column of panels per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = report.models()
    if not models:
        raise ValueError("report has no cells: nothing to plot")
    figure, axes = plt.subplots(
        2, len(models), figsize=(4.2 * len(models), 6.4), squeeze=False, layout="constrained"
    )
    for column, model in enumerate(models):
        top, bottom = axes[0][column], axes[1][column]
        for kind in (BASE, OURS):
            cells = [report.find(model, kind, b) for b in report.batches(model)]
            points = [(c.batch, c.tokens_per_s) for c in cells if c]
            if points:
                top.loglog(*zip(*points), marker="o", label=kind, base=2)
        points = [(b, report.speedup(model, b)) for b in report.batches(model)]
        points = [p for p in points if p[1]]
        if points:
            bottom.semilogx(*zip(*points), marker="o", label="measured", base=2)
        name, values = next(iter(PAPER.items()))
        bottom.semilogx(PAPER_BATCHES, values, "--", color="grey", label=name, base=2)
        bottom.axhline(1, color="black", linewidth=0.5)
        top.set_title(model)
        top.set_ylabel("tokens/s")
        bottom.set_ylabel("speed-up over FP16")
        bottom.set_xlabel("batch")
        top.legend()
        bottom.legend(fontsize="small")
    env = report.environment
    figure.suptitle(f"{env.get('gpus', 1)} x {env.get('gpu') or 'no GPU'}, {env.get('date')}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path
