"""What is in a checkpoint folder and what will become of every tensor, decided from headers alone.

A plan names each quantised layer with its form, the tensors that pass through, and all problems at
once, before a byte of weight data is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint_scheme import Scheme, read_config, scheme_of
from .json_file import read_object
from .safetensors_stream import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"

# Tensors of a layer by scheme: required, optional.
TENSORS = {
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "compressed-tensors": (
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
    ),
    "marlin-24": (("weight_packed", "scale_packed", "meta"), ()),
    "marlin": (("B", "s"), ("workspace",)),
    "sparse-marlin": (("B_24", "s", "B_meta"), ("workspace",)),
}
ANCHOR = {name: required[0] for name, (required, _) in TENSORS.items()}
SCALES = {
    "compressed-tensors": "weight_scale",
    "marlin-24": "scale_packed",
    "marlin": "s",
    "sparse-marlin": "s",
}  # of the others: "scales"
EMBEDDING = re.compile(r"(^|[._])(embed\w*|wte|wpe|tok_embeddings|shared)($|[._])")


@dataclass
class LayerPlan:
    """One layer: its tensors by role -> (full name, shard)."""

    name: str
    tensors: dict[str, tuple[str, str]]
    scheme: Scheme
    shape: tuple[int, int]  # (K, N)
    experts: int | None = None
    note: str = ""


@dataclass
class Plan:
    """Everything the conversion will do, and why it may not start."""

    folder: Path
    scheme: Scheme
    config: dict
    shards: dict[str, dict[str, TensorInfo]]
    layers: list[LayerPlan] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)  # tensor -> shard
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recognise: bool = False  # quantised layers that have 2:4 sparsity are packed as such

    def info(self, tensor: str, shard: str) -> TensorInfo:
        """Header entry of a tensor."""
        return self.shards[shard][tensor]

    def bytes_in(self) -> int:
        """Bytes of all tensors read."""
        return sum(i.stop - i.start for infos in self.shards.values() for i in infos.values())


def list_shards(folder: Path) -> dict[str, dict[str, TensorInfo]]:
    """Headers of all safetensors files, checked against the index if there is one."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_NAME
    if index.is_file():
        names = _shard_names(index)
        missing = sorted(n for n in names if not (folder / n).is_file())
        if missing:
            raise FileNotFoundError(
                f"{folder}: the index names missing shards {', '.join(missing)}"
            )
        files = [f for f in files if f.name in names]
    if not files:
        hint = " (.bin files are pickles and are not read)" if list(folder.glob("*.bin")) else ""
        raise FileNotFoundError(f"{folder} holds no .safetensors file{hint}")
    return {f.name: read_header(f)[0] for f in files}


