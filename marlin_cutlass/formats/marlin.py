"""MARLIN's own serialised format: B int32 [K/16, 2N], s fp16 [G, N]; symmetric, no zero points.

The codes lie in the fragment order of mma.m16n8k16 for chunks of 16 (K) x 64 (N), scales in the
order in which a thread of that kernel reads them (MARLIN paper, section 3.4).
"""

from __future__ import annotations

import torch

from .bits import unpack_nibbles
from .weight import QuantizedWeight, check_group_size, check_scales

TILE = 16
CHUNK = 1024  # codes of one 16 x 64 chunk: 32 lanes x 4 tiles x 8 codes
NIBBLE_TO_PAIR = (0, 2, 4, 6, 1, 3, 5, 7)  # low halves first, then high halves


def code_positions() -> torch.Tensor:
    """int64 [1024]: stored position in a chunk -> tile * 256 + row * 16 + column."""
    position = torch.arange(CHUNK)
    lane, tile = position // 32, position // 8 % 4
    pair = torch.tensor(NIBBLE_TO_PAIR)[position % 8]
    row = 2 * (lane % 4) + pair % 2 + 8 * (pair // 2 % 2)
    column = lane // 4 + 8 * (pair // 4)
    return tile * 256 + row * TILE + column


def scale_positions(grouped: bool) -> torch.Tensor:
    """int64 [64 or 32]: stored position -> column inside 64 (grouped) or 32 columns."""
    if grouped:
        position = torch.arange(64)
        return position // 8 + 8 * (position % 8)
    position = torch.arange(32)
    return 2 * (position // 8) + position % 2 + 8 * (position % 8 // 2)


def _restore(stored: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Undo `natural[..., positions] == stored` on chunks of len(positions) along the last dim."""
    chunks = stored.reshape(-1, positions.numel())
    natural = torch.empty_like(chunks)
    natural[:, positions.to(stored.device)] = chunks
    return natural.reshape(stored.shape)


def read_marlin(
    B: torch.Tensor,
    s: torch.Tensor,
    *,
    group_size: int,
    name: str = "marlin weight",
) -> QuantizedWeight:
    """Decode one MARLIN layer; K must be a multiple of 16 and N of 64, as its packer requires."""
    if B.dim() != 2 or B.dtype != torch.int32 or B.shape[1] % 128:
        raise ValueError(
            f"{name}: B has shape {tuple(B.shape)} and dtype {B.dtype}; int32 [K/16, 2*N] with N a"
            " multiple of 64 is required"
        )
    k, n = B.shape[0] * TILE, B.shape[1] // 2
    groups = check_group_size(group_size, k)
    check_scales(s, groups, n, f"{name}: s")
    tiles = _restore(unpack_nibbles(B, 1), code_positions())
    q = tiles.view(k // TILE, n // TILE, TILE, TILE).permute(0, 2, 1, 3).reshape(k, n)
    scales = _restore(s, scale_positions(grouped=groups > 1))
    return QuantizedWeight(q.contiguous(), scales, None, group_size)


def from_marlin(B: torch.Tensor, s: torch.Tensor, *, group_size: int):
    """One layer of a MARLIN checkpoint -> `PackedWeight`; errors as in `read_marlin`."""
    return read_marlin(B, s, group_size=group_size).to_packed()
