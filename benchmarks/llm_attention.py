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
WARP_HALVES = 32 * 8  # of a warp's load: 16 bytes a thread
# Most programs -> keys of a tile, warps and, for _decode_one, tiles in flight (1 or 2; two of a
# group exceed its registers). Few programs have an SM each and wait for one load of all keys of a
# short text; of many, those that share an SM must fit its registers. llm_small.py, H200,
# 2026-11-30, the best of seven tiles or more: GROUP at 8, 32, 128, 192, 256 and 512 programs 3.2,
# 3.6, 4.6, 5.1, 6.4 and 9.5 us, ONE at 512 and 2048 8.6 and 25.3. One head is a group as well, and
# few programs are faster so (ONE's best at 32: 4.9). At 128 programs (128, 8) takes 5.1 in such a
# chain, where launches overlap; a step of 70B at batch 16 took 6.3 ms with it and 6.4 to 6.6 with
# (128, 4), though other kernels had changed in between.
TILES_GROUP = ((32, (128, 4)), (132, (128, 8)), (256, (128, 4)), (math.inf, (32, 2)))
TILES_ONE = (*TILES_GROUP[:3], (1056, (16, 1, 2)), (math.inf, (8, 1, 2)))


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
    def _lines(part, line, last, dim: tl.constexpr):
        """Cached keys or values of the positions line [...]; 0 from `last` on. int32 [..., D/2].

        In pairs: halves that a loop carries are repacked at its end, which waits for their load.
        """
        line = tl.expand_dims(line, -1)
        at = part.to(tl.pointer_type(tl.int32)) + (line * (dim // 2) + tl.arange(0, dim // 2))
        return tl.load(at, mask=line < last, other=0)

    @triton.jit
    def _halves(pairs, dtype: tl.constexpr):
        """Even and odd elements [..., D/2] of what `_lines` loaded."""
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
        return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)

    @triton.jit
    def _even_odd(x):
        """Even and odd columns of x [M, D]."""
        return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))

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
    def _one_tile(k, v, q, top, total, total_v, keys, values, line, ahead, last,
                  dim: tl.constexpr):  # fmt: skip
        """Add the keys at line [block / slots, slots] to the sums of their slots; load those ahead.

        A slot's sums stay with the threads that load its keys: no barrier. A key from `last` on
        weighs exp2(-1e30 - top) = 0, as top begins with the new token's score.
        """
        even, odd = _halves(k, keys.dtype.element_ty)
        score = tl.sum(tl.interleave(even, odd).to(tl.float32) * q, 2)
        score = tl.where(line < last, score, -1e30)
        k = _lines(keys, line + ahead, last, dim)  # while v is used
        new_top = tl.maximum(top, tl.max(score, 0))
        shrink, p = tl.exp2(top - new_top), tl.exp2(score - new_top)
        total = total * shrink + tl.sum(p, 0)
        even, odd = _halves(v, keys.dtype.element_ty)
        part = p[:, :, None] * tl.interleave(even, odd).to(tl.float32)
        total_v = total_v * shrink[:, None] + tl.sum(part, 0)
        v = _lines(values, line + ahead, last, dim)
        return k, v, new_top, total, total_v

    @triton.jit
    def _decode_one(
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, scale, length,
        heads: tl.constexpr, dim: tl.constexpr, normed: tl.constexpr, block: tl.constexpr,
        tiles: tl.constexpr, slots: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # As many key heads as query heads: a program is one of them, its products are of vectors.
        pdl_start(pdl)
        pair = tl.program_id(0)  # batch * heads + head: owns this head's cache
        d, i, slot = tl.arange(0, dim), tl.arange(0, block // slots), tl.arange(0, slots)
        line = i[:, None] * slots + slot[None, :]
        # Earlier steps wrote the position and the cache before it.
        last = tl.load(start).to(tl.int32)
        keys += pair.to(tl.int64) * length * dim
        values += pair.to(tl.int64) * length * dim
        k, v = _lines(keys, line, last, dim), _lines(values, line, last, dim)
        if tiles == 2:
            k_2 = _lines(keys, block + line, last, dim)
            v_2 = _lines(values, block + line, last, dim)
        c, s, wq, wq_other, wk, wk_other = _constants(cos, sin, q_norm, k_norm, last, dim, normed)
        pdl_wait(pdl)

        at = qkv + ((pair // heads).to(tl.int64) * 3 * heads + pair % heads) * dim
        x, other = tl.load(at + d), tl.load(at + (d + dim // 2) % dim)
        q = _turn(x, other, wq, wq_other, c, s, eps, normed).to(tl.float32) * scale
        new_k, new_v = _new_token(
            at + heads * dim, heads * dim, keys, values, last, wk, wk_other, c, s, eps, dim, normed
        )
        new_score = tl.sum(q * new_k, 0)
        top = tl.zeros((slots,), tl.float32) + new_score
        total, total_v = tl.zeros((slots,), tl.float32), tl.zeros((slots, dim), tl.float32)
        q = q[None, None, :]
        for first in range(0, last, tiles * block):
            k, v, top, total, total_v = _one_tile(
                k, v, q, top, total, total_v, keys, values, first + line, tiles * block, last, dim
            )
            if tiles == 2:  # noqa: SIM102 (a constant, unlike the next)
                if first + block < last:
                    k_2, v_2, top, total, total_v = _one_tile(
                        k_2, v_2, q, top, total, total_v, keys, values, first + block + line,
                        tiles * block, last, dim,
                    )  # fmt: skip
        whole_top = tl.max(top, 0)
        shrink, p = tl.exp2(top - whole_top), tl.exp2(new_score - whole_top)
        whole = tl.sum(total * shrink, 0) + p
        whole_v = tl.sum(total_v * shrink[:, None], 0) + p * new_v
        tl.store(out + pair.to(tl.int64) * dim + d, (whole_v / whole).to(x.dtype))

    @triton.jit
    def _decode_group(
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, scale, length,
        kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr,
        normed: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # `group` query heads share a key head: a program is one key head, its products are tl.dot.
        pdl_start(pdl)
        pair = tl.program_id(0)  # batch * kv_heads + kv head: owns this head's cache
        d, g, line = tl.arange(0, dim), tl.arange(0, rows), tl.arange(0, block)
        # Earlier steps wrote the position and the cache before it.
        last = tl.load(start).to(tl.int32)
        keys += pair.to(tl.int64) * length * dim
        values += pair.to(tl.int64) * length * dim
        k, v = _lines(keys, line, last, dim), _lines(values, line, last, dim)
        c, s, wq, wq_other, wk, wk_other = _constants(cos, sin, q_norm, k_norm, last, dim, normed)
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
        even, odd = _even_odd(tl.zeros((rows, dim), tl.float32) + new_v[None, :])
        q_even, q_odd = _even_odd(q)
        for first in range(0, last, block):
            k_even, k_odd = _halves(k, x.dtype)
            score = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even))) * scale
            score = tl.where((first + line < last)[None, :], score, -1e30)
            k = _lines(keys, first + block + line, last, dim)  # while v is used
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink, p = tl.exp2(top - new_top), tl.exp2(score - new_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            v_even, v_odd = _halves(v, x.dtype)
            even = tl.dot(p.to(x.dtype), v_even, even * shrink[:, None])
            odd = tl.dot(p.to(x.dtype), v_odd, odd * shrink[:, None])
            v = _lines(values, first + block + line, last, dim)
            top = new_top
        total_v = tl.interleave(even, odd)
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
    choice = TILES_ONE if group == 1 else TILES_GROUP
    block, warps, *tiles = next(tile for most, tile in choice if programs <= most)
    scale = dim**-0.5 * math.log2(math.e)  # exp2 is one instruction
    tensors = (qkv, start, cos, sin, q_norm, k_norm, keys, values, out)
    # One stage: a tile is loaded into registers ahead of its use, not through shared memory.
    options = launch_options(warps, batch) | {"num_stages": 1}
    sizes = (dim, norms is not None, block)
    if tiles:
        slots = min(block, warps * WARP_HALVES // dim)
        _decode_one[(programs,)](
            *tensors, eps, scale, length, kv_heads, *sizes, *tiles, slots, **options
        )
    else:
        rows = max(MIN_HEADS, triton.next_power_of_2(group))
        _decode_group[(programs,)](
            *tensors, eps, scale, length, kv_heads, group, rows, *sizes, **options
        )
    return out
