"""Several GPUs for `llm.py`: a process each, and the sum over ranks after a row-parallel layer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.llm_kernels import Parts, add_norm
from benchmarks.llm_model import Reduce

SYMMETRIC_ELEMENTS = 128 * 8192  # largest sum in symmetric memory: batch 128 of hidden size 8192


class Nccl:
    """torch.distributed's all_reduce, in place."""

    def __call__(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def buffer(self, m: int, width: int) -> Tensor | None:
        return None


class Symmetric:
    """Partial sums stay where each rank's product wrote them; the norm behind reads all of them.

    Over NVLink: one barrier of the GPUs, no kernel of its own. Two buffers take turns: a rank that
    writes one again has passed the barrier of the other, which its peers reach only after they read
    the first.
    Tensors that do not fit go through NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        options = {"dtype": torch.float16, "device": device}
        self.memory = symmetric.empty(2 * SYMMETRIC_ELEMENTS, **options)
        self.handle = symmetric.rendezvous(self.memory, dist.group.WORLD.group_name)
        self.turn = 0

    def buffer(self, m: int, width: int) -> Tensor | None:
        if m * width > SYMMETRIC_ELEMENTS:
            return None
        first = self.turn * SYMMETRIC_ELEMENTS
        return self.memory[first : first + m * width].view(m, width)

    def __call__(self, x: Tensor) -> Tensor | Parts:
        mine = self.buffer(*x.shape)
        if mine is None or x.data_ptr() != mine.data_ptr():
            dist.all_reduce(x)
            return x
        self.handle.barrier(channel=self.turn)
        place = (list(x.shape), x.dtype, self.turn * SYMMETRIC_ELEMENTS)
        self.turn ^= 1
        return tuple(self.handle.get_buffer(r, *place) for r in range(dist.get_world_size()))


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
    return (reduce, "symmetric") if right else (Nccl(), "nccl (symmetric memory gave another sum)")


def _agrees(reduce: Symmetric, device: torch.device) -> bool:
    """Whether the norm's sums equal NCCL's on every rank, in each buffer and then once more."""
    wrong = torch.zeros((), device=device)
    weight = torch.ones(256, device=device).half()
    for _ in range(4):
        x = torch.randn(4, 256, device=device).half()
        expected = x.float()
        dist.all_reduce(expected)
        out = reduce.buffer(4, 256)
        out.copy_(x)
        _, total = add_norm(reduce(out), None, weight, 1e-5)
        wrong = wrong.maximum((total.float() - expected).abs().max())
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return float(wrong) <= 1e-2


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
