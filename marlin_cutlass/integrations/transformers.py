"""Transformers (5.16 and newer): INT4 checkpoints straight into `QuantLinear`.

`from_pretrained` takes GPTQ, AWQ, compressed-tensors and MARLIN folders as well as converted ones;
after `register()` the plain `AutoModelForCausalLM.from_pretrained` reads converted ones too, and
what `save_pretrained` wrote. Layers are repacked one by one on their device as soon as all tensors
are there, so that memory peaks at the checkpoint's own size and one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint_plan import ANCHOR, TENSORS
from ..checkpoint_read import SPARSE
from ..checkpoint_scheme import FORMAT_NAME, Scheme, read_config, scheme_of
from ..files import FORMAT_VERSION
from ..formats import QuantizedWeight, read_awq, read_compressed_tensors, read_gptq, read_marlin
from ..layout import LAYOUT_VERSION
from ..nn import QuantLinear
from ..safetensors_stream import TensorInfo, read_header
from .experts import LoopedExperts, is_fused_experts
from .fused_mlp import FusedMLP

# Where foreign layers are repacked; None: where Transformers has put them.
REPACK_DEVICE: ContextVar[torch.device | None] = ContextVar("repack_device", default=None)
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)$")


class MarlinCutlassConfig(QuantizationConfigMixin):
    """`quantization_config` of a converted folder: the form of every layer by its checkpoint name.

    source: the original configuration of a foreign folder that is to be repacked on loading.
    """

    def __init__(
        self,
        layers: Mapping[str, dict] | None = None,
        modules_to_not_convert: list[str] | None = None,
        group_size: int | None = None,
        source_format: str = FORMAT_NAME,
        source: Mapping[str, Any] | None = None,
        format_version: int = FORMAT_VERSION,
        layout_version: int = LAYOUT_VERSION,
        **unknown: Any,
    ) -> None:
        self.quant_method = FORMAT_NAME
        for name, found, mine in (
            ("format_version", format_version, FORMAT_VERSION),
            ("layout_version", layout_version, LAYOUT_VERSION),
        ):
            if int(found) != mine:
                raise ValueError(f"{name}={found} is not supported: this release reads {mine}")
        self.format_version, self.layout_version = FORMAT_VERSION, LAYOUT_VERSION
        self.source_format, self.bits, self.group_size = source_format, 4, group_size
        self.modules_to_not_convert = list(modules_to_not_convert or [])
        self.layers = dict(layers or {})
        if source is not None:
            self.source = dict(source)


class RawLinear(nn.Module):
    """A quantised layer as its checkpoint stores it: buffers to be loaded, then repacked."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], bias: bool, scheme: Scheme, name: str, dtype
    ) -> None:
        super().__init__()
        self.scheme, self.name, self.dtype = scheme, name, dtype
        for role, info in tensors.items():
            self.register_buffer(role, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        if bias:
            width = _columns(scheme, tensors)
            self.register_buffer("bias", torch.empty(width, dtype=dtype, device="meta"))

    def repack(self) -> QuantLinear:
        """The layer as every kernel reads it. Raises ValueError naming the layer."""
        parts = {role: tensor for role, tensor in self.named_buffers() if role != "bias"}
        try:
            weight = _read(self.scheme, parts, self.name).to_packed()
        except (ValueError, TypeError) as error:
            text = str(error)
            text = text if text.startswith(self.name) else f"{self.name}: {text}"
            raise type(error)(text) from None
        weight.dtype = self.dtype
        return QuantLinear.from_packed(weight, getattr(self, "bias", None))


def _columns(scheme: Scheme, tensors: Mapping[str, TensorInfo]) -> int:
    rows, columns = tensors[ANCHOR[scheme.name]].shape
    if scheme.name in ("marlin", *SPARSE):
        return columns // 2
    return {"awq": columns * 8, "compressed-tensors": rows}.get(scheme.name, columns)


def _read(scheme: Scheme, parts: dict[str, Tensor], name: str) -> QuantizedWeight:
    """Decode a layer from its tensors by role, on their device."""
    size = scheme.group_size
    if scheme.name == "gptq":
        return read_gptq(
            parts["qweight"], parts.get("qzeros"), parts["scales"], parts.get("g_idx"),
            group_size=size, checkpoint_format=scheme.checkpoint_format, sym=scheme.sym,
            zero_rule=scheme.zero_rule, name=name,
        )  # fmt: skip
    if scheme.name == "awq":
        return read_awq(
            parts["qweight"], parts.get("qzeros"), parts["scales"], group_size=size, name=name
        )
    if scheme.name == "marlin":
        return read_marlin(parts["B"], parts["s"], group_size=size, name=name)
    if scheme.name in SPARSE:
        roles = TENSORS[scheme.name][0]
        return SPARSE[scheme.name](*(parts[r] for r in roles), group_size=size, name=name)
    return read_compressed_tensors(
        parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point"),
        parts.get("weight_shape"), parts.get("weight_g_idx"),
        group_size=size, actorder=scheme.act_order, symmetric=scheme.sym, name=name,
    )  # fmt: skip


def headers_of(files: Iterable[str | Path] | None) -> dict[str, TensorInfo]:
    """Tensors of all checkpoint files by name. Raises ValueError where they are not safetensors."""
    tensors: dict[str, TensorInfo] = {}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: only safetensors checkpoints are read (a .bin is a pickle)")
        tensors |= read_header(Path(file))[0]
    return tensors


class Names:
    """Names of layers in the model for their names in the checkpoint, as Transformers renames."""

    def __init__(self, model: nn.Module) -> None:
        transforms = get_model_conversion_mapping(model)
        self.renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self.modules = {name for name, _ in model.named_modules()}
        self.prefix = getattr(model, "base_model_prefix", "") + "."

    def in_model(self, layer: str) -> str:
        """The model's name; ValueError if it has no such module."""
        key = f"{layer}.weight"
        for renaming in self.renamings:
            key = renaming.rename_source_key(key)[0]
        name = key.removesuffix(".weight")
        for candidate in (name, self.prefix + name, name.removeprefix(self.prefix)):
            expert = EXPERT.match(candidate)
            if candidate in self.modules or (expert and expert[1] in self.modules):
                return candidate
        raise ValueError(f"{layer} is quantised in the checkpoint, and the model has no such layer")


def _refuse_fused(model: nn.Module, call: str) -> None:
    fused = [name for name, module in model.named_modules() if isinstance(module, FusedMLP)]
    if fused:
        raise ValueError(
            f"{call}: {len(fused)} MLPs were fused by fuse_mlps ({fused[0]}, ...), and a model "
            f"does not load under their names: call {call} before fuse_mlps"
        )


class MarlinCutlassHfQuantizer(HfQuantizer):
    """Puts empty layers into the model before loading, and repacks foreign ones afterwards."""

    requires_calibration = True  # models are quantised elsewhere: only pre-quantised ones load
    quantization_config: MarlinCutlassConfig

    def __init__(self, quantization_config: MarlinCutlassConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.replaced_experts: set[str] = set()
        self.checkpoint_names: dict[str, str] = {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files=None, dtype=None, **kwargs: Any
    ) -> nn.Module:
        config = self.quantization_config
        dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
        source = getattr(config, "source", None)
        headers = headers_of(checkpoint_files)
        if source is None:
            layers = {name: self._native(name, form, headers, dtype)
                      for name, form in config.layers.items()}  # fmt: skip
        else:
            scheme = scheme_of({"quantization_config": source})
            layers = dict(_foreign(scheme, headers, dtype))
        if not layers:
            raise ValueError("the checkpoint has no quantised layer: load it without this package")
        names = Names(model)
        for name, layer in layers.items():
            path = names.in_model(name)
            self.checkpoint_names[path] = name
            self._place(model, path, layer)
        return model

    @staticmethod
    def _native(name: str, form: dict, headers: Mapping[str, TensorInfo], dtype) -> QuantLinear:
        if "experts" in form:
            raise ValueError(
                f"{name}: experts stacked in one tensor are not supported in Transformers"
            )
        return QuantLinear(
            form["k"],
            form["n"],
            f"{name}.bias" in headers,
            group_size=form["group_size"],
            zeros=form["has_zeros"],
            act_order=f"{name}.perm" in headers,
            sparse=form.get("sparse", False),
            dtype=dtype,
            device="meta",
        )

    def _place(self, model: nn.Module, path: str, layer: nn.Module) -> None:
        """Put `layer` at `path`; an expert's goes into a loop that replaces the fused module."""
        expert = EXPERT.match(path)
        if expert and is_fused_experts(old := model.get_submodule(expert[1])):
            model.set_submodule(expert[1], LoopedExperts(old))
            self.replaced_experts.add(expert[1])
        if expert and isinstance(looped := model.get_submodule(expert[1]), LoopedExperts):
            looped.put(int(expert[2]), expert[3], layer)
            return
        old = model.get_submodule(path)
        if isinstance(layer, QuantLinear) and isinstance(old, nn.Linear):
            sizes = (old.in_features, old.out_features)
            if sizes != (layer.in_features, layer.out_features):
                mine = (layer.in_features, layer.out_features)
                raise ValueError(f"{path} is {sizes} in the model and {mine} in the checkpoint")
        model.set_submodule(path, layer)

    def update_weight_conversions(self, weight_conversions: list, *args: Any) -> list:
        """Experts that became a loop are loaded one by one: nothing merges their tensors."""
        if not self.replaced_experts:
            return weight_conversions
        return [
            c
            for c in weight_conversions
            if not (isinstance(c, WeightConverter) and ".experts" in str(c.target_patterns))
            and not (isinstance(c, WeightConverter) and "experts." in str(c.source_patterns))
        ]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        device = REPACK_DEVICE.get()
        for path, module in list(model.named_modules()):
            if isinstance(module, RawLinear):
                raw = module if device is None else module.to(device)
                model.set_submodule(path, raw.repack())
        config = self.quantization_config
        config.layers = {
            self.checkpoint_names.get(path, path): _form(module)
            for path, module in model.named_modules()
            if isinstance(module, QuantLinear)
        }
        if hasattr(config, "source"):
            scheme = scheme_of({"quantization_config": config.source})
            config.group_size = scheme.group_size
            config.source_format = (
                scheme.checkpoint_format if scheme.name == "gptq" else scheme.name
            )
            del config.source
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Dense `nn.Linear` layers with the values that the kernels multiply by. Raises ValueError
        for MLPs that are fused, whose columns no dense model expects."""
        _refuse_fused(model, "dequantize")
        for path, module in list(model.named_modules()):
            if not isinstance(module, QuantLinear):
                continue
            with torch.device("meta"):
                bias = module.bias is not None
                linear = nn.Linear(module.in_features, module.out_features, bias)
            linear.weight = nn.Parameter(module.dequantize(dtype).contiguous())
            if bias:
                linear.bias = nn.Parameter(module.bias.to(linear.weight.dtype))
            model.set_submodule(path, linear)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: nn.Module):
        """As every quantizer's. Raises ValueError for what a folder could not give back."""
        _refuse_fused(model, "save_pretrained")
        return super().get_state_dict_and_metadata(model)

    @property
    def is_trainable(self) -> bool:
        """Gradients reach activations and adapters; the INT4 weights are fixed."""
        return True

    @property
    def is_compileable(self) -> bool:
        """gemm is one operator with a fake implementation: whole graphs compile."""
        return True


def _form(layer: QuantLinear) -> dict:
    return layer.weight_packed.metadata() | {"act_order": layer.perm is not None}


def _foreign(scheme: Scheme, headers: Mapping[str, TensorInfo], dtype):
    """(checkpoint name, layer to be loaded) of every quantised layer of a foreign checkpoint."""
    if scheme.name == "dense":
        raise ValueError("the checkpoint is not quantised")
    required, optional = TENSORS[scheme.name]
    anchor = "." + ANCHOR[scheme.name]
    for tensor in headers:
        if not tensor.endswith(anchor):
            continue
        name = tensor.removesuffix(anchor)
        if len(headers[tensor].shape) != 2:
            raise ValueError(f"{name}: stacked experts are not supported in Transformers")
        roles = {
            role: headers[f"{name}.{role}"]
            for role in (*required, *optional)
            if f"{name}.{role}" in headers
        }
        missing = [r for r in required if r not in roles and not (r == "qzeros" and scheme.sym)]
        if missing:
            raise ValueError(f"{name}: tensor {name}.{missing[0]} is missing")
        yield name, RawLinear(roles, f"{name}.bias" in headers, scheme, name, dtype)


def register() -> None:
    """Make `quant_method: marlin_cutlass` known to Transformers; calling it again is harmless."""
    if FORMAT_NAME not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(FORMAT_NAME)(MarlinCutlassConfig)
    if FORMAT_NAME not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(FORMAT_NAME)(MarlinCutlassHfQuantizer)


def from_pretrained(
    path: str | Path,
    *args: Any,
    auto_class: Any = None,
    device: torch.device | str | None = None,
    **options: Any,
):
    """`AutoModelForCausalLM.from_pretrained` for any INT4 folder that `convert` can read.

    auto_class: another auto or model class. device: where to repack and return the whole model,
    without accelerate, which device_map needs. options: as Transformers takes them (dtype, ...). A
    folder saved afterwards is a converted one: stock loaders of the original format do not read it.
    Raises ValueError for a folder that is not quantised or not supported, saying why.
    """
    register()
    auto_class = auto_class or AutoModelForCausalLM
    config = options.pop("config", None) or AutoConfig.from_pretrained(path)
    found = getattr(config, "quantization_config", None)
    if found is None and Path(path).is_dir():  # old GPTQ folders keep it in a file of its own
        found = read_config(Path(path)).get("quantization_config")
    if not found:
        raise ValueError(f"{path} is not quantised: convert or quantise it first")
    found = dict(found) if isinstance(found, Mapping) else found.to_dict()
    if found.get("quant_method") != FORMAT_NAME:
        scheme_of({"quantization_config": found})  # refuses what cannot be read, before loading
        config.quantization_config = {"quant_method": FORMAT_NAME, "source": found}
    if device is not None and options.get("device_map") is not None:
        raise ValueError(
            f"device={device} and device_map={options['device_map']}: give one of them"
        )
    device = None if device is None else torch.device(device)
    token = REPACK_DEVICE.set(device)
    try:
        model = auto_class.from_pretrained(path, *args, config=config, **options)
    finally:
        REPACK_DEVICE.reset(token)
    if device is None:
        return model
    if isinstance(model, tuple):  # output_loading_info=True
        return model[0].to(device), *model[1:]
    return model.to(device)
