"""A Variant in the vocabulary of CUTLASS: data types, math instruction, tile description.

The enums and tag tables are those of `cutlass_library` (PyPI: nvidia-cutlass); this module only
adds the element tags of our kernels. Names of Variant.dtype are `DataTypeNames` of CUTLASS.
"""

from __future__ import annotations

import sys

# NOTE: cutlass_library parses sys.argv when it is imported: it would answer --help itself, and
# leave submodules out for -m (pytest -m ...).
_argv, sys.argv = sys.argv, sys.argv[:1]
try:
    from cutlass_library import library as cutlass
finally:
    sys.argv = _argv

from generator.variant import Variant  # noqa: E402

DATA_TYPES: dict[str, cutlass.DataType] = {
    cutlass.DataTypeNames[t]: t for t in (cutlass.DataType.f16, cutlass.DataType.bf16)
}
# The tag types that select an element in the kernels (prims.cuh); cutlass_library's own tags are
# cutlass::half_t ...
ELEMENT_TAG = {
    cutlass.DataType.f16: "marlin_cutlass::F16",
    cutlass.DataType.bf16: "marlin_cutlass::BF16",
}
# Symmetric codes mean q - 8, a signed number; with zero points they are unsigned.
WEIGHT_TYPE = {False: cutlass.DataType.s4, True: cutlass.DataType.u4}


def element(variant: Variant) -> cutlass.DataType:
    """Type of activations and outputs; raises ValueError for an unknown dtype."""
    if variant.dtype not in DATA_TYPES:
        raise ValueError(f"dtype={variant.dtype!r} is not one of {', '.join(DATA_TYPES)}")
    return DATA_TYPES[variant.dtype]


def element_tag(variant: Variant) -> str:
    return ELEMENT_TAG[element(variant)]


def weight_type(variant: Variant) -> cutlass.DataType:
    return WEIGHT_TYPE[variant.zeros]


def math_instruction(variant: Variant) -> cutlass.MathInstruction:
    """Weights are the row operand, so the instruction's m runs along weight columns."""
    shape = {"ampere": [16, 8, 16], "sparse": [16, 8, 32]}.get(
        variant.family, [64, variant.m_tile, 32 if variant.sparse else 16]
    )
    e = element(variant)
    return cutlass.MathInstruction(
        shape,
        e,
        e,
        cutlass.DataType.f32,
        cutlass.OpcodeClass.TensorOp,
        cutlass.MathOperation.multiply_add,
    )


def tile_description(variant: Variant, compute_capability: int) -> cutlass.TileDescription:
    """Threadblock shape [weight columns, activation rows, depth] with stages, warps and cluster."""
    warps = 4 if variant.hopper else 1  # a warpgroup is four warps along the columns
    return cutlass.TileDescription(
        [variant.n_sm, variant.m_tile, variant.k_sm],
        variant.stages,
        [variant.warps_n * warps, 1, variant.warps_k],
        math_instruction(variant),
        compute_capability,
        compute_capability,
        cluster_shape=[variant.cluster, 1, 1],
    )


def procedural_name(variant: Variant) -> str:
    """How cutlass_library would describe the operands and tile, for people who know its names."""
    e, w = cutlass.DataTypeNames[element(variant)], cutlass.DataTypeNames[weight_type(variant)]
    capability = 90 if variant.hopper else 80
    return f"{w}_{e}_f32_{tile_description(variant, capability).procedural_name()}"


def cpp_type(data_type: cutlass.DataType) -> str:
    """CUTLASS's C++ spelling: cutlass::half_t ..."""
    return cutlass.DataTypeTag[data_type]
