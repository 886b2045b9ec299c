"""Rotation, key-value cache and attention of `llm.py`: one launch in a decode step.

A Triton kernel for prompts that rotates and stores (attention itself is torch's), two for a decode
step, and the same in plain torch.
"""

from __future__ import annotations

import math

from torch import Tensor, arange, cat
from torch.nn import functional

from benchmarks.llm_kernels import launch_options, rms_norm, use_triton

try:
    import triton
    import triton.language as tl

    from benchmarks.llm_kernels import pdl_start, pdl_wait
except ImportError:  # the CPU needs none
    triton = None

MIN_HEADS = 16  # rows of the smallest tl.dot
ROPE_HEADS = 16  # heads of a program that rotates and stores: 16 values a thread
# Most programs -> keys of a tile and warps. Few programs have an SM each and wait for one load of
# all keys of a short text; of many, those that share an SM must fit its registers (139 and 111 a
# thread at the ends of the first list, 138, 148, 105 in the second; 132 SMs). The first list is the
# best of eight tiles at 32, 512 and 2048 programs (llm_small.py, H200, 2026-11-30: 3.7, 9.1 and
# 25.4 us); the second was not measured.
TILES_ONE = ((132, (128, 8)), (1056, (32, 2)), (math.inf, (16, 1)))
TILES_GROUP = ((132, (128, 8)), (396, (64, 4)), (math.inf, (32, 4)))


