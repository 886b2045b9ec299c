"""Random INT4 layers in every checkpoint format, and the dense weight that each stands for.

Plain torch, written from the formats' definitions, apart from the package's readers (but for the
order of marlin-24).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_cutlass.formats import marlin_24

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Tensor, dim: int, order=range(8)) -> Tensor:
    """int32 words: nibble i holds neighbour order[i] along `dim`."""
    parts = codes.to(torch.int64).unflatten(dim, (-1, 8)).unbind(dim + 1)
    total = sum(parts[neighbour] << (4 * i) for i, neighbour in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


@dataclass
class Layer:
    """Codes [K, N], scales and zero points [G, N], group of each row."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    g_idx: Tensor

    @property
    def dense(self) -> Tensor:
        """float32 [K, N]."""
        zeros = torch.full_like(self.scales, 8) if self.zeros is None else self.zeros
        index = self.g_idx.long()
        return (self.q.float() - zeros.float()[index]) * self.scales.float()[index]

    def marlin_24(self) -> dict[str, Tensor]:
        """Of a 2:4-sparse weight, by the reader's own places: tests/fixtures hold the reader to
        what the packers write."""
        k, n = self.q.shape
        fours = (self.q != 8).view(k // 4, 4, n)
        order = (~fours).to(torch.uint8).argsort(dim=1, stable=True)[:, :2].sort(1).values
        kept = self.q.view(k // 4, 4, n).gather(1, order).view(k // 32, 16, n // 16, 16)
        chunks = kept.permute(0, 2, 1, 3).reshape(-1, 1024)[:, marlin_24.code_positions()]
        packed = words(chunks.reshape(k // 32, 16 * n), 1)
        meta = torch.zeros(n * k // 16, dtype=torch.int64)
        nibbles = (order[:, 0] + 4 * order[:, 1]).t().reshape(n, k // 16, 4)
        meta[marlin_24.meta_positions(n, k // 16)] = sum(nibbles[..., i] << 4 * i for i in range(4))
        meta = torch.where(meta >= 2**15, meta - 2**16, meta).to(torch.int16)
        scales = self.scales
        if 0 < self.group_size < k // 2:
            chunks = scales.reshape(-1, 64)[:, marlin_24.scale_positions()]
            scales = chunks.reshape(scales.shape)
        meta = meta.view(k // 32, 2 * n)
        return {"weight_packed": packed, "scale_packed": scales, "meta": meta}

    def gptq(self) -> dict[str, Tensor]:
        """Version 1: zero points minus one, none of them 0 here."""
        zeros = torch.full(self.scales.shape, 8) if self.zeros is None else self.zeros
        return {
            "qweight": words(self.q, 0),
            "qzeros": words(zeros.long() - 1, 1),
            "scales": self.scales,
            "g_idx": self.g_idx.int(),
        }

    def awq(self) -> dict[str, Tensor]:
        return {
            "qweight": words(self.q, 1, AWQ_ORDER),
            "qzeros": words(self.zeros, 1, AWQ_ORDER),
            "scales": self.scales,
        }

    def compressed_tensors(self) -> dict[str, Tensor]:
        k, n = self.q.shape
        out = {
            "weight_packed": words(self.q.t().contiguous(), 1),
            "weight_scale": self.scales.t().contiguous(),
            "weight_shape": torch.tensor([n, k]),
        }
        if self.zeros is not None:
            out["weight_zero_point"] = words(self.zeros.t().contiguous(), 0)
        return out


def random_layer(
    k: int,
    n: int,
    group_size: int,
    zeros: bool = False,
    act_order: Tensor | bool = False,
    seed: int = 0,
    scale: float = 0.02,
    dtype: torch.dtype = torch.float16,
    sparse: bool = False,
) -> Layer:
    """act_order: True, or the g_idx to use. sparse: two of each four codes along K are 8."""
    g = torch.Generator().manual_seed(seed)
    size = k if group_size < 0 else group_size
    groups = k // size
    index = torch.arange(k) // size
    if isinstance(act_order, Tensor):
        index = act_order
    elif act_order:
        index = index[torch.randperm(k, generator=g)]
    q = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    if sparse:
        order = torch.rand(k // 4, 4, n, generator=g).argsort(1).view(k, n)
        q = torch.where(order < 2, q, torch.full_like(q, 8))
    return Layer(
        q,
        ((torch.rand(groups, n, generator=g) + 0.5) * scale).to(dtype),
        torch.randint(1, 16, (groups, n), generator=g, dtype=torch.uint8) if zeros else None,
        group_size,
        index,
    )
