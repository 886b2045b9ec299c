"""2:4-sparse MARLIN: Sparse-Marlin's own format, and compressed-tensors "marlin-24", which is the
same but for names, the shape of the metadata and one rule.

B int32 [K/32, 2N] holds the codes of the two kept values of each four rows; meta int16, N * K / 16
of them in CUTLASS's interleaved order, their places; s [G, N] the scales. Of each kernel chunk of
16 kept rows x 64 columns a lane owns 4 columns. Symmetric, no zero points, no row order.
"""

from __future__ import annotations

import torch

from ..layout import sparse_block_bytes
from .bits import unpack_nibbles
from .marlin import NIBBLE_TO_PAIR, TILE, _restore
from .weight import SYMMETRIC_ZERO, QuantizedWeight, check_group_size, check_scales

CHUNK = 1024  # codes of 16 kept rows x 64 columns: 32 lanes x 4 columns x 8 codes
COLUMNS = 64
ROWS = 32  # rows that 16 kept ones stand for
META_ROWS = 16  # rows whose places share an int16: four times four bits
FOUR = 4


def code_positions() -> torch.Tensor:
    """int64 [1024]: stored position in a chunk -> tile * 256 + kept row * 16 + column."""
    position = torch.arange(CHUNK)
    lane, column = position // 32, position // 8 % 4
    pair = torch.tensor(NIBBLE_TO_PAIR)[position % 8]
    row = 2 * (lane % 4) + pair % 2 + 8 * (pair // 2 % 2)
    column = column + 4 * (pair // 4) + 8 * (lane // 4 % 2)
    return lane // 8 * 256 + row * TILE + column


def scale_positions() -> torch.Tensor:
    """int64 [64]: stored position -> column inside 64, where there are several groups."""
    position = torch.arange(COLUMNS)
    return position // 8 * 8 + position % 8 // 2 + 4 * (position % 2)


def meta_positions(n: int, words: int) -> torch.Tensor:
    """int64 [N, words]: where the int16 of column n and rows 16w .. 16w + 15 is stored."""
    column, word = torch.arange(n).view(-1, 1), torch.arange(words)
    row = column // 64 * 64 + column % 2 * 2 + column % 8 // 4
    row = row + column % 4 // 2 * 32 + column % 64 // 8 * 4
    # Pairs of words are interleaved, and 2 x 2 blocks transposed.
    return word // 2 * (2 * n) + 2 * (row - row % 2) + 2 * (word % 2) + row % 2


def _kept_codes(B: torch.Tensor, k: int, n: int) -> torch.Tensor:
    """uint8 [K/2, N] in natural order."""
    tiles = _restore(unpack_nibbles(B, 1), code_positions())
    return tiles.view(k // ROWS, n // TILE, TILE, TILE).permute(0, 2, 1, 3).reshape(k // 2, n)


def _places(meta: torch.Tensor, k: int, n: int, name: str) -> torch.Tensor:
    """uint8 [K/4, 2, N]: rows of the kept values inside their four, rising."""
    words = meta.reshape(-1)[meta_positions(n, k // META_ROWS).to(meta.device)]
    nibbles = [words.bitwise_right_shift(4 * i).bitwise_and(15) for i in range(FOUR)]
    places = torch.stack(nibbles, dim=2).view(n, k // FOUR).t().to(torch.uint8)
    low, high = places & 3, places >> 2
    if bool((low >= high).any()):
        four, column = (int(i) for i in (low >= high).nonzero()[0])
        raise ValueError(
            f"{name}: meta gives rows {FOUR * four}:{FOUR * four + FOUR} of column {column} the"
            f" places {int(low[four, column])} and {int(high[four, column])}: they must rise"
        )
    return torch.stack((low, high), dim=1)


def _sizes(B: torch.Tensor, s: torch.Tensor, meta: torch.Tensor, name: str) -> tuple[int, int]:
    """(K, N), from tensors that agree on them."""
    wanted = (("codes", B, torch.int32), ("scales", s, None), ("meta", meta, torch.int16))
    for role, tensor, dtype in wanted:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {role} are {type(tensor).__name__}: a tensor is required")
        dtype = dtype or tensor.dtype  # of scales: check_scales
        if tensor.dim() != 2 or tensor.dtype != dtype:
            raise ValueError(
                f"{name}: {role} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}:"
                f" two dimensions of {dtype} are required"
            )
    k, n = B.shape[0] * ROWS, B.shape[1] // 2
    if n % COLUMNS or not n or s.shape[-1] != n or meta.numel() * META_ROWS != k * n:
        raise ValueError(
            f"{name}: codes of shape {tuple(B.shape)}, scales of {tuple(s.shape)} and meta of"
            f" {tuple(meta.shape)} do not fit: [K/32, 2N], [G, N] and N * K / 16 values are"
            " required for 4 bits, with N a multiple of 64"
        )
    if B.device != meta.device:
        raise ValueError(f"{name}: codes are on {B.device} and meta on {meta.device}")
    return k, n


def _read(B, s, meta, group_size: int, name: str, grouped) -> QuantizedWeight:
    k, n = _sizes(B, s, meta, name)
    groups = check_group_size(group_size, k)
    sparse_block_bytes(group_size)  # refuses 32
    check_scales(s, groups, n, f"{name}: scales")
    fours = torch.full((k // FOUR, FOUR, n), SYMMETRIC_ZERO, dtype=torch.uint8, device=B.device)
    places = _places(meta, k, n, name).long()
    fours.scatter_(1, places, _kept_codes(B, k, n).view(k // FOUR, 2, n))
    scales = _restore(s, scale_positions()) if grouped(k) else s
    return QuantizedWeight(fours.view(k, n), scales, None, group_size, sparse=True)


def read_sparse_marlin(
    B: torch.Tensor,
    s: torch.Tensor,
    meta: torch.Tensor,
    *,
    group_size: int,
    name: str = "sparse marlin weight",
) -> QuantizedWeight:
    """Decode one layer of Sparse-Marlin (`Layer_2_4.pack(..., trans=True)`, the order that its
    kernel reads), torchao or vLLM's gptq_marlin_24 (B_24, s, B_meta).

    K must be a multiple of 32 and N of 64. group_size: 64, 128, a multiple of 128, or -1. Raises
    TypeError or ValueError naming what does not fit.
    """
    return _read(B, s, meta, group_size, name, lambda k: group_size not in (-1, k))


def read_marlin_24(
    weight_packed: torch.Tensor,
    scale_packed: torch.Tensor,
    meta: torch.Tensor,
    *,
    group_size: int,
    name: str = "marlin-24 weight",
) -> QuantizedWeight:
    """Decode one layer of a compressed-tensors "marlin-24" checkpoint; see `read_sparse_marlin`.

    NOTE: its packer compares the group size with the number of kept rows, K / 2, and so leaves the
    scales of a layer with two groups in their natural order.
    """
    return _read(
        weight_packed, scale_packed, meta, group_size, name, lambda k: 0 < group_size < k // 2
    )


def from_sparse_marlin(B: torch.Tensor, s: torch.Tensor, meta: torch.Tensor, *, group_size: int):
    """One layer of Sparse-Marlin -> 2:4-sparse `PackedWeight`; errors as in
    `read_sparse_marlin`."""
    return read_sparse_marlin(B, s, meta, group_size=group_size).to_packed()
