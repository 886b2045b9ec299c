"""What is measured: weight shapes from text, from named models or from a config.json, and batch
sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Row counts at which tables are measured: a measurement decides for everything down to the next
# smaller one (generator/rows.py). 8 stands for decoding with one row: both read the weight once.
# Ends of row tiles of the tables that are built by default, and large products.
DEFAULT_MS = (
    *(8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256),
    *(512, 1024),
)


@dataclass(frozen=True, order=True)
class WeightShape:
    """A weight [k, n] of one device."""

    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer block that fix its linear layers."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_intermediate: int | None = None  # mixture of experts: one expert's hidden size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """From a config.json of transformers; ValueError names the key that is missing."""
        config = config.get("text_config", config)
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                hidden,
                config["intermediate_size"],
                heads,
                config.get("num_key_value_heads") or heads,
                config.get("head_dim") or hidden // heads,
                config.get("moe_intermediate_size"),
            )
        except KeyError as error:
            raise ValueError(f"the configuration lacks {error}") from None

    def layers(self, tp: int, fused: bool) -> Iterator[tuple[str, int, int]]:
        """(layer, n, k) on one of `tp` devices: columns of q, k, v, gate and up are shared out,
        rows of the output and down projections."""
        query = _share("heads", self.heads, tp) * self.head_dim
        keys = max(1, self.kv_heads // tp) * self.head_dim  # fewer heads than devices: replicated
        inner = _share("intermediate_size", self.intermediate, tp)
        if fused:
            yield "qkv", query + 2 * keys, self.hidden
        else:
            yield "q", query, self.hidden
            yield "k", keys, self.hidden
        yield "o", self.hidden, query
        yield from self._mlp("", inner, fused)
        if self.expert_intermediate:
            share = _share("moe_intermediate_size", self.expert_intermediate, tp)
            yield from self._mlp("expert ", share, fused)

    def _mlp(self, name: str, inner: int, fused: bool) -> Iterator[tuple[str, int, int]]:
        yield f"{name}gate_up" if fused else f"{name}gate", inner * (1 + fused), self.hidden
        yield f"{name}down", self.hidden, inner


MODELS = {
    "llama3-8b": Architecture(4096, 14336, 32, 8, 128),
    "llama3-70b": Architecture(8192, 28672, 64, 8, 128),
    "llama3-405b": Architecture(16384, 53248, 128, 8, 128),
    "llama2-7b": Architecture(4096, 11008, 32, 32, 128),
    "llama2-13b": Architecture(5120, 13824, 40, 40, 128),
    "mistral-7b": Architecture(4096, 14336, 32, 8, 128),
    "qwen2.5-7b": Architecture(3584, 18944, 28, 4, 128),
    "qwen2.5-14b": Architecture(5120, 13824, 40, 8, 128),
    "qwen2.5-32b": Architecture(5120, 27648, 40, 8, 128),
    "qwen2.5-72b": Architecture(8192, 29568, 64, 8, 128),
    "qwen3-8b": Architecture(4096, 12288, 32, 8, 128),
    "qwen3-32b": Architecture(5120, 25600, 64, 8, 128),
    "gemma2-9b": Architecture(3584, 14336, 16, 8, 256),
    "gemma2-27b": Architecture(4608, 36864, 32, 16, 128),
    "phi4-14b": Architecture(5120, 17920, 40, 10, 128),
}


def _share(name: str, value: int, tp: int) -> int:
    if value % tp:
        raise ValueError(f"{name}={value} is not a multiple of tp={tp}")
    return value // tp


@dataclass
class ShapePlan:
    """Shapes in the order in which they were asked for, and what was left out and why."""

    shapes: list[WeightShape]
    left_out: list[str]

    def add(self, n: int, k: int, group_size: int, what: str = "") -> None:
        """Keeps a shape once; one that its group size does not divide is left out by name."""
        shape = WeightShape(n, k)
        if group_size > 0 and k % group_size:
            where = f" ({what})" if what else ""
            self.left_out.append(f"{shape}{where}: k is not a multiple of group_size={group_size}")
        elif shape not in self.shapes:
            self.shapes.append(shape)


def plan_shapes(
    shapes: str = "",
    models: str = "",
    tp: str = "1",
    layers: str = "fused",
    group_size: int = 128,
) -> ShapePlan:
    """Shapes from 'NxK,...', and from models (names of MODELS, or paths of a config.json or of the
    folder that holds one) on each of the `tp` numbers of devices.

    layers: fused (qkv and gate with up, as serving engines run them), separate, or both. Raises
    ValueError for text that is none of these.
    """
    plan = ShapePlan([], [])
    for part in _parts(shapes):
        plan.add(*_parse_shape(part), group_size)
    if layers not in ("fused", "separate", "both"):
        raise ValueError(f"layers={layers!r} is not fused, separate or both")
    kinds = {"fused": (True,), "separate": (False,), "both": (True, False)}[layers]
    for name in _parts(models):
        architecture = load_model(name)
        for devices in parse_numbers(tp, "tp"):
            for fused in kinds:
                _add_model(plan, name, architecture, devices, fused, group_size)
    if not plan.shapes:
        detail = "; ".join(plan.left_out)
        raise ValueError(
            f"no shape to measure{': ' + detail if detail else ''}; give --shapes NxK,... or"
            " --models NAME,..."
        )
    return plan


def _add_model(
    plan: ShapePlan, name: str, architecture: Architecture, tp: int, fused: bool, group_size: int
) -> None:
    try:
        for layer, n, k in architecture.layers(tp, fused):
            plan.add(n, k, group_size, f"{layer} of {name}, tp={tp}")
    except ValueError as error:
        plan.left_out.append(f"{name}, tp={tp}: {error}")


def load_model(name: str) -> Architecture:
    """A named model, or the one that a config.json (or the folder with it) describes."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model {name!r} is neither a config.json nor one of {', '.join(MODELS)}")
    try:
        return Architecture.from_config(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_shape(text: str) -> tuple[int, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape {text!r} is not NxK with positive sizes, such as 4096x11008")
    return int(sizes[0]), int(sizes[1])


def parse_problem(text: str) -> tuple[int, int, int]:
    """(m, n, k) from 'MxNxK'; ValueError for anything else."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"problem {text!r} is not MxNxK with positive sizes, such as 16x4096x4096")
    m, n, k = map(int, sizes)
    return m, n, k


def parse_numbers(text: str, name: str) -> list[int]:
    """Ascending positive integers from '1,8,16'."""
    parts = _parts(text)
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}={text!r}: positive integers separated by commas are needed")
    return sorted({int(part) for part in parts})


def join(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
