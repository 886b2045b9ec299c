"""The small kernels of `llm.py` by themselves: us per launch, and attention for each size of tile.

    python benchmarks/llm_small.py --model llama2-7b --batches 1,16,64

A CUDA graph of many launches behind one another, over as many caches as exceed the L2 cache twice;
the median of its replays. With PDL a launch overlaps the one before it, as in a step. Each tile's
result is compared with plain torch first. llm_attention.TILES_* hold what was chosen.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import llm_attention, llm_kernels
from benchmarks.llm import MODELS, clock, configuration
from benchmarks.llm_model import head_dim, record

ONE = (  # keys, warps, tiles in flight
    (64, 2, 1), (32, 2, 1), (32, 2, 2), (16, 1, 1), (16, 1, 2), (8, 1, 1), (8, 1, 2),
)  # fmt: skip
GROUP = ((128, 8), (128, 4), (64, 4), (64, 2), (32, 4), (32, 2), (16, 1))  # keys, warps
LENGTH, POSITION = 136, 96  # of the cache, as llm.py has it; of the new token
LAUNCHES, REPLAYS = 48, 7
MAX_ERROR = 5e-3


def us_per_launch(launches: list[Callable[[], object]]) -> float:
    """Median over replays of a graph of all launches; the first replay warms up."""
    graph = record(lambda: [launch() for launch in launches], warm_up=1)
    times = []
    for _ in range(REPLAYS + 1):
        now = clock(torch.device("cuda"))
        start = now()
        graph.replay()
        times.append(now() - start)
    return 1e3 * statistics.median(times[1:]) / len(launches)


class Attention:
    """Random inputs of one step of a model at one batch size."""

    def __init__(self, config, batch: int) -> None:
        self.dim, kv_heads = head_dim(config), config.num_key_value_heads
        self.group = config.num_attention_heads // kv_heads
        shape = (batch, kv_heads, LENGTH, self.dim)
        device = torch.device("cuda")
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(LAUNCHES, max(2, math.ceil(2 * l2 / (4 * math.prod(shape)))))
        make = {"device": device, "dtype": torch.float16}
        self.caches = [
            (torch.randn(shape, **make), torch.randn(shape, **make)) for _ in range(count)
        ]
        self.qkv = torch.randn(batch, (self.group + 2) * kv_heads * self.dim, **make)
        self.start = torch.tensor([POSITION], device=device)
        angle = torch.rand(LENGTH, self.dim // 2, device=device)
        self.place = (self.start, 1, angle.cos(), angle.sin(), None, 1e-6)

    def launch(self, i: int) -> Tensor:
        """One call on cache i, modulo their number."""
        return llm_attention.attention(self.qkv, *self.place, *self.caches[i % len(self.caches)])

    def expected(self) -> Tensor:
        """Plain torch's result on cache 0."""
        cache = [part.clone() for part in self.caches[0]]
        q = llm_attention._rope_cache_torch(self.qkv, *self.place, *cache)
        return llm_attention.attend(q, *cache, self.start, 1)

    def row(self, tile: tuple[int, ...]) -> str:
        """us per launch with a tile of ONE or GROUP, or why there is none."""
        chosen = llm_attention.TILES_ONE, llm_attention.TILES_GROUP
        llm_attention.TILES_ONE = llm_attention.TILES_GROUP = ((math.inf, tile),)
        try:
            error = float((self.launch(0) - self.expected()).abs().max())
            if not error < MAX_ERROR:
                return f"wrong: {error:.1e}"
            return f"{us_per_launch([lambda i=i: self.launch(i) for i in range(LAUNCHES)]):.2f}"
        except Exception as error:  # a tile that does not compile must not end the run
            return type(error).__name__
        finally:
            llm_attention.TILES_ONE, llm_attention.TILES_GROUP = chosen


def others(config, batch: int) -> dict[str, Callable[[], object]]:
    """The other small kernels on random rows."""
    make = {"device": "cuda", "dtype": torch.float16}
    x = torch.randn(batch, config.hidden_size, **make)
    total, weight = torch.randn_like(x), torch.ones(config.hidden_size, **make)
    wide = torch.randn(batch, 2 * config.intermediate_size, **make)
    logits = torch.randn(batch, config.vocab_size, **make)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    start = torch.zeros(1, dtype=torch.int64, device="cuda")
    return {
        "add_norm": lambda: llm_kernels.add_norm(x, total, weight, 1e-6),
        "silu_mul": lambda: llm_kernels.silu_mul(wide),
        "next_token": lambda: llm_kernels.next_token(logits, ids, start, 1),
    }


@torch.no_grad()
def main(
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "llama2-7b",
    batches: Annotated[str, typer.Option(help="batch sizes, by commas")] = "1,16,64",
    pdl: Annotated[str, typer.Option(help="early, late, off; auto")] = "auto",
) -> None:
    """Times of the small kernels."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU here")
    llm_kernels.set_pdl(pdl)
    sizes, config = [int(b) for b in batches.split(",")], configuration(model)
    table = Table(title=f"{model}, us per launch, PDL {llm_kernels.pdl_text()}")
    for name in ("kernel", *(f"batch {b}" for b in sizes)):
        table.add_column(name, justify="right")
    rows: dict[str, list[str]] = {}
    for batch in sizes:
        for name, launch in others(config, batch).items():
            rows.setdefault(name, []).append(f"{us_per_launch([launch] * LAUNCHES):.2f}")
        inputs = Attention(config, batch)
        for tile in (*ONE, *GROUP) if inputs.group == 1 else GROUP:
            name = "attention" + "".join(
                f", {n} {what}" for n, what in zip(tile, ("keys", "warps", "tiles"))
            )
            rows.setdefault(name, []).append(inputs.row(tile))
        del inputs
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
