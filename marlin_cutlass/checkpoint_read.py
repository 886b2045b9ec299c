"""Reading the layers of a planned checkpoint, one at a time, by plain reads."""

from __future__ import annotations

from pathlib import Path

import torch

from .checkpoint_plan import TENSORS, LayerPlan, Plan
from .formats import (
    QuantizedWeight,
    read_awq,
    read_compressed_tensors,
    read_gptq,
    read_marlin,
    read_marlin_24,
    read_sparse_marlin,
)
from .prune import prune_2_4
from .quantize.rtn import all_finite, quantize_rtn
from .safetensors_stream import TensorInfo

# Readers of 2:4-sparse layers, whose arguments are in the order of checkpoint_plan.TENSORS.
SPARSE = {"marlin-24": read_marlin_24, "sparse-marlin": read_sparse_marlin}


def read_tensor(path: Path, info: TensorInfo) -> torch.Tensor:
    """One tensor of a safetensors file in memory of its own.

    NOTE: not a memory map: pages of a map count as memory in use until the file is closed, which
    for a shard of 5 GB defeats the bound that streaming is for.
    """
    size = info.stop - info.start
    if not size:
        return torch.empty(info.shape, dtype=info.dtype)
    buffer = torch.empty(size, dtype=torch.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(info.start)
        view = memoryview(buffer.numpy())
        while view:
            got = file.readinto(view)
            if not got:
                raise ValueError(f"{path} is cut short")
            view = view[got:]
    return buffer.view(info.dtype).view(info.shape)


def read_layer(plan: Plan, layer: LayerPlan) -> list[QuantizedWeight]:
    """Decode one layer: one weight, or one per stacked expert. Errors name the layer."""
    parts = {
        role: read_tensor(plan.folder / shard, plan.info(tensor, shard))
        for role, (tensor, shard) in layer.tensors.items()
        if role != "workspace"
    }
    scheme = layer.scheme
    if scheme.name == "dense":
        return _read_dense(layer, parts["weight"])
    if scheme.name == "gptq":
        return [_read_gptq(layer, parts)]
    if scheme.name == "awq":
        return [
            read_awq(
                parts["qweight"],
                parts.get("qzeros"),
                parts["scales"],
                group_size=scheme.group_size,
                name=layer.name,
            )
        ]
    if scheme.name == "marlin":
        return [read_marlin(parts["B"], parts["s"], group_size=scheme.group_size, name=layer.name)]
    if scheme.name in SPARSE:
        values = (parts[role] for role in TENSORS[scheme.name][0])
        return [SPARSE[scheme.name](*values, group_size=scheme.group_size, name=layer.name)]
    if layer.experts is None:
        return [_read_ct(layer, parts)]
    shape = parts.pop("weight_shape", None)
    return [
        _read_ct(layer, {**{r: t[i] for r, t in parts.items()}, "weight_shape": shape})
        for i in range(layer.experts)
    ]


def _read_gptq(layer: LayerPlan, parts: dict) -> QuantizedWeight:
    scheme = layer.scheme
    return read_gptq(
        parts["qweight"],
        parts.get("qzeros"),
        parts["scales"],
        parts.get("g_idx"),  # whatever desc_act says: an index that orders nothing is dropped
        group_size=scheme.group_size,
        checkpoint_format=scheme.checkpoint_format,
        sym=scheme.sym,
        zero_rule=scheme.zero_rule,
        name=layer.name,
    )


def _read_ct(layer: LayerPlan, parts: dict) -> QuantizedWeight:
    scheme = layer.scheme
    return read_compressed_tensors(
        parts["weight_packed"],
        parts["weight_scale"],
        parts.get("weight_zero_point"),
        parts.get("weight_shape"),
        parts.get("weight_g_idx"),
        group_size=scheme.group_size,
        actorder=scheme.act_order,
        symmetric=scheme.sym,
        name=layer.name,
    )


def _read_dense(layer: LayerPlan, weight: torch.Tensor) -> list[QuantizedWeight]:
    options = layer.scheme.source
    scale_dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    if not all_finite(weight):
        raise ValueError(f"{layer.name}: the weight holds NaN or infinity")
    slabs = weight if weight.dim() == 3 else weight.unsqueeze(0)
    sparse = options["sparsity"] is not None
    return [
        quantize_rtn(
            prune_2_4(slab) if sparse else slab,
            layer.scheme.group_size,
            symmetric=options["symmetric"],
            clip=options["clip"],
            scale_dtype=scale_dtype,
            sparse=sparse,
        )
        for slab in slabs
    ]
