"""Splitting and joining packed weights: tensor-parallel shards and fused siblings.

Everything works on stored bits: codes, normalised scales and column factors are moved, never
computed again, so a shard dequantises to exactly its part of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import sparse
from .errors import sizes
from .layout import (
    BLOCK_COLUMNS,
    BLOCK_DEPTH,
    SLACK_BLOCKS,
    block_bytes,
    ceil_div,
    check_sizes,
    sparse_block_bytes,
    stored_group_size,
)
from .pack import Unpacked, _assemble, unpack
from .packed_weight import PackedWeight


def _describe(w: PackedWeight) -> str:
    return sizes(w.k, w.n, w.group_size)


def shard_range(total: int, rank: int, world: int, what: str) -> tuple[int, int]:
    """[first, last) of an even split; ValueError unless world divides total."""
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not in 0..{world - 1}")
    if total % world:
        raise ValueError(f"{what}={total} is not a multiple of world={world}")
    size = total // world
    return rank * size, (rank + 1) * size


def _blocks(w: PackedWeight) -> Tensor:
    """Blocks [n_blocks, k_blocks, block_bytes] without the slack."""
    n_blocks, k_blocks = ceil_div(w.n, BLOCK_COLUMNS), ceil_div(w.k, BLOCK_DEPTH)
    width = sparse_block_bytes(w.group_size) if w.sparse else block_bytes(w.group_size, w.has_zeros)
    return w.packed.view(-1, width)[: n_blocks * k_blocks].view(n_blocks, k_blocks, width)


def _with_slack(w: PackedWeight, blocks: Tensor) -> Tensor:
    """Packed buffer of some of the blocks of `w`, with the slack that its kind of block has."""
    width = blocks.shape[-1]
    slack = w.packed.view(-1, width)[-SLACK_BLOCKS:]
    return torch.cat((blocks.reshape(-1, width), slack)).view(-1)


def _columns_padded(values: Tensor) -> Tensor:
    """col_scale [N] padded with zeros to whole blocks of columns."""
    n = values.numel()
    out = torch.zeros(
        ceil_div(n, BLOCK_COLUMNS) * BLOCK_COLUMNS, dtype=torch.float32, device=values.device
    )
    out[:n] = values
    return out


def _parts(w: PackedWeight) -> Unpacked:
    """`unpack` cut to the logical sizes; rows in packed order, scales per stored group."""
    parts = unpack(w)
    group = stored_group_size(w.group_size)
    groups = 1 if group < 0 else ceil_div(w.k, group)
    zeros = None if parts.zeros is None else parts.zeros[:groups, : w.n]
    return Unpacked(parts.codes[: w.k, : w.n], parts.scales[:groups, : w.n], zeros)


def _rebuild(w: PackedWeight, parts: Unpacked, col_scale: Tensor, perm: Tensor | None):
    """A weight of `w`'s kind from other codes [K', N'] and stored scales [G', N']."""
    k, n = parts.codes.shape
    group = stored_group_size(w.group_size)
    scales = None if group < 0 else parts.scales.contiguous()
    zeros = None if parts.zeros is None else parts.zeros.contiguous()
    codes = parts.codes.contiguous()
    if w.sparse:
        packed = sparse._assemble(codes, scales, group)
    else:
        packed = _assemble(codes, scales, zeros, group)
    return replace(w, packed=packed, col_scale=_columns_padded(col_scale), perm=perm, k=k, n=n)


def shard_columns(w: PackedWeight, rank: int, world: int) -> PackedWeight:
    """Columns [rank*N/world, (rank+1)*N/world): the weight of a column-parallel rank.

    Exact for any N that world divides; a copy of blocks where the cut is a multiple of 64.
    """
    first, last = shard_range(w.n, rank, world, "N")
    return slice_columns(w, first, last)


