"""Offline packing: INT4 codes, scales and zero points into the layout of `layout.py`, and back.

Everything runs on the device of `q`: vectorised torch, and on a CPU the loops of `host_library`
where there is a compiler, with the same bits. The extra memory stays near one byte per weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import host_library
from .errors import short_dtype, sizes
from .layout import (
    BLOCK_COLUMNS,
    BLOCK_DEPTH,
    CODE_BYTES,
    SLACK_BLOCKS,
    block_bytes,
    ceil_div,
    check_sizes,
    stored_group_size,
)
from .packed_weight import PackedWeight

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
# Stored scales are weight scales times 2^22 or 2^18, the inverse weights of the two code positions
# as fp16 subnormals.
LOW_SHIFT, HIGH_SHIFT = 22, 18
# Normalised scales stay below 2^-6, so that 2^22 times a scale fits fp16.
SCALE_EXPONENT = 6
# s_n of a per-column weight, a constant of the kernels; the column scale carries the rest.
COLUMN_SCALE = 2.0**-7
# Above this the power of two that normalises a column, or a per-column scale times 2^7, leaves
# fp32.
MAX_SCALE = 2.0**120
MAX_ZERO = 16  # GPTQ v1 stores z - 1 in four bits


def pack(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int,
    g_idx: Tensor | None = None,
) -> PackedWeight:
    """Packs W[k, n] = (q[k, n] - z[k / group_size, n]) * s[k / group_size, n] for every kernel of
    every architecture.

    q: uint8 [K, N], values 0..15, rows in natural order. scales: float16, bfloat16 or float32 [K /
    group_size, N] (one row for group_size=-1). zeros: integers 0..16 of the same shape, in any
    integer or floating type; None means 8. g_idx: group of each row, int32 or int64 [K], on any
    device (act-order); None, all -1 and k // group_size mean the natural order. group_size: 32, 64,
    128, a multiple of 128, or -1.

    Scales are stored as fp16 after division by a power of two per column, so bfloat16 scales lose
    nothing unless the groups of one column differ by more than 2^8; float32 scales are rounded to
    fp16 (not for group_size=-1).

    Raises TypeError for a wrong dtype, ValueError for wrong shapes or values, before anything is
    written.
    """
    _check_code_form(q)
    k, n = q.shape
    check_sizes(k, n, group_size)
    rows = 1 if group_size < 0 else k // group_size
    _check_scale_form(scales, rows, q, group_size)
    scales = scales.to(q.device)
    zeros = None if zeros is None else _zero_form(zeros, scales).to(q.device)
    if not _values_fit(q, scales, zeros):
        _refuse_values(q, scales, zeros)
    zeros = None if zeros is None else zeros.to(torch.int16)
    perm = None if g_idx is None else _permutation(g_idx, k, n, group_size)
    if perm is not None:
        q = q.index_select(0, perm.to(q.device))
    stored, exponent_scale = _normalise(scales, group_size)
    col_scale = torch.zeros(
        ceil_div(n, BLOCK_COLUMNS) * BLOCK_COLUMNS, dtype=torch.float32, device=q.device
    )
    col_scale[:n] = exponent_scale
    return PackedWeight(
        packed=_assemble(q, stored, zeros, group_size),
        col_scale=col_scale,
        perm=None if perm is None else perm.to(q.device, torch.int32),
        n=n,
        k=k,
        group_size=group_size,
        has_zeros=zeros is not None,
        dtype=scales.dtype if scales.dtype in (torch.float16, torch.bfloat16) else torch.float16,
    )


def _dtype_of(value: object) -> str:
    """Dtype of a tensor, type of anything else, for messages."""
    return short_dtype(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _first(mask: Tensor) -> tuple[int, int]:
    """Row and column of the first True of a 2-D mask."""
    row, column = (int(i) for i in mask.nonzero()[0])
    return row, column


def _check_code_form(q: Tensor) -> None:
    if not isinstance(q, Tensor) or q.dtype != torch.uint8:
        raise TypeError(
            f"q has dtype {_dtype_of(q)}: codes must be a uint8 tensor, one per element"
        )
    if q.layout != torch.strided or q.is_meta:
        raise TypeError(f"q is {'on meta' if q.is_meta else q.layout}: codes must have values")
    if q.dim() != 2:
        raise ValueError(
            f"q has shape {tuple(q.shape)}: it must be [K, N] "
            "(pack the experts of a 3-D weight one by one)"
        )


def _check_code_values(q: Tensor) -> None:
    if q.numel() and int(q.max()) > 15:
        k, n = _first(q > 15)
        raise ValueError(f"q[{k}, {n}]={int(q[k, n])} is not a 4-bit code: values must be 0..15")


def _check_codes(q: Tensor) -> None:
    _check_code_form(q)
    _check_code_values(q)


def _check_scale_form(scales: Tensor, rows: int, q: Tensor, group_size: int) -> None:
    k, n = q.shape
    if not isinstance(scales, Tensor) or scales.dtype not in SCALE_DTYPES:
        raise TypeError(
            f"scales have dtype {_dtype_of(scales)}: they must be float16, bfloat16 or float32"
        )
    if tuple(scales.shape) != (rows, n):
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}: {sizes(k, n, group_size)} "
            f"needs [K/group_size, N] = ({rows}, {n})"
        )


def _check_scale_values(scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        group, column = _first(~torch.isfinite(scales))
        value = float(scales[group, column])
        raise ValueError(f"scales[{group}, {column}]={value}: scales must be finite")
    largest = float(scales.abs().amax())
    if largest >= MAX_SCALE:
        raise ValueError(f"scales reach {largest:g}: they must stay below 2^120")


def _check_scales(scales: Tensor, rows: int, q: Tensor, group_size: int) -> None:
    _check_scale_form(scales, rows, q, group_size)
    _check_scale_values(scales)


def _zero_form(zeros: Tensor, scales: Tensor) -> Tensor:
    """The zero points themselves, of a type and shape that can be right."""
    if not isinstance(zeros, Tensor) or zeros.dtype == torch.bool or zeros.is_complex():
        raise TypeError(
            f"zeros have dtype {_dtype_of(zeros)}: they must be an integer or floating-point tensor"
        )
    if zeros.shape != scales.shape:
        raise ValueError(
            f"zeros have shape {tuple(zeros.shape)} and scales {tuple(scales.shape)}: "
            "they must be equal"
        )
    return zeros


def _check_zero_values(zeros: Tensor) -> None:
    if zeros.is_floating_point():
        fractional = zeros != zeros.round()  # also true for NaN
        if bool(fractional.any()):
            group, column = _first(fractional)
            raise ValueError(
                f"zeros[{group}, {column}]={float(zeros[group, column]):g} is fractional: zero "
                "points must be integers 0..16 (they are never rounded here: requantise)"
            )
    low, high = float(zeros.amin()), float(zeros.amax())
    if low < 0 or high > MAX_ZERO:
        raise ValueError(f"zeros span {low:g}..{high:g}: zero points must be 0..16")


def _values_fit(q: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
    """Whether all values can be packed: one wait for the device, whatever there is to check."""
    fit = (q.amax() <= 15) & (scales.abs().amax().float() < MAX_SCALE)  # NaN and inf are not less
    if zeros is not None:
        low, high = torch.aminmax(zeros)
        fit &= (low >= 0) & (high <= MAX_ZERO)
        if zeros.is_floating_point():
            fit &= (zeros == zeros.round()).all()
    return bool(fit)


def _refuse_values(q: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """Raises for the first value that does not fit."""
    _check_code_values(q)
    _check_scale_values(scales)
    if zeros is not None:
        _check_zero_values(zeros)


def _permutation(g_idx: Tensor, k: int, n: int, group_size: int) -> Tensor | None:
    """Row order that makes groups contiguous (int64 [K]), or None where the natural one does."""
    if not isinstance(g_idx, Tensor) or g_idx.dtype not in INDEX_DTYPES:
        raise TypeError(f"g_idx has dtype {_dtype_of(g_idx)}: it must be int32 or int64")
    if tuple(g_idx.shape) != (k,):
        raise ValueError(f"g_idx has shape {tuple(g_idx.shape)}: it must be [K] = ({k},)")
    index = g_idx.detach().to("cpu", torch.int64)
    if bool((index == -1).all()):
        return None
    groups = 1 if group_size < 0 else k // group_size
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx spans {low}..{high}: the scales have groups 0..{groups - 1}")
    counts = torch.bincount(index, minlength=groups)
    if group_size > 0 and bool((counts != group_size).any()):
        group = int((counts != group_size).nonzero()[0])
        raise ValueError(
            f"g_idx gives group {group} {int(counts[group])} rows: "
            f"{sizes(k, n, group_size)} needs {group_size} in each"
        )
    perm = torch.argsort(index, stable=True)
    return None if bool((perm == torch.arange(k)).all()) else perm


def _normalise(scales: Tensor, group_size: int) -> tuple[Tensor | None, Tensor]:
    """(s_n fp16 [groups, N] or None per column, column factor fp32 [N]) with scales = s_n *
    factor."""
    values = scales.float()
    if group_size < 0:
        return None, values[0] / COLUMN_SCALE
    largest = values.abs().amax(dim=0)
    exponent = torch.frexp(largest).exponent.to(torch.int32) + SCALE_EXPONENT
    exponent = torch.where(largest > 0, exponent, 0).clamp(min=-126)
    rounded = torch.ldexp(largest, -exponent).half()
    exponent += (rounded.float() >= 2.0**-SCALE_EXPONENT).to(
        torch.int32
    )  # rounding reached the next power of two
    return torch.ldexp(values, -exponent).half(), torch.ldexp(torch.ones_like(largest), exponent)


def _assemble(q: Tensor, stored: Tensor | None, zeros: Tensor | None, group_size: int) -> Tensor:
    """Packed buffer uint8 [total bytes] from codes [K, N], s_n and zero points [groups, N]."""
    k, n = q.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK_COLUMNS), ceil_div(k, BLOCK_DEPTH)
    count, width = n_blocks * k_blocks, block_bytes(group_size, zeros is not None)
    out = torch.empty(count + SLACK_BLOCKS, width, dtype=torch.uint8, device=q.device)
    out[count:] = 0
    fill = 8 if zeros is None else 0
    if not host_library.pack_codes(q, fill, out):
        words = _code_words(_padded(q, k_blocks * BLOCK_DEPTH, n_blocks * BLOCK_COLUMNS, fill))
        out.view(torch.int32)[:count, : CODE_BYTES // 4] = words.view(count, CODE_BYTES // 4)
    if width > CODE_BYTES:
        entries = _entries(stored, zeros, group_size, n_blocks, k_blocks)
        out[:count, CODE_BYTES:] = entries.view(torch.uint8).view(count, width - CODE_BYTES)
    return out.view(-1)


def _padded(values: Tensor, rows: int, columns: int, fill: int) -> Tensor:
    if tuple(values.shape) == (rows, columns):
        return values
    out = torch.full((rows, columns), fill, dtype=values.dtype, device=values.device)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _code_words(q: Tensor) -> Tensor:
    """int32 words [n_block, k_block, half, atom, lane, step] of padded codes [K, N]; axes as in
    `layout.Layout.code`.

    Four neighbouring columns are two rows (v) of two lanes (j). Moved together, the codes of both v
    fill a byte, and a word is four such bytes, of different k, rotated left by 2.
    """
    k_blocks, n_blocks = q.shape[0] // BLOCK_DEPTH, q.shape[1] // BLOCK_COLUMNS
    q = q.contiguous()
    q = q.clone() if q.storage_offset() % 4 else q  # a part of a larger tensor, between words
    fours = q.view(torch.int32)  # bytes: v 0 j 0, v 0 j 1, v 1 j 0, v 1 j 1
    fours = fours.bitwise_right_shift(12).bitwise_or_(fours)  # bytes j = 0, 1, and two of no use
    # k = block, half, step, u (deep / 8), t (lane % 4), high; n = block, atom, i (4 columns), byte
    both = fours.view(torch.uint8).view(k_blocks, 2, 4, 2, 4, 2, n_blocks, 4, 4, 4)[..., :2]
    # word: n_block, k_block, half, atom, lane = i, j, t, step; its bytes: high, u
    parts = both.permute(6, 0, 1, 7, 8, 9, 4, 2, 5, 3).contiguous()
    words = parts.flatten(-2).view(torch.int32).squeeze(-1)
    top = words.bitwise_right_shift(30).bitwise_and_(3)
    return words.bitwise_left_shift_(2).bitwise_or_(top)


def _spread(values: Tensor, rows: int, k_blocks: int, per_block: int, n_blocks: int) -> Tensor:
    """[groups, N] -> [n_block, k_block, group, atom, row (8), row half (2)], groups repeated and
    padded with 0."""
    repeat = rows // values.shape[0]
    if repeat > 1:
        values = values.repeat_interleave(repeat, dim=0)
    values = _padded(values, k_blocks * per_block, n_blocks * BLOCK_COLUMNS, 0)
    values = values.view(k_blocks, per_block, n_blocks, 4, 4, 2, 2)  # ..., atom, i, row half, j
    return values.permute(2, 0, 1, 3, 4, 6, 5).reshape(n_blocks, k_blocks, per_block, 4, 8, 2)


def _entries(
    stored: Tensor | None, zeros: Tensor | None, group_size: int, n_blocks: int, k_blocks: int
) -> Tensor:
    """Scale entries, int16 [n_block, k_block, group, atom, row, 2 or 4]."""
    group = stored_group_size(group_size)
    per_block = 1 if group < 0 else BLOCK_DEPTH // group
    given = stored if stored is not None else zeros
    rows = given.shape[0] * (max(group_size, group) // group if group > 0 else 1)
    if group < 0:
        zeros = zeros.expand(k_blocks, -1)
        rows = k_blocks
    parts = []
    if stored is not None:
        spread = _spread(stored, rows, k_blocks, per_block, n_blocks).float()
        # By numbers, not by a tensor of two: a copy to the device would wait for it.
        spread[..., 0] *= 2.0**LOW_SHIFT
        spread[..., 1] *= 2.0**HIGH_SHIFT
        parts.append(spread.half().view(torch.int16))
    if zeros is not None:  # z * 2^-22 is the fp16 subnormal z << 2
        spread = _spread(zeros, rows, k_blocks, per_block, n_blocks).clone()
        spread[..., 0] <<= 2
        spread[..., 1] <<= 6
        parts.append(spread)
    return torch.cat(parts, dim=-1).contiguous()


class Unpacked(NamedTuple):
    """Contents of a range of column blocks, padding included, rows in packed order."""

    codes: Tensor  # uint8 [k_blocks * 128, columns]
    scales: Tensor  # fp16 s_n [groups, columns]; one row per column weight
    zeros: Tensor | None  # int16 [groups, columns]


def unpack(w: PackedWeight, first: int = 0, last: int | None = None) -> Unpacked:
    """Codes, normalised scales and zero points of column blocks first..last-1 (64 columns each)."""
    n_blocks, k_blocks = ceil_div(w.n, BLOCK_COLUMNS), ceil_div(w.k, BLOCK_DEPTH)
    last = n_blocks if last is None else last
    if w.sparse:
        from .sparse import unpack_sparse

        return unpack_sparse(w, first, last)
    blocks = w.packed.view(-1, block_bytes(w.group_size, w.has_zeros))
    blocks = blocks[first * k_blocks : last * k_blocks]
    codes = _unpack_codes(blocks[:, :CODE_BYTES], last - first, k_blocks)
    entries = blocks[:, CODE_BYTES:].contiguous().view(torch.int16)
    scales, zeros = _unpack_entries(entries, w, last - first, k_blocks)
    return Unpacked(codes, scales, zeros)


def _unpack_codes(code_bytes: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    words = code_bytes.contiguous().view(torch.int32).view(n_blocks, k_blocks, 2, 4, 4, 2, 4, 4)
    words = words.permute(1, 2, 7, 6, 0, 3, 4, 5)  # k_block, half, step, t, n_block, atom, i, j
    shape = (k_blocks, 2, 4, 2, 4, 2, n_blocks, 4, 4, 2, 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for pair in range(4):
        for high in range(2):
            shift = 2 + 4 * pair + 16 * high
            code = words.bitwise_right_shift(shift).bitwise_and_(3 if shift == 30 else 15)
            if shift == 30:
                code.bitwise_or_(words.bitwise_and(3).bitwise_left_shift_(2))
            codes[:, :, :, pair // 2, :, high, :, :, :, pair % 2, :] = code
    return codes.view(k_blocks * BLOCK_DEPTH, n_blocks * BLOCK_COLUMNS)


def _unpack_entries(
    entries: Tensor, w: PackedWeight, n_blocks: int, k_blocks: int
) -> tuple[Tensor, Tensor | None]:
    group = stored_group_size(w.group_size)
    per_block = 1 if group < 0 else BLOCK_DEPTH // group
    columns = n_blocks * BLOCK_COLUMNS
    scales = torch.full((1, columns), COLUMN_SCALE, dtype=torch.float16, device=entries.device)
    if entries.shape[1] == 0:
        return scales, None
    width = entries.shape[1] // (per_block * 32)
    grid = entries.view(n_blocks, k_blocks, per_block, 4, 4, 2, width)  # atom, i, j, entry
    grid = grid.permute(1, 2, 0, 3, 4, 6, 5)  # k_block, group, n_block, atom, i, entry, j

    def rows(part: Tensor) -> Tensor:
        return part.reshape(k_blocks * per_block, columns)

    if group > 0:
        factor = torch.tensor([2.0**-LOW_SHIFT, 2.0**-HIGH_SHIFT], device=entries.device).view(2, 1)
        stored = grid[..., :2, :].contiguous().view(torch.float16).float()
        scales = rows((stored * factor).half())
    if not w.has_zeros:
        return scales, None
    shifts = torch.tensor([2, 6], dtype=torch.int16, device=entries.device).view(2, 1)
    zeros = rows(grid[..., -2:, :] >> shifts)
    return scales, zeros[:1] if group < 0 else zeros
