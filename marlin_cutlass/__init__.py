"""INT4-weight x FP16/BF16 matrix multiplication: kernels generated ahead of time, chosen per shape
at run time."""

from __future__ import annotations

import importlib
from typing import Any

from .explain import build_info, explain
from .gemm import gemm
from .pack import pack
from .packed_weight import PackedWeight
from .reference import dequantize

__version__ = "0.1.0"

# Loaded at first use, so that importing the package stays quick and needs neither compiler, GPU nor
# kernel table.
_LAZY = {
    "quantize": "quantize",
    "quantize_model": "quantize",
    "prune_2_4": "prune",
    "check_2_4": "sparse",
    "pack_sparse": "sparse",
    "fuse_gate_up": "sharding",
    "fuse_mlps": "integrations.fused_mlp",
    "QuantLinear": "nn",
    "pin_kernels": "pinning",
    "from_gptq": "formats",
    "from_awq": "formats",
    "from_compressed_tensors": "formats",
    "save": "files",
    "load": "files",
    "load_model": "files",
    "convert_checkpoint": "checkpoint",
}
__all__ = ["PackedWeight", "build_info", "dequantize", "explain", "gemm", "pack", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    value = getattr(module, name)
    globals()[name] = value  # the submodule `quantize` must not shadow the function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
