"""What is in a file or folder, and which kernel each layer would get on a GPU given by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint_plan import Plan, make_plan
from .checkpoint_read import SPARSE
from .checkpoint_scheme import FORMAT_NAME, read_config
from .files import check_metadata
from .layout import packed_bytes
from .safetensors_stream import read_header

DENSE = "floating point"  # format of a folder that is not quantised

# GPUs by marketing name; any other is given as sm_86, 90a, ...
GPU_ARCHS = {
    "A100": "sm_80",
    "A10": "sm_86",
    "A6000": "sm_86",
    "RTX3090": "sm_86",
    "RTX4090": "sm_89",
    "L4": "sm_89",
    "L40": "sm_89",
    "L40S": "sm_89",
    "H100": "sm_90",
    "H200": "sm_90",
    "GH200": "sm_90",
}


@dataclass
class LayerInfo:
    """One quantised layer. kernels: m -> kernel name, or the reason there is none."""

    name: str
    k: int
    n: int
    group_size: int
    zeros: bool | None
    act_order: bool | None
    experts: int | None = None
    sparse: bool = False
    kernels: dict[int, str] = field(default_factory=dict)


@dataclass
class Inspection:
    """Format, layers and problems of a file or folder."""

    path: str
    format: str
    layers: list[LayerInfo]
    other_tensors: int
    bytes: int
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def gpu_arch(name: str) -> str:
    """`H200`, `rtx 4090`, `sm_86`, `90a` -> an architecture that `explain` takes."""
    short = name.upper().replace(" ", "").replace("-", "").replace("_", "")
    if short in GPU_ARCHS:
        return GPU_ARCHS[short]
    digits = short.removeprefix("SM").rstrip("A")
    if digits.isdigit() and 2 <= len(digits) <= 3:
        return f"sm_{short.removeprefix('SM').lower()}"
    raise ValueError(f"GPU {name!r} is unknown: {', '.join(GPU_ARCHS)} or an arch such as sm_86")


def inspect_path(path: str | Path) -> Inspection:
    """Look at one of our files, or a folder in any readable format; only headers are read."""
    path = Path(path)
    if path.is_file():
        return _inspect_file(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist")
    quant = read_config(path).get("quantization_config") or {}
    if quant.get("quant_method") == FORMAT_NAME:
        return _inspect_ours(path, quant)
    return _inspect_plan(path, make_plan(path))


def _info(name: str, form: dict) -> LayerInfo:
    return LayerInfo(
        name,
        form["k"],
        form["n"],
        form["group_size"],
        form["has_zeros"],
        form.get("act_order"),
        form.get("experts"),
        bool(form.get("sparse", False)),
    )


def _inspect_file(path: Path) -> Inspection:
    tensors, metadata = read_header(path)
    forms = check_metadata(metadata, str(path))
    layers = []
    for name, form in forms.items():
        layer = _info(name, form)
        layer.act_order = f"{name}.perm" in tensors
        layers.append(layer)
    ours = {f"{n}.{r}" for n in forms for r in ("packed", "col_scale", "perm", "bias")}
    size = sum(t.stop - t.start for t in tensors.values())
    versions = {k: metadata[k] for k in ("format_version", "layout_version")}
    return Inspection(
        str(path), FORMAT_NAME, layers, len(set(tensors) - ours), size, details=versions
    )


def _inspect_ours(path: Path, quant: dict) -> Inspection:
    layers, other, size = [], 0, 0
    for file in sorted(path.glob("*.safetensors")):
        found = _inspect_file(file)
        layers += found.layers
        other += found.other_tensors
        size += found.bytes
    for layer in layers:
        layer.experts = quant["layers"].get(layer.name, {}).get("experts")
    details = {k: v for k, v in quant.items() if k != "layers"}
    return Inspection(str(path), FORMAT_NAME, layers, other, size, details=details)


def _inspect_plan(path: Path, plan: Plan) -> Inspection:
    scheme = plan.scheme
    zeros = None if scheme.sym is None else not scheme.sym
    form = (scheme.group_size, zeros, bool(scheme.act_order))
    sparse = scheme.name in SPARSE
    layers = [LayerInfo(x.name, *x.shape, *form, x.experts, sparse) for x in plan.layers]
    name = scheme.checkpoint_format if scheme.name == "gptq" else scheme.name
    return Inspection(
        str(path),
        DENSE if name == "dense" else name,
        layers,
        len(plan.passed),
        plan.bytes_in(),
        plan.problems,
        plan.notes,
        {k: v for k, v in scheme.source.items() if isinstance(v, (str, int, float, bool))},
    )


def add_kernels(found: Inspection, gpu: str, rows: Sequence[int], dtype: str = "f16") -> None:
    """Fill `kernels` of every layer for the given numbers of activation rows."""
    from .explain import explain

    arch = gpu_arch(gpu)
    known: dict[tuple, str] = {}
    for layer in found.layers:
        for m in rows:
            key = (m, layer.n, layer.k, layer.group_size, bool(layer.zeros), layer.sparse)
            if key not in known:
                try:
                    answer = explain(*key[:4], dtype, arch, bool(layer.zeros), sparse=layer.sparse)
                    known[key] = answer.kernel or answer.why
                except ValueError as error:
                    known[key] = str(error)
            layer.kernels[m] = known[key]


def packed_size(layer: LayerInfo) -> int:
    """Bytes of the layer's codes, scales and zero points in our layout."""
    one = packed_bytes(layer.k, layer.n, layer.group_size, bool(layer.zeros), layer.sparse)
    return one * (layer.experts or 1)


def to_json(found: Inspection) -> str:
    """The inspection as JSON text."""
    from dataclasses import asdict

    return json.dumps(asdict(found), indent=1)
