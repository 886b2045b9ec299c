"""Comparing a converted folder with its source, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .checkpoint_plan import LayerPlan, Plan, make_plan
from .checkpoint_read import read_layer, read_tensor
from .packed_weight import PackedWeight
from .reference import dequantize
from .safetensors_stream import read_header


def verify_checkpoint(
    src: str | Path, dst: str | Path, tick: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Dequantise both sides, layer by layer: largest |difference| relative to the largest |weight|.

    A floating-point source gives the quantisation error instead, of the weights that are not 0
    where a layer was pruned on the way. Copied tensors must be equal
    bytes. Raises ValueError naming layers or tensors that are absent on one side.
    """
    dst = Path(dst)
    where = {t: f for f in dst.glob("*.safetensors") for t in read_header(f)[0]}
    forms = json.loads((dst / "config.json").read_text())["quantization_config"]["layers"]
    plan = make_plan(Path(src))
    if plan.scheme.name == "dense":
        _dense_from_forms(plan, forms)
    absent = sorted({x.name for x in plan.layers} ^ set(forms))
    absent += sorted(t for t in plan.passed if t not in where)
    if absent:
        raise ValueError(f"{src} and {dst} hold different tensors: {', '.join(absent[:8])}")
    errors = {}
    for layer in plan.layers:
        for i, weight in enumerate(_originals(plan, layer)):
            packed = _load_layer(layer, forms[layer.name], where, i)
            ours = dequantize(packed, torch.float32)
            if packed.sparse and plan.scheme.name == "dense":
                weight = weight * (ours != 0)
            difference = float((ours - weight).abs().max())
            error = difference / max(float(weight.abs().max()), 1e-30)
            errors[layer.name] = max(error, errors.get(layer.name, 0.0))
        tick(layer.name)
    _compare_passed(plan, where)
    return errors


def _dense_from_forms(plan: Plan, forms: dict) -> None:
    for name in forms:
        tensor = f"{name}.weight"
        if tensor in plan.passed:
            shard = plan.passed.pop(tensor)
            n, k = plan.info(tensor, shard).shape
            plan.layers.append(LayerPlan(name, {"weight": (tensor, shard)}, plan.scheme, (k, n)))


def _originals(plan: Plan, layer: LayerPlan) -> Iterator[torch.Tensor]:
    if layer.scheme.name == "dense":
        tensor, shard = layer.tensors["weight"]
        yield read_tensor(plan.folder / shard, plan.info(tensor, shard)).float().t()
    else:
        for weight in read_layer(plan, layer):
            yield weight.dequantize()


def _load_layer(layer: LayerPlan, form: dict, where: dict, expert: int) -> PackedWeight:
    state = {}
    for role in ("packed", "col_scale", "perm"):
        name = f"{layer.name}.{role}"
        if name in where:
            tensor = read_tensor(where[name], read_header(where[name])[0][name])
            state[role] = tensor[expert].contiguous() if layer.experts is not None else tensor
    return PackedWeight.from_state({**state, "metadata": form})


def _compare_passed(plan: Plan, where: dict) -> None:
    for tensor, shard in plan.passed.items():
        ours = read_tensor(where[tensor], read_header(where[tensor])[0][tensor])
        theirs = read_tensor(plan.folder / shard, plan.info(tensor, shard))
        if not torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
            raise ValueError(f"tensor {tensor} differs between the two folders")
