"""How peers store INT4 codes, where that is no more than a few shifts."""

from __future__ import annotations

import torch


def pack_rows(q: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [k, n] -> int32 [k/8, n], eight rows a word, first row in the lowest bits."""
    k, n = q.shape
    shifts = torch.arange(8, device=q.device, dtype=torch.int64).view(1, 8, 1) * 4
    words = (q.view(k // 8, 8, n).long() << shifts).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
