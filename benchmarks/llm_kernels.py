"""The small kernels of a decode step that work on rows: norm, SwiGLU, the choice of a token.

An engine fuses these; without that a step of a 7B model is half small launches and says little of
its matrix products. Each has a Triton kernel and the same in plain torch, which runs on the CPU and
is what the tests hold against Transformers. Attention is in llm_attention.py.

Programmatic dependent launch (PDL): a kernel may start while the one before it runs, so that its
launch, its constants and the weights of a product behind it are loaded meanwhile. The rule that
every kernel of the chain keeps: nothing that another kernel of the step writes is read, and nothing
is written, before `pdl_wait`, and every kernel does wait. Then whatever ran before the kernel that
was waited for is complete as well. A kernel without PDL (torch's, cuBLAS', a sum over GPUs) starts
when all before it are complete; the embedding at the start of each step is one, so results of
earlier steps may be read before the wait.

With two GPUs the norm behind a row-parallel product and the choice of a token meet the other GPU's
kernel themselves, one program per row: `signal` and `wait_for_signal`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU needs none
    triton = None

FORCE_TRITON = False  # also for CPU tensors: Triton's interpreter

# When a kernel lets the next one start: never before its end, once it has waited, at its start.
PDL_MODES = ("off", "late", "early")
_pdl = "auto"
# Beyond so many rows small kernels that start early hold SMs which the product before still wants:
# Llama-2-7B, INT4, ms a token, early / late in one run (H200, 2026-11-30, with other tiles
# of attention): batch 1 1.48 / 1.53, 16 2.07 / 2.13, 64 3.36 / 3.29.
EARLY_ROWS = 32

# A product leaves 4096 registers of an SM free: two warps of up to 64 registers a thread can wait
# for it on the same SM. Long inputs take larger blocks, as there the rate of launches counts.
SILU_BLOCK, SILU_WARPS = 512, 2
SILU_BLOCK_LONG, SILU_WARPS_LONG, LONG_ROWS = 2048, 8, 256
NORM_FEW_ROWS = 32
ARGMAX_PARTS, ARGMAX_BLOCK = 32, 1024

# Tries of a program that waits for the other GPU before it gives up: more than a minute, as one
# rank may compile kernels while the other waits.
MOST_TRIES = 1 << 27


def use_triton(x: Tensor) -> bool:
    """Kernels for CUDA tensors, plain torch elsewhere."""
    return triton is not None and (x.is_cuda or FORCE_TRITON)


@functools.cache
def pdl_missing() -> str | None:
    """Why PDL is not possible here; None where it is (Triton 3.4 or newer and sm_90 or newer)."""
    if triton is None:
        return "Triton is not installed"
    if not isinstance(_add_norm, triton.JITFunction):
        return "Triton's interpreter has no programmatic dependent launch"
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return "this Triton has no CUDA compiler"
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    if not hasattr(cuda, "gdc_wait") or "launch_pdl" not in CUDAOptions.__dataclass_fields__:
        return f"Triton {triton.__version__} has no programmatic dependent launch"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return "needs a GPU of sm_90 or newer"
    return None


def set_pdl(mode: str) -> None:
    """Choose from PDL_MODES or "auto": early where it is possible. ValueError if it is not."""
    global _pdl
    if mode not in (*PDL_MODES, "auto"):
        raise ValueError(f"pdl={mode!r}: one of {', '.join(PDL_MODES)}, auto")
    if mode in ("early", "late") and pdl_missing():
        raise ValueError(f"pdl={mode!r}: {pdl_missing()}")
    _pdl = mode


def pdl_mode(rows: int = 1) -> str:
    """The mode in force for kernels of so many rows."""
    if _pdl != "auto":
        return _pdl
    return "off" if pdl_missing() else "early" if rows <= EARLY_ROWS else "late"


def pdl_text() -> str:
    """The modes in force, for a report."""
    few, many = pdl_mode(), pdl_mode(EARLY_ROWS + 1)
    return few if few == many else f"{few}, {many} beyond {EARLY_ROWS} rows"


def launch_options(num_warps: int, rows: int) -> dict:
    """Keywords of a launch, for `rows` rows, of a kernel that has a parameter `pdl`."""
    level = PDL_MODES.index(pdl_mode(rows))
    # Older versions of Triton know no launch_pdl.
    return {"pdl": level, "num_warps": num_warps} | ({"launch_pdl": True} if level else {})


if triton is not None:

    @triton.jit
    def pdl_start(pdl: tl.constexpr):
        """First in a kernel. pdl: index in PDL_MODES."""
        if pdl == 2:
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def pdl_wait(pdl: tl.constexpr):
        """All earlier kernels are complete behind this."""
        if pdl:
            tl.extra.cuda.gdc_wait()
        if pdl == 1:
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def give_up(tries, limit: tl.constexpr):
        """tries + 1; at the limit the kernel ends with an error in place of a hang."""
        if tries == limit:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
        return tries + 1

    @triton.jit
    def signal(flag):
        """Set the other GPU's flag, an int32 that is 0: all this program may read is complete."""
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")

    @triton.jit
    def wait_for_signal(flag, limit: tl.constexpr):
        """Wait until the other GPU has set this flag, and clear it.

        What its kernels before wrote may be read behind this, past the L1 cache: volatile.
        """
        tries = 0
        while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
            tries = give_up(tries, limit)
        tl.debug_barrier()  # one thread has acquired, for all of the program

    @triton.jit
    def _add_norm(
        x, other, residual, weight, out, flags, other_flags, eps, width,
        has_other: tl.constexpr, has_residual: tl.constexpr, meets: tl.constexpr,
        limit: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # meets: `other` is the other GPU's; each program waits for its program of the same row.
        pdl_start(pdl)
        row = tl.program_id(0)
        columns = tl.arange(0, block)
        inside = columns < width
        at = row * width + columns
        w = tl.load(weight + columns, mask=inside, other=0.0)
        pdl_wait(pdl)
        if meets:
            signal(other_flags + row)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if has_residual:  # loaded while the signal is under way
            before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if meets:
            wait_for_signal(flags + row, limit)
        if has_other:
            value += tl.load(other + at, mask=inside, other=0.0, volatile=meets).to(tl.float32)
        if has_residual:
            value += before
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        normed = (value * scale).to(w.dtype)
        tl.store(out + at, normed * w, mask=inside)

    @triton.jit
    def _silu_mul(x, out, width, block: tl.constexpr, pdl: tl.constexpr):
        pdl_start(pdl)
        row = tl.program_id(0)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        at = x + row.to(tl.int64) * 2 * width + columns
        pdl_wait(pdl)
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=inside, other=0.0)
        value = (gate / (1 + tl.exp(-gate))).to(up.dtype) * up
        tl.store(out + row.to(tl.int64) * width + columns, value, mask=inside)

    @triton.jit
    def _argmax_part(logits, best, where, width, block: tl.constexpr, pdl: tl.constexpr):
        # The largest of this program's share of a row, and its first place.
        pdl_start(pdl)
        row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        share = tl.cdiv(tl.cdiv(width, parts), block) * block
        i = tl.arange(0, block)
        top = tl.full((block,), float("-inf"), tl.float32)
        place = tl.zeros((block,), tl.int32)
        pdl_wait(pdl)
        for first in range(part * share, tl.minimum(part * share + share, width), block):
            column = first + i
            value = tl.load(logits + row.to(tl.int64) * width + column, mask=column < width,
                            other=float("-inf")).to(tl.float32)  # fmt: skip
            better = value > top
            top = tl.where(better, value, top)
            place = tl.where(better, column, place)
        most = tl.max(top, 0)
        tl.store(best + row * parts + part, most)
        tl.store(where + row * parts + part, tl.min(tl.where(top == most, place, width), 0))

    @triton.jit
    def largest_of_both(value, token, key, other_key, limit: tl.constexpr):
        """The token of the larger of this GPU's and the other's value; the smaller of equal ones.

        A value and its token travel as one int64 that orders them and is not 0: no other data, so
        that the order of memory accesses does not matter. Both words are 0 before and after.
        """
        value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        mine = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        tl.atomic_xchg(other_key, mine, sem="relaxed", scope="sys")
        tries = 0
        theirs = tl.atomic_xchg(key, 0, sem="relaxed", scope="sys")
        while theirs == 0:
            tries = give_up(tries, limit)
            theirs = tl.atomic_xchg(key, 0, sem="relaxed", scope="sys")
        return 0x7FFFFFFF - (tl.maximum(mine, theirs) & 0x7FFFFFFF)

    @triton.jit
    def _argmax_whole(
        best, where, ids, start, tokens, keys, other_keys, first,
        parts: tl.constexpr, meets: tl.constexpr, limit: tl.constexpr, pdl: tl.constexpr,
    ):  # fmt: skip
        # The largest of a row's parts; the first row also moves the position on.
        # meets: the larger of both GPUs'; column 0 is token `first`.
        pdl_start(pdl)
        row = tl.program_id(0)
        i = tl.arange(0, parts)
        pdl_wait(pdl)
        top = tl.load(best + row * parts + i)
        place = tl.load(where + row * parts + i)
        most = tl.max(top, 0)
        token = tl.min(tl.where(top == most, place, 2147483647), 0).to(tl.int64)
        if meets:
            token = largest_of_both(most, token + first, keys + row, other_keys + row, limit)
        tl.store(ids + row, token)
        if row == 0:
            tl.store(start, tl.load(start) + tokens)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch, over the last dimension, rounded to x's dtype before the weight."""
    value = x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return value.to(x.dtype) * weight


