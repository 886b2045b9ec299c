"""2:4-sparse weights: the check, offline packing into `layout.SparseLayout`, and back.

Of every four consecutive rows of a column at most two differ from zero. The codes of two of them
and their places are stored, 3 bits per weight of the dense 4, and sparse tensor cores multiply only
these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import (
    BLOCK_COLUMNS,
    BLOCK_DEPTH,
    SLACK_BLOCKS,
    SPARSE_CODE_BYTES,
    SPARSE_META_BYTES,
    SPARSE_META_PADDING,
    ceil_div,
    check_sizes,
    sparse_block_bytes,
)
from .pack import (
    Unpacked,
    _check_codes,
    _check_scales,
    _code_words,
    _entries,
    _normalise,
    _padded,
    _unpack_codes,
    _unpack_entries,
)
from .packed_weight import PackedWeight

ZERO_CODE = 8
KEPT, CHUNK = 2, 4
HALF_DEPTH = BLOCK_DEPTH // KEPT  # kept values of a column in a block
_START = SPARSE_CODE_BYTES + SPARSE_META_BYTES  # of the scale entries in a block


def check_2_4(weight: Tensor) -> None:
    """Raises ValueError unless at most two of each four consecutive values along K differ from 0.

    weight: [N, K] as in `nn.Linear.weight`; four are columns 4i .. 4i + 3. The message names the
    first four, in row-major order, that has more.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be [N, K]")
    n, k = weight.shape
    padded = torch.zeros(n, ceil_div(k, CHUNK) * CHUNK, dtype=torch.bool, device=weight.device)
    padded[:, :k] = weight != 0
    count = padded.view(n, -1, CHUNK).sum(-1)
    if bool((count > KEPT).any()):
        row, chunk = (int(i) for i in (count > KEPT).nonzero()[0])
        first = chunk * CHUNK
        raise ValueError(
            f"weight[{row}, {first}:{first + CHUNK}] has {int(count[row, chunk])} values that are "
            "not zero: 2:4 sparsity allows 2 of 4 along K (see prune_2_4)"
        )


def has_2_4(q: Tensor) -> bool:
    """Whether codes [K, N] have 2:4 sparsity, without a transposed copy of them."""
    whole = q.shape[0] // CHUNK * CHUNK
    rest = q[whole:] != ZERO_CODE
    fours = (q[:whole] != ZERO_CODE).view(-1, CHUNK, q.shape[1])
    more = fours[:, 0].to(torch.uint8)
    for i in range(1, CHUNK):
        more += fours[:, i]
    return not bool((more > KEPT).any()) and not bool((rest.sum(0) > KEPT).any())


