"""Several GPUs for `llm.py`: a process each, and the sum over ranks after a row-parallel layer."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import llm_kernels as kernels
from benchmarks.llm_model import Reduce

SYMMETRIC_ELEMENTS = 128 * 8192  # largest sum in symmetric memory: batch 128 of hidden size 8192
SYMMETRIC_ROWS = 128  # most rows for which two GPUs' kernels meet: one program each, on 132 SMs
ROUNDS = 16  # of the check at the start


class Nccl:
    """torch.distributed's all_reduce, in place, and all_gather for the choice of a token."""

    def __call__(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def buffer(self, m: int, width: int) -> Tensor | None:
        return None

    def choose(self, logits: Tensor, first: int, ids: Tensor, start: Tensor, tokens: int) -> None:
        ids.copy_(best_token(logits, first))
        start += tokens


class Symmetric:
    """Partial sums stay where each rank's product wrote them; the norm behind reads all of them.

    Over NVLink, without a kernel for the sum. Two ranks of up to SYMMETRIC_ROWS rows wait for each
    other in the norm itself, row by row; others in a barrier's kernel before it. Tensors that do
    not fit go through NCCL.

    Two buffers take turns, and a flag per row belongs to each. Neither waits to be free: a rank
    that writes buffer 0 again has completed a norm (or barrier) on buffer 1, so had a signal from
    each peer's, which began when the peer's norm on buffer 0 was complete: sums read, flags
    cleared. That of one row is enough. A recorded step has an even number of sums, or its last and
    the next replay's first would share a buffer. The key of a choice needs no turns: between two
    choices lies a sum, of whichever kind, that a peer takes part in only after it has taken the
    first key.
    """

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        sums, words = 2 * SYMMETRIC_ELEMENTS, 2 * SYMMETRIC_ROWS  # float16, behind them int64
        self.memory = symmetric.empty(sums + 4 * words, dtype=torch.float16, device=device)
        self.handle = symmetric.rendezvous(self.memory, dist.group.WORLD.group_name)
        self.turn, self.flags, self.keys = 0, None, None
        if dist.get_world_size() == 2 and kernels.use_triton(self.memory):
            mine = self.memory[sums:].view(torch.int64)
            place = ([words], torch.int64, sums // 4)
            other = self.handle.get_buffer(1 - dist.get_rank(), *place)
            self.flags, self.keys = zip(flags_and_keys(mine), flags_and_keys(other))
            mine.zero_()
            torch.cuda.synchronize(device)
            dist.barrier()  # no rank signals before both have cleared

    @property
    def name(self) -> str:
        meets = f"in the norm up to {SYMMETRIC_ROWS} rows, then barriers"
        return f"symmetric ({'barriers' if self.flags is None else meets})"

    def buffer(self, m: int, width: int) -> Tensor | None:
        if m * width > SYMMETRIC_ELEMENTS:
            return None
        first = self.turn * SYMMETRIC_ELEMENTS
        return self.memory[first : first + m * width].view(m, width)

    def __call__(self, x: Tensor) -> Tensor | kernels.Pending:
        mine = self.buffer(*x.shape)
        if mine is None or x.data_ptr() != mine.data_ptr():
            dist.all_reduce(x)
            return x
        turn, rank, world = self.turn, dist.get_rank(), dist.get_world_size()
        self.turn ^= 1
        place = (list(x.shape), x.dtype, turn * SYMMETRIC_ELEMENTS)
        parts = tuple(self.handle.get_buffer(r, *place) for r in range(world))
        pair = None
        if self.flags is not None and x.shape[0] <= SYMMETRIC_ROWS:
            pair = (x, parts[1 - rank]), tuple(flags[turn] for flags in self.flags)
        return kernels.Pending(parts, functools.partial(self.handle.barrier, channel=turn), pair)

    def choose(self, logits: Tensor, first: int, ids: Tensor, start: Tensor, tokens: int) -> None:
        if self.keys is None or logits.shape[0] > SYMMETRIC_ROWS:
            Nccl().choose(logits, first, ids, start, tokens)
        else:
            kernels.next_token(logits, ids, start, tokens, first, self.keys)


def flags_and_keys(words: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [2 * SYMMETRIC_ROWS] -> flags int32 [turn, row], keys of a choice int64 [row]."""
    flags, keys = words.split(SYMMETRIC_ROWS)
    return flags.view(torch.int32).view(2, SYMMETRIC_ROWS), keys


def make_reduce(kind: str, world: int, device: torch.device) -> tuple[Reduce | None, str]:
    """The sum over ranks and its name; "auto": symmetric memory if it works here, else NCCL."""
    if world == 1:
        return None, "none"
    if kind == "nccl" or device.type != "cuda":
        return Nccl(), dist.get_backend()
    try:
        reduce = Symmetric(device)
        right = _agrees(reduce, device)
    except Exception as error:
        if kind == "symm":
            raise
        return Nccl(), f"nccl (symmetric: {type(error).__name__}: {str(error)[:120]})"
    return (reduce, reduce.name) if right else (Nccl(), "nccl (symmetric memory: wrong results)")


def _agrees(reduce: Symmetric, device: torch.device, m: int = 5, width: int = 512) -> bool:
    """Whether sums and choices equal NCCL's on every rank.

    NCCL's come before all others: the rounds themselves have to keep the ranks in step.
    """
    rank = dist.get_rank()
    own = torch.Generator(device).manual_seed(1 + rank)
    x = torch.randn(ROUNDS, m, width, device=device, generator=own).half()
    logits = torch.randn(ROUNDS, m, width, device=device, generator=own).half()
    expected = x.float()
    dist.all_reduce(expected)
    tokens = best_token(logits.flatten(0, 1), rank * width).view(ROUNDS, m, 1)
    weight = torch.ones(width, device=device).half()
    start = torch.zeros(1, dtype=torch.int64, device=device)
    got, ids = torch.empty_like(x), torch.empty_like(tokens)
    for i in range(ROUNDS):
        out = reduce.buffer(m, width)
        out.copy_(x[i])
        total = reduce(out)
        if i % 4 == 2:  # also the barrier of its own, in turn with the norms
            (total,) = kernels.added(total)
        got[i] = kernels.add_norm(total, None, weight, 1e-5)[1]
        if i % 3 == 0:  # not in each: a choice synchronises as well
            reduce.choose(logits[i], rank * width, ids[i], start, 1)
    right = bool((got.float() - expected).abs().max() <= 1e-2)
    right &= torch.equal(ids[::3], tokens[::3]) and int(start) == len(ids[::3])
    wrong = torch.tensor(float(not right), device=device)
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return float(wrong) == 0


def best_token(logits: Tensor, first: int) -> Tensor:
    """The token of the largest of all ranks' logits: int64 [B, 1], the same on every rank.

    logits: [B, this rank's part of the vocabulary]; first: the token its first column stands for.
    Of equal logits the first token counts.
    """
    value, at = logits.float().max(-1)
    mine = torch.stack([value, (at + first).float()])  # float32 holds token numbers exactly
    every = mine.new_empty(2 * dist.get_world_size(), logits.shape[0])
    dist.all_gather_into_tensor(every, mine)
    every = every.view(-1, *mine.shape)
    owner = every[:, 0].argmax(0, keepdim=True)
    return every[:, 1].gather(0, owner).long().t()


def _process(rank: int, function: Callable, world: int, port: int, options: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank) if cuda else None,
    )
    try:
        function(rank, world, options)
    finally:
        dist.destroy_process_group()


def launch(function: Callable[[int, int, Any], None], world: int, options: Any) -> None:
    """Call function(rank, world, options) in one process per GPU; here if there is one only."""
    if world == 1:
        function(0, 1, options)
        return
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        raise ValueError(f"gpus={world}: this machine has {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (function, world, port, options), nprocs=world)
