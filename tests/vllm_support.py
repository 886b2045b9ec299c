"""vLLM's linear layers on the CPU: one process, any tensor-parallel rank."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


@pytest.fixture(scope="session")
def vllm_config():
    """A CPU configuration and a one-process gloo group, as an engine would set up."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():  # once for all test files of a process
            init_distributed_environment(
                world_size=1,
                rank=0,
                distributed_init_method=f"tcp://127.0.0.1:{port}",
                local_rank=0,
                backend="gloo",
            )
            initialize_model_parallel(1)
        yield config


def _rank(rank: int, world: int) -> ExitStack:
    """Every place that vLLM's layers ask for rank and world size."""
    stack = ExitStack()
    for module in ("vllm.model_executor.parameter", "vllm.model_executor.layers.linear"):
        for name, value in (("rank", rank), ("world_size", world)):
            target = f"{module}.get_tensor_model_parallel_{name}"
            stack.enter_context(mock.patch(target, return_value=value))
    return stack


def _module(kind: str, config, k: int, n, bias: bool, dtype, prefix: str):
    from vllm.model_executor.layers import linear

    options = {"bias": bias, "quant_config": config, "params_dtype": dtype, "prefix": prefix}
    if kind == "column":
        return linear.ColumnParallelLinear(k, n, **options)
    if kind == "row":  # no all-reduce: each rank's part is looked at by itself
        return linear.RowParallelLinear(k, n, reduce_results=False, **options)
    if kind == "replicated":
        return linear.ReplicatedLinear(k, n, **options)
    if kind == "merged":
        return linear.MergedColumnParallelLinear(k, n, **options)
    head, heads, kv_heads = n
    return linear.QKVParallelLinear(k, head, heads, kv_heads, **options)


def fill(module, shards: dict) -> None:
    """Load checkpoint tensors (shard id -> name -> tensor) through the parameters' loaders."""
    parameters = dict(module.named_parameters())
    for shard, tensors in shards.items():
        for name, tensor in tensors.items():
            if name not in parameters:
                assert name == "g_idx", name  # dropped by vLLM's weight mapper
                continue
            loader = parameters[name].weight_loader
            loader(parameters[name], tensor, *(() if shard is None else (shard,)))


def load_layer(
    kind: str,
    config,
    k: int,
    n,
    shards: dict,
    tp: tuple[int, int] = (0, 1),
    dtype: torch.dtype = torch.float16,
    prefix: str = "model.layers.0.proj",
    process: bool = True,
):
    """A layer of `kind` with the checkpoint tensors of `shards` (shard id -> name -> tensor) loaded
    through the weight loaders, as rank tp[0] of tp[1].

    n: outputs, list of outputs (merged), or (head size, heads, key-value heads) (qkv).
    """
    bias = any("bias" in tensors for tensors in shards.values())
    with _rank(*tp):
        module = _module(kind, config, k, n, bias, dtype, prefix)
        fill(module, shards)
        if process:
            module.quant_method.process_weights_after_loading(module)
            module.update_param_tp_status()
    return module
