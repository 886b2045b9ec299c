"""How a checkpoint folder is quantised, from its config.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from .formats.support import MARLIN_24, support
from .json_file import read_object

FORMAT_NAME = "marlin_cutlass"


@dataclass(frozen=True)
class Scheme:
    """How a folder is quantised, from its config.json."""

    name: str  # key of checkpoint_plan.TENSORS, or "dense"
    group_size: int = 128
    sym: bool | None = None
    checkpoint_format: str = "gptq"
    act_order: bool | str | None = None
    zero_rule: str = "word"
    source: dict = field(default_factory=dict)


def read_config(folder: Path) -> dict:
    """config.json, with quantize_config.json (old GPTQ folders) as its quantization_config."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    config = read_object(path)
    old = folder / "quantize_config.json"
    if "quantization_config" not in config and old.is_file():
        config["quantization_config"] = {"quant_method": "gptq", **read_object(old)}
    return config


def scheme_of(config: dict) -> Scheme:
    """The quantisation of a config; ValueError with the reason when it cannot be read."""
    quant = config.get("quantization_config") or config.get("compression_config")
    if not quant:
        return Scheme("dense")
    if not isinstance(quant, dict):
        raise ValueError(f"quantization_config is a {type(quant).__name__} instead of an object")
    method = quant.get("quant_method", "gptq")
    if method == FORMAT_NAME:
        raise ValueError(f"the folder is in {FORMAT_NAME} format already")
    readers = {
        "gptq": _gptq_scheme,
        "marlin": _gptq_scheme,
        "awq": _awq_scheme,
        "compressed-tensors": _ct_scheme,
    }
    if not isinstance(method, str) or method not in readers:
        raise ValueError(f"quant_method={method!r} is not supported: one of {', '.join(readers)}")
    try:
        return readers[method](quant)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"quantization_config is malformed: {error!r}") from None


def _whole(quant: dict, name: str, default: int | None = None) -> int:
    """A whole number of a config; a text of digits and 128.0 count, 64.5 and True do not."""
    value = quant.get(name, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    text = isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value) is not None
    if isinstance(value, bool) or not (whole or text):
        raise ValueError(f"quantization_config has {name}={value!r}: a whole number is required")
    return int(value)


def _checked(fmt: str, scheme: Scheme, bits: int, version: str | None) -> Scheme:
    answer = support(
        fmt,
        sym=bool(scheme.sym in (True, None)),
        group_size=scheme.group_size,
        act_order=scheme.act_order,
        bits=bits,
        version=version,
    )
    if not answer:
        raise ValueError(f"quantization_config is not supported: {answer.reason}")
    return scheme


def _check_overrides(quant: dict) -> None:
    """GPTQModel's per-module overrides: leaving modules out is fine, other formats are not."""
    for pattern, override in (quant.get("dynamic") or {}).items():
        if pattern.startswith("-:") or not isinstance(override, dict):
            continue
        for key in ("bits", "group_size", "sym", "desc_act"):
            if key in override and override[key] != quant.get(key):
                raise ValueError(
                    f"dynamic override {pattern!r} sets {key}={override[key]}: modules of another"
                    " format in one folder are not supported"
                )


def _gptq_scheme(quant: dict) -> Scheme:
    _check_overrides(quant)
    fmt = quant.get("checkpoint_format") or ("marlin" if quant.get("is_marlin_format") else "gptq")
    fmt = "marlin" if quant.get("quant_method") == "marlin" else fmt
    fmt = "sparse-marlin" if fmt == "marlin_24" else fmt
    name = fmt if fmt in ("marlin", "sparse-marlin") else "gptq"
    scheme = Scheme(
        name,
        _whole(quant, "group_size", -1),
        quant.get("sym"),
        fmt,
        bool(quant.get("desc_act")),
        source=quant,
    )
    # A marlin file may say desc_act from its origin; it cannot have been kept.
    act_order = scheme.act_order if name == "gptq" else None
    scheme = Scheme(**{**scheme.__dict__, "act_order": act_order})
    return _checked(fmt, scheme, _whole(quant, "bits", 4), None)


def _awq_scheme(quant: dict) -> Scheme:
    group_name = "q_group_size" if "q_group_size" in quant else "group_size"
    group_size = _whole(quant, group_name, 128)
    scheme = Scheme("awq", group_size, not quant.get("zero_point", True), "awq", source=quant)
    bits = _whole(quant, "w_bit" if "w_bit" in quant else "bits", 4)
    return _checked("awq", scheme, bits, str(quant.get("version", "gemm")).lower())


def _ct_scheme(quant: dict) -> Scheme:
    groups = [g for g in quant.get("config_groups", {}).values() if g.get("weights")]
    if len({json.dumps(g["weights"], sort_keys=True) for g in groups}) != 1:
        raise ValueError(
            f"config_groups holds {len(groups)} different weight schemes: one is needed"
        )
    if any(g.get("input_activations") for g in groups):
        raise ValueError("quantised activations (input_activations) are not supported")
    weights = groups[0]["weights"]
    strategy = weights.get("strategy")
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel", "tensor"):
        raise ValueError(
            f"weights of type {weights.get('type')} with strategy {strategy} are not"
            " supported: int with group, channel or tensor"
        )
    fmt = groups[0].get("format") or quant.get("format")
    scheme = Scheme(
        MARLIN_24 if fmt == MARLIN_24 else "compressed-tensors",
        _whole(weights, "group_size") if strategy == "group" else -1,
        weights.get("symmetric", True),
        "compressed-tensors",
        weights.get("actorder"),
        source=quant,
    )
    return _checked("compressed-tensors", scheme, _whole(weights, "num_bits", 4), fmt)