def slice_columns(w: PackedWeight, first: int, last: int) -> PackedWeight:
    """Columns [first, last) as a weight of their own."""
    if not 0 <= first < last <= w.n:
        raise ValueError(f"columns {first}..{last} are not a range of N={w.n}")
    col_scale = w.col_scale[first:last]
    if first % BLOCK_COLUMNS == 0 and (last % BLOCK_COLUMNS == 0 or last == w.n):
        blocks = _blocks(w)[first // BLOCK_COLUMNS : ceil_div(last, BLOCK_COLUMNS)]
        packed = _with_slack(w, blocks)
        return replace(w, packed=packed, col_scale=_columns_padded(col_scale), n=last - first)
    parts = _parts(w)
    zeros = None if parts.zeros is None else parts.zeros[:, first:last]
    cut = Unpacked(parts.codes[:, first:last], parts.scales[:, first:last], zeros)
    return _rebuild(w, cut, col_scale, w.perm)


def shard_rows(w: PackedWeight, rank: int, world: int) -> PackedWeight:
    """Rows [rank*K/world, (rank+1)*K/world): the weight of a row-parallel rank.

    Outputs of the ranks add up to the whole; give the bias to one rank only. A cut inside a group
    is refused, and so is act-order, whose groups are spread over all rows: see
    `shard_rows_in_order`.
    """
    if w.perm is not None:
        raise ValueError(
            f"{_describe(w)} has act-order: its groups are spread over all rows, so a contiguous"
            " range of rows is not a weight; shard columns, or use shard_rows_in_order"
        )
    first, last = shard_range(w.k, rank, world, "K")
    return _slice_rows(w, first, last)


def shard_rows_in_order(w: PackedWeight, rank: int, world: int) -> tuple[PackedWeight, Tensor]:
    """Row shard of an act-order weight in packed order, and the input features int64 it multiplies.

    The rank's activations are a[:, features] of the *whole* activations: permute the columns of the
    layer before (its outputs) by the concatenated features, and no gather is left at run time.
    """
    first, last = shard_range(w.k, rank, world, "K")
    order = torch.arange(w.k, device=w.device) if w.perm is None else w.perm.long()
    return _slice_rows(replace(w, perm=None), first, last), order[first:last].clone()


def _slice_rows(w: PackedWeight, first: int, last: int) -> PackedWeight:
    group = w.group_size
    if group > 0 and (first % group or last % group):
        raise ValueError(
            f"{_describe(w)}: rows {first}..{last} cut a group: shards must be multiples of"
            f" group_size={group}"
        )
    if w.sparse and first % sparse.CHUNK:
        raise ValueError(f"{_describe(w)}: row {first} cuts four rows that 2:4 sparsity counts")
    check_sizes(last - first, w.n, group)
    if first % BLOCK_DEPTH == 0 and (last % BLOCK_DEPTH == 0 or last == w.k):
        blocks = _blocks(w)[:, first // BLOCK_DEPTH : ceil_div(last, BLOCK_DEPTH)]
        packed = _with_slack(w, blocks)
        return replace(w, packed=packed, col_scale=w.col_scale.clone(), k=last - first)
    parts = _parts(w)
    stored = stored_group_size(group)
    rows = slice(None) if stored < 0 else slice(first // stored, last // stored)
    zeros = None if parts.zeros is None else parts.zeros[rows]
    cut = Unpacked(parts.codes[first:last], parts.scales[rows], zeros)
    return _rebuild(w, cut, w.col_scale[: w.n], None)


def why_not_fuse(weights: Sequence[PackedWeight]) -> str | None:
    """Why these weights cannot become one with their columns side by side; None if they can."""
    if not weights:
        return "there is nothing to fuse"
    first = weights[0]
    for i, w in enumerate(weights[1:], 1):
        for name in ("k", "group_size", "has_zeros", "sparse", "device"):
            mine, theirs = getattr(first, name), getattr(w, name)
            if mine != theirs:
                return f"{name} differs: {mine} in weight 0, {theirs} in weight {i}"
        if (first.perm is None) != (w.perm is None) or (
            first.perm is not None and not torch.equal(first.perm, w.perm)
        ):
            return f"the act-order of weight {i} differs from that of weight 0"
    return None


def _check_fusable(weights: Sequence[PackedWeight]) -> None:
    reason = why_not_fuse(weights)
    if reason:
        raise ValueError(f"these weights cannot be fused: {reason}")


def fuse_columns(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight with the columns of all (q, k, v; gate, up), bit for bit, or ValueError."""
    _check_fusable(weights)
    first = weights[0]
    col_scale = torch.cat([w.col_scale[: w.n] for w in weights])
    if all(w.n % BLOCK_COLUMNS == 0 for w in weights[:-1]):
        packed = _with_slack(first, torch.cat([_blocks(w) for w in weights]))
        n = sum(w.n for w in weights)
        return replace(first, packed=packed, col_scale=_columns_padded(col_scale), n=n)
    parts = [_parts(w) for w in weights]
    zeros = None if first.has_zeros is False else torch.cat([p.zeros for p in parts], 1)
    joined = Unpacked(
        torch.cat([p.codes for p in parts], 1), torch.cat([p.scales for p in parts], 1), zeros
    )
    return _rebuild(first, joined, col_scale, first.perm)


def interleave_pairs(gate: Tensor, up: Tensor) -> Tensor:
    """[..., I] and [..., I], I even -> [..., 2 I]: two columns of the gate, the same two of up, the
    next two of the gate."""
    return torch.stack([x.unflatten(-1, (-1, 2)) for x in (gate, up)], -2).flatten(-3)


def fuse_gate_up(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """One weight [K, 2 I] of a gate and an up projection [K, I], bit for bit, for
    `gemm(..., swiglu=True)`; biases are laid out alike by `interleave_pairs`.

    Shards of a multiple of 4 columns are weights of the same kind. Raises ValueError unless both
    have the same form, an even number of columns and the same act-order.
    """
    if gate.n != up.n or gate.n % 2:
        raise ValueError(f"gate has N={gate.n} and up N={up.n}: they must be equal and even")
    _check_fusable((gate, up))
    ours, theirs = _parts(gate), _parts(up)
    zeros = None if ours.zeros is None else interleave_pairs(ours.zeros, theirs.zeros)
    codes = interleave_pairs(ours.codes, theirs.codes)
    mixed = Unpacked(codes, interleave_pairs(ours.scales, theirs.scales), zeros)
    col_scale = interleave_pairs(gate.col_scale[: gate.n], up.col_scale[: up.n])
    return _rebuild(gate, mixed, col_scale, gate.perm)