def _shard_names(index: Path) -> set[str]:
    """Files that an index names; ValueError where one would lie outside of the folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map that maps tensors to files")
    names = list(weight_map.values())
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{index} names {str(name)[:200]!r}: plain file names are required")
    return set(names)


def make_plan(folder: Path) -> Plan:
    """Read config and headers, find layers, check everything. Raises only for a folder that cannot
    be understood at all; everything else is listed in `problems`."""
    config = read_config(folder)
    plan = Plan(folder, scheme_of(config), config, list_shards(folder))
    where = {t: shard for shard, infos in plan.shards.items() for t in infos}
    if plan.scheme.name == "dense":
        plan.passed = where
        return plan
    used: set[str] = set()
    for layer in _find_layers(plan, where):
        used |= {name for name, _ in layer.tensors.values()}
        plan.layers.append(layer)
        plan.problems += _check_layer(plan, layer)
    roles = {r for group in TENSORS[plan.scheme.name] for r in group}
    _find_orphans(plan, where, used, roles)
    _check_tied(plan)
    if not plan.layers and not plan.problems:
        plan.problems.append(f"no tensor named *.{ANCHOR[plan.scheme.name]}: nothing is quantised")
    return plan


def _find_layers(plan: Plan, where: dict[str, str]) -> Iterator[LayerPlan]:
    scheme = plan.scheme
    anchor = "." + ANCHOR[scheme.name]
    required, optional = TENSORS[scheme.name]
    for tensor in where:
        if not tensor.endswith(anchor):
            continue
        prefix = tensor.removesuffix(anchor)
        found = {
            role: (f"{prefix}.{role}", where[f"{prefix}.{role}"])
            for role in (*required, *optional)
            if f"{prefix}.{role}" in where
        }
        shape, experts = _shape(plan, found)
        yield LayerPlan(prefix, found, scheme, shape, experts)


def _shape(plan: Plan, found: dict) -> tuple[tuple[int, int], int | None]:
    """Logical (K, N) and the number of stacked experts, from the anchor's header."""
    scheme = plan.scheme.name
    stored = plan.info(*found[ANCHOR[scheme]]).shape
    experts = stored[0] if len(stored) == 3 else None
    rows, columns = stored[-2:] if len(stored) >= 2 else (0, 0)
    shapes = {
        "gptq": (rows * 8, columns),
        "awq": (rows, columns * 8),
        "marlin": (rows * 16, columns // 2),
        "sparse-marlin": (rows * 32, columns // 2),
        "marlin-24": (rows * 32, columns // 2),
        "compressed-tensors": (columns * 8, rows),
    }
    return shapes[scheme], experts


def _check_layer(plan: Plan, layer: LayerPlan) -> list[str]:
    """All problems of one layer that its headers show."""
    required, _ = TENSORS[layer.scheme.name]
    out = []
    for role in required:
        optional_zeros = role == "qzeros" and layer.scheme.sym
        if role not in layer.tensors and not optional_zeros:
            out.append(f"{layer.name}: tensor {layer.name}.{role} is missing")
    asymmetric = layer.scheme.sym is False and layer.scheme.name == "compressed-tensors"
    if asymmetric and "weight_zero_point" not in layer.tensors:
        out.append(f"{layer.name}: tensor {layer.name}.weight_zero_point is missing")
    if EMBEDDING.search(layer.name):
        out.append(f"{layer.name}: a quantised embedding cannot be looked up; not supported")
    if layer.experts is not None and layer.scheme.name != "compressed-tensors":
        out.append(f"{layer.name}: stacked experts (3-D) are not defined for {layer.scheme.name}")
    k, n = layer.shape
    group = layer.scheme.group_size
    # compressed-tensors may pad K to a multiple of 8: only the reader knows the logical K.
    if group > 0 and k % group and layer.scheme.name != "compressed-tensors":
        out.append(f"{layer.name}: K={k}, N={n}: K={k} is not a multiple of group_size={group}")
    if "g_idx" in layer.tensors and (found := plan.info(*layer.tensors["g_idx"]).shape) != (k,):
        # The one header that shows other bits than 4 where there is one group per column.
        out.append(f"{layer.name}: g_idx has shape {list(found)}; [{k}] is required for 4 bits")
    out += _check_scale_shape(plan, layer)
    return out


def _check_scale_shape(plan: Plan, layer: LayerPlan) -> list[str]:
    k, n = layer.shape
    group = layer.scheme.group_size
    role = SCALES.get(layer.scheme.name, "scales")
    if role not in layer.tensors or (group > 0 and k % group) or layer.experts is not None:
        return []
    found = plan.info(*layer.tensors[role]).shape
    groups = 1 if group < 0 else k // group
    want = (n, groups) if role == "weight_scale" else (groups, n)
    scalar = groups == 1 and role == "weight_scale" and len(found) < 2
    if found == want or scalar:
        return []
    return [
        f"{layer.name}: {role} has shape {list(found)}; {list(want)} is required for"
        f" K={k}, N={n}, group_size={group}"
    ]


def _find_orphans(plan: Plan, where: dict[str, str], used: set[str], roles: set[str]) -> None:
    """Tensors without a layer: parts of one without codes are a problem, the rest pass."""
    anchor = ANCHOR[plan.scheme.name]
    names = {layer.name for layer in plan.layers}
    for tensor, shard in where.items():
        if tensor in used:
            continue
        prefix, _, role = tensor.rpartition(".")
        if role in roles and prefix not in names:
            plan.problems.append(f"{prefix}: tensor {prefix}.{anchor} is missing ({role} is there)")
        elif prefix in names and role != "bias":
            plan.unused.append(tensor)
        else:
            plan.passed[tensor] = shard


def _check_tied(plan: Plan) -> None:
    """A tied lm_head that is stored quantised would be thrown away by loaders: say so, untie it."""
    heads = [layer.name for layer in plan.layers if layer.name.split(".")[-1] == "lm_head"]
    if not heads:
        return
    plan.notes.append(f"{heads[0]}: converted (quantised output head)")
    if plan.config.get("tie_word_embeddings"):
        plan.notes.append(
            f"{heads[0]}: tie_word_embeddings is set to false, the embedding stays floating point"
        )
