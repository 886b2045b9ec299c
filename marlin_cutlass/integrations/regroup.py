"""Row shards of act-order weights.

Act-order spreads each group over all input features. A rank that holds some of the features then
has an uneven number of rows of each group, which the packed layout cannot hold. Here every group's
rows are padded with rows that add nothing to a multiple of 32, and stored with groups of 32: exact,
without communication, at the price of the padding (about 16 rows a group).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..pack import pack
from ..packed_weight import PackedWeight

SMALL_GROUP = 32  # the smallest group that kernels handle
SYMMETRIC = 8


@dataclass
class Rows:
    """Some rows of a weight, in any order.

    q: uint8 [K, N]. scales: [G, N]; zeros: [G, N] or None (8). group: int64 [K], row of `scales`.
    source: int64 [K], the input feature that each row multiplies.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: Tensor
    source: Tensor


def regroup(rows: Rows) -> tuple[PackedWeight, Tensor]:
    """(weight with groups of 32, int64 [its K]: which input feature each of its rows multiplies).

    x[..., features] @ weight is the rows' product. Raises ValueError for a zero point 16 in a group
    that needs padding, since no code there means zero.
    """
    order = torch.argsort(rows.group, stable=True)
    counts = torch.bincount(rows.group, minlength=rows.scales.shape[0])
    padded = (counts + SMALL_GROUP - 1) // SMALL_GROUP * SMALL_GROUP
    total = int(padded.sum())
    starts, first = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    sorted_group = rows.group[order]
    place = starts[sorted_group] + torch.arange(order.numel(), device=order.device)
    place -= first[sorted_group]
    block_group = torch.repeat_interleave(
        torch.arange(counts.numel(), device=counts.device), padded // SMALL_GROUP
    )
    zeros = None if rows.zeros is None else rows.zeros[block_group]
    q = _neutral(zeros, total, rows)
    q[place] = rows.q[order]
    features = torch.zeros(total, dtype=torch.int64, device=rows.q.device)
    features[place] = rows.source[order]
    return pack(q, rows.scales[block_group], zeros, group_size=SMALL_GROUP), features


def _neutral(zeros: Tensor | None, total: int, rows: Rows) -> Tensor:
    """Codes that stand for 0 everywhere."""
    n = rows.q.shape[1]
    if zeros is None:
        return torch.full((total, n), SYMMETRIC, dtype=torch.uint8, device=rows.q.device)
    if bool((rows.zeros > 15).any()):
        raise ValueError(
            "a zero point is 16: the row shard of an act-order weight cannot be padded there"
        )
    return zeros.to(torch.uint8).repeat_interleave(SMALL_GROUP, 0)
