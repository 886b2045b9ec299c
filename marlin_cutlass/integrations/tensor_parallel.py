"""Tensor parallelism for `QuantLinear` by torch's own means: `parallelize_module` styles.

    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    parallelize_module(mlp, mesh, {"up": ColwiseQuant(), "down": RowwiseQuant()})
    tensor_parallel(model, mesh)  # a whole Transformers decoder, by the names of its layers

A column-parallel layer keeps a range of outputs, a row-parallel one a range of inputs and adds the
partial sums over the ranks. Every part holds the bits of its part of the whole. Any number of ranks
that divides the sizes works, row ranges must be whole groups, and gloo, NCCL and other backends do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ..nn import QuantLinear
from ..packed_weight import PackedWeight
from ..sharding import fuse_columns, shard_range, shard_rows_in_order, slice_columns
from .fused_mlp import FusedMLP

COLUMN_NAMES = r"(^|\.)(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3)$"
ROW_NAMES = r"(^|\.)(o_proj|down_proj|w2)$"


def _become(layer: QuantLinear, weight: PackedWeight, bias: Tensor | None) -> None:
    """Give `layer` other contents in place: its place in the model stays."""
    layer.in_features, layer.out_features = weight.k, weight.n
    layer.packed, layer.col_scale = weight.packed, weight.col_scale
    layer.register_buffer("perm", weight.perm)
    layer.register_buffer("bias", bias)


def shard_column(layer: QuantLinear, rank: int, world: int, parts: Sequence[int] = ()) -> None:
    """Keep this rank's outputs of `layer`, in place.

    parts: outputs of each of several fused layers (q, k, v), of each of which the rank keeps its
    range. Raises ValueError where world does not divide a size, or parts do not add up to N.
    """
    parts = list(parts) or [layer.out_features]
    if sum(parts) != layer.out_features:
        raise ValueError(f"parts={parts} add up to {sum(parts)}, not to N={layer.out_features}")
    first, ranges = 0, []
    for size in parts:
        start, stop = shard_range(size, rank, world, "N")
        ranges.append((first + start, first + stop))
        first += size
    weight = layer.weight_packed
    mine = [slice_columns(weight, start, stop) for start, stop in ranges]
    bias = layer.bias
    if bias is not None:
        bias = torch.cat([bias[start:stop] for start, stop in ranges])
    _become(layer, mine[0] if len(mine) == 1 else fuse_columns(mine), bias)


def shard_row(layer: QuantLinear, rank: int, world: int) -> Tensor | None:
    """Keep this rank's inputs of `layer`, in place; the bias stays on rank 0 only.

    Returns None, or for an act-order layer the features int64 [K / world] of the *whole* input that
    this rank multiplies: act-order spreads every group over all inputs.
    """
    weight, bias = layer.weight_packed, layer.bias if rank == 0 else None
    mine, features = shard_rows_in_order(weight, rank, world)
    _become(layer, mine, bias)
    return None if weight.perm is None else features


def _local(x: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement, grad: Placement):
    """The local part of x, which is a DTensor or else laid out as `given`, laid out as `wanted`."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (given,), run_check=False)
    if x.placements != (wanted,):
        x = x.redistribute(placements=(wanted,))
    return x.to_local(grad_placements=(grad,))


def _outputs(x: Tensor, mesh: DeviceMesh, have: Placement, wanted: Placement, local: bool):
    x = DTensor.from_local(x, mesh, (have,), run_check=False)
    if wanted != have:
        x = x.redistribute(placements=(wanted,))
    return x.to_local() if local else x


def _checked(module: nn.Module, mesh: DeviceMesh, style: str) -> QuantLinear:
    if not isinstance(module, QuantLinear):
        raise TypeError(f"{style} is for QuantLinear, not {type(module).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{style}: device_mesh has {mesh.ndim} dimensions; slice out one")
    return module


class ColwiseQuant(ParallelStyle):
    """Column parallel, as torch's ColwiseParallel is for nn.Linear.

    parts: sizes of fused layers, see `shard_column`. input_layouts: of a plain input tensor,
    default Replicate. output_layouts: default Shard(-1), each rank its outputs. use_local_output: a
    plain tensor and not a DTensor.
    """

    def __init__(
        self,
        *,
        parts: Sequence[int] = (),
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module, device_mesh, "ColwiseQuant")
        shard_column(layer, device_mesh.get_local_rank(), device_mesh.size(), self.parts)

        def before(_module, args):
            # Each rank's gradient of the input is a part of the sum.
            x = _local(args[0], device_mesh, self.input_layouts, Replicate(), Partial())
            return (x, *args[1:])

        def after(_module, _args, out):
            # A negative dimension is only known once there is a tensor.
            have, wanted = (_resolve(p, out) for p in (Shard(-1), self.output_layouts))
            return _outputs(out, device_mesh, have, wanted, self.use_local_output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
        return layer


class RowwiseQuant(ParallelStyle):
    """Row parallel, as torch's RowwiseParallel is for nn.Linear: partial sums are added.

    input_layouts: of a plain input tensor, default Shard(-1), the outputs of a column-parallel
    layer. output_layouts: default Replicate (all-reduce); Shard(1) is the reduce-scatter of
    sequence parallelism. An act-order layer gathers its input and picks the features it holds.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Shard(-1)
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module, device_mesh, "RowwiseQuant")
        features = shard_row(layer, device_mesh.get_local_rank(), device_mesh.size())
        layer.register_buffer("row_features", features, persistent=False)

        def before(module, args):
            x = args[0]
            given = _resolve(self.input_layouts, x)
            if module.row_features is None:
                wanted = _resolve(Shard(-1), x)
                return (_local(x, device_mesh, given, wanted, wanted), *args[1:])
            x = _local(x, device_mesh, given, Replicate(), Partial())
            return (x.index_select(-1, module.row_features), *args[1:])

        def after(_module, _args, out):
            wanted = _resolve(self.output_layouts, out)
            return _outputs(out, device_mesh, Partial(), wanted, self.use_local_output)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
        return layer


def _resolve(placement: Placement, x: Tensor) -> Placement:
    """The placement with its dimension counted from the front."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(x.dim() + placement.dim)
    return placement


def plan_for(
    model: nn.Module, column: str = COLUMN_NAMES, row: str = ROW_NAMES
) -> dict[str, ParallelStyle]:
    """Styles for every QuantLinear whose name matches a regular expression; the rest stay whole.

    Raises ValueError for an MLP that `fuse_mlps` made, which would stay whole unnoticed.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMLP):
            raise ValueError(
                f"{name} was fused by fuse_mlps: shard a model whose MLPs are not fused"
            )
        if not isinstance(module, QuantLinear):
            continue
        if re.search(column, name):
            plan[name] = ColwiseQuant()
        elif re.search(row, name):
            plan[name] = RowwiseQuant()
    return plan


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle] | None = None
) -> nn.Module:
    """Shard a decoder in place over a 1-D mesh: q, k, v, gate, up by columns, o, down by rows.

    For Transformers' Llama-like models, whose attention takes the number of heads from what the
    projections return. Embedding, norms and output head stay whole on every rank. Raises ValueError
    where the ranks do not divide the attention heads, before anything is changed.
    """
    world = mesh.size()
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % world:
            raise ValueError(f"{name}={heads} is not a multiple of {world} ranks")
    plan = plan_for(model) if plan is None else dict(plan)
    if not plan:
        raise ValueError("the model has no QuantLinear that the plan names")
    return parallelize_module(model, mesh, plan)
