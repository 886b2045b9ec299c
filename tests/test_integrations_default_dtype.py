"""Engines build and load models under another default dtype: nothing may depend on it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from integration_weights import random_layer

from marlin_cutlass import QuantLinear, dequantize, gemm, pack, quantize
from marlin_cutlass.sharding import fuse_columns, shard_columns, shard_rows, slice_columns


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def everything(layer, index):
    """Tensors of all kinds that packing, splitting, multiplying and quantising make."""
    weight = pack(layer.q, layer.scales, layer.zeros, group_size=layer.group_size, g_idx=index)
    out = {
        **weight.tensors(),
        "dense": dequantize(weight),
        "dense32": dequantize(weight, torch.float32),
    }
    a = torch.arange(2 * weight.k).view(2, -1).half() / weight.k
    out["product"] = gemm(a, weight)
    parts = {"column": shard_columns(weight, 1, 2), "slice": slice_columns(weight, 3, 70)}
    parts["fused"] = fuse_columns([weight, weight])
    if index is None:
        parts["row"] = shard_rows(weight, 1, 2)
    for name, part in parts.items():
        out |= {f"{name}.{role}": tensor for role, tensor in part.tensors().items()}
    made = quantize(layer.dense.t().contiguous(), group_size=layer.group_size)
    out |= {f"quantised.{role}": tensor for role, tensor in made.tensors().items()}
    empty = QuantLinear(weight.k, weight.n, True, group_size=layer.group_size)
    return out | {f"empty.{role}": tensor for role, tensor in empty.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group_size,zeros,act_order", [
    (64, False, False), (128, True, False), (32, True, True), (-1, False, False), (-1, True, False),
])  # fmt: skip
def test_nothing_depends_on_the_default_dtype(dtype, group_size, zeros, act_order):
    layer = random_layer(256, 128, group_size, zeros, act_order)
    index = layer.g_idx if act_order else None
    expected = everything(layer, index)
    with default_dtype(dtype):
        found = everything(layer, index)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
