"""A PackedWeight in the order in which CUTLASS's mixed-input GEMM reads it.

`repack` is explicit; `repacked` keeps one copy a weight and activation type, as long as it lives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import BLOCK_COLUMNS, ceil_div
from .pack import unpack
from .packed_weight import PackedWeight
from .reference import column_chunks

ATOM = 16  # columns and depth of what the order repeats
GROUP_SIZES = (64, 128)  # as stored: a tile is 64 deep and takes one scale a column
DTYPES = (torch.float16, torch.bfloat16)  # of activations, and of the scales with them
ALIGNMENT = 8  # elements: 16 bytes, which TMA asks of every row


@dataclass(frozen=True)
class CollectiveWeight:
    """A weight in CUTLASS's order: W[k, n] = alpha * code[k, n] * scales[k / group_size, n].

    codes: uint8 [K/16, ceil(N/16), 128], two's complement nibbles. scales: float16 or bfloat16,
    [K/group_size, N]. perm: row order of an act-order weight, or None.
    """

    codes: Tensor
    scales: Tensor
    alpha: float
    perm: Tensor | None
    n: int
    k: int
    group_size: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def clone(self) -> CollectiveWeight:
        """A copy with codes and scales of its own."""
        rest = (self.alpha, self.perm, self.n, self.k, self.group_size)
        return CollectiveWeight(self.codes.clone(), self.scales.clone(), *rest)


def why_not(w: PackedWeight) -> str | None:
    """The rule that keeps collective kernels from taking `w`, or None."""
    if w.sparse:
        return "the weight is 2:4-sparse: collective kernels take dense ones"
    if w.has_zeros:
        return "the weight has zero points: collective kernels take symmetric ones"
    if w.stored_group_size not in GROUP_SIZES:
        return (
            f"group_size={w.group_size}: collective kernels take 64, 128 and multiples of 128 "
            "(one scale a column for a tile that is 64 deep)"
        )
    if w.n % ALIGNMENT:
        return f"N={w.n} is not a multiple of {ALIGNMENT}: TMA stores rows of whole 16 bytes"
    if w.n * w.k >= 2**31:
        return f"K x N = {w.k} x {w.n} is not below 2^31 codes"
    return None


def repack(w: PackedWeight, dtype: torch.dtype) -> CollectiveWeight:
    """`w` in CUTLASS's order for activations of `dtype`; on w's device, exact but for the rounding
    of scales to `dtype`.

    alpha is the power of two that brings the largest scale below 1, so that no scale overflows.
    Raises ValueError naming the rule that `w` breaks, TypeError for anything but a PackedWeight.
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w must be a PackedWeight, not {type(w).__name__}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: torch.float16 or torch.bfloat16 is required")
    reason = why_not(w)
    if reason is not None:
        raise ValueError(reason)
    tiles = ceil_div(w.n, ATOM)
    codes = torch.empty(w.k // ATOM, tiles, 128, dtype=torch.uint8, device=w.device)
    # Not the default dtype, which engines set to fp16 while they load: a scale may be larger.
    groups = w.k // w.stored_group_size
    scales = torch.empty(groups, w.n, dtype=torch.float32, device=w.device)
    for first, last in column_chunks(w):
        start, stop = first * BLOCK_COLUMNS, min(last * BLOCK_COLUMNS, w.n)
        part = unpack(w, first, last)
        width = ceil_div(stop - start, ATOM) * ATOM  # padded columns hold code 8, which is zero
        codes[:, start // ATOM : (start + width) // ATOM] = reorder(part.codes[: w.k, :width])
        normalised = part.scales[: scales.shape[0], : stop - start].float()
        scales[:, start:stop] = normalised * w.col_scale[start:stop]
    exponent = int(torch.frexp(scales.abs().amax()).exponent)
    stored = torch.ldexp(scales, torch.tensor(-exponent, device=w.device)).to(dtype)
    return CollectiveWeight(codes, stored, 2.0**exponent, w.perm, w.n, w.k, w.stored_group_size)


def reorder(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 of [K, N], both multiples of 16, as nibbles [K/16, N/16, 128].

    16 x 16 codes follow one another; inside, place = 32 * (n % 8) + 8 * (k / 2 % 4) + 4 * (k % 2) +
    2 * (k / 8) + n / 8: the eight codes of a lane of wgmma are one word, even depths in its low
    half. q - 8 in two's complement is q with the top bit flipped.
    """
    k, n = codes.shape
    grid = (codes ^ 8).view(k // ATOM, 2, 4, 2, n // ATOM, 2, 8)
    grid = grid.permute(0, 4, 6, 2, 3, 1, 5)  # tiles, then from the slowest digit of the place on
    return (grid[..., 0] | grid[..., 1] << 4).reshape(k // ATOM, n // ATOM, 128)


# Repacked copies by the identity of the weight and the activation type; each is dropped with its
# weight, and made again when the weight was written to.
_repacked: dict[tuple[int, torch.dtype], tuple[weakref.ref, tuple, CollectiveWeight]] = {}


def repacked(w: PackedWeight, dtype: torch.dtype) -> CollectiveWeight:
    """`repack(w, dtype)`, kept as long as `w` lives and is not changed.

    Raises RuntimeError while a CUDA graph is captured, unless the copy is there.
    """
    key, state = (id(w), dtype), _state(w)
    known = _repacked.get(key)
    if known is not None and known[0]() is w and known[1] == state:
        return known[2]
    if _on_cuda(w) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the weight is repacked at the first call: make one before the capture")
    copy = repack(w, dtype)
    _repacked[key] = (weakref.ref(w, lambda _: _repacked.pop(key, None)), state, copy)
    return copy


def _on_cuda(w: PackedWeight) -> bool:
    return w.packed.is_cuda


def _state(w: PackedWeight) -> tuple:
    """Changes when the weight's tensors are replaced or written to."""
    tensors = (w.packed, w.col_scale)
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)
