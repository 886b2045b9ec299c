"""vLLM's quantization method `marlin_cutlass`: converted folders, and other INT4 folders by choice.

With `--quantization marlin_cutlass` it takes over GPTQ (asymmetric and act-order as well, which
vLLM itself refuses), AWQ and compressed-tensors folders; without the flag only converted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils.config import get_safetensors_params_metadata

from .. import ops
from ..checkpoint_plan import ANCHOR, TENSORS
from ..checkpoint_scheme import FORMAT_NAME, Scheme, scheme_of
from ..files import FORMAT_VERSION
from ..layout import LAYOUT_VERSION
from ..safetensors_stream import DTYPES
from ..sharding import fuse_columns, why_not_fuse
from .vllm_kernel import ACTIVATIONS, MIN_CAPABILITY, why_not_device
from .vllm_layers import ForeignLoader, NativeLoader, Packed, Sizes

METHOD = FORMAT_NAME
TAKEN_OVER = ("gptq", "awq", "compressed-tensors", METHOD)
CONFIG_FILES = ["quantize_config.json", "quant_config.json"]


class MarlinCutlassConfig(QuantizationConfig):
    """What a folder's `quantization_config` and its tensors say.

    layers: of a converted folder, the form of each layer by name. scheme: of any other one.
    """

    def __init__(self, scheme: Scheme | None, layers: Mapping[str, dict]) -> None:
        super().__init__()
        self.scheme, self.layers = scheme, dict(layers)
        # Tensors of each quantised layer of a foreign folder and their dtypes, once it is known.
        self.roles: dict[str, dict[str, torch.dtype]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MarlinCutlassConfig:
        """From config.json's `quantization_config`; ValueError says what is not supported."""
        if config.get("quant_method") != METHOD:
            scheme = scheme_of({"quantization_config": config})
            if scheme.name not in ("gptq", "awq", "compressed-tensors"):
                raise ValueError(f"{scheme.name} folders are not read by vLLM: convert them first")
            return cls(scheme, {})
        for name, mine in (("format_version", FORMAT_VERSION), ("layout_version", LAYOUT_VERSION)):
            if int(config.get(name, mine)) != mine:
                raise ValueError(f"{name}={config[name]} is not supported: this reads {mine}")
        return cls(None, config["layers"])

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(ACTIVATIONS)

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return CONFIG_FILES

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over a folder only where `--quantization marlin_cutlass` asks for it."""
        found = str(hf_quant_cfg.get("quant_method", "")).lower()
        return METHOD if user_quant == METHOD and found in TAKEN_OVER else None

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Nothing is dropped: vLLM's own methods lose act-order (g_idx) here."""
        return WeightsMapper()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Names of layers as the model of vLLM has them."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)
        self.roles = hf_to_vllm_mapper.apply_dict(self.roles)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Learn from the checkpoint's headers which layers are quantised, and with what."""
        if self.scheme is not None:
            self.read_headers(get_safetensors_params_metadata(model_name, revision=revision))

    def read_headers(self, headers: Mapping[str, Mapping[str, Any]]) -> None:
        """headers: entry of each tensor by name, with its "dtype" as safetensors spells it."""
        anchor = "." + ANCHOR[self.scheme.name]
        known = [role for group in TENSORS[self.scheme.name] for role in group]
        for tensor in headers:
            if not tensor.endswith(anchor):
                continue
            layer = tensor.removesuffix(anchor)
            self.roles[layer] = {
                role: DTYPES[headers[f"{layer}.{role}"]["dtype"]]
                for role in known
                if f"{layer}.{role}" in headers
            }
        if not self.roles:
            raise ValueError(f"no tensor named *{anchor}: the checkpoint is not quantised, or its"
                             " headers cannot be read")  # fmt: skip

    def parts_of(self, prefix: str) -> list[str]:
        """Names in the checkpoint of the layer `prefix`: itself, or the layers fused in it."""
        known = self.roles if self.scheme is not None else self.layers
        if prefix in known:
            return [prefix]
        head, _, last = prefix.rpartition(".")
        names = [f"{head}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
        found = [name for name in names if name in known]
        if found and len(found) != len(names):
            missing = ", ".join(sorted(set(names) - set(found)))
            raise ValueError(f"{prefix}: {missing} not quantised, but layers fused with it are")
        return found

    def get_quant_method(self, layer: nn.Module, prefix: str):
        """Ours for a quantised linear layer, vLLM's for the others; ValueError for quantised
        experts and output heads."""
        known = self.roles if self.scheme is not None else self.layers
        if isinstance(layer, RoutedExperts):
            if any(name.startswith(f"{prefix}.") for name in known):
                raise ValueError(
                    f"{prefix}: quantised experts are not supported by {METHOD} in vLLM; load the"
                    " folder without --quantization"
                )
            return UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, ParallelLMHead):
            if prefix in known:
                raise ValueError(f"{prefix}: a quantised output head is not supported in vLLM")
            return None
        if not isinstance(layer, LinearBase):
            return None
        parts = self.parts_of(prefix)
        return (
            MarlinCutlassLinearMethod(self, prefix, parts) if parts else UnquantizedLinearMethod()
        )


