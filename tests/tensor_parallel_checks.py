"""What every rank checks, over gloo on the CPU or over NCCL on GPUs.

Each check compares with the whole layer, which every rank makes from the same seed.
"""

from __future__ import annotations

import copy
import os
import socket
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from marlin_cutlass import QuantLinear, pack
from marlin_cutlass.integrations.tensor_parallel import (
    ColwiseQuant,
    RowwiseQuant,
    tensor_parallel,
)


def make(k, n, group_size=32, zeros=False, act_order=False, bias=True, seed=0):
    """The same random layer on every rank."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    groups = 1 if group_size < 0 else k // group_size
    scales = (torch.rand(groups, n, generator=g) + 0.5).half() * 0.02
    points = torch.randint(1, 16, (groups, n), generator=g) if zeros else None
    index = None
    if act_order:
        index = (torch.arange(k) // group_size)[torch.randperm(k, generator=g)].int()
    weight = pack(q, scales, points, group_size=group_size, g_idx=index)
    return QuantLinear.from_packed(weight, torch.randn(n, generator=g).half() if bias else None)


def close(actual, expected, tolerance=4e-3):
    error = float((actual.float() - expected.float()).abs().max())
    assert error <= tolerance * float(expected.float().abs().max()), error


def inputs(k, device, *shape):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (5,)), k, generator=g).half().to(device)


def column_and_row(mesh, device):
    rank, world = mesh.get_local_rank(), mesh.size()
    for group_size, zeros in ((32, False), (64, True), (-1, False)):
        layer = make(256 * world, 48 * world, group_size, zeros).to(device)
        x = inputs(layer.in_features, device)
        whole = layer(x)
        column = copy.deepcopy(layer)
        parallelize_module(column, mesh, ColwiseQuant())
        mine = column(x)
        assert torch.equal(mine, whole[:, rank * 48 : rank * 48 + 48]) or mine.is_cuda
        close(mine, whole[:, rank * 48 : rank * 48 + 48])
        dense = layer.dequantize()
        assert torch.equal(column.dequantize(), dense[rank * 48 : rank * 48 + 48])
        row = copy.deepcopy(layer)
        parallelize_module(row, mesh, RowwiseQuant())
        close(row(x[:, rank * 256 : rank * 256 + 256]), whole)
        assert (row.bias is None) == (rank != 0)


def layouts(mesh, device):
    """DTensors in and out, gathered outputs, reduce-scatter over the sequence."""
    rank, world = mesh.get_local_rank(), mesh.size()
    layer = make(64 * world, 64 * world).to(device)
    x = inputs(layer.in_features, device, 2, 3 * world)
    whole = layer(x)
    column = parallelize_module(
        copy.deepcopy(layer), mesh, ColwiseQuant(output_layouts=Replicate())
    )
    close(column(x), whole)
    column = parallelize_module(copy.deepcopy(layer), mesh, ColwiseQuant(use_local_output=False))
    out = column(DTensor.from_local(x, mesh, (Replicate(),)))
    assert isinstance(out, DTensor) and out.placements == (Shard(2),)
    close(out.full_tensor(), whole)
    row = parallelize_module(copy.deepcopy(layer), mesh, RowwiseQuant(output_layouts=Shard(1)))
    mine = row(x.chunk(world, -1)[rank])
    close(mine, whole.chunk(world, 1)[rank])
    row = parallelize_module(copy.deepcopy(layer), mesh, RowwiseQuant(input_layouts=Replicate()))
    close(row(x), whole)


def act_order(mesh, device):
    rank, world = mesh.get_local_rank(), mesh.size()
    layer = make(128 * world, 64 * world, act_order=True).to(device)
    x = inputs(layer.in_features, device)
    whole = layer(x)
    column = parallelize_module(copy.deepcopy(layer), mesh, ColwiseQuant())
    close(column(x), whole.chunk(world, -1)[rank])
    row = parallelize_module(copy.deepcopy(layer), mesh, RowwiseQuant())
    assert row.perm is None and row.in_features == 128
    close(row(x.chunk(world, -1)[rank]), whole)


def fused_columns(mesh, device):
    rank, world = mesh.get_local_rank(), mesh.size()
    sizes = [64 * world, 32 * world, 32 * world]
    parts = [make(128, n, seed=i).to(device) for i, n in enumerate(sizes)]
    x = inputs(128, device)
    expected = torch.cat([p(x).chunk(world, -1)[rank] for p in parts], -1)
    fused = QuantLinear.fuse(parts)
    parallelize_module(fused, mesh, ColwiseQuant(parts=sizes))
    close(fused(x), expected)


class Mlp(nn.Module):
    def __init__(self, world):
        super().__init__()
        self.gate, self.up = make(128, 64 * world, seed=1), make(128, 64 * world, seed=2)
        self.down = make(64 * world, 128, seed=3)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gradients(mesh, device):
    """An adapter in front of sharded layers gets the gradient that it gets without sharding."""
    model = Mlp(mesh.size()).to(device)
    x = inputs(128, device).requires_grad_()
    model(x).float().square().mean().backward()
    expected, x.grad = x.grad.clone(), None
    plan = {"gate": ColwiseQuant(), "up": ColwiseQuant(), "down": RowwiseQuant()}
    parallelize_module(model, mesh, plan)
    model(x).float().square().mean().backward()
    close(x.grad, expected, 2e-2)


def decoder(mesh, device):
    """A Transformers model over all ranks: the same logits, prefill and cached decoding."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return
    world = mesh.size()
    config = LlamaConfig(
        hidden_size=32 * 2 * world,
        intermediate_size=64 * world,
        num_hidden_layers=2,
        num_attention_heads=2 * world,
        num_key_value_heads=world,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).half().eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            model.set_submodule(name, QuantLinear.from_linear(module, group_size=32))
    model = model.to(device)
    ids = torch.arange(14, device=device).view(2, 7) % 64
    with torch.no_grad():
        whole = model(ids).logits
        tensor_parallel(model, mesh)
        first = model.model.layers[0]
        assert first.self_attn.q_proj.out_features == 64
        assert first.mlp.down_proj.in_features == 64
        close(model(ids).logits, whole, 1e-2)
        out = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 10)


