"""Where the time of a decode step goes, by kind of kernel: for `llm.py --profile`.

The profiler's time line of a few replays, in which kernels overlap: one that waits for another
counts as running. So each kind has two figures: `busy`, the sum of its kernels' times, and `alone`,
the time by which its kernels moved the end of the line. The second adds up, with the gaps, to the
length of the line. The profiler itself costs time: the table shows what a step takes without it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

REPLAYS = 5
GAP = "no kernel"
KINDS = (  # the first that is found in a kernel's name
    ("our gemm", r"^w4a16_"),
    ("norm", r"_add_norm"),
    ("attention", r"_decode_one|_decode_group"),
    ("silu", r"_silu_mul"),
    ("argmax", r"_argmax"),
    ("sum over GPUs", r"nccl|all_reduce|symm"),
    ("cuBLAS", r"nvjet|cublas|cutlass|gemv|gemm|splitk"),
)


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; "other" for what is none of ours."""
    return next((kind for kind, text in KINDS if re.search(text, name, re.IGNORECASE)), "other")


def shares(events: Iterable[tuple[str, float, float]], replays: int = 1) -> dict[str, Any]:
    """(name, start, duration) of kernels -> {kind: {"count", "busy", "alone"}} of one replay."""
    rows: dict[str, dict[str, float]] = {}
    line = None
    for name, start, duration in sorted(events, key=lambda event: event[1] + event[2]):
        end = start + duration
        line = start if line is None else line
        row = rows.setdefault(kind_of(name), {"count": 0, "busy": 0.0, "alone": 0.0})
        row["count"] += 1 / replays
        row["busy"] += duration / replays
        row["alone"] += (end - max(start, line)) / replays
        if start > line:
            gap = rows.setdefault(GAP, {"count": 0, "busy": 0.0, "alone": 0.0})
            gap["count"] += 1 / replays
            gap["alone"] += (start - line) / replays
        line = end
    return rows


def profile(step: Callable[[], None], replays: int = REPLAYS) -> dict[str, Any]:
    """`shares` of step() on the GPU, in microseconds; empty if the profiler may not look."""
    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(replays):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [(e["name"], e["ts"], e["dur"]) for e in trace if e.get("cat") in kinds]
    return shares(events, replays)


def profile_table(title: str, rows: dict[str, Any]) -> Table:
    """A row per kind, the longest first."""
    table = Table(title=title, title_justify="left")
    table.add_column("kernels")
    for name in ("launches", "busy, us", "alone, us"):
        table.add_column(name, justify="right")
    for kind, row in sorted(rows.items(), key=lambda item: -item[1]["alone"]):
        table.add_row(kind, f"{row['count']:.0f}", f"{row['busy']:.0f}", f"{row['alone']:.0f}")
    total = sum(row["alone"] for row in rows.values())
    launches = sum(row["count"] for kind, row in rows.items() if kind != GAP)
    table.add_row("all", f"{launches:.0f}", "", f"{total:.0f}")
    return table
