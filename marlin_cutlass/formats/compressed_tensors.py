"""compressed-tensors checkpoints, format "pack-quantized", 4-bit integers ("marlin-24": see
marlin_24.py).

weight_packed int32 [N, ceil(K/8)] holds q + 8 along K, q in -8..7; weight_scale [N, G];
weight_zero_point (asymmetric only) int32 [ceil(N/8), G] holds z + 8 along N, or int8 [N, G] holds
z; weight_shape [2] = (N, K). Adding 8 to both leaves q - z as it is. Experts add a first dimension.
"""

from __future__ import annotations

import torch

from .bits import unpack_nibbles
from .marlin_24 import read_marlin_24
from .weight import QuantizedWeight, check_group_size, check_scales, clean_g_idx, drop_symmetric

ACT_ORDERS = (None, False, "static", "weight", "group", "dynamic")
# "static" and "weight" only order the work of the quantiser; "group" (old name: "dynamic", True)
# reorders rows before grouping, so only then does weight_g_idx mean anything.
USES_G_IDX = ("group", "dynamic", True)


def _logical_shape(packed: torch.Tensor, weight_shape, name: str) -> tuple[int, int]:
    n, k = packed.shape[0], packed.shape[1] * 8
    if weight_shape is None:
        return n, k
    n_given, k_given = (int(v) for v in torch.as_tensor(weight_shape).flatten()[-2:])
    if n_given != n or not k - 8 < k_given <= k:
        raise ValueError(
            f"{name}: weight_shape={(n_given, k_given)} does not fit weight_packed of shape"
            f" {tuple(packed.shape)}"
        )
    return n_given, k_given


def _scales(scale: torch.Tensor, n: int, groups: int, name: str) -> torch.Tensor:
    """[N, G], [N] (channel) or a single value (tensor) -> [G, N]."""
    if scale.numel() == 1 and groups == 1:
        scale = scale.reshape(1, 1).expand(n, 1)
    elif scale.dim() == 1 and groups == 1:
        scale = scale.unsqueeze(1)
    scales = scale.t().contiguous() if scale.dim() == 2 else scale
    check_scales(scales, groups, n, f"{name}: weight_scale transposed")
    return scales


def _zero_points(zero: torch.Tensor, n: int, groups: int, name: str) -> torch.Tensor:
    if zero.dim() == 1 and groups == 1:
        zero = zero.unsqueeze(1)
    if zero.dtype == torch.int32 and zero.shape == (-(-n // 8), groups):
        return unpack_nibbles(zero, 0)[:n].t().contiguous()
    if zero.dtype == torch.int8 and zero.shape == (n, groups):
        return (zero.t().to(torch.int16) + 8).to(torch.uint8).contiguous()
    if zero.dtype.is_floating_point:
        raise ValueError(
            f"{name}: weight_zero_point has dtype {zero.dtype}: fractional zeros are not supported"
        )
    raise ValueError(
        f"{name}: weight_zero_point has shape {tuple(zero.shape)} and dtype {zero.dtype}; int32"
        f" [{-(-n // 8)}, {groups}] or int8 [{n}, {groups}] is required"
    )


def read_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape=None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    group_size: int,
    actorder: str | bool | None = None,
    symmetric: bool | None = None,
    name: str = "compressed-tensors weight",
) -> QuantizedWeight:
    """Decode one layer. `group_size` -1 is strategy "channel" (or "tensor").

    actorder null / "static" / "weight" never use weight_g_idx; "group" does, unless it is all -1.
    symmetric=True ignores no zero point: one other than 0 is refused.
    """
    if actorder not in ACT_ORDERS and actorder is not True:
        raise ValueError(f"{name}: actorder={actorder!r} is unknown")
    if weight_packed.dim() != 2:
        raise ValueError(
            f"{name}: weight_packed has shape {tuple(weight_packed.shape)}; [N, K/8] is required"
        )
    n, k = _logical_shape(weight_packed, weight_shape, name)
    groups = check_group_size(group_size, k)
    q = unpack_nibbles(weight_packed, 1)[:, :k].t().contiguous()
    scales = _scales(weight_scale, n, groups, name)
    zeros = None
    if weight_zero_point is not None:
        zeros = _zero_points(weight_zero_point, n, groups, name)
    zeros = drop_symmetric(zeros, symmetric, name)
    g_idx = None
    if actorder in USES_G_IDX:
        g_idx = clean_g_idx(weight_g_idx, k, group_size)
    return QuantizedWeight(q, scales, zeros, group_size, g_idx)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape=None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    scale_packed: torch.Tensor | None = None,
    meta: torch.Tensor | None = None,
    group_size: int,
    actorder: str | bool | None = None,
    symmetric: bool | None = None,
):
    """One layer -> `PackedWeight`, or a list of them for stacked experts (3-D weight_packed).

    Either weight_scale ("pack-quantized", with the arguments of `read_compressed_tensors`) or
    scale_packed and meta ("marlin-24": 2:4-sparse, see `read_marlin_24`) are needed.
    """
    rest = (weight_scale, weight_zero_point, weight_shape, weight_g_idx)
    if scale_packed is not None or meta is not None:
        if actorder not in (None, False, "static", "weight"):
            raise ValueError(f"actorder={actorder!r}: marlin-24 layers have no activation order")
        return _from_marlin_24(weight_packed, scale_packed, meta, rest, group_size, symmetric)
    if weight_scale is None:
        raise ValueError("weight_scale is missing (or scale_packed and meta of a marlin-24 layer)")
    options = {"group_size": group_size, "actorder": actorder, "symmetric": symmetric}
    if weight_packed.dim() != 3:
        return read_compressed_tensors(weight_packed, *rest, **options).to_packed()

    def expert(tensor, i):
        return None if tensor is None else tensor[i]

    return [
        read_compressed_tensors(
            weight_packed[i],
            weight_scale[i],
            expert(weight_zero_point, i),
            weight_shape,
            weight_g_idx[i]
            if weight_g_idx is not None and weight_g_idx.dim() == 2
            else weight_g_idx,
            name=f"expert {i}",
            **options,
        ).to_packed()
        for i in range(weight_packed.shape[0])
    ]


def _from_marlin_24(weight_packed, scale_packed, meta, others, group_size: int, symmetric):
    if scale_packed is None or meta is None or any(tensor is not None for tensor in others):
        raise ValueError(
            "a marlin-24 layer has weight_packed, scale_packed and meta, and nothing else: no"
            " weight_scale, weight_zero_point, weight_shape or weight_g_idx"
        )
    if symmetric is False:
        raise ValueError("symmetric=False: marlin-24 layers have no zero points")
    weight = read_marlin_24(weight_packed, scale_packed, meta, group_size=group_size)
    return weight.to_packed()
