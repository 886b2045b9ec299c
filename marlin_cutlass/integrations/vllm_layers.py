"""Parameters of INT4 layers in vLLM, by checkpoint format: made for one rank, loaded, decoded.

A *loader* makes a layer's parameters (`create`), whose vLLM classes know how to take this rank's
part of a checkpoint tensor, and turns what was loaded into packed weights (`weights`), one per
fused part (q, k, v; gate, up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)

from ..checkpoint_scheme import Scheme
from ..formats.bits import AWQ_ORDER, PLAIN_ORDER, unpack_nibbles
from ..formats.compressed_tensors import USES_G_IDX
from ..formats.gptq import decode_zeros_v1
from ..formats.weight import drop_symmetric
from ..layout import BLOCK_COLUMNS, ceil_div, packed_bytes
from ..pack import pack, unpack
from ..packed_weight import PackedWeight
from ..sharding import shard_rows, slice_columns
from .regroup import Rows, regroup

SHARD_IDS = {"q": 0, "k": 1, "v": 2}
Packed = tuple[PackedWeight, Tensor | None]  # a weight, and the features it takes (None: all)


@dataclass(frozen=True)
class Sizes:
    """A layer on this rank: inputs here and on all ranks, outputs of its fused parts here."""

    k: int
    full_k: int
    parts: tuple[int, ...]
    rank: int
    world: int
    name: str

    @property
    def n(self) -> int:
        return sum(self.parts)

    @property
    def by_rows(self) -> bool:
        """Whether the ranks share the inputs."""
        return self.k != self.full_k

    @property
    def first_row(self) -> int:
        """First of this rank's inputs."""
        return self.rank * self.k if self.by_rows else 0

    def ranges(self) -> list[tuple[int, int]]:
        """Columns [first, last) of each part on this rank."""
        out, first = [], 0
        for size in self.parts:
            out.append((first, first + size))
            first += size
        return out


def shard_index(shard: str | int | None) -> int | None:
    """Number of a fused part from vLLM's shard id; ValueError for one that names several."""
    if shard is None or isinstance(shard, int):
        return shard
    if shard not in SHARD_IDS:
        raise ValueError(f"shard id {shard!r} is not supported: q, k, v or a number")
    return SHARD_IDS[shard]


