"""Row shards of act-order weights: exact, whatever part of the features a rank holds."""

from __future__ import annotations

import pytest
import torch
from integration_weights import random_layer

from marlin_cutlass import dequantize
from marlin_cutlass.integrations.regroup import Rows, regroup


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_hold_every_row_once_and_padding_adds_nothing(world, zeros):
    k, n, group = 512, 96, 128
    layer = random_layer(k, n, group, zeros, act_order=True)
    dense = layer.dense
    total = torch.zeros(k, n)
    for part in torch.arange(k).chunk(world):
        rows = Rows(layer.q[part], layer.scales, layer.zeros, layer.g_idx[part], part - part[0])
        weight, features = regroup(rows)
        assert weight.group_size == 32 and weight.k == features.numel()
        assert weight.k <= part.numel() + 31 * (k // group)
        values = dequantize(weight, torch.float32)
        mine = torch.zeros(part.numel(), n).index_add_(0, features, values)
        assert torch.equal(mine, dense[part])
        total[part] += mine
    assert torch.equal(total, dense)


def test_a_group_that_a_rank_does_not_hold_takes_no_room():
    layer = random_layer(256, 64, 64, act_order=True)
    part = (layer.g_idx == 1).nonzero().flatten()
    weight, features = regroup(Rows(layer.q[part], layer.scales, None, layer.g_idx[part], part))
    assert weight.k == 64 and torch.equal(features.sort().values, part)


def test_zero_point_sixteen_is_refused():
    layer = random_layer(128, 64, 64, zeros=True, act_order=True)
    layer.zeros[0, 0] = 16
    part = torch.arange(40)
    rows = Rows(layer.q[part], layer.scales, layer.zeros, layer.g_idx[part], part)
    with pytest.raises(ValueError, match="zero point is 16"):
        regroup(rows)
