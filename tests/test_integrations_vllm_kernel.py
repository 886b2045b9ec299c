"""The kernel under vLLM's own checkpoint methods, with the real vllm package on the CPU.

vLLM's layers, parameters and weight loaders run as they do on a GPU; only the multiply takes the
reference path. Skipped (never passed) where vllm is not installed.
"""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vllm is imported
pytest.importorskip("vllm", reason="needs the vllm package")

from integration_weights import random_layer
from vllm_support import fill, load_layer, vllm_config  # noqa: F401

from marlin_cutlass.integrations import vllm as plugin

K, N = 256, 128
pytestmark = pytest.mark.usefixtures("vllm_config")


@pytest.fixture
def kernel():
    """Our kernel, first in the CPU's list; the list is put back afterwards."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    before = {platform: list(known) for platform, known in linear._POSSIBLE_KERNELS.items()}
    yield plugin.register_kernel(first=True, platform=PlatformEnum.CPU)
    for platform, known in before.items():
        linear._POSSIBLE_KERNELS[platform][:] = known


def gptq_config(group_size):
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

    config = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": True}
    return AutoGPTQConfig.from_config(config)


def awq_config(group_size):
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

    return AutoAWQConfig.from_config({"bits": 4, "group_size": group_size, "zero_point": True})


def ct_config(group_size, symmetric):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    strategy = {"strategy": "channel"}
    if group_size > 0:
        strategy = {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, **strategy}
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [],
        }
    )


def case(fmt, group_size, seed=0, k=K, n=N, dtype=torch.float16):
    """(vLLM's config, random layer, its checkpoint tensors)."""
    zeros = fmt in ("awq", "ct_asym")
    layer = random_layer(k, n, group_size, zeros, seed=seed, dtype=dtype)
    if fmt == "gptq":
        return gptq_config(group_size), layer, layer.gptq()
    if fmt == "awq":
        return awq_config(group_size), layer, layer.awq()
    return ct_config(group_size, fmt == "ct"), layer, layer.compressed_tensors()


def check(module, x, dense, bias=None):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    expected = x.float() @ dense
    if bias is not None:
        expected += bias.float()
    assert out.dtype == x.dtype
    assert torch.allclose(out.float(), expected, atol=3e-3 * float(expected.abs().max()))


FORMATS = [("gptq", 64), ("gptq", 128), ("gptq", -1), ("awq", 64), ("ct", 64), ("ct", -1)]
FORMATS += [("ct_asym", 32), ("ct_asym", 128)]


@pytest.mark.parametrize("fmt,group_size", FORMATS)
def test_every_checkpoint_method_of_vllm_uses_the_kernel(kernel, fmt, group_size):
    config, layer, tensors = case(fmt, group_size)
    module = load_layer("column", config, K, N, {None: tensors})
    scheme = getattr(module, "scheme", None) or module.quant_method
    assert type(scheme.kernel) is kernel
    check(module, torch.randn(3, K, dtype=torch.float16), layer.dense)


def test_bfloat16_bias_and_any_leading_shape(kernel):
    config, layer, tensors = case("gptq", 64, dtype=torch.bfloat16)
    bias = torch.randn(N).to(torch.bfloat16)
    module = load_layer(
        "column", config, K, N, {None: {**tensors, "bias": bias}}, dtype=torch.bfloat16
    )
    x = torch.randn(2, 1, 5, K).to(torch.bfloat16)
    out, skipped = module(x)
    assert out.shape == (2, 1, 5, N) and skipped is None
    expected = x.float() @ layer.dense + bias.float()
    assert torch.allclose(out.float(), expected, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("fmt", ["gptq", "awq", "ct", "ct_asym"])
def test_fused_gate_up_and_qkv(kernel, fmt):
    config, gate, gate_tensors = case(fmt, 64, seed=1)
    _, up, up_tensors = case(fmt, 64, seed=2)
    module = load_layer("merged", config, K, [N, N], {0: gate_tensors, 1: up_tensors})
    check(module, torch.randn(2, K).half(), torch.cat([gate.dense, up.dense], 1))
    parts = {s: case(fmt, 64, seed=i, n=n) for i, (s, n) in enumerate(zip("qkv", (128, 64, 64)))}
    module = load_layer("qkv", config, K, (64, 2, 1), {s: p[2] for s, p in parts.items()})
    dense = torch.cat([p[1].dense for p in parts.values()], 1)
    check(module, torch.randn(2, K).half(), dense)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fmt", ["gptq", "awq", "ct_asym"])
def test_tensor_parallel_shards(kernel, fmt, rank):
    config, layer, tensors = case(fmt, 64)
    x = torch.randn(3, K).half()
    column = load_layer("column", config, K, N, {None: tensors}, tp=(rank, 2))
    check(column, x, layer.dense[:, rank * 64 : rank * 64 + 64])
    row = load_layer("row", config, K, N, {None: tensors}, tp=(rank, 2))
    check(row, x[:, rank * 128 :][:, :128], layer.dense[rank * 128 :][:128])


def test_channel_scales_are_repeated_on_the_ranks_of_a_row_parallel_layer(kernel):
    config, layer, tensors = case("ct", -1)
    row = load_layer("row", config, K, N, {None: tensors}, tp=(1, 2))
    check(row, torch.randn(3, 128).half(), layer.dense[128:])


def test_refusals_name_the_rule(kernel):
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    def config(**changes):
        form = {
            "full_weight_shape": (256, 128),
            "partition_weight_shape": (256, 128),
            "weight_type": scalar_types.uint4b8,
            "act_type": torch.float16,
            "group_size": 128,
            "zero_points": False,
        }
        return MPLinearLayerConfig(**{**form, **changes})

    assert kernel.can_implement(config()) == (True, None)
    for changes, word in (
        ({"weight_type": scalar_types.uint8b128}, "weight type"),
        ({"weight_type": scalar_types.uint4}, "without zero points"),
        ({"act_type": torch.int8}, "activations"),
        ({"group_size": 48}, "group_size=48"),
        ({"partition_weight_shape": (64, 128)}, "in_features=64 (of 256 on all ranks)"),
    ):
        ok, reason = kernel.can_implement(config(**changes))
        assert not ok and word in reason, (changes, reason)


def test_order_of_registration_and_the_name_that_vllm_reorders():
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils.humming.priority import prioritize_humming
    from vllm.platforms import PlatformEnum

    known = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    before = list(known)
    try:
        ours = plugin.register_kernel(first=False)
        assert plugin.register_kernel(first=False) is ours  # again: still once
        assert known[-1] is ours and known.count(ours) == 1
        plugin.register_kernel(first=True)
        assert known[0] is ours and known.count(ours) == 1
        for capability in (80, 90, 100):
            assert prioritize_humming(known, capability)[0] is ours
        assert ours in linear._LINEAR_BACKEND_KERNEL_MAP["cutlass"]
    finally:
        known[:] = before


def test_the_switch(monkeypatch):
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    known = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    before = [k for k in known if k.__name__ != "McW4A16LinearKernel"]
    try:
        for value, index in (("0", None), ("1", 0), ("", -1)):
            known[:] = before
            monkeypatch.setenv(plugin.ENVIRONMENT, value)
            plugin.register()
            plugin.register()
            names = [k.__name__ for k in known]
            if index is None:
                assert "McW4A16LinearKernel" not in names
            else:
                assert names[index] == "McW4A16LinearKernel" and len(names) == len(before) + 1
    finally:
        known[:] = before


@pytest.mark.parametrize("fmt", ["gptq", "ct_asym"])
def test_reloading_writes_into_the_memory_that_graphs_have_captured(kernel, fmt):
    from vllm.model_executor.model_loader.reload import layerwise

    config, _, tensors = case(fmt, 64)
    module = load_layer("column", config, K, N, {None: tensors}, process=False)
    layerwise.record_metadata_for_reloading(module)
    module.quant_method.process_weights_after_loading(module)
    addresses = {name: p.data_ptr() for name, p in module.named_parameters()}
    _, layer, tensors = case(fmt, 64, seed=7)
    layerwise.initialize_layerwise_reload(module)
    fill(module, {None: tensors})
    layerwise.finalize_layerwise_reload(module, None)
    check(module, torch.randn(2, K).half(), layer.dense)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == addresses


def test_traced_with_any_number_of_rows(kernel):
    config, layer, tensors = case("gptq", 64)
    module = load_layer("column", config, K, N, {None: tensors})
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (1, 3, 17):
        check(compiled, torch.randn(m, K).half(), layer.dense)
