"""The SplitK paper's decomposition in Triton, written for this comparison.

One program computes a 16 x 32 tile of C over a quarter of K (SplitK, split 4) or all of it
(data-parallel): INT4 codes are unpacked beside the dot product, and the parts of a tile are added
to C in fp16 by atomics, so the order of the sum and the last bits change from run to run.
Configuration: arXiv 2402.00025 as published with it: blocks 16 x 32 x 128, 4 warps, 3 stages
(data-parallel: 4), tiles in groups of 8 along M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 128
GROUP_M = 8
SPLIT = 4
WARPS = 4
STAGES = {True: 3, False: 4}  # SplitK, data-parallel


@triton.jit
def _tile(pid, m, n, block_m: tl.constexpr, block_n: tl.constexpr, group_m: tl.constexpr):
    tiles_m = tl.cdiv(m, block_m)
    tiles_n = tl.cdiv(n, block_n)
    first = pid // (group_m * tiles_n) * group_m
    height = tl.minimum(tiles_m - first, group_m)
    inside = pid % (group_m * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def _w4a16(
    a_ptr,  # [m, k] fp16
    w_ptr,  # [k/8, n] int32
    s_ptr,  # [k/group, n] fp16
    c_ptr,  # [m, n] fp16, zeroed before a SplitK launch
    m,
    n,
    k,
    group: tl.constexpr,
    split: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    tile_m, tile_n = _tile(tl.program_id(0), m, n, block_m, block_n, group_m)
    part = tl.program_id(1)
    rows = tile_m * block_m + tl.arange(0, block_m)
    columns = tile_n * block_n + tl.arange(0, block_n)
    depth = tl.arange(0, block_k)
    shift = (depth % 8) * 4
    in_rows = rows[:, None] < m
    in_columns = columns[None, :] < n
    acc = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(part, tl.cdiv(k, block_k), split):
        start = step * block_k
        a = tl.load(a_ptr + rows[:, None] * k + (start + depth)[None, :], mask=in_rows, other=0.0)
        words = tl.load(
            w_ptr + ((start + depth) // 8)[:, None] * n + columns[None, :], mask=in_columns, other=0
        )
        scale = tl.load(s_ptr + (start // group) * n + columns[None, :], mask=in_columns, other=0.0)
        codes = (words >> shift[:, None]) & 0xF
        w = (codes - 8).to(tl.float16) * scale
        acc = tl.dot(a, w, acc)
    out = acc.to(tl.float16)
    target = c_ptr + rows[:, None] * n + columns[None, :]
    if split > 1:
        tl.atomic_add(target, out, mask=in_rows & in_columns, sem="release")
    else:
        tl.store(target, out, mask=in_rows & in_columns)


def matmul(
    a: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    group_size: int = 128,
    split: int = SPLIT,
) -> torch.Tensor:
    """out[m, n] = a[m, k] @ dequantised weight, fp16; split 1 is the data-parallel kernel.

    Raises ValueError where a 128-deep step would straddle groups.
    """
    m, k = a.shape
    n = words.shape[1]
    if group_size % BLOCK_K or k % BLOCK_K:
        raise ValueError(f"k={k} and group_size={group_size} must be multiples of {BLOCK_K}")
    grid = (triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N), split)
    if split > 1:
        out.zero_()
    _w4a16[grid](
        a,
        words,
        scales,
        out,
        m,
        n,
        k,
        group=group_size,
        split=split,
        block_m=BLOCK_M,
        block_n=BLOCK_N,
        block_k=BLOCK_K,
        group_m=GROUP_M,
        num_warps=WARPS,
        num_stages=STAGES[split > 1],
    )
    return out