class ForeignLoader:
    """GPTQ, AWQ and compressed-tensors layers.

    roles: tensors of the layer in the checkpoint and their dtypes; scales keep theirs, whatever
    dtype the model runs in.
    """

    def __init__(self, scheme: Scheme, roles: Mapping[str, torch.dtype]) -> None:
        self.scheme, self.roles = scheme, roles
        self.order = scheme.name == "gptq" or scheme.act_order in USES_G_IDX

    def create(self, layer: nn.Module, sizes: Sizes, dtype: torch.dtype, loader) -> None:
        """Register the checkpoint's tensors, in the shapes that they have on this rank."""
        group = self.scheme.group_size
        # act-order: any row of this rank may belong to any group of the whole layer
        whole = sizes.by_rows and bool(self.scheme.act_order) and group > 0
        k = sizes.full_k if whole else sizes.k
        if group > 0 and k % group:
            raise ValueError(
                f"{sizes.name}: in_features={k} of a rank is not a multiple of group_size={group}"
            )
        by_rows = group > 0 and not whole
        groups = k // group if group > 0 else 1
        make = {
            "gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed_tensors,
        }[self.scheme.name]  # fmt: skip
        make(layer, sizes, groups, by_rows, dtype, loader)

    def _gptq(self, layer, sizes, groups, by_rows, dtype, loader) -> None:
        words = torch.empty(sizes.k // 8, sizes.n, dtype=torch.int32)
        layer.register_parameter("qweight", _packed(words, 0, 1, 0, loader))
        scales = torch.empty(groups, sizes.n, dtype=self.roles.get("scales", dtype))
        _scales(layer, "scales", scales, 1, by_rows, loader)
        if "qzeros" in self.roles:
            zeros = torch.empty(groups, sizes.n // 8, dtype=torch.int32)
            _zeros(layer, "qzeros", zeros, 1, by_rows, loader)
        if "g_idx" in self.roles:
            _index(layer, "g_idx", sizes)

    def _awq(self, layer, sizes, groups, by_rows, dtype, loader) -> None:
        words = torch.empty(sizes.k, sizes.n // 8, dtype=torch.int32)
        layer.register_parameter("qweight", _packed(words, 0, 1, 1, loader))
        scales = torch.empty(groups, sizes.n, dtype=self.roles.get("scales", dtype))
        _scales(layer, "scales", scales, 1, by_rows, loader)
        if "qzeros" in self.roles:
            zeros = torch.empty(groups, sizes.n // 8, dtype=torch.int32)
            _zeros(layer, "qzeros", zeros, 1, by_rows, loader)

    def _compressed_tensors(self, layer, sizes, groups, by_rows, dtype, loader) -> None:
        words = torch.empty(sizes.n, ceil_div(sizes.k, 8), dtype=torch.int32)
        layer.register_parameter("weight_packed", _packed(words, 1, 0, 1, loader))
        scales = torch.empty(sizes.n, groups, dtype=self.roles.get("weight_scale", dtype))
        _scales(layer, "weight_scale", scales, 0, by_rows, loader)
        shape = torch.empty(2, dtype=torch.int64)
        layer.register_parameter(
            "weight_shape", BasevLLMParameter(data=shape, weight_loader=loader)
        )
        if "weight_zero_point" in self.roles:
            zeros = torch.empty(ceil_div(sizes.n, 8), groups, dtype=torch.int32)
            _zeros(layer, "weight_zero_point", zeros, 0, by_rows, loader)
        if "weight_g_idx" in self.roles:
            _index(layer, "weight_g_idx", sizes)

    def weights(self, layer: nn.Module, sizes: Sizes) -> list[Packed]:
        """Decode and pack what was loaded, one weight per fused part."""
        q, scales, zeros, index = self._decode(layer, sizes)
        out = []
        for part, (first, last) in enumerate(sizes.ranges()):
            column = slice(first, last)
            mine = drop_symmetric(
                None if zeros is None else zeros[:, column], self.scheme.sym, sizes.name
            )
            parts = (q[:, column], scales[:, column], mine)
            out.append(self._pack(*parts, None if index is None else index[part], sizes))
        return out

    def _pack(self, q, scales, zeros, index: Tensor | None, sizes: Sizes) -> Packed:
        group = self.scheme.group_size
        first = sizes.first_row
        if group < 0 or index is None or bool((index == -1).all()):
            return pack(q, scales, zeros, group_size=group), None
        natural = torch.arange(first, first + sizes.k, device=index.device) // group
        whole = scales.shape[0] * group == sizes.full_k
        if bool((index == natural).all()) and (sizes.k % group == 0 and first % group == 0):
            if whole:
                rows = slice(first // group, (first + sizes.k) // group)
                scales, zeros = scales[rows], None if zeros is None else zeros[rows]
            return pack(q, scales, zeros, group_size=group), None
        if not sizes.by_rows:
            return pack(q, scales, zeros, group_size=group, g_idx=index), None
        if not whole:
            raise ValueError(
                f"{sizes.name}: g_idx orders rows although the configuration says that there is no"
                " activation order: row shards of it cannot be loaded"
            )
        source = torch.arange(sizes.k, device=q.device)
        return regroup(Rows(q, scales, zeros, index.to(q.device).long(), source))

    def _decode(self, layer: nn.Module, sizes: Sizes):
        """(q [K, N], scales [G, N], zeros [G, N] or None, index [parts, K] or None)."""
        name = self.scheme.name
        if name == "compressed-tensors":
            q = unpack_nibbles(layer.weight_packed.data, 1)[:, : sizes.k].t()
            zeros = getattr(layer, "weight_zero_point", None)
            zeros = None if zeros is None else unpack_nibbles(zeros.data, 0)[: sizes.n].t()
            index = getattr(layer, "weight_g_idx", None) if self.order else None
            return q, layer.weight_scale.data.t(), zeros, index
        stored = getattr(layer, "qzeros", None)
        if name == "awq":
            q = unpack_nibbles(layer.qweight.data, 1, AWQ_ORDER)
            zeros = None if stored is None else unpack_nibbles(stored.data, 1, AWQ_ORDER)
            return q, layer.scales.data, zeros, None
        q = unpack_nibbles(layer.qweight.data, 0)
        zeros = None
        if stored is not None:
            v2 = self.scheme.checkpoint_format == "gptq_v2"
            zeros = unpack_nibbles(stored.data, 1, PLAIN_ORDER) if v2 else None
            if zeros is None:
                zeros = decode_zeros_v1(stored.data, self.scheme.zero_rule, sizes.name)
        return q, layer.scales.data, zeros, getattr(layer, "g_idx", None)


def _packed(words: Tensor, input_dim: int, output_dim: int, packed_dim: int, loader):
    return PackedvLLMParameter(
        data=words,
        input_dim=input_dim,
        output_dim=output_dim,
        packed_dim=packed_dim,
        packed_factor=8,
        weight_loader=loader,
    )


def _scales(layer, name: str, data: Tensor, output_dim: int, by_rows: bool, loader) -> None:
    """Scales: one row per group of this rank, or all of them on every rank."""
    options = {"data": data, "output_dim": output_dim, "weight_loader": loader}
    if by_rows:
        parameter = GroupQuantScaleParameter(input_dim=1 - output_dim, **options)
    else:
        parameter = ChannelQuantScaleParameter(**options)
    layer.register_parameter(name, parameter)


def _zeros(layer, name: str, data: Tensor, output_dim: int, by_rows: bool, loader) -> None:
    options = {"data": data, "output_dim": output_dim, "packed_dim": output_dim}
    options |= {"packed_factor": 8, "weight_loader": loader}
    if by_rows:
        parameter = PackedvLLMParameter(input_dim=1 - output_dim, **options)
    else:
        parameter = PackedColumnParameter(**options)
    layer.register_parameter(name, parameter)


def _index(layer: nn.Module, name: str, sizes: Sizes) -> None:
    """g_idx [parts, K on this rank]; a file that has none for a part leaves it -1 (natural)."""

    # NOTE: vLLM's reloader passes another `param`, by this name.
    def load(param: nn.Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
        rows = loaded[sizes.first_row : sizes.first_row + sizes.k].to(torch.int32)
        part = shard_index(shard)
        target = param.data if part is None else param.data[part]
        target.copy_(rows)  # fused on disk: one order for all parts

    data = torch.full((len(sizes.parts), sizes.k), -1, dtype=torch.int32)
    layer.register_parameter(name, BasevLLMParameter(data=data, weight_loader=load))


def _sparse(form: dict) -> bool:
    """Whether a converted layer is 2:4-sparse; only those say so."""
    return bool(form.get("sparse", False))


class NativeLoader:
    """Layers of a converted folder. forms: of each fused part, or one that is fused on disk."""

    def __init__(self, forms: Sequence[dict]) -> None:
        self.forms = [dict(form) for form in forms]

    def create(self, layer: nn.Module, sizes: Sizes, dtype: torch.dtype, loader) -> None:
        """Register packed bytes, column factors and order, each for all parts in one tensor."""
        if len(self.forms) == 1:
            self.forms *= len(sizes.parts)
        for form in self.forms:
            if form["k"] != sizes.full_k:
                raise ValueError(
                    f"{sizes.name}: K={form['k']} in the checkpoint, {sizes.full_k} in the model"
                )
        self.act_order = any(form.get("act_order") for form in self.forms)
        # Rows of an act-order weight are found once its order is loaded as well.
        self.keep_rows = sizes.by_rows and self.act_order
        lengths = [
            packed_bytes(self._k(sizes), n, form["group_size"], form["has_zeros"], _sparse(form))
            for form, n in zip(self.forms, sizes.parts)
        ]
        columns = [ceil_div(n, BLOCK_COLUMNS) * BLOCK_COLUMNS for n in sizes.parts]
        self.lengths, self.columns = lengths, columns
        self._register(layer, "packed", torch.empty(sum(lengths), dtype=torch.uint8), sizes)
        factors = torch.zeros(sum(columns), dtype=torch.float32)
        self._register(layer, "col_scale", factors, sizes)
        if self.act_order:
            order = torch.arange(sizes.full_k, dtype=torch.int32).repeat(len(sizes.parts))
            self._register(layer, "perm", order, sizes)

    def _k(self, sizes: Sizes) -> int:
        return sizes.full_k if self.keep_rows else sizes.k

    def _register(self, layer: nn.Module, role: str, data: Tensor, sizes: Sizes) -> None:
        counts = {"packed": self.lengths, "col_scale": self.columns}.get(role)
        counts = counts or [sizes.full_k] * len(sizes.parts)

        # NOTE: vLLM's reloader passes another `param`, by this name.
        def load(param: nn.Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
            part = shard_index(shard)
            parts = range(len(sizes.parts)) if part is None else [part]
            for i in parts:
                mine = self._local(role, loaded, i, sizes, fused=part is None and len(parts) > 1)
                start = sum(counts[:i])
                param.data[start : start + mine.numel()].copy_(mine)

        layer.register_parameter(role, BasevLLMParameter(data=data, weight_loader=load))

    def _columns(self, part: int, sizes: Sizes, fused: bool) -> tuple[int, int]:
        """This rank's columns of the stored weight that holds `part`."""
        n, total = sizes.parts[part], self.forms[part]["n"]
        if sizes.by_rows or (total == n and not fused):
            return 0, n
        if fused:  # parts side by side on disk, each split over the ranks
            start = sum(sizes.parts[:part]) * sizes.world
            return start + sizes.rank * n, start + (sizes.rank + 1) * n
        ranks = total // n  # fewer than the ranks where key-value heads are repeated
        first = sizes.rank * ranks // sizes.world * n
        return first, first + n

    def _local(self, role: str, loaded: Tensor, part: int, sizes: Sizes, fused: bool) -> Tensor:
        """This rank's part of a stored tensor."""
        if role == "perm":
            return loaded
        first, last = self._columns(part, sizes, fused)
        if role == "col_scale":
            return loaded[first:last]
        form = self.forms[part]
        columns = ceil_div(form["n"], BLOCK_COLUMNS) * BLOCK_COLUMNS
        weight = PackedWeight(
            loaded, torch.zeros(columns, dtype=torch.float32, device=loaded.device), None,
            form["n"], form["k"], form["group_size"], form["has_zeros"], sparse=_sparse(form),
        )  # fmt: skip
        weight.check_shapes()
        if (first, last) != (0, form["n"]):
            weight = slice_columns(weight, first, last)
        if sizes.by_rows and not self.keep_rows:
            weight = shard_rows(weight, sizes.rank, sizes.world)
        return weight.packed

    def weights(self, layer: nn.Module, sizes: Sizes) -> list[Packed]:
        """The packed weight of each part, this rank's rows of it."""
        packed = layer.packed.data.split(self.lengths)
        factors = layer.col_scale.data.split(self.columns)
        out: list[Packed] = []
        for i, (form, n) in enumerate(zip(self.forms, sizes.parts)):
            perm = None
            if form.get("act_order"):
                perm = layer.perm.data.view(len(sizes.parts), -1)[i].clone()
            weight = PackedWeight(
                packed[i].clone(), factors[i].clone(), perm,
                n, self._k(sizes), form["group_size"], form["has_zeros"], sparse=_sparse(form),
            )  # fmt: skip
            weight.check()
            out.append(_row_shard(weight, sizes) if self.keep_rows else (weight, None))
        return out


def _row_shard(weight: PackedWeight, sizes: Sizes) -> Packed:
    """This rank's features of a whole weight, which may have act-order."""
    if weight.perm is None:
        return shard_rows(weight, sizes.rank, sizes.world), None
    parts = unpack(weight)
    order = weight.perm.long()
    first = sizes.first_row
    mine = ((order >= first) & (order < first + sizes.k)).nonzero().flatten()
    scales = parts.scales[:, : weight.n].float() * weight.col_scale[: weight.n]
    zeros = None if parts.zeros is None else parts.zeros[:, : weight.n]
    group = mine // weight.stored_group_size
    codes = parts.codes[mine, : weight.n]
    return regroup(Rows(codes, scales, zeros, group, order[mine] - first))
