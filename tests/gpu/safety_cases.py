"""Kernels, weights and the criterion that the safety tests on a GPU share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import marlin_cutlass as mc
from marlin_cutlass import dispatch, library
from marlin_cutlass.errors import UnsupportedArchError

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FROBENIUS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def built_kernels() -> list[dispatch.Kernel]:
    """Kernels for dense weights of this device's table."""
    if not torch.cuda.is_available():
        return []
    try:
        kernels = library.table_for_capability(*torch.cuda.get_device_capability()).kernels
    except UnsupportedArchError:
        return []
    return [kernel for kernel in kernels if not kernel.sparse]


KERNELS = built_kernels()


def plain(kernel: dispatch.Kernel) -> bool:
    return (kernel.dtype, kernel.zeros, kernel.group_size) == ("f16", False, 128)


def one_of_each() -> list[dispatch.Kernel]:
    """One kernel of each family, decomposition and multicast: float16, symmetric, groups of 128."""
    found: dict[tuple, dispatch.Kernel] = {}
    for kernel in filter(plain, KERNELS):
        found.setdefault((kernel.family, kernel.decomposition, kernel.multicast > 1), kernel)
    return list(found.values())


@dataclass
class Weight:
    """A packed weight and what it means, in float64, for both activation types."""

    packed: mc.PackedWeight
    dense: dict[torch.dtype, torch.Tensor]


def make_weight(k, n, group, zeros=False, act_order=False, scales=None, seed=0) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if group < 0 else k // group
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, generator=generator)
    z = torch.randint(0, 17, (rows, n), generator=generator) if zeros else None
    if scales is None:
        scales = (torch.rand(rows, n, generator=generator) * 0.1 + 0.005).half()
        scales *= torch.randint(0, 2, (rows, n), generator=generator) * 2 - 1
    g_idx = None
    if act_order and group > 0:
        g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=generator)]
    z = None if z is None else z.to(DEVICE)
    packed = mc.pack(q.to(DEVICE), scales.to(DEVICE), z, group_size=group, g_idx=g_idx)
    return Weight(packed, {d: mc.dequantize(packed, d).double() for d in UNIT})


def is_right(out: torch.Tensor, a: torch.Tensor, w: torch.Tensor, bias=None) -> torch.Tensor:
    """The criterion of tests/reference.py on the device, without waiting: a boolean tensor.

    a: [..., K] and out: [..., N] of one type; w: float64 [K, N]; bias: float64 [N] or None.
    """
    kind = out.dtype
    rows, got = a.reshape(-1, a.shape[-1]).double(), out.reshape(-1, out.shape[-1]).double()
    want = rows @ w
    magnitude = rows.abs() @ w.abs()
    if bias is not None:
        want, magnitude = want + bias, magnitude + bias.abs()
    # What overflows the type may be infinite, nothing else.
    representable = want.to(kind).isfinite()
    finite = got.isfinite() | ~representable
    error = torch.where(representable, got - want, 0.0).nan_to_num(nan=1e30, posinf=1e30)
    close = (error.abs() <= 4 * UNIT[kind] * magnitude).all()
    small = error.norm() <= FROBENIUS[kind] * torch.where(representable, want, 0.0).norm()
    return finite.all() & (close | small)


@functools.cache
def weight(k: int, n: int, group: int = 128, zeros: bool = False) -> Weight:
    return make_weight(k, n, group, zeros)


def names_to_try() -> list[str | None]:
    """The table's choice, and one kernel of each decomposition."""
    return [None, *(kernel.name for kernel in one_of_each())]
