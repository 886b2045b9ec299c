"""Saving and loading packed weights and models: safetensors, memory-mapped, never pickle.

Tensor names are `<layer>.packed`, `.col_scale`, `.perm` and `.bias`, exactly a `QuantLinear`'s
state dict; sizes and kinds of all layers are one JSON text in the file's metadata. A single weight
is the layer named "weight".
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .errors import short_dtype
from .json_file import parse_object
from .layout import LAYOUT_VERSION
from .nn import QuantLinear
from .packed_weight import PackedWeight, checked_metadata

FORMAT = "marlin_cutlass"
FORMAT_VERSION = 1
SINGLE = "weight"  # layer name of a file that holds one weight


def format_metadata(layers: Mapping[str, dict]) -> dict[str, str]:
    """Metadata of every file of ours: format, versions, and the form of each layer."""
    return {
        # "pt" keeps readers happy that ask which framework wrote the tensors.
        "format": "pt",
        "quant_format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "layout_version": str(LAYOUT_VERSION),
        "layers": json.dumps(dict(layers), sort_keys=True, separators=(",", ":")),
    }


def check_metadata(metadata: Mapping[str, str] | None, where: str) -> dict[str, dict]:
    """The form of each layer of a file; ValueError for a foreign file or an unknown version."""
    metadata = metadata or {}
    if metadata.get("quant_format") != FORMAT:
        raise ValueError(f"{where} is not a {FORMAT} file: its metadata does not name the format")
    version = metadata.get("format_version")
    if version != str(FORMAT_VERSION):
        raise ValueError(
            f"{where} has format_version={version}: this release reads version {FORMAT_VERSION}"
        )
    if metadata.get("layout_version") != str(LAYOUT_VERSION):
        raise ValueError(
            f"{where} has layout_version={metadata.get('layout_version')}: this release reads"
            f" version {LAYOUT_VERSION}"
        )
    layers = parse_object(metadata.get("layers", "{}"), f"{where}: metadata entry 'layers'")
    for name, form in layers.items():
        try:
            fields = checked_metadata(form)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: layer {name}: {error}") from None
        layers[name] = {**form, **fields, "dtype": short_dtype(fields["dtype"])}
    return layers


def write_atomically(path: Path, write) -> None:
    """Call `write(temporary path)` and rename: readers see the old file or the whole new one."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: {path.parent} is not a folder")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _layer_form(layer: QuantLinear) -> dict:
    return layer.weight_packed.metadata()


def _collect(what: Any) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """Tensors and layer forms of a weight, a module or a mapping of names to either or tensors."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict] = {}
    if isinstance(what, PackedWeight):
        what = {SINGLE: what}
    if isinstance(what, nn.Module):
        modules = [(n, m) for n, m in what.named_modules() if isinstance(m, QuantLinear)]
        layers = {name: _layer_form(module) for name, module in modules}
        return _state_dict(what), layers
    if not isinstance(what, Mapping):
        raise TypeError(f"cannot save {type(what).__name__}: a PackedWeight, module or mapping")
    for name, value in what.items():
        if isinstance(value, PackedWeight):
            layers[name] = value.metadata()
            tensors |= {f"{name}.{key}": t for key, t in value.tensors().items()}
        elif isinstance(value, QuantLinear):
            layers[name] = _layer_form(value)
            tensors |= {f"{name}.{key}": t for key, t in value.state_dict().items()}
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            raise TypeError(
                f"{name} is {type(value).__name__}: PackedWeight, QuantLinear or tensor"
            )
    return tensors, layers


def _state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict without second names of tied tensors (they are tied again on loading)."""
    seen: dict[tuple, str] = {}
    out = {}
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))
        if tensor.numel() and key in seen:
            continue
        seen[key] = name
        out[name] = tensor
    return out


