"""What a kernel computes, in plain torch: `dequantize` and the CPU path of `gemm`.

The arithmetic is the kernels': a weight is rounded once to the activation dtype with its normalised
scale, products are summed in fp32, and the column factor and the bias are applied in fp32 before
the only rounding of the result. Some Hopper kernels do without the first rounding (docs/layout.md)
and are that much closer to the exact product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .errors import short_dtype
from .layout import BLOCK_COLUMNS, BLOCK_DEPTH, ceil_div, stored_group_size
from .pack import unpack
from .packed_weight import PackedWeight

# Weights dequantised at a time; bounds the fp32 temporaries to 32 MiB.
CHUNK_WEIGHTS = 1 << 22


def column_chunks(w: PackedWeight) -> list[tuple[int, int]]:
    """Ranges of column blocks of at most CHUNK_WEIGHTS weights, at least one block each."""
    n_blocks = ceil_div(w.n, BLOCK_COLUMNS)
    step = max(1, CHUNK_WEIGHTS // (BLOCK_COLUMNS * ceil_div(w.k, BLOCK_DEPTH) * BLOCK_DEPTH))
    return [(first, min(first + step, n_blocks)) for first in range(0, n_blocks, step)]


def normalised_weights(w: PackedWeight, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """dtype((q - z) * dtype(s_n)) as fp32 [K, columns] of column blocks first..last-1, rows in
    packed order.

    For float32 nothing is rounded: the exact product with the stored fp16 scale.
    """
    codes, scales, zeros = unpack(w, first, last)
    group = stored_group_size(w.group_size)
    depth = group if group > 0 else codes.shape[0]
    grid = codes.view(-1, depth, codes.shape[1])
    centred = grid.float() - (8.0 if zeros is None else zeros.float().unsqueeze(1))
    values = centred.mul_(scales.to(dtype).float().unsqueeze(1)).to(dtype).float()
    return values.view(-1, codes.shape[1])[: w.k]


def natural_order(w: PackedWeight, rows: Tensor) -> Tensor:
    """Rows [K, ...] in packed order put back where the activations expect them."""
    if w.perm is None:
        return rows
    out = torch.empty_like(rows)
    out[w.perm.long()] = rows
    return out


def dequantize(w: PackedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """The weight as a dense [K, N] tensor in natural row order: bit for bit what a kernel gives for
    identity activations (those for the largest products, to a unit in the last place:
    docs/layout.md).

    dtype: float16 or bfloat16 (the activation dtype whose kernels are meant; default `w.dtype`), or
    float32 for the product of the stored values without rounding to an activation dtype. Raises
    TypeError for any other dtype.
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(
            f"w must be a PackedWeight (see marlin_cutlass.pack), not {type(w).__name__}"
        )
    dtype = w.dtype if dtype is None else dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(
            f"dtype={short_dtype(dtype)} is not supported: use float16, bfloat16 or float32"
        )
    out = torch.empty(w.k, w.n, dtype=dtype, device=w.device)
    for first, last in column_chunks(w):
        columns = slice(first * BLOCK_COLUMNS, min(last * BLOCK_COLUMNS, w.n))
        values = (
            normalised_weights(w, dtype, first, last)
            * w.col_scale[first * BLOCK_COLUMNS : last * BLOCK_COLUMNS]
        )
        out[:, columns] = values[:, : columns.stop - columns.start].to(dtype)
    return natural_order(w, out)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up [..., N/2] of x [..., N] with columns as `fuse_gate_up` lays them: two of the
    gate, the same two of up, the next two of the gate. Each step is rounded to x's dtype."""
    pairs = x.unflatten(-1, (-1, 2, 2))
    return (functional.silu(pairs[..., 0, :]) * pairs[..., 1, :]).flatten(-2)


def in_fp32(x: Tensor):
    """A context in which products of float32 tensors like x stay so, also under autocast."""
    return torch.autocast(x.device.type, enabled=False)


def gemm_reference(
    a: Tensor, w: PackedWeight, bias: Tensor | None = None, *, row_by_row: bool = False
) -> Tensor:
    """a [..., K] @ W + bias -> [..., N] in a's dtype; slow, on any device, sums in fp32.

    row_by_row: one product per row, so that a row's bits do not depend on the number of rows.
    """
    rows = a.reshape(-1, w.k)
    if w.perm is not None:
        rows = rows.index_select(1, w.perm)
    rows = rows.float()
    out = torch.empty(rows.shape[0], w.n, dtype=a.dtype, device=a.device)
    for first, last in column_chunks(w):
        weights = normalised_weights(w, a.dtype, first, last)
        columns = slice(first * BLOCK_COLUMNS, min(last * BLOCK_COLUMNS, w.n))
        width = columns.stop - columns.start
        parts = rows.split(1) if row_by_row else (rows,)
        with in_fp32(rows):
            sums = [part @ weights[:, :width] for part in parts]
        total = (torch.cat(sums) if sums else rows.new_empty(0, width)) * w.col_scale[columns]
        out[:, columns] = (total if bias is None else total + bias[columns].float()).to(a.dtype)
    return out.view(*a.shape[:-1], w.n)