Parts = tuple[Tensor, ...]  # what ranks have to add, in the order of the ranks
Pair = tuple[Tensor, Tensor]  # this rank's tensor and the other's, of two


@dataclass(frozen=True)
class Pending:
    """Parts in memory that all ranks read, before the ranks have waited for each other."""

    parts: Parts
    barrier: Callable[[], None]  # a kernel of its own that waits for all ranks
    # Of two ranks, for a kernel that waits itself: the parts, and flags int32 [rows], all 0.
    pair: tuple[Pair, Pair] | None = None


def added(x: Tensor | Parts | Pending, keep: int = 1) -> Parts:
    """The first of `x` added up until `keep` are left."""
    if isinstance(x, Pending):
        x.barrier()
        x = x.parts
    parts = x if isinstance(x, tuple) else (x,)
    while len(parts) > keep:
        parts = (parts[0] + parts[1], *parts[2:])
    return parts


def add_norm(x: Tensor | Parts | Pending, residual: Tensor | None, weight: Tensor, eps: float):
    """x [M, H] + residual -> (its RMS norm, the sum); None: x itself is the sum.

    Of several x the sum is meant; two are added in the same launch, in float32.
    """
    flags = None
    if isinstance(x, Pending) and x.pair is not None and use_triton(weight):
        parts, flags = x.pair
    else:
        parts = added(x, 2 if use_triton(weight) else 1)
    first, *rest = parts
    if not use_triton(first):
        total = first if residual is None else first + residual
        return rms_norm(total, weight, eps), total
    m, width = first.shape
    total = torch.empty_like(first) if residual is None else residual
    out = torch.empty_like(first)
    block = triton.next_power_of_2(width)
    # Values a thread, most warps. One load a thread also behind a signal: between two volatile
    # loads ptxas waits. H200, 2026-11-30, ms a step of Llama-2-7B: with 16 values and with 8 at
    # batch 16 1.934 and 1.885, at 64 3.280 and 3.263; with 8 and with 4 in turn at 16 1.861 and
    # 1.871, at 64 3.282 and 3.226.
    if m > LONG_ROWS and flags is None:
        values, most = 16, 16
    else:
        values, most = 8 if m <= NORM_FEW_ROWS else 4, 32
    warps = min(most, max(4, block // (32 * values)))
    other = rest[0] if rest else first
    constants = (bool(rest), residual is not None, flags is not None, MOST_TRIES, block)
    tensors = (first, other, total, weight, out, *(flags or (None, None)))
    _add_norm[(m,)](*tensors, eps, width, *constants, **launch_options(warps, m))
    return out, total


def silu_mul(x: Tensor) -> Tensor:
    """[M, 2 I] (gate beside up) -> silu(gate) * up [M, I]."""
    m, width = x.shape[0], x.shape[1] // 2
    if not use_triton(x):
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    out = x.new_empty(m, width)
    long = m > LONG_ROWS
    block, warps = (SILU_BLOCK_LONG, SILU_WARPS_LONG) if long else (SILU_BLOCK, SILU_WARPS)
    _silu_mul[(m, triton.cdiv(width, block))](x, out, width, block, **launch_options(warps, m))
    return out


def next_token(
    logits: Tensor,
    ids: Tensor,
    start: Tensor,
    tokens: int,
    first: int = 0,
    keys: Pair | None = None,
) -> None:
    """Greedy choice from logits [B, vocab] into ids int64 [B, 1]; start int64 [1] += tokens.

    Of equal logits the first counts. keys, by Triton only: the choice is made among the logits of
    two ranks, of which column 0 is token `first` here; int64 [>= B], all 0, see `largest_of_both`.
    """
    if not use_triton(logits):
        torch.argmax(logits, -1, keepdim=True, out=ids)
        start += tokens
        return
    batch, width = logits.shape
    best = torch.empty(batch, ARGMAX_PARTS, dtype=torch.float32, device=logits.device)
    where = torch.empty(batch, ARGMAX_PARTS, dtype=torch.int32, device=logits.device)
    options = launch_options(4, batch)
    _argmax_part[(batch, ARGMAX_PARTS)](logits, best, where, width, ARGMAX_BLOCK, **options)
    tensors = (best, where, ids, start, tokens, *(keys or (None, None)), first)
    constants = (ARGMAX_PARTS, keys is not None, MOST_TRIES)
    _argmax_whole[(batch,)](*tensors, *constants, **launch_options(1, batch))
