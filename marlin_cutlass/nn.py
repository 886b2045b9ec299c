"""`QuantLinear`: a linear layer whose weight is a `PackedWeight`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops, reference
from .layout import BLOCK_COLUMNS, ceil_div, check_sizes, form_of, packed_bytes
from .packed_weight import PackedWeight, check_permutation
from .sharding import fuse_columns, shard_columns, shard_rows


def check_rows(rows: int) -> None:
    """Raises TypeError or ValueError unless `rows` is a number of rows to pin a kernel for."""
    if type(rows) is not int:
        raise TypeError(f"rows={rows!r} must be a whole number")
    if rows < 1:
        raise ValueError(f"rows={rows}: at least one is required")


class QuantLinear(nn.Module):
    """y = x @ W + bias with INT4 W; a drop-in for `nn.Linear` at inference and under LoRA.

    Buffers, which are also the whole state dict: `packed` uint8 [bytes], `col_scale` float32
    [ceil(N/64)*64], `perm` int32 [K] (act-order only), `bias` [N] (if any); nothing derived.

    `.half()`, `.bfloat16()` and `.to(dtype)` change the bias and `dtype` only: codes and scales are
    the same bits for every activation dtype, and `col_scale` stays float32. Moving devices moves
    everything. Activations may be fp16 or bf16; float32 ones are converted to `dtype` and back.
    """

    packed: Tensor
    col_scale: Tensor
    perm: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group_size: int = 128,
        zeros: bool = False,
        act_order: bool = False,
        sparse: bool = False,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> None:
        """An all-zero layer to load a state dict into; see `from_linear` and `from_packed`.

        sparse: the weight has 2:4 sparsity. dtype: float16 or bfloat16, what float32 activations
        are converted to and the bias' dtype.
        Raises ValueError for sizes that cannot be packed.
        """
        super().__init__()
        check_sizes(in_features, out_features, group_size)
        if dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"dtype={dtype} is not supported: use float16 or bfloat16")
        # Integers of numpy overflow in what follows.
        in_features, out_features, group_size = int(in_features), int(out_features), int(group_size)
        self.in_features, self.out_features = in_features, out_features
        self.group_size, self.has_zeros, self.dtype = group_size, bool(zeros), dtype
        self.sparse = sparse
        self.pins: dict[int, str] = {}  # kernel by number of rows; see pin
        self._pinned: dict[tuple[int, torch.dtype], int] = {}
        size = packed_bytes(in_features, out_features, group_size, zeros, sparse)
        columns = ceil_div(out_features, BLOCK_COLUMNS) * BLOCK_COLUMNS
        self.register_buffer("packed", torch.zeros(size, dtype=torch.uint8, device=device))
        self.register_buffer("col_scale", torch.zeros(columns, device=device, dtype=torch.float32))
        order = torch.arange(in_features, dtype=torch.int32, device=device) if act_order else None
        self.register_buffer("perm", order)
        # Zeros, not empty memory: a file without a bias must never leave a random one.
        start = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_buffer("bias", start)

    @classmethod
    def from_packed(cls, weight: PackedWeight, bias: Tensor | None = None) -> QuantLinear:
        """Wrap a packed weight (not copied). bias: [N] in natural order, any floating dtype."""
        if not isinstance(weight, PackedWeight):
            raise TypeError(f"weight must be a PackedWeight, not {type(weight).__name__}")
        layer = cls(
            weight.k,
            weight.n,
            group_size=weight.group_size,
            zeros=weight.has_zeros,
            sparse=weight.sparse,
            dtype=weight.dtype,
            device="meta",
        )
        layer.packed, layer.col_scale = weight.packed, weight.col_scale
        layer.register_buffer("perm", weight.perm)
        if bias is not None:
            if tuple(bias.shape) != (weight.n,) or not bias.is_floating_point():
                raise ValueError(
                    f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}: it must be"
                    f" floating point [{weight.n}]"
                )
            bias = bias.detach().to(weight.device).clone()
        layer.register_buffer("bias", bias)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, method: str = "rtn", **options: Any) -> QuantLinear:
        """Quantise an `nn.Linear`; `options` as in `marlin_cutlass.quantize`. The bias is kept."""
        from .quantize import quantize

        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, not {type(linear).__name__}")
        if linear.weight.dtype == torch.bfloat16:
            options.setdefault("scale_dtype", torch.bfloat16)
        weight = quantize(linear.weight.detach(), method, **options)
        if linear.weight.dtype in (torch.float16, torch.bfloat16):
            weight.dtype = linear.weight.dtype
        layer = cls.from_packed(weight, linear.bias)
        return layer.train(linear.training)

    @property
    def weight_packed(self) -> PackedWeight:
        """The weight as gemm takes it; shares the buffers."""
        return PackedWeight(
            self.packed,
            self.col_scale,
            self.perm,
            self.out_features,
            self.in_features,
            self.group_size,
            self.has_zeros,
            self.dtype,
            sparse=self.sparse,
        )

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.packed.device

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dense weight [N, K] as `nn.Linear` holds it, in `dtype` (default: `self.dtype`)."""
        from .reference import dequantize

        return dequantize(self.weight_packed, dtype or self.dtype).t()

    @torch.no_grad()
    def copy_(self, weight: PackedWeight, bias: Tensor | None = None) -> QuantLinear:
        """Overwrite the contents in place: addresses stay, captured graphs see the new weight.

        Raises ValueError unless form, sizes and presence of a bias are the same.
        """
        if (bias is None) != (self.bias is None):
            raise ValueError("copy_ needs a bias exactly where the layer has one")
        self.weight_packed.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)
        return self

    def shard(self, rank: int, world: int, dim: str) -> QuantLinear:
        """Tensor-parallel part: dim "column" (outputs) or "row" (inputs; bias on rank 0 only).

        Dequantises bit for bit to its part of the whole. Errors as in `sharding`.
        """
        if dim == "column":
            weight = shard_columns(self.weight_packed, rank, world)
            first = rank * weight.n
            bias = None if self.bias is None else self.bias[first : first + weight.n]
        elif dim == "row":
            weight = shard_rows(self.weight_packed, rank, world)
            bias = self.bias if rank == 0 else None
        else:
            raise ValueError(f"dim={dim!r}: 'column' or 'row' is required")
        return type(self).from_packed(weight, bias)

    @classmethod
    def fuse(cls, layers: Sequence[QuantLinear]) -> QuantLinear:
        """One layer whose outputs are those of `layers` side by side (q, k, v; gate, up).

        ValueError says why siblings cannot be fused: other K, group size, zero points, act-order,
        or a bias in only some of them.
        """
        weight = fuse_columns([layer.weight_packed for layer in layers])
        biases = [layer.bias for layer in layers]
        missing = [bias is None for bias in biases]
        if any(missing) and not all(missing):
            raise ValueError(
                f"these layers cannot be fused: bias present in {missing.count(False)}"
                f" of {len(missing)}"
            )
        return cls.from_packed(weight, None if all(missing) else torch.cat(biases))

    def pin(self, rows: int, kernel: str | None) -> None:
        """Use `kernel` (a name or geometry as of `gemm`) for calls with exactly `rows` rows; None:
        the table's choice again. See `pin_kernels`.

        Pin last: copies, pickles and layers made of this one (`shard`, `fuse`, `fuse_mlps`), state
        dicts and other devices know nothing of it. Activations of the dtype that the layer does not
        have take the table's choice where the kernel is not built for it. Under torch.compile a
        layer with pins is compiled anew for each number of rows.

        Raises TypeError for what is no number or no name, ValueError for rows < 1, for a layer that
        is not on a GPU, and for a kernel that is not there or for another format.
        """
        check_rows(rows)
        if not (kernel is None or isinstance(kernel, str)):
            raise TypeError(f"kernel={kernel!r} must be the name of a variant, or None")
        codes = {} if kernel is None else self._codes_of(kernel)
        for dtype in (torch.float16, torch.bfloat16):
            self._pinned.pop((rows, dtype), None)
        self._pinned |= {(rows, dtype): code for dtype, code in codes.items()}
        self.pins.pop(rows, None)
        if kernel is not None:
            self.pins[rows] = kernel

    def _codes_of(self, kernel: str) -> dict[torch.dtype, int]:
        """The operators' argument for a named kernel, by dtype of the activations."""
        from . import library

        if self.device.type != "cuda":
            raise ValueError(
                f"kernel={kernel!r} is a CUDA kernel and the layer is on {self.device}"
            )
        capability = torch.cuda.get_device_capability(self.device)
        form = (self.has_zeros, self.group_size, self.sparse)
        code = library.forced_index(kernel, capability, library.KEYS_DTYPE[self.dtype], *form)
        other = torch.bfloat16 if self.dtype == torch.float16 else torch.float16
        try:  # not compiled on demand for a dtype that may never come
            table = library.table_for_capability(*capability)
            return {self.dtype: code, other: table.find(kernel, library.KEYS_DTYPE[other], *form)}
        except ValueError:
            return {self.dtype: code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Places in the kernel table of the process that pinned them; older pickles have none.
        self.pins, self._pinned = {}, {}

    def forward(self, x: Tensor, swiglu: bool = False) -> Tensor:
        """x [..., K] -> [..., N], with swiglu [..., N/2] (see `gemm`), in x's dtype (under
        autocast: the autocast dtype)."""
        device = "cuda" if x.is_cuda else "cpu"
        if torch.is_autocast_enabled(device) and not x.is_meta:
            x = x.to(torch.get_autocast_dtype(device))
        a = x.to(self.dtype) if x.dtype == torch.float32 else x
        if swiglu:
            ops.check_swiglu(self.out_features)
        pinned, code = self._pinned, ops.AUTO
        if pinned:
            code = pinned.get((a.numel() // self.in_features, a.dtype), code)
        # Not as attributes: a module finds each of them in Python, which takes a microsecond.
        own = self._buffers
        try:
            packed, col_scale = own["packed"], own["col_scale"]
            perm, bias = own["perm"], own["bias"]
        except KeyError:  # one is a parameter now, parametrised, or a plain attribute of a replica
            packed, col_scale, perm, bias = self.packed, self.col_scale, self.perm, self.bias
        needs_grad = torch.is_grad_enabled() and (
            a.requires_grad or (bias is not None and bias.requires_grad)
        )
        n, k = self.out_features, self.in_features
        group_size, has_zeros = self.group_size, self.has_zeros
        form = form_of(k, n, group_size, has_zeros)
        if form is None or needs_grad or swiglu:
            op = ops.GEMM_AUTOGRAD if needs_grad else ops.GEMM_SWIGLU if swiglu else ops.GEMM
            out = op(a, packed, col_scale, bias, perm, n, k, group_size, has_zeros, code)
        elif bias is None and perm is None and code == ops.AUTO:
            out = ops.GEMM_COMPACT(a, packed, col_scale, form)  # what is left out costs nothing
        else:
            out = ops.GEMM_COMPACT(a, packed, col_scale, form, bias, perm, code)
        if swiglu and needs_grad:
            out = reference.swiglu(out)
        return out.to(x.dtype) if a is not x else out

    def extra_repr(self) -> str:
        kind = "zero points" if self.has_zeros else "symmetric"
        kind += ", 2:4 sparse" if self.sparse else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, group_size={self.group_size}, {kind},"
            f" act_order={self.perm is not None}"
        )

    def _apply(self, fn, recurse: bool = True):
        """`nn.Module._apply`, after which `col_scale` is float32 again. Another device, which has
        another kernel table, takes pins back."""
        before = self.col_scale
        super()._apply(fn, recurse)
        if self.col_scale.dtype != torch.float32:
            if self.col_scale.dtype in (torch.float16, torch.bfloat16):
                self.dtype = self.col_scale.dtype
            if before.device.type == "meta":
                self.col_scale = torch.empty_like(self.col_scale, dtype=torch.float32)
            else:  # from the original: a round trip through fp16 would lose bits
                self.col_scale = before.to(self.col_scale.device)
        if before.device != self.col_scale.device:
            self.pins.clear()
            self._pinned.clear()
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *rest) -> None:
        """Act-order is known from the file: `perm` is made or dropped before the usual checks."""
        given = state_dict.get(prefix + "perm")
        if given is not None and given.device.type != "meta":
            try:  # a kernel that reads past its activations would stop the device
                check_permutation(given)
            except ValueError as error:
                rest[-1].append(f"{prefix}{error}")
        if prefix + "packed" in state_dict and (given is not None) != (self.perm is not None):
            order = None
            if given is not None:
                order = torch.arange(self.in_features, dtype=torch.int32, device=self.device)
            self.register_buffer("perm", order)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
