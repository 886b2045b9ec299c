"""The source of a `collective` unit: what cutlass_library emits, between includes and exports."""

from __future__ import annotations

import functools

from generator.collective import CollectiveVariant
from generator.cutlass_types import DATA_TYPES, cutlass
from generator.render import template

ALIGNMENT_BITS = 128  # of every operand: what TMA asks for
# CUTLASS's A is the weight (N x K row-major), its B the activations (K x M column-major), its D the
# transposed output: the only order that cutlass_library emits for a 4-bit operand.
LAYOUT_A = cutlass.LayoutType.RowMajor
LAYOUT_B = LAYOUT_CD = cutlass.LayoutType.ColumnMajor
SCHEDULES = {
    "cooperative": (
        cutlass.KernelScheduleType.TmaWarpSpecializedCooperative,
        cutlass.EpilogueScheduleType.TmaWarpSpecializedCooperative,
    ),
    "pingpong": (
        cutlass.KernelScheduleType.TmaWarpSpecializedPingpong,
        cutlass.EpilogueScheduleType.TmaWarpSpecialized,
    ),
}
SCHEDULERS = {
    "data_parallel": cutlass.TileSchedulerType.Default,
    "stream_k": cutlass.TileSchedulerType.StreamK,
}


def operation(variant: CollectiveVariant):
    """cutlass_library's description: symmetric INT4 with group scales in its shuffled weight order,
    and as many stages as fit (0).
    """
    from cutlass_library.gemm_operation import GemmOperation

    weight, element = cutlass.DataType.s4, DATA_TYPES[variant.dtype]
    kernel_schedule, epilogue_schedule = SCHEDULES[variant.schedule]
    output = _tensor(element, LAYOUT_CD)
    return GemmOperation(
        cutlass.GemmKind.Universal3x,
        90,
        _tile(variant, weight, element),
        _tensor(weight, LAYOUT_A),
        _tensor(element, LAYOUT_B),
        output,
        cutlass.DataType.f32,
        cutlass.EpilogueFunctor.LinearCombination,
        cutlass.SwizzlingFunctor.Identity1,
        output,
        kernel_schedule,
        epilogue_schedule,
        SCHEDULERS[variant.decomposition],
        mixed_input_mode=cutlass.MixedInputMode.ScaleOnly,
        mixed_input_shuffle=True,
    )


def _tensor(element: cutlass.DataType, layout: cutlass.LayoutType) -> cutlass.TensorDescription:
    return cutlass.TensorDescription(
        element, layout, ALIGNMENT_BITS // cutlass.DataTypeSize[element]
    )


def _tile(
    variant: CollectiveVariant, weight: cutlass.DataType, element: cutlass.DataType
) -> cutlass.TileDescription:
    instruction = cutlass.MathInstruction(
        [64, variant.m_tile, 16],
        weight,
        element,
        cutlass.DataType.f32,
        cutlass.OpcodeClass.TensorOp,
        cutlass.MathOperation.multiply_add,
    )
    shape = [variant.n_sm, variant.m_tile, variant.k_sm]
    warps, cluster = [4, 1, 1], [variant.multicast, 1, 1]
    return cutlass.TileDescription(shape, 0, warps, instruction, 90, 90, cluster)


@functools.lru_cache(maxsize=64)
def render_collective(variant: CollectiveVariant) -> str:
    """Source of one unit; the same text for the same variant, always."""
    from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance

    emitter, described = EmitGemmUniversal3xInstance(), operation(variant)
    return template("collective.cu.jinja").render(
        variant=variant,
        includes=emitter.includes,
        emitted="\n".join(line.rstrip() for line in emitter.emit(described).strip().splitlines()),
        kernel=described.procedural_name(),
    )
