"""`PackedWeight`: the only weight that `gemm` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .errors import short_dtype, sizes
from .layout import (
    BLOCK_COLUMNS,
    LAYOUT_VERSION,
    ceil_div,
    check_sizes,
    form_of,
    packed_bytes,
    stored_group_size,
)

_SIZES = frozenset({"packed", "n", "k", "group_size", "has_zeros", "sparse"})
ACTIVATION_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(eq=False, repr=False)
class PackedWeight:
    """An INT4 weight of K rows and N columns in the layout of `layout.py`; made by `pack` or
    `from_state`.

    packed: uint8 [bytes]. col_scale: float32 [ceil(N/64)*64], the factor of each column in the
    epilogue. perm: int32 [K], row order of an act-order weight, or None. n, k, group_size: logical
    sizes, padding is never visible. sparse: 2:4 sparsity along K, in the layout of
    `layout.SparseLayout`. dtype: dtype of the scales given to `pack` (float16 or
    bfloat16), the default of `dequantize`; activations may have either dtype.
    """

    packed: Tensor
    col_scale: Tensor
    perm: Tensor | None
    n: int
    k: int
    group_size: int
    has_zeros: bool
    dtype: torch.dtype = torch.float16
    layout_version: int = LAYOUT_VERSION
    sparse: bool = False
    # Sizes as the operator `gemm_compact` takes them (`layout.form_of`); None where they are not
    # those of `packed`, which `gemm` then says, or are too large for it.
    form: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        self.form = self._form()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in _SIZES and "form" in self.__dict__:
            self.form = self._form()

    def _form(self) -> int | None:
        try:
            check_sizes(self.k, self.n, self.group_size)
            k, n, group_size = int(self.k), int(self.n), int(self.group_size)
            total = packed_bytes(k, n, group_size, self.has_zeros, self.sparse)
        except (TypeError, ValueError):
            return None
        if not isinstance(self.packed, Tensor) or self.packed.numel() != total:
            return None
        return form_of(k, n, group_size, bool(self.has_zeros))

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.k, self.n

    @property
    def size_k(self) -> int:
        """Rows (input features)."""
        return self.k

    @property
    def size_n(self) -> int:
        """Columns (output features)."""
        return self.n

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def stored_group_size(self) -> int:
        """Group size that kernels see: multiples of 128 are stored as 128."""
        return stored_group_size(self.group_size)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; `perm` only where there is one."""
        named = {"packed": self.packed, "col_scale": self.col_scale, "perm": self.perm}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors, as plain JSON values."""
        # Only where it is set, so that dense weights keep the bytes that earlier releases wrote.
        kind = {"sparse": True} if self.sparse else {}
        return {
            **kind,
            "layout_version": self.layout_version,
            "n": self.n,
            "k": self.k,
            "group_size": self.group_size,
            "has_zeros": self.has_zeros,
            "dtype": short_dtype(self.dtype),
        }

    def state(self) -> dict[str, Any]:
        """`tensors()` plus `metadata()` under the key 'metadata': what `from_state` takes. Tensors
        are not copied."""
        return {**self.tensors(), "metadata": self.metadata()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> PackedWeight:
        """Rebuilds a weight from `state()` and checks every size, dtype and value that a kernel
        relies on.

        Raises ValueError or TypeError naming what is wrong; KeyError text names a missing entry.
        """
        missing = [name for name in ("packed", "col_scale", "metadata") if name not in state]
        if missing:
            raise ValueError(
                f"state lacks {', '.join(missing)}: it has {', '.join(sorted(state)) or 'nothing'}"
            )
        unknown = sorted(set(state) - {"packed", "col_scale", "perm", "metadata"})
        if unknown:
            raise ValueError(f"state has unknown entries {', '.join(unknown)}")
        fields = checked_metadata(state["metadata"])
        weight = cls(
            packed=state["packed"], col_scale=state["col_scale"], perm=state.get("perm"), **fields
        )
        weight.check()
        return weight

    def check(self) -> None:
        """Raises ValueError or TypeError unless the tensors fit the sizes, so that no kernel can
        read past them."""
        check_sizes(self.k, self.n, self.group_size)
        self.check_shapes()
        if self.perm is not None and self.perm.device.type != "meta":
            check_permutation(self.perm)

    def check_shapes(self) -> None:
        """`check` without reading a tensor."""
        where = sizes(self.k, self.n, self.group_size)
        if self.sparse and self.has_zeros:
            raise ValueError(f"{where}: 2:4 sparsity needs symmetric codes, not zero points")
        total = packed_bytes(self.k, self.n, self.group_size, self.has_zeros, self.sparse)
        _check_tensor("packed", self.packed, torch.uint8, total, where)
        columns = ceil_div(self.n, BLOCK_COLUMNS) * BLOCK_COLUMNS
        _check_tensor("col_scale", self.col_scale, torch.float32, columns, where)
        if self.perm is not None:
            _check_tensor("perm", self.perm, torch.int32, self.k, where)
        devices = {str(tensor.device) for tensor in self.tensors().values()}
        if len(devices) > 1:
            raise ValueError(
                f"the tensors of a weight are on different devices: {', '.join(sorted(devices))}"
            )

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> PackedWeight:
        """The weight on another device; itself where it is there already."""
        moved = {
            name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors().items()
        }
        if all(moved[name] is tensor for name, tensor in self.tensors().items()):
            return self
        return replace(self, **moved)

    def cuda(self, device: int | None = None) -> PackedWeight:
        """The weight on a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def cpu(self) -> PackedWeight:
        """The weight in host memory."""
        return self.to("cpu")

    def clone(self) -> PackedWeight:
        """A copy that shares no memory."""
        return replace(self, **{name: tensor.clone() for name, tensor in self.tensors().items()})

    def copy_(self, other: PackedWeight) -> PackedWeight:
        """Overwrites the contents in place; addresses stay, so captured graphs use the new values.
        Returns self.

        Raises ValueError unless both have the same sizes, group size, zero points and act-order.
        """
        mine, theirs = self._signature(), other._signature()
        if mine != theirs:
            differ = ", ".join(
                f"{name}={mine[name]} and {theirs[name]}"
                for name in mine
                if mine[name] != theirs[name]
            )
            raise ValueError(f"copy_ needs a weight of the same form: {differ} (self and other)")
        for name, tensor in self.tensors().items():
            tensor.copy_(other.tensors()[name])
        self.dtype = other.dtype
        return self

    copy_from_ = copy_

    def _signature(self) -> dict[str, Any]:
        names = ("n", "k", "group_size", "has_zeros", "layout_version", "sparse")
        return {**{name: getattr(self, name) for name in names}, "act_order": self.perm is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedWeight):
            return NotImplemented
        if self.metadata() != other.metadata() or self.tensors().keys() != other.tensors().keys():
            return False
        if self.device != other.device:
            return False
        return all(
            torch.equal(tensor, other.tensors()[name]) for name, tensor in self.tensors().items()
        )

    __hash__ = None  # type: ignore[assignment]  # equality compares contents, which can change

    def __repr__(self) -> str:
        kind = "zero points" if self.has_zeros else "symmetric"
        kind += ", 2:4 sparse" if self.sparse else ""
        order = ", act-order" if self.perm is not None else ""
        return (
            f"PackedWeight(k={self.k}, n={self.n}, group_size={self.group_size}, {kind}{order}, "
            f"{short_dtype(self.dtype)}, {self.nbytes} bytes on {self.device})"
        )


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments from `metadata()`; numbers may be strings, as file headers store
    them."""
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict, not {type(metadata).__name__}")
    needed = ("layout_version", "n", "k", "group_size", "has_zeros", "dtype")
    missing = [name for name in needed if name not in metadata]
    if missing:
        raise ValueError(f"metadata lacks {', '.join(missing)}")
    version = _number(metadata, "layout_version")
    if version != LAYOUT_VERSION:
        raise ValueError(
            f"layout_version={version} is not supported: this release reads {LAYOUT_VERSION}"
        )
    dtype = str(metadata["dtype"]).removeprefix("torch.")
    if dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"dtype={dtype} is not supported: use float16 or bfloat16")
    fields: dict[str, Any] = {name: _number(metadata, name) for name in ("n", "k", "group_size")}
    fields["has_zeros"] = _flag(metadata["has_zeros"])
    fields["sparse"] = _flag(metadata.get("sparse", False))
    return {**fields, "dtype": ACTIVATION_DTYPES[dtype], "layout_version": version}


def _number(metadata: dict[str, Any], name: str) -> int:
    value = metadata[name]
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        value = int(value)
    if type(value) is not int:
        raise ValueError(f"{name}={value!r} is not a whole number")
    return value


def _flag(value: Any) -> bool:
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, count: int, where: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(
            f"{name} has dtype {short_dtype(tensor.dtype)}: it must be {short_dtype(dtype)}"
        )
    if tuple(tensor.shape) != (count,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: {where} needs ({count},)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def check_permutation(perm: Tensor) -> None:
    """An index out of range would stop the device at the first multiply, so it is refused here."""
    if perm.dim() != 1 or perm.is_floating_point() or not perm.numel():
        kind = f"{short_dtype(perm.dtype)} {tuple(perm.shape)}"
        raise ValueError(f"perm is {kind}: it must be one-dimensional and of integers")
    index = perm.to(torch.int64)
    rule = f"it must permute 0..{perm.numel() - 1}"
    if bool((index < 0).any()) or bool((index >= perm.numel()).any()):
        raise ValueError(f"perm spans {int(perm.min())}..{int(perm.max())}: {rule}")
    if bool((torch.bincount(index, minlength=perm.numel()) != 1).any()):
        raise ValueError(f"perm repeats a row: {rule}")
