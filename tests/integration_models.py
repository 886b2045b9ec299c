"""Tiny checkpoints of real architectures: a quantised folder, and the dense model it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from integration_weights import random_layer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = 3


def config_of(name: str, **changes):
    """Tiny configuration; qwen2 has biases in q, k, v, mixtral has three experts."""
    if name == "mixtral":
        changes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, **changes}
    kinds = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mixtral": MixtralConfig}
    return kinds[name](**{**SIZES, **changes})


def linear_names(name: str) -> list[tuple[str, int, int, bool]]:
    """(checkpoint name, K, N, has a bias) of every layer that is quantised."""
    out = []
    for i in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{i}."
        bias = name == "qwen2"
        for part, n in (("q", 128), ("k", 64), ("v", 64)):
            out.append((f"{at}self_attn.{part}_proj", 128, n, bias))
        out.append((f"{at}self_attn.o_proj", 128, 128, False))
        if name == "mixtral":
            for e in range(EXPERTS):
                expert = f"{at}block_sparse_moe.experts.{e}."
                out += [(f"{expert}{w}", 128, 256, False) for w in ("w1", "w3")]
                out.append((f"{expert}w2", 256, 128, False))
        else:
            out += [(f"{at}mlp.{w}_proj", 128, 256, False) for w in ("gate", "up")]
            out.append((f"{at}mlp.down_proj", 256, 128, False))
    return out


def quantization_config(fmt: str, group_size: int, zeros: bool, act_order: bool) -> dict:
    if fmt == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group_size,
            "desc_act": act_order,
            "sym": not zeros,
            "checkpoint_format": "gptq",
        }
    if fmt == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
        }
    strategy = {"strategy": "channel"} if group_size < 0 else {"strategy": "group"}
    if group_size > 0:
        strategy["group_size"] = group_size
    weights = {"num_bits": 4, "type": "int", "symmetric": not zeros, **strategy}
    return {
        "quant_method": "compressed-tensors",
        "format": "marlin-24" if fmt == "marlin-24" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def write_folder(
    folder: Path,
    name: str = "llama",
    fmt: str = "gptq",
    group_size: int = 64,
    zeros: bool = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    shards: int = 1,
    scale: float = 0.02,
    **changes,
):
    """Write a quantised checkpoint; returns the dense Transformers model with the same weights."""
    torch.manual_seed(0)
    config = config_of(name, **changes)
    rest = AutoModelForCausalLM.from_config(config, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    rest.save_pretrained(folder)  # names as published checkpoints have them
    from safetensors.torch import load_file

    dense = load_file(folder / "model.safetensors")
    tensors = dict(dense)
    orders: dict[str, torch.Tensor] = {}
    for i, (layer, k, n, bias) in enumerate(linear_names(name)):
        order: torch.Tensor | bool = False
        if act_order:  # q, k, v and gate, up share their inputs, hence their order
            key = f"{layer.rsplit('.', 1)[0]}{k}"
            if key not in orders:
                g = torch.Generator().manual_seed(i)
                orders[key] = (torch.arange(k) // group_size)[torch.randperm(k, generator=g)]
            order = orders[key]
        form = (zeros or fmt == "awq", order, i, scale, dtype, fmt == "marlin-24")
        made = random_layer(k, n, group_size, *form)
        del tensors[f"{layer}.weight"]
        writers = {"gptq": made.gptq, "awq": made.awq, "marlin-24": made.marlin_24}
        parts = writers.get(fmt, made.compressed_tensors)()
        tensors |= {f"{layer}.{role}": tensor.contiguous() for role, tensor in parts.items()}
        dense[f"{layer}.weight"] = made.dense.t().to(dtype).contiguous()
        if bias:
            tensors[f"{layer}.bias"] = torch.randn(n).to(dtype)
            dense[f"{layer}.bias"] = tensors[f"{layer}.bias"]
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    _write(folder, tensors, shards)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = quantization_config(fmt, group_size, zeros, act_order)
    (folder / "config.json").write_text(json.dumps(raw))
    return reference


def _write(folder: Path, tensors: dict, shards: int) -> None:
    (folder / "model.safetensors").unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]  # tensors of one layer lie in different files
        save_file({n: tensors[n] for n in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def quantised(model: nn.Module) -> list[str]:
    """Names of the model's QuantLinear layers."""
    from marlin_cutlass import QuantLinear

    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]