def save(what: Any, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a PackedWeight, a model with QuantLinear layers, or a mapping of names to them.

    Tensors are written contiguous and unshared. metadata: further text entries. The file is written
    aside and renamed.
    """
    tensors, layers = _collect(what)
    # clone() only views of something bigger, which safetensors would refuse or duplicate.
    flat = {name: _own(tensor.detach()) for name, tensor in tensors.items()}
    extra = {**(metadata or {}), **format_metadata(layers)}
    write_atomically(Path(path), lambda temporary: save_file(flat, temporary, extra))


def _own(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def open_file(path: str | Path, device: str | torch.device = "cpu"):
    """`safe_open` with an error that names the file instead of the parser's position."""
    path = Path(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}")
    try:
        return safe_open(path, "pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def load_with_metadata(path: str | Path, device: str | torch.device = "cpu"):
    """(what `load` returns, the file's metadata)."""
    with open_file(path, device) as file:
        metadata = dict(file.metadata() or {})
        layers = check_metadata(metadata, str(path))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    out: dict[str, Any] = {}
    for name, form in layers.items():
        parts = {key: tensors.pop(f"{name}.{key}", None) for key in ("packed", "col_scale", "perm")}
        state = {key: t for key, t in parts.items() if t is not None}
        try:
            out[name] = PackedWeight.from_state({**state, "metadata": form})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{path}: layer {name}: {error}") from None
    out |= tensors
    return (out[SINGLE] if list(out) == [SINGLE] else out), metadata


def load(path: str | Path, device: str | torch.device = "cpu") -> PackedWeight | dict[str, Any]:
    """Read what `save` wrote: a PackedWeight for a single one, otherwise a dict of names to
    PackedWeight and the remaining tensors. Memory-mapped on the CPU; every size is checked."""
    return load_with_metadata(path, device)[0]


def load_model(model: nn.Module, path: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """Replace the linear layers that `path` has quantised, and load it strictly; returns `model`.

    path: a file written by `save(model, path)`, or a converted folder. Tensors are assigned, not
    copied, so the model may be on the meta device if it computes no buffers of its own. Raises
    ValueError naming missing tensors; unused ones are warned about.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors file")
    state: dict[str, Tensor] = {}
    for name in files:
        with open_file(name, device) as file:
            layers = check_metadata(file.metadata(), str(name))
            keys = set(file.keys())
            for layer, form in layers.items():
                replace_linear(model, layer, form, bias=f"{layer}.bias" in keys)
            state |= {key: file.get_tensor(key) for key in keys}
    missing, unknown = model.load_state_dict(state, strict=False, assign=True)
    absent = sorted(set(missing) - _tied_names(model, missing))
    if absent:
        raise ValueError(f"{path} does not fit the model: missing {absent[:8]}")
    # Old checkpoints hold buffers that models compute for themselves today.
    known = {name for name, _ in model.named_buffers()}
    if unused := sorted(set(unknown) - known):
        warnings.warn(f"{path}: tensors not used: {', '.join(unused[:8])}", stacklevel=2)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    _check_no_meta(model, path)
    return model


def _check_no_meta(model: nn.Module, path: Path) -> None:
    """Buffers that are in no state dict have no value on the meta device: refused, not garbage."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, t in tensors if t.device.type == "meta"]
    if left:
        raise ValueError(
            f"{path} has no values for {', '.join(left[:8])}: they are computed when a model is"
            " built, so build it on the CPU instead of the meta device"
        )


def _tied_names(model: nn.Module, missing: list[str]) -> set[str]:
    """Names that `tie_weights` fills in after loading."""
    tied = getattr(model, "_tied_weights_keys", None) or []
    return {name for name in missing if any(name.endswith(str(key)) for key in tied)}


def replace_linear(model: nn.Module, name: str, form: dict, bias: bool) -> None:
    """Put an empty QuantLinear (on meta) of the given form at `name`; refuses other sizes."""
    try:
        old = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no layer {name}, which the file has quantised") from None
    if isinstance(old, nn.Linear):
        sizes = (old.in_features, old.out_features)
        if sizes != (form["k"], form["n"]):
            raise ValueError(
                f"layer {name} is {sizes} in the model, {form['k'], form['n']} in the file"
            )
    layer = QuantLinear(
        form["k"],
        form["n"],
        bias,
        group_size=form["group_size"],
        zeros=form["has_zeros"],
        sparse=form.get("sparse", False),
        dtype=getattr(torch, form["dtype"]),
        device="meta",
    )
    model.set_submodule(name, layer.train(old.training))
