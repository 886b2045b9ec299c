"""gemm on the emulator: the same Schedule, packed weight and variant names as a launch on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from emulator import runtime
from emulator.build import INCLUDE, build_kernel
from emulator.errors import EmulationError
from generator.problem import ProblemShape, round_up
from generator.render import render
from generator.schedule import Schedule, make_schedule
from generator.variant import Variant
from marlin_cutlass.packed_weight import PackedWeight

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
POISON = 0xFF  # bytes of fresh memory: a NaN in every floating type used here


@dataclass(frozen=True)
class Result:
    """c: [m, n] in the activation type. statistics: counts by the names in runtime.STATISTICS."""

    c: torch.Tensor
    statistics: dict[str, int]
    schedule: Schedule


@dataclass(frozen=True)
class Options:
    """How a launch is emulated, beyond the operands.

    sms: SMs of the imagined GPU, which sets the grid and how many blocks run at a time. ldc: row
    stride of C in elements (default: its columns). c_offset: bytes by which C's base misses a
    16-byte boundary (a multiple of 2, with swiglu of 4). programmatic: check the rules of
    programmatic dependent launch. include: headers to compile against. debug: compile for gdb.
    swiglu: C is [m, n/2].
    """

    sms: int = 3
    seed: int = 0
    lda: int | None = None
    ldc: int | None = None
    c_offset: int = 0
    programmatic: bool | None = None
    include: Path = INCLUDE
    debug: bool = False
    swiglu: bool = False


def gemm(
    a: torch.Tensor,
    weight: PackedWeight,
    variant: Variant | str,
    bias: torch.Tensor | None = None,
    options: Options | None = None,
    **changes: object,
) -> Result:
    """a [m, k] @ weight -> [m, n] (swiglu: [m, n/2]) by `variant`, executed on the CPU.

    changes: fields of Options. Raises EmulationError for anything that the emulator objects to, and
    for outputs that the kernel did not store or flags that it did not clear; ValueError if the
    variant is not for this call.
    """
    variant = Variant.parse(variant) if isinstance(variant, str) else variant
    options = options or Options(**changes)
    _check_call(a, weight, variant)
    if weight.perm is not None:
        a = a[:, weight.perm.long()]
    problem = ProblemShape(
        a.shape[0], weight.n, weight.k, weight.group_size, variant.dtype, weight.has_zeros
    )
    schedule = make_schedule(problem, variant, options.sms)
    memory = _Memory(a, weight, variant, bias, schedule, options)
    library = build_kernel(render(variant), variant.name, options.include, options.debug)
    hopper = variant.hopper
    programmatic = hopper if options.programmatic is None else options.programmatic
    launch = runtime.Launch(
        params=memory.params(problem, variant, schedule),
        buffers=memory.buffers(variant),
        grid=schedule.grid,
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        cluster=schedule.cluster,
        resident=max(1, options.sms * variant.ctas_per_sm // schedule.cluster) * schedule.cluster,
        tensor_map=memory.tensor_map(variant) if hopper else None,
        programmatic=programmatic,
        seed=options.seed,
    )
    statistics = runtime.run(library, variant.symbol, launch)
    memory.check_after()
    return Result(memory.c_view().clone(), statistics, schedule)


def _check_call(a: torch.Tensor, weight: PackedWeight, variant: Variant) -> None:
    if a.dtype != DTYPES[variant.dtype] or a.dim() != 2 or a.shape[1] != weight.k:
        raise ValueError(
            f"a is {a.dtype} {tuple(a.shape)}; {variant.name} takes {variant.dtype} [m, {weight.k}]"
        )
    if weight.sparse != variant.sparse:
        raise ValueError(f"weight has sparse={weight.sparse}: not for {variant.name}")
    if (weight.has_zeros, weight.stored_group_size) != (variant.zeros, variant.group_size):
        raise ValueError(
            f"weight has zeros={weight.has_zeros} and group_size={weight.group_size}: "
            f"not for {variant.name}"
        )


def aligned_bytes(count: int, alignment: int = 256, offset: int = 0) -> torch.Tensor:
    """`count` poisoned bytes whose address is `offset` past a multiple of `alignment`."""
    storage = torch.full((count + alignment + offset,), POISON, dtype=torch.uint8)
    start = -storage.data_ptr() % alignment + offset
    return storage[start : start + count]


class _Memory:
    """Global memory of one launch, laid out as the run time would."""

    def __init__(
        self,
        a: torch.Tensor,
        weight: PackedWeight,
        variant: Variant,
        bias: torch.Tensor | None,
        schedule: Schedule,
        options: Options,
    ) -> None:
        self.m, self.n, self.k = a.shape[0], weight.n, weight.k
        self.dtype = a.dtype
        # Rows of A that are not a multiple of what copies need are padded with zeros (as the run
        # time does).
        self.width = round_up(self.k, 64 if variant.hopper else 8)
        self.lda = options.lda or self.width
        self.swiglu = options.swiglu
        self.columns = self.n // 2 if self.swiglu else self.n  # of C
        self.ldc = options.ldc or self.columns
        self.a = self._activations(a)
        self.weight = self._copy(weight.packed)
        self.col_scale = self._copy(weight.col_scale)
        self.bias = None if bias is None else self._copy(bias.to(a.dtype))
        self.c = aligned_bytes(
            max(1, (self.m - 1) * self.ldc + self.columns) * 2, offset=options.c_offset
        )
        self.partials = aligned_bytes(max(16, 4 * schedule.partials))
        self.flags = aligned_bytes(max(4, 4 * schedule.flags))
        self.flags.zero_()

    def _activations(self, a: torch.Tensor) -> torch.Tensor:
        rows = aligned_bytes(max(1, self.m) * self.lda * 2).view(self.dtype).view(-1, self.lda)
        rows[: self.m, : self.width] = 0
        rows[: self.m, : self.k] = a
        return rows

    @staticmethod
    def _copy(tensor: torch.Tensor) -> torch.Tensor:
        raw = aligned_bytes(tensor.numel() * tensor.element_size())
        raw.copy_(tensor.contiguous().view(torch.uint8))
        return raw

    def params(
        self, problem: ProblemShape, variant: Variant, schedule: Schedule
    ) -> runtime.GemmParams:
        """Every field that params.h declares; the schedule gives those of its decomposition."""
        aligned = self.c.data_ptr() % 8 == 0 and self.ldc % 4 == 0 and self.n % 4 == 0
        tensors = ("a", "weight", "col_scale", "bias", "c", "partials", "flags")
        pointers = {name: getattr(self, name) for name in tensors}
        values = {
            **{name: None if t is None else t.data_ptr() for name, t in pointers.items()},
            **{name: getattr(self, name) for name in ("m", "n", "k", "lda", "ldc")},
            "n_blocks": problem.n_blocks,
            "k_blocks": problem.k_blocks,
            "vector_store": int(aligned and not self.swiglu),
            "swiglu": int(self.swiglu),
        }
        for name, _ in runtime.GemmParams._fields_:
            values.setdefault(name, getattr(schedule, name, getattr(schedule.hybrid, name, 0)))
        return runtime.GemmParams(**values)

    def tensor_map(self, variant: Variant) -> runtime.TensorMap:
        """A as [k / 64][m][64]: one box is the activations of one stage, each 64-deep slice m_tile
        rows of 128 bytes, or, of fewer rows, one such slice."""
        slices = variant.k_sm // 64 // variant.multicast if self.m >= variant.m_tile else 1
        return runtime.TensorMap(
            self.a.data_ptr(),
            (ctypes.c_int64 * 3)(64, self.m, self.width // 64),
            (ctypes.c_int64 * 2)(2 * self.lda, 128),
            (ctypes.c_int32 * 3)(64, min(self.m, variant.m_tile), slices),
            runtime.TensorMap.MAGIC,
        )

    def buffers(self, variant: Variant) -> list[runtime.Buffer]:
        r = runtime
        a_bytes = ((self.m - 1) * self.lda + self.width) * 2
        buffers = [
            r.Buffer(
                "a",
                self.a.data_ptr(),
                a_bytes,
                r.READ | r.PREVIOUS,
                2,
                self.width * 2,
                self.lda * 2,
            ),
            r.Buffer("weight", self.weight.data_ptr(), self.weight.numel(), r.READ),
            r.Buffer("col_scale", self.col_scale.data_ptr(), self.col_scale.numel(), r.READ, 4),
            r.Buffer(
                *("c", self.c.data_ptr(), self.c.numel()),
                r.WRITE | r.WRITE_ONCE | r.PREVIOUS,
                *(2, self.columns * 2, self.ldc * 2),
            ),
            self._workspace("partials", self.partials, r.READ | r.WRITE | r.ORDERED),
            self._workspace("flags", self.flags, r.SYNC),
        ]
        if self.bias is not None:
            buffers.append(r.Buffer("bias", self.bias.data_ptr(), self.bias.numel(), r.READ, 2))
        return buffers

    @staticmethod
    def _workspace(name: str, tensor: torch.Tensor, flags: int) -> runtime.Buffer:
        return runtime.Buffer(name, tensor.data_ptr(), tensor.numel(), flags | runtime.PREVIOUS, 4)

    def c_view(self) -> torch.Tensor:
        return torch.as_strided(self.c.view(self.dtype), (self.m, self.columns), (self.ldc, 1))

    def check_after(self) -> None:
        """Raises EmulationError for elements of C never stored and for flags left set."""
        missing = (self.c_view().view(torch.int16) == -1).nonzero()
        if len(missing):
            row, column = missing[0].tolist()
            raise EmulationError(
                "output",
                f"{len(missing)} elements of c were never stored, first c[{row}, {column}]",
            )
        if self.flags.any():
            raise EmulationError("output", "flags are not zero after the launch")