def pack_sparse(q: Tensor, scales: Tensor, *, group_size: int) -> PackedWeight:
    """Packs W[k, n] = (q[k, n] - 8) * s[k / group_size, n] with 2:4 sparsity along k.

    q: uint8 [K, N], values 0..15, of which at most two of rows 4i .. 4i + 3 differ from 8. scales
    and group_size as in `marlin_cutlass.pack`, without 32. Raises as `pack` does, and ValueError
    naming the first four values that are not 2:4.
    """
    _check_codes(q)
    k, n = q.shape
    check_sizes(k, n, group_size)
    sparse_block_bytes(group_size)
    _check_scales(scales, 1 if group_size < 0 else k // group_size, q, group_size)
    if not has_2_4(q):
        check_2_4(q.t().to(torch.int16) - ZERO_CODE)
    scales = scales.to(q.device)
    stored, factor = _normalise(scales, group_size)
    col_scale = torch.zeros(
        ceil_div(n, BLOCK_COLUMNS) * BLOCK_COLUMNS, dtype=torch.float32, device=q.device
    )
    col_scale[:n] = factor
    return PackedWeight(
        packed=_assemble(q, stored, group_size),
        col_scale=col_scale,
        perm=None,
        n=n,
        k=k,
        group_size=group_size,
        has_zeros=False,
        dtype=scales.dtype if scales.dtype in (torch.float16, torch.bfloat16) else torch.float16,
        sparse=True,
    )


def _assemble(q: Tensor, stored: Tensor | None, group_size: int) -> Tensor:
    k, n = q.shape
    n_blocks, k_blocks = ceil_div(n, BLOCK_COLUMNS), ceil_div(k, BLOCK_DEPTH)
    count, width = n_blocks * k_blocks, sparse_block_bytes(group_size)
    padded = _padded(q, k_blocks * BLOCK_DEPTH, n_blocks * BLOCK_COLUMNS, ZERO_CODE)
    kept, places = _select(padded)
    out = torch.zeros(count + SLACK_BLOCKS, width, dtype=torch.uint8, device=q.device)
    padding = SPARSE_META_PADDING * 0x11
    out[:, SPARSE_CODE_BYTES:_START] = padding
    codes = _code_bytes(kept, n_blocks, k_blocks)
    out[:count, :SPARSE_CODE_BYTES] = codes.view(count, SPARSE_CODE_BYTES)
    meta = _meta_words(places, n_blocks, k_blocks)
    out[:count, SPARSE_CODE_BYTES:_START] = meta.view(torch.uint8).view(count, SPARSE_META_BYTES)
    if width > _START:
        entries = _entries(stored, None, group_size, n_blocks, k_blocks)
        out[:count, _START:] = entries.view(torch.uint8).view(count, width - _START)
    return out.view(-1)


def _select(q: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the kept values [K / 2, N], metadata [K / 4, N]) of codes [K, N]: the values that
    are not zero, and the first zeros where there are fewer than two of them."""
    chunks = q.view(-1, CHUNK, q.shape[1])
    index = torch.arange(CHUNK, dtype=torch.uint8, device=q.device).view(1, CHUNK, 1)
    # Nonzero values first, each kind in order: the two smallest ranks are kept.
    rank = (chunks == ZERO_CODE).to(torch.uint8) * CHUNK + index
    even, odd = rank[:, ::2], rank[:, 1::2]
    low, high = torch.minimum(even, odd), torch.maximum(even, odd)
    first = low.amin(1) % CHUNK
    second = torch.minimum(low.amax(1), high.amin(1)) % CHUNK
    places = torch.stack((torch.minimum(first, second), torch.maximum(first, second)), dim=1)
    kept = chunks.gather(1, places.long())
    return kept.reshape(-1, q.shape[1]), places[:, 0] + places[:, 1] * CHUNK


def _code_bytes(kept: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """Bytes [n_block, k_block, 2048] of kept codes: a dense weight of half the depth, whose half
    blocks are the sparse blocks."""
    pairs = ceil_div(k_blocks, 2)
    words = _code_words(_padded(kept, pairs * BLOCK_DEPTH, n_blocks * BLOCK_COLUMNS, ZERO_CODE))
    words = words.view(n_blocks, 2 * pairs, SPARSE_CODE_BYTES // 4)[:, :k_blocks]
    return words.contiguous().view(torch.uint8)


def _meta_words(places: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """int32 words [n_block, k_block, atom pair, lane, step] of metadata [K / 4, N]."""
    # k = block, step, half, position; n = block, atom pair, member, i (4 columns), v (row / 8), j
    grid = places.view(k_blocks, 4, 2, 4, n_blocks, 2, 2, 4, 2, 2)
    words = None
    for v in range(2):
        for position in range(4):
            part = grid[:, :, :, position, :, :, :, :, v, :].to(torch.int32)
            part = part.bitwise_left_shift(16 * v + 4 * position)
            words = part if words is None else words.bitwise_or_(part)
    # axes now: k_block, step, half, n_block, pair, member, i, j; a lane is i, j, member, half
    return words.permute(3, 0, 4, 6, 7, 5, 2, 1).contiguous()


def unpack_sparse(w: PackedWeight, first: int, last: int) -> Unpacked:
    """As `pack.unpack`: dense codes of column blocks first..last-1, 8 where nothing is kept."""
    n_blocks, k_blocks = last - first, ceil_div(w.k, BLOCK_DEPTH)
    blocks = w.packed.view(-1, sparse_block_bytes(w.group_size))
    blocks = blocks[first * k_blocks : last * k_blocks]
    kept = _unpack_kept(blocks[:, :SPARSE_CODE_BYTES], n_blocks, k_blocks)
    places = _unpack_meta(blocks[:, SPARSE_CODE_BYTES:_START], n_blocks, k_blocks)
    chunks = torch.full(
        (places.shape[0], CHUNK, places.shape[1]), ZERO_CODE, dtype=torch.uint8, device=kept.device
    )
    index = torch.stack((places % CHUNK, places // CHUNK), dim=1).long()
    chunks.scatter_(1, index, kept.view(-1, KEPT, kept.shape[1]))
    entries = blocks[:, _START:].contiguous().view(torch.int16)
    scales, _ = _unpack_entries(entries, w, n_blocks, k_blocks)
    return Unpacked(chunks.view(-1, kept.shape[1]), scales, None)


def _unpack_kept(code_bytes: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """Kept codes [K / 2, columns]."""
    pairs = ceil_div(k_blocks, 2)
    padded = torch.zeros(
        n_blocks, 2 * pairs, SPARSE_CODE_BYTES, dtype=torch.uint8, device=code_bytes.device
    )
    padded[:, :k_blocks] = code_bytes.reshape(n_blocks, k_blocks, SPARSE_CODE_BYTES)
    codes = _unpack_codes(padded.view(n_blocks * pairs, -1), n_blocks, pairs)
    return codes[: k_blocks * HALF_DEPTH]


def _unpack_meta(meta_bytes: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """Metadata [K / 4, columns], uint8."""
    words = meta_bytes.contiguous().view(torch.int32)
    words = words.view(n_blocks, k_blocks, 2, 4, 2, 2, 2, 4).permute(1, 7, 6, 0, 2, 5, 3, 4)
    shape = (k_blocks, 4, 2, 4, n_blocks, 2, 2, 4, 2, 2)
    grid = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for v in range(2):
        for position in range(4):
            nibble = words.bitwise_right_shift(16 * v + 4 * position).bitwise_and(15)
            grid[:, :, :, position, :, :, :, :, v, :] = nibble.to(torch.uint8)
    return grid.view(k_blocks * BLOCK_DEPTH // CHUNK, n_blocks * BLOCK_COLUMNS)