def refusals(mesh, device):
    world = mesh.size()
    for k, n, style, word in (
        (64, 64 * world + 1, ColwiseQuant(), "is not a multiple of world"),
        (96, 64, RowwiseQuant(), "cut a group"),
        (64, 64, ColwiseQuant(parts=[32, 16]), "add up to 48"),
    ):
        try:
            parallelize_module(make(k, n).to(device), mesh, style)
        except ValueError as error:
            assert word in str(error), (word, error)
        else:
            raise AssertionError(f"K={k}, N={n} over {world} ranks was not refused")
    try:
        parallelize_module(nn.Linear(8, 8), mesh, ColwiseQuant())
    except TypeError as error:
        assert "QuantLinear" in str(error)


def graph(mesh, device):
    """A row-parallel layer with its all-reduce inside a CUDA graph (GPU only)."""
    if device.type != "cuda":
        return
    rank, world = mesh.get_local_rank(), mesh.size()
    layer = make(256 * world, 512, 128).to(device)
    x = inputs(layer.in_features, device)
    whole = layer(x)
    row = parallelize_module(copy.deepcopy(layer), mesh, RowwiseQuant())
    mine = x.chunk(world, -1)[rank].contiguous()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                row(mine)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        # NCCL's own thread may make calls that a capture of all threads forbids.
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            out = row(mine)
    captured.replay()
    torch.cuda.synchronize()
    close(out, whole)
    mine.mul_(2)
    captured.replay()
    torch.cuda.synchronize()
    bias = layer.bias.float()
    close(out.float() - bias, 2 * (whole.float() - bias), 1e-2)


CHECKS = (
    column_and_row, layouts, act_order, fused_columns, gradients, decoder, refusals, graph,
)  # fmt: skip


def _process(rank, world, port, device_type, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    mesh = init_device_mesh(device_type, (world,))
    for check in CHECKS:
        try:
            check(mesh, device)
            queue.put((rank, check.__name__, "ok"))
        except Exception:
            queue.put((rank, check.__name__, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, device_type: str, timeout: float = 300) -> dict[str, list[str]]:
    """Result of each check on every rank, by the check's name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_process, args=(rank, world, port, device_type, queue), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[str, list[str]] = {check.__name__: [] for check in CHECKS}
    try:
        for _ in range(world * len(CHECKS)):
            _, name, text = queue.get(timeout=timeout)
            results[name].append(text)
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    return results
