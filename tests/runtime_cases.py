"""Tables, weights and calls that the tests of the launcher library over host memory share."""

from __future__ import annotations

import reference
import torch

from marlin_cutlass import dequantize, pack

SMS = 132
SPLIT = {"family": "hopper", "decomposition": "split_k", "split": 2}
SHAPES = {
    "ampere": {"family": "ampere"},
    "striped": {"family": "ampere", "decomposition": "striped", "ctas_per_sm": 2},
    "hopper": {"family": "hopper", "m_tile": 64, "n_sm": 256, "k_sm": 256},
    "split": SPLIT,
    "streamk": {"family": "hopper", "decomposition": "stream_k", "n_sm": 256},
    "hybrid": {"family": "hopper", "decomposition": "hybrid", "n_sm": 256},
    "multicast": {"family": "hopper", "n_sm": 256, "multicast": 2},
}


def weight(k=256, n=96, group_size=128, zeros=False, act_order=False):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, n)) if zeros else None
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k)] if act_order else None
    return pack(q, torch.rand(rows, n).half() * 0.1 + 0.01, z, group_size=group_size, g_idx=g_idx)


def gemm(a, w, bias=None, out=None, variant=-1):
    form = (a, w.packed, w.col_scale, bias, w.perm, w.n, w.k, w.group_size, w.has_zeros)
    if out is None:
        return torch.ops.marlin_cutlass_host.gemm(*form, variant)
    torch.ops.marlin_cutlass_host.gemm_out(*form, out, variant)
    return out


def right(out, a, w, bias=None):
    reference.check(out, a, dequantize(w, a.dtype), None if bias is None else bias.to(a.dtype))
