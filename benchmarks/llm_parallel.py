"""Several GPUs for `llm.py`: a process each, and the sum over ranks after a row-parallel layer."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.llm_model import Reduce

SYMMETRIC_ELEMENTS = 128 * 8192  # largest one-shot sum: batch 128 of hidden size 8192


class Nccl:
    """torch.distributed's all_reduce, in place."""

    def __call__(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def buffer(self, m: int, width: int) -> Tensor | None:
        return None


class OneShot:
    """Each rank reads all others' buffers over NVLink and adds: one short kernel for small tensors.

    Products are written straight into the symmetric buffer; larger tensors go through NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.group = dist.group.WORLD.group_name
        self.memory = symmetric.empty(SYMMETRIC_ELEMENTS, dtype=torch.float16, device=device)
        symmetric.rendezvous(self.memory, self.group)
        self.address = self.memory.data_ptr()

    def buffer(self, m: int, width: int) -> Tensor | None:
        if m * width > SYMMETRIC_ELEMENTS:
            return None
        return self.memory[: m * width].view(m, width)

    def __call__(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self.address:
            dist.all_reduce(x)
            return x
        return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", self.group)


def make_reduce(kind: str, world: int, device: torch.device) -> tuple[Reduce | None, str]:
    """The sum over ranks and its name; "auto": one-shot if it works here, else NCCL."""
    if world == 1:
        return None, "none"
    if kind == "nccl" or device.type != "cuda":
        return Nccl(), dist.get_backend()
    try:
        reduce = OneShot(device)
        right = _agrees(reduce, device)
    except Exception as error:
        if kind == "symm":
            raise
        return Nccl(), f"nccl (one-shot: {type(error).__name__}: {str(error)[:120]})"
    return (reduce, "one-shot") if right else (Nccl(), "nccl (one-shot gave another sum)")


def _agrees(reduce: OneShot, device: torch.device) -> bool:
    """Whether one-shot sums equal NCCL's on every rank."""
    x = torch.randn(4, 256, device=device).half()
    expected = x.float()
    dist.all_reduce(expected)
    out = reduce.buffer(4, 256)
    out.copy_(x)
    wrong = ((reduce(out).float() - expected).abs().max() > 1e-2).float()
    dist.all_reduce(wrong)
    return float(wrong) == 0


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
