"""Four-bit fields inside int32 words: the one place that packs and unpacks them.

Every checkpoint format stores eight codes per 32-bit word and differs in two things only: the
dimension along which the eight neighbours lie, and which neighbour sits in which nibble (`order`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import host_library

NIBBLES = 8  # 4-bit fields in an int32
PLAIN_ORDER: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER: tuple[int, ...] = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i holds neighbour AWQ_ORDER[i]


def unpack_nibbles(
    words: torch.Tensor, dim: int, order: Sequence[int] = PLAIN_ORDER
) -> torch.Tensor:
    """Unpack int32 `words` along `dim`: that dimension grows by 8; returns uint8 codes 0..15."""
    if words.dtype != torch.int32:
        raise TypeError(f"packed words have dtype {words.dtype}; int32 is required")
    dim = dim % words.dim()
    shape = list(words.shape)
    if words.dim() == 2:
        codes = host_library.unpack_fields(words, dim == 0, order)
        if codes is not None:
            return codes
    out = torch.empty(
        [*shape[: dim + 1], NIBBLES, *shape[dim + 1 :]], dtype=torch.uint8, device=words.device
    )
    for nibble, neighbour in enumerate(order):
        # The shift is arithmetic; the mask drops the sign bits again.
        field = torch.bitwise_right_shift(words, 4 * nibble).bitwise_and_(15)
        out.select(dim + 1, neighbour).copy_(field)
    shape[dim] *= NIBBLES
    return out.view(shape)


def pack_nibbles(codes: torch.Tensor, dim: int, order: Sequence[int] = PLAIN_ORDER) -> torch.Tensor:
    """Inverse of `unpack_nibbles`: integer codes 0..15 -> int32 words, `dim` shrinks by 8."""
    dim = dim % codes.dim()
    if codes.shape[dim] % NIBBLES:
        raise ValueError(f"dimension {dim} of size {codes.shape[dim]} is not a multiple of 8")
    shape = list(codes.shape)
    split = codes.reshape([*shape[:dim], shape[dim] // NIBBLES, NIBBLES, *shape[dim + 1 :]])
    shape[dim] //= NIBBLES
    words = torch.zeros(shape, dtype=torch.int32, device=codes.device)
    for nibble, neighbour in enumerate(order):
        words |= split.select(dim + 1, neighbour).to(torch.int32) << (4 * nibble)
    return words