if triton is not None:

    @triton.jit
    def _turn(x, other, w, w_other, c, s, eps, normed: tl.constexpr):
        """Heads x [..., D] -> normed (Qwen3) and rotated, in their dtype.

        other: x with its halves exchanged, as is w_other [D]; s: negative in the first half.
        """
        dtype = x.dtype
        if normed:
            f = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(f * f, -1, keep_dims=True) / x.shape[-1] + eps)
            x, other = (f * scale).to(dtype) * w, (other.to(tl.float32) * scale).to(dtype) * w_other
        return (x.to(tl.float32) * c + other.to(tl.float32) * s).to(dtype)

    @triton.jit
    def _constants(cos, sin, q_norm, k_norm, last, dim: tl.constexpr, normed: tl.constexpr):
        """Cosine, signed sine and the norms' weights [D], each also with its halves exchanged."""
        d = tl.arange(0, dim)
        half: tl.constexpr = dim // 2
        turn = last * half + d % half
        c, s = tl.load(cos + turn), tl.load(sin + turn)
        s = tl.where(d < half, -s, s)
        if normed:
            other = (d + half) % dim
            wq, wq_other = tl.load(q_norm + d), tl.load(q_norm + other)
            return c, s, wq, wq_other, tl.load(k_norm + d), tl.load(k_norm + other)
        else:
            return c, s, c, c, c, c

    @triton.jit
    def _rope_cache(
        qkv, start, cos, sin, q_norm, k_norm, q_out, keys, values, eps, tokens, length,
        heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, normed: tl.constexpr,
        block: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # A program has `block` of the heads of q, k and v of one token.
        pdl_start(pdl)
        row, h, d = tl.program_id(0), tl.arange(0, block), tl.arange(0, dim)[None, :]
        h = (tl.program_id(1) * block + h)[:, None]
        position = (tl.load(start) + row % tokens).to(tl.int32)
        c, s, wq, wq_other, wk, wk_other = _constants(
            cos, sin, q_norm, k_norm, position, dim, normed
        )
        is_q, is_value = h < heads, h >= heads + kv_heads
        inside = h < heads + 2 * kv_heads
        at = qkv + (row.to(tl.int64) * (heads + 2 * kv_heads) + h) * dim
        pdl_wait(pdl)
        x = tl.load(at + d, mask=inside, other=0.0)
        other = tl.load(at + (d + dim // 2) % dim, mask=inside, other=0.0)
        w = tl.where(is_q, wq[None, :], wk[None, :])
        w_other = tl.where(is_q, wq_other[None, :], wk_other[None, :])
        turned = _turn(x, other, w, w_other, c, s, eps, normed)
        tl.store(q_out + (row.to(tl.int64) * heads + h) * dim + d, turned, mask=is_q)
        line = (row // tokens).to(tl.int64) * kv_heads * length + position
        slot = h - heads
        tl.store(
            keys + (line + slot * length) * dim + d, turned, mask=(slot >= 0) & (slot < kv_heads)
        )
        slot -= kv_heads
        tl.store(values + (line + slot * length) * dim + d, x, mask=is_value & inside)

    @triton.jit
    def _tile(keys, values, first, last, dim: tl.constexpr, block: tl.constexpr):
        """Cached keys and values [block, D] from `first`; 0 from `last` on."""
        line = first + tl.arange(0, block)
        seen = (line < last)[:, None]
        spot = line[:, None] * dim + tl.arange(0, dim)[None, :]
        return tl.load(keys + spot, mask=seen, other=0.0), tl.load(
            values + spot, mask=seen, other=0.0
        )

    @triton.jit
    def _new_token(at, apart, keys, values, last, w, w_other, c, s, eps,
                   dim: tl.constexpr, normed: tl.constexpr):  # fmt: skip
        """Key at `at`, rotated, and value `apart` behind it; both go to the cache at `last`."""
        d = tl.arange(0, dim)
        x, other = tl.load(at + d), tl.load(at + (d + dim // 2) % dim)
        value = tl.load(at + apart + d)
        key = _turn(x, other, w, w_other, c, s, eps, normed)
        tl.store(keys + last * dim + d, key)
        tl.store(values + last * dim + d, value)
        return key.to(tl.float32), value.to(tl.float32)

    @triton.jit
    def _decode_one(
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, scale, length,
        heads: tl.constexpr, dim: tl.constexpr, normed: tl.constexpr, block: tl.constexpr,
        pdl: tl.constexpr,
    ):  # fmt: skip
        # As many key heads as query heads: a program is one of them, its products are of vectors.
        pdl_start(pdl)
        pair = tl.program_id(0)  # batch * heads + head: owns this head's cache
        d, l = tl.arange(0, dim), tl.arange(0, block)
        # Earlier steps wrote the position and the cache before it.
        last = tl.load(start).to(tl.int32)
        c, s, wq, wq_other, wk, wk_other = _constants(cos, sin, q_norm, k_norm, last, dim, normed)
        keys += pair.to(tl.int64) * length * dim
        values += pair.to(tl.int64) * length * dim
        k, v = _tile(keys, values, 0, last, dim, block)
        pdl_wait(pdl)

        at = qkv + ((pair // heads).to(tl.int64) * 3 * heads + pair % heads) * dim
        x, other = tl.load(at + d), tl.load(at + (d + dim // 2) % dim)
        q = _turn(x, other, wq, wq_other, c, s, eps, normed).to(tl.float32) * scale
        new_k, total_v = _new_token(
            at + heads * dim, heads * dim, keys, values, last, wk, wk_other, c, s, eps, dim, normed
        )
        top = tl.sum(q * new_k, 0)
        total = 1.0
        for first in range(0, last, block):
            score = tl.sum(k.to(tl.float32) * q[None, :], 1)
            score = tl.where(first + l < last, score, -1e30)
            new_top = tl.maximum(top, tl.max(score, 0))
            shrink, p = tl.exp2(top - new_top), tl.exp2(score - new_top)
            total = total * shrink + tl.sum(p, 0)
            total_v = total_v * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
            top = new_top
            k, v = _tile(keys, values, first + block, last, dim, block)
        tl.store(out + pair.to(tl.int64) * dim + d, (total_v / total).to(x.dtype))

    @triton.jit
    def _decode_group(
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, scale, length,
        kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr,
        normed: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # `group` query heads share a key head: a program is one key head, its products are tl.dot.
        pdl_start(pdl)
        pair = tl.program_id(0)  # batch * kv_heads + kv head: owns this head's cache
        d, g, l = tl.arange(0, dim), tl.arange(0, rows), tl.arange(0, block)
        # Earlier steps wrote the position and the cache before it.
        last = tl.load(start).to(tl.int32)
        c, s, wq, wq_other, wk, wk_other = _constants(cos, sin, q_norm, k_norm, last, dim, normed)
        keys += pair.to(tl.int64) * length * dim
        values += pair.to(tl.int64) * length * dim
        k, v = _tile(keys, values, 0, last, dim, block)
        pdl_wait(pdl)

        head = pair % kv_heads
        row = qkv + (pair // kv_heads).to(tl.int64) * (group + 2) * kv_heads * dim
        own = g[:, None] < group
        at = row + (head * group + g[:, None]) * dim
        x = tl.load(at + d[None, :], mask=own, other=0.0)
        other = tl.load(at + ((d + dim // 2) % dim)[None, :], mask=own, other=0.0)
        q = _turn(x, other, wq, wq_other, c, s, eps, normed)
        new_k, new_v = _new_token(
            row + (group * kv_heads + head) * dim, kv_heads * dim, keys, values, last,
            wk, wk_other, c, s, eps, dim, normed,
        )  # fmt: skip
        top = tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale
        total = tl.full((rows,), 1.0, tl.float32)
        total_v = tl.zeros((rows, dim), tl.float32) + new_v[None, :]
        for first in range(0, last, block):
            score = tl.where((first + l < last)[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink, p = tl.exp2(top - new_top), tl.exp2(score - new_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            total_v = tl.dot(p.to(x.dtype), v, total_v * shrink[:, None])
            top = new_top
            k, v = _tile(keys, values, first + block, last, dim, block)
        to = out + (pair * group + g[:, None]).to(tl.int64) * dim + d[None, :]
        tl.store(to, (total_v / total[:, None]).to(x.dtype), mask=own)


def rope_cache(qkv, start, tokens, cos, sin, norms, eps, keys, values) -> Tensor:
    """Rotate q and k of qkv [B*tokens, (heads + 2 kv) * D], store k and v in the cache, return q.

    start: int64 [1], position of the first token of each row of the batch. cos, sin: float32
    [length, D/2]. norms: (q, k) weights [D] or None. keys, values: [B, kv_heads, length, D].
    Returns [B*tokens, heads, D].
    """
    _, kv_heads, length, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if not use_triton(qkv):
        return _rope_cache_torch(qkv, start, tokens, cos, sin, norms, eps, keys, values)
    out = qkv.new_empty(qkv.shape[0], heads, dim)
    q_norm, k_norm = norms or (qkv, qkv)  # not read where there are none
    _rope_cache[(qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, ROPE_HEADS))](
        qkv, start, cos, sin, q_norm, k_norm, out, keys, values, eps, tokens, length,
        heads, kv_heads, dim, norms is not None, ROPE_HEADS, **launch_options(4, qkv.shape[0]),
    )  # fmt: skip
    return out


def _rope_cache_torch(qkv, start, tokens, cos, sin, norms, eps, keys, values) -> Tensor:
    batch, kv_heads, _, dim = keys.shape
    parts = qkv.view(batch, tokens, -1, dim).transpose(1, 2)  # [B, heads, tokens, D]
    q, k, v = parts.split([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    position = start + arange(tokens, device=qkv.device)
    c, s = cos[position], sin[position]

    def rotate(x):
        low, high = x.float().chunk(2, -1)
        return cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)

    keys.index_copy_(2, position, rotate(k))
    values.index_copy_(2, position, v)
    return rotate(q).transpose(1, 2).reshape(batch * tokens, -1, dim)


def attend(q: Tensor, keys: Tensor, values: Tensor, start: Tensor, tokens: int) -> Tensor:
    """q [B*tokens, heads, D] against the cache up to `start` + own token -> [B*tokens, heads*D].

    More than one token only from position 0 (prefill). Plain torch.
    """
    batch, kv_heads, length, dim = keys.shape
    heads = q.shape[1]
    query = q.view(batch, tokens, heads, dim).transpose(1, 2)
    options = {"enable_gqa": heads != kv_heads}
    if tokens > 1:
        k, v = keys[:, :, :tokens], values[:, :, :tokens]
        out = functional.scaled_dot_product_attention(query, k, v, is_causal=True, **options)
    else:
        mask = (arange(length, device=q.device) <= start).view(1, 1, 1, length)
        out = functional.scaled_dot_product_attention(query, keys, values, mask, **options)
    return out.transpose(1, 2).reshape(batch * tokens, heads * dim)


def attention(qkv, start, tokens, cos, sin, norms, eps, keys, values) -> Tensor:
    """`rope_cache` and `attend`; one launch for a decode step. Returns [B*tokens, heads*D].

    The launch may read `start`, cos, sin and the cache before `start` while the kernel before it
    runs: see llm_kernels.py.
    """
    if tokens > 1 or not use_triton(qkv):
        q = rope_cache(qkv, start, tokens, cos, sin, norms, eps, keys, values)
        return attend(q, keys, values, start, tokens)
    batch, kv_heads, length, dim = keys.shape
    group = qkv.shape[1] // dim // kv_heads - 2
    out = qkv.new_empty(batch, kv_heads * group * dim)
    q_norm, k_norm = norms or (qkv, qkv)  # not read where there are none
    programs = batch * kv_heads
    tiles = TILES_ONE if group == 1 else TILES_GROUP
    block, warps = next(tile for most, tile in tiles if programs <= most)
    scale = dim**-0.5 * math.log2(math.e)  # exp2 is one instruction
    tensors = (qkv, start, cos, sin, q_norm, k_norm, keys, values, out)
    # One stage: a tile is loaded into registers ahead of its use, not through shared memory.
    options = launch_options(warps, batch) | {"num_stages": 1}
    sizes = (dim, norms is not None, block)
    if group == 1:
        _decode_one[(programs,)](*tensors, eps, scale, length, kv_heads, *sizes, **options)
    else:
        rows = max(MIN_HEADS, triton.next_power_of_2(group))
        _decode_group[(programs,)](
            *tensors, eps, scale, length, kv_heads, group, rows, *sizes, **options
        )
    return out