@register_weight_loader_v2_supported_method
class MarlinCutlassLinearMethod(LinearMethodBase):
    """One linear layer. parts: names in the checkpoint of the layers fused in it."""

    def __init__(self, config: MarlinCutlassConfig, prefix: str, parts: list[str]) -> None:
        self.prefix = prefix
        reason = why_not_device()
        if reason:
            raise ValueError(f"{prefix}: {reason}")
        if config.scheme is None:
            self.loader = NativeLoader([config.layers[name] for name in parts])
        else:
            self.loader = ForeignLoader(config.scheme, config.roles[parts[0]])

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the checkpoint's tensors, in the shapes that they have on this rank."""
        self.sizes = Sizes(
            input_size_per_partition,
            input_size,
            tuple(output_partition_sizes),
            layer.tp_rank,
            layer.tp_size,
            self.prefix,
        )
        self.loader.create(layer, self.sizes, params_dtype, extra_weight_attrs["weight_loader"])

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the checkpoint's tensors by packed weights, fused into one where possible."""
        packed = fused(self.loader.weights(layer, self.sizes))
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        self.forms = []
        for i, (weight, features) in enumerate(packed):
            tensors = {**weight.tensors(), "features": features}
            for role, tensor in tensors.items():
                if tensor is not None:
                    layer.register_parameter(
                        f"mc_{role}_{i}", nn.Parameter(tensor, requires_grad=False)
                    )
            self.forms.append((weight.n, weight.k, weight.group_size, weight.has_zeros))
        self.variant = ops.BATCH_INVARIANT if envs.VLLM_BATCH_INVARIANT else ops.AUTO

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype: one product, or one per part that could not be
        fused."""
        outputs, first = [], 0
        for i, form in enumerate(self.forms):
            features = getattr(layer, f"mc_features_{i}", None)
            a = x if features is None else x.index_select(-1, features)
            mine = bias
            if bias is not None and len(self.forms) > 1:
                mine = bias[first : first + form[0]]
            packed, col_scale = (
                getattr(layer, f"mc_packed_{i}"),
                getattr(layer, f"mc_col_scale_{i}"),
            )
            perm = getattr(layer, f"mc_perm_{i}", None)
            outputs.append(
                torch.ops.marlin_cutlass.gemm(a, packed, col_scale, mine, perm, *form, self.variant)
            )
            first += form[0]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def fused(parts: list[Packed]) -> list[Packed]:
    """One weight where the parts agree in everything, act-order included; else the parts."""
    features = [f for _, f in parts]
    same = all(f is None for f in features) or all(
        f is not None and torch.equal(f, features[0]) for f in features
    )
    weights = [w for w, _ in parts]
    if len(parts) == 1 or not same or why_not_fuse(weights) is not None:
        return parts
    return [(fuse_columns(weights), features[0])]
