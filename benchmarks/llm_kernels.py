"""The small kernels of a decode step, one launch each: norm, rotation and cache, attention, SwiGLU.

An engine fuses these; without that a step of a 7B model is half small launches and says little of
its matrix products. Each has a Triton kernel and the same in plain torch, which runs on the CPU and
is what the tests hold against Transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU needs none
    triton = None

WARPS = 8
BLOCK_L = 64  # keys per step of the attention kernel
MIN_HEADS = 16  # rows of the smallest tl.dot


FORCE_TRITON = False  # also for CPU tensors: Triton's interpreter


def use_triton(x: Tensor) -> bool:
    """Kernels for CUDA tensors, plain torch elsewhere."""
    return triton is not None and (x.is_cuda or FORCE_TRITON)


if triton is not None:

    @triton.jit
    def _add_norm(
        x, residual, weight, out, eps, width, has_residual: tl.constexpr, block: tl.constexpr
    ):
        row = tl.program_id(0)
        columns = tl.arange(0, block)
        inside = columns < width
        at = row * width + columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if has_residual:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        w = tl.load(weight + columns, mask=inside, other=0.0)
        normed = (value * scale).to(w.dtype)
        tl.store(out + at, normed * w, mask=inside)

    @triton.jit
    def _rope_cache(
        qkv, start, cos, sin, q_norm, k_norm, q_out, keys, values, eps, tokens, length,
        heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, normed: tl.constexpr,
    ):  # fmt: skip
        row, head = tl.program_id(0), tl.program_id(1)
        position = tl.load(start) + row % tokens
        at = qkv + (row * (heads + 2 * kv_heads) + head).to(tl.int64) * 2 * half
        i = tl.arange(0, half)
        low, high = tl.load(at + i), tl.load(at + half + i)
        dtype = low.dtype
        if normed:  # noqa: SIM102 - known when compiled; the inner one is not
            if head < heads + kv_heads:
                f_low, f_high = low.to(tl.float32), high.to(tl.float32)
                mean = (tl.sum(f_low * f_low, 0) + tl.sum(f_high * f_high, 0)) / (2 * half)
                scale = tl.rsqrt(mean + eps)
                weight = q_norm
                if head >= heads:
                    weight = k_norm
                low = (f_low * scale).to(dtype) * tl.load(weight + i)
                high = (f_high * scale).to(dtype) * tl.load(weight + half + i)
        if head < heads + kv_heads:
            c, s = tl.load(cos + position * half + i), tl.load(sin + position * half + i)
            f_low, f_high = low.to(tl.float32), high.to(tl.float32)
            low, high = (f_low * c - f_high * s).to(dtype), (f_high * c + f_low * s).to(dtype)
        if head < heads:
            to = q_out + (row * heads + head).to(tl.int64) * 2 * half
        else:
            slot = head - heads
            base = keys
            if slot >= kv_heads:
                slot -= kv_heads
                base = values
            line = ((row // tokens) * kv_heads + slot) * length + position
            to = base + line.to(tl.int64) * 2 * half
        tl.store(to + i, low)
        tl.store(to + half + i, high)

    @triton.jit
    def _decode(
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, scale, length,
        kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, half: tl.constexpr,
        normed: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        pair = tl.program_id(0)  # batch * kv_heads + kv head: owns this head's cache
        head, last = pair % kv_heads, tl.load(start)
        dim: tl.constexpr = 2 * half
        row = qkv + (pair // kv_heads).to(tl.int64) * (group + 2) * kv_heads * dim
        i, g, l = tl.arange(0, half), tl.arange(0, rows), tl.arange(0, block)
        c, s = tl.load(cos + last * half + i), tl.load(sin + last * half + i)
        base = pair.to(tl.int64) * length * dim

        at = row + (group * kv_heads + head) * dim + i
        low, high = tl.load(at), tl.load(at + half)
        dtype = low.dtype
        if normed:
            f_low, f_high = low.to(tl.float32), high.to(tl.float32)
            mean = (tl.sum(f_low * f_low, 0) + tl.sum(f_high * f_high, 0)) / dim
            factor = tl.rsqrt(mean + eps)
            low = (f_low * factor).to(dtype) * tl.load(k_norm + i)
            high = (f_high * factor).to(dtype) * tl.load(k_norm + half + i)
        f_low, f_high = low.to(tl.float32), high.to(tl.float32)
        to = base + last * dim + i
        tl.store(keys + to, (f_low * c - f_high * s).to(dtype))
        tl.store(keys + to + half, (f_high * c + f_low * s).to(dtype))
        at += kv_heads * dim
        tl.store(values + to, tl.load(at))
        tl.store(values + to + half, tl.load(at + half))
        tl.debug_barrier()  # other threads of this block read them below

        own = g[:, None] < group
        at = row + (head * group + g[:, None]) * dim + i[None, :]
        low, high = tl.load(at, mask=own, other=0.0), tl.load(at + half, mask=own, other=0.0)
        if normed:
            f_low, f_high = low.to(tl.float32), high.to(tl.float32)
            mean = (tl.sum(f_low * f_low, 1) + tl.sum(f_high * f_high, 1)) / dim
            factor = tl.rsqrt(mean + eps)[:, None]
            low = (f_low * factor).to(dtype) * tl.load(q_norm + i)[None, :]
            high = (f_high * factor).to(dtype) * tl.load(q_norm + half + i)[None, :]
        f_low, f_high = low.to(tl.float32), high.to(tl.float32)
        q_low = (f_low * c[None, :] - f_high * s[None, :]).to(dtype)
        q_high = (f_high * c[None, :] + f_low * s[None, :]).to(dtype)

        top = tl.full((rows,), -1e30, tl.float32)
        total = tl.zeros((rows,), tl.float32)
        sum_low, sum_high = tl.zeros((rows, half), tl.float32), tl.zeros((rows, half), tl.float32)
        for first in range(0, last + 1, block):
            line = first + l
            seen = (line <= last)[:, None]
            spot = base + line[:, None] * dim + i[None, :]
            k_low = tl.load(keys + spot, mask=seen, other=0.0)
            k_high = tl.load(keys + spot + half, mask=seen, other=0.0)
            score = tl.dot(q_low, tl.trans(k_low)) + tl.dot(q_high, tl.trans(k_high))
            score = tl.where((line <= last)[None, :], score * scale, -1e30)
            new_top = tl.maximum(top, tl.max(score, 1))
            shrink, p = tl.exp(top - new_top), tl.exp(score - new_top[:, None])
            total = total * shrink + tl.sum(p, 1)
            v_low = tl.load(values + spot, mask=seen, other=0.0)
            v_high = tl.load(values + spot + half, mask=seen, other=0.0)
            sum_low = sum_low * shrink[:, None] + tl.dot(p.to(dtype), v_low)
            sum_high = sum_high * shrink[:, None] + tl.dot(p.to(dtype), v_high)
            top = new_top
        to = out + (pair * group + g[:, None]).to(tl.int64) * dim + i[None, :]
        tl.store(to, (sum_low / total[:, None]).to(dtype), mask=own)
        tl.store(to + half, (sum_high / total[:, None]).to(dtype), mask=own)

    @triton.jit
    def _silu_mul(x, out, width, block: tl.constexpr):
        row = tl.program_id(0)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        at = x + row.to(tl.int64) * 2 * width + columns
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=inside, other=0.0)
        value = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
        tl.store(out + row.to(tl.int64) * width + columns, value, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch, over the last dimension, rounded to x's dtype before the weight."""
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return value.to(x.dtype) * weight


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float):
    """x [M, H] + residual -> (its RMS norm, the sum); None: x itself is the sum."""
    if not use_triton(x):
        total = x if residual is None else x + residual
        return rms_norm(total, weight, eps), total
    m, width = x.shape
    total = torch.empty_like(x) if residual is None else residual
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    has_residual = residual is not None
    _add_norm[(m,)](x, total, weight, out, eps, width, has_residual, block, num_warps=WARPS)
    return out, total


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
    _rope_cache[(qkv.shape[0], heads + 2 * kv_heads)](
        qkv, start, cos, sin, q_norm, k_norm, out, keys, values, eps, tokens, length,
        heads, kv_heads, dim // 2, norms is not None, num_warps=1,
    )  # fmt: skip
    return out


