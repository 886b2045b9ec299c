"""`QuantizedWeight`: codes, scales, zero points and row order of one layer, in natural order.

Readers and quantisers produce it; `to_packed` turns it into the `PackedWeight` that gemm takes.
It is the plain meaning of a layer: W[k, n] = (q[k, n] - z[group(k), n]) * s[group(k), n].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SYMMETRIC_ZERO = 8
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_SIZES = "32, 64, 128 or a multiple of 128, or -1 (one group per column)"


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantised layer.

    q: uint8 [K, N], 0..15. scales: fp16/bf16/fp32 [G, N]. zeros: uint8 [G, N] (0..16), or None for
    the symmetric zero point 8. g_idx: int32 [K], the group of each row, None for k // group_size.
    sparse: q has 2:4 sparsity (two of each four rows are 8), which `to_packed` makes use of.
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    g_idx: torch.Tensor | None = None
    sparse: bool = False

    @property
    def k(self) -> int:
        return self.q.shape[0]

    @property
    def n(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> torch.Tensor:
        """Group of every row, int64 [K]."""
        if self.g_idx is not None:
            return self.g_idx.long()
        size = self.k if self.group_size == -1 else self.group_size
        return torch.arange(self.k, device=self.q.device) // size

    def dequantize(self) -> torch.Tensor:
        """float32 [K, N], by the formula and nothing else (no kernel rounding)."""
        zero = SYMMETRIC_ZERO if self.zeros is None else self.zeros.float()[self.groups]
        return (self.q.float() - zero) * self.scales.float()[self.groups]

    def recognised(self) -> QuantizedWeight:
        """With `sparse` set where the codes have 2:4 sparsity and the sparse layout can hold them:
        symmetric, in natural order, group size 64, a multiple of 128, or -1."""
        from ..sparse import has_2_4

        if self.zeros is not None or self.g_idx is not None or self.group_size == 32:
            return self
        return replace(self, sparse=has_2_4(self.q))

    def to_packed(self):
        """Pack into the layout that every kernel reads; see `marlin_cutlass.pack`."""
        from ..pack import pack

        if self.sparse:
            from ..sparse import pack_sparse

            return pack_sparse(self.q, self.scales, group_size=self.group_size)
        return pack(self.q, self.scales, self.zeros, group_size=self.group_size, g_idx=self.g_idx)


def check_group_size(group_size: int, k: int) -> int:
    """Return the number of groups of a K-deep layer, or refuse the group size by name."""
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size={group_size!r} must be an int: {GROUP_SIZES}")
    if group_size == -1:
        return 1
    if group_size not in (32, 64) and (group_size <= 0 or group_size % 128):
        raise ValueError(f"group_size={group_size} is not supported: it must be {GROUP_SIZES}")
    if k % group_size:
        raise ValueError(f"k={k} is not a multiple of group_size={group_size}")
    return k // group_size


def check_scales(scales: torch.Tensor, groups: int, n: int, name: str = "scales") -> None:
    """Refuse scales of another dtype or shape than [groups, n]."""
    if scales.dtype not in SCALE_DTYPES:
        raise TypeError(f"{name} has dtype {scales.dtype}; fp16, bf16 or fp32 is required")
    if tuple(scales.shape) != (groups, n):
        raise ValueError(f"{name} has shape {tuple(scales.shape)}; [{groups}, {n}] is required")


def drop_symmetric(zeros: torch.Tensor | None, sym: bool | None, source: str):
    """Zeros that are all 8 are the symmetric case (None); refuse a claim of symmetry that is false.

    NOTE: a file that claims sym=True with every zero point 9 (or 7) was written by the other GPTQ
    convention; reading it as 8 would be right by luck only, so it is refused with the hint.
    """
    if zeros is None or bool((zeros == SYMMETRIC_ZERO).all()):
        return None
    if sym:
        values = zeros.unique().tolist()
        raise ValueError(
            f"{source}: sym=True, but zero points {values[:6]} occur (8 is required); if they are"
            " all 9 the file is gptq_v2, if all 7 it is gptq: pass the other checkpoint_format"
        )
    return zeros


def clean_g_idx(g_idx: torch.Tensor | None, k: int, group_size: int) -> torch.Tensor | None:
    """Normalise an act-order index: int32 [K] on the CPU, or None when it orders nothing.

    None, all -1 (never filled in by the writer) and k // group_size mean "no permutation"; with
    group_size -1 any index does, because one group has no order.
    """
    if g_idx is None or g_idx.numel() == 0:
        return None
    if g_idx.dtype.is_floating_point or g_idx.dtype == torch.bool:
        raise TypeError(f"g_idx has dtype {g_idx.dtype}; an integer dtype is required")
    g_idx = g_idx.detach().cpu().long().flatten()
    if bool((g_idx == -1).all()) or group_size == -1:
        return None
    if g_idx.numel() != k:
        raise ValueError(f"g_idx has {g_idx.numel()} entries; k={k} is required")
    groups = k // group_size
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise ValueError(
            f"g_idx holds {int(g_idx.min())}..{int(g_idx.max())}; 0..{groups - 1} is required"
        )
    if bool((g_idx == torch.arange(k) // group_size).all()):
        return None
    return g_idx.int()
