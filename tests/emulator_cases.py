"""What the emulator tests share: one call of one variant on independently packed random data, and
its expected result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from emulator_packing import Weight, make_weight
from test_sparse import scales_for, sparse_codes

from emulator import Result, gemm
from generator.variant import Variant
from marlin_cutlass.packed_weight import PackedWeight
from marlin_cutlass.reference import dequantize
from marlin_cutlass.sparse import pack_sparse

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# Relative Frobenius error of rounding to the output type once: 2^-11 / sqrt(3) and 2^-8 / sqrt(3),
# and a margin of 2.
TOLERANCE = {"f16": 6e-4, "bf16": 4.6e-3}


@dataclass(frozen=True)
class Case:
    """Operands of one call and the exact product."""

    variant: Variant
    a: torch.Tensor
    weight: PackedWeight
    bias: torch.Tensor | None
    expected: np.ndarray
    source: Weight | None  # of dense weights

    def run(self, **options: object) -> Result:
        return gemm(self.a, self.weight, self.variant, self.bias, **options)

    def error(self, result: Result) -> float:
        """Relative Frobenius error; NaN if anything is NaN."""
        difference = result.c.double().numpy() - self.expected
        return float(np.linalg.norm(difference) / np.linalg.norm(self.expected))

    def check(self, **options: object) -> Result:
        result = self.run(**options)
        error = self.error(result)
        assert error < TOLERANCE[self.variant.dtype], f"relative error {error}"
        return result


def make_case(
    variant: Variant,
    m: int,
    n: int,
    k: int,
    seed: int = 0,
    bias: bool = True,
    group_size: int | None = None,
) -> Case:
    """Random activations, weight and bias. group_size: logical, when it differs from the
    variant's."""
    group = group_size or variant.group_size
    if variant.sparse:
        return _sparse_case(variant, m, n, k, seed, bias)
    source = make_weight(k, n, group, variant.zeros, seed)
    weight = _packed_weight(source, k, n, group, variant)
    return _case(variant, m, weight, source.dense(variant.dtype), seed, bias, source)


def _case(variant, m, weight, dense, seed, bias, source=None) -> Case:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, weight.k, generator=generator).to(DTYPES[variant.dtype])
    b = torch.randn(weight.n, generator=generator).to(a.dtype) if bias else None
    expected = a.double().numpy() @ dense
    if b is not None:
        expected = expected + b.double().numpy()
    return Case(variant, a, weight, b, expected, source)


def _sparse_case(variant: Variant, m: int, n: int, k: int, seed: int, bias: bool) -> Case:
    codes, scales = sparse_codes(k, n, seed), scales_for(k, n, variant.group_size)
    weight = pack_sparse(codes, scales, group_size=variant.group_size)
    dense = dequantize(weight, DTYPES[variant.dtype]).double().numpy()
    return _case(variant, m, weight, dense, seed, bias)


def _packed_weight(
    source: Weight, k: int, n: int, group_size: int, variant: Variant
) -> PackedWeight:
    weight = PackedWeight(
        packed=torch.from_numpy(source.packed.copy()),
        col_scale=torch.from_numpy(source.col_scale.copy()),
        perm=None,
        n=n,
        k=k,
        group_size=group_size,
        has_zeros=variant.zeros,
    )
    weight.check()
    return weight


def ragged_shapes(variant: Variant) -> list[tuple[int, int, int]]:
    """A shape that needs several tiles each way with ragged edges, and one smaller than a tile."""
    k = 392 if variant.group_size == -1 else 384
    return [(variant.m_tile + 3, variant.n_sm + 72, k), (max(1, variant.m_tile - 5), 50, 128)]


def unit_rows(m: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the identity at random depths: a product with them is the dequantised weight, bit for
    bit."""
    depth = torch.randint(0, k, (m,), generator=torch.Generator().manual_seed(seed))
    a = torch.zeros(m, k, dtype=dtype)
    a[torch.arange(m), depth] = 1
    return a, depth