def _rope_cache_torch(qkv, start, tokens, cos, sin, norms, eps, keys, values) -> Tensor:
    batch, kv_heads, _, dim = keys.shape
    parts = qkv.view(batch, tokens, -1, dim).transpose(1, 2)  # [B, heads, tokens, D]
    q, k, v = parts.split([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    position = start + torch.arange(tokens, device=qkv.device)
    c, s = cos[position], sin[position]

    def rotate(x):
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)

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
        mask = torch.arange(length, device=q.device) <= start
        mask = mask.view(1, 1, 1, length)
        out = functional.scaled_dot_product_attention(query, keys, values, mask, **options)
    return out.transpose(1, 2).reshape(batch * tokens, heads * dim)


def attention(qkv, start, tokens, cos, sin, norms, eps, keys, values) -> Tensor:
    """`rope_cache` and `attend`; one launch for a decode step. Returns [B*tokens, heads*D]."""
    if tokens > 1 or not use_triton(qkv):
        q = rope_cache(qkv, start, tokens, cos, sin, norms, eps, keys, values)
        return attend(q, keys, values, start, tokens)
    batch, kv_heads, length, dim = keys.shape
    group = qkv.shape[1] // dim // kv_heads - 2
    out = qkv.new_empty(batch, kv_heads * group * dim)
    q_norm, k_norm = norms or (qkv, qkv)  # not read where there are none
    rows = max(MIN_HEADS, triton.next_power_of_2(group))
    _decode[(batch * kv_heads,)](
        qkv, start, cos, sin, q_norm, k_norm, keys, values, out, eps, dim**-0.5, length,
        kv_heads, group, rows, dim // 2, norms is not None, BLOCK_L, num_warps=4,
    )  # fmt: skip
    return out


def silu_mul(x: Tensor) -> Tensor:
    """[M, 2 I] (gate beside up) -> silu(gate) * up [M, I]."""
    m, width = x.shape[0], x.shape[1] // 2
    if not use_triton(x):
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    out = x.new_empty(m, width)
    block = 1024
    _silu_mul[(m, triton.cdiv(width, block))](x, out, width, block, num_warps=4)
    return out
