"""Random INT4 layers in every checkpoint format, and the dense weight that each stands for.

Plain torch, written from the formats' definitions, apart from the package's readers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
) -> Layer:
    """act_order: True, or the g_idx to use."""
    g = torch.Generator().manual_seed(seed)
    size = k if group_size < 0 else group_size
    groups = k // size
    index = torch.arange(k) // size
    if isinstance(act_order, Tensor):
        index = act_order
    elif act_order:
        index = index[torch.randperm(k, generator=g)]
    return Layer(
        torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8),
        ((torch.rand(groups, n, generator=g) + 0.5) * scale).to(dtype),
        torch.randint(1, 16, (groups, n), generator=g, dtype=torch.uint8) if zeros else None,
        group_size,
        index,
    )
