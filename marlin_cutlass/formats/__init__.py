"""Readers of INT4 checkpoints: each turns the tensors of one layer into a `PackedWeight`."""

from .awq import from_awq, read_awq
from .compressed_tensors import from_compressed_tensors, read_compressed_tensors
from .gptq import AmbiguousZeroWarning, from_gptq, read_gptq
from .hqq import dequantize_hqq, from_hqq, read_hqq
from .marlin import from_marlin, read_marlin
from .marlin_24 import from_sparse_marlin, read_marlin_24, read_sparse_marlin
from .support import FORMATS, Support, support
from .weight import QuantizedWeight

__all__ = [
    "FORMATS",
    "AmbiguousZeroWarning",
    "QuantizedWeight",
    "Support",
    "dequantize_hqq",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_hqq",
    "from_marlin",
    "from_sparse_marlin",
    "read_awq",
    "read_compressed_tensors",
    "read_gptq",
    "read_hqq",
    "read_marlin",
    "read_marlin_24",
    "read_sparse_marlin",
    "support",
]
