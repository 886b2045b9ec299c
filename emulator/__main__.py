"""Runs one variant on random data under several schedules: `python -m emulator NAME M N K`."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from emulator.errors import EmulationError
from emulator.gemm import DTYPES, gemm
from generator.variant import Variant
from marlin_cutlass.pack import pack
from marlin_cutlass.packed_weight import PackedWeight
from marlin_cutlass.reference import dequantize
from marlin_cutlass.sparse import pack_sparse

# Relative Frobenius error of one rounding to the output type, with a margin of 2.
TOLERANCE = {"f16": 6e-4, "bf16": 4.6e-3}


def _variant(name: str) -> Variant:
    try:
        return Variant.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m emulator", description=__doc__)
    parser.add_argument("variant", type=_variant, help="name of a variant")
    for size in ("m", "n", "k"):
        parser.add_argument(size, type=_positive)
    parser.add_argument("--seeds", type=_positive, default=4, help="schedules 0 .. SEEDS-1 (4)")
    parser.add_argument("--sms", type=_positive, default=3, help="SMs of the imagined GPU (3)")
    parser.add_argument("--statistics", action="store_true", help="print counts of the last run")
    parser.add_argument("--debug", action="store_true", help="compile for gdb")
    options = parser.parse_args(argv)
    v, k = options.variant, options.k
    if v.group_size > 0 and k % v.group_size:
        parser.error(f"k={k} is not a multiple of the variant's group size {v.group_size}")
    if v.sparse and k % 4:
        parser.error(f"k={k} is not a multiple of 4, as 2:4 sparsity needs")
    return options


def _random_weight(variant: Variant, n: int, k: int) -> PackedWeight:
    groups = 1 if variant.group_size < 0 else k // variant.group_size
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = (torch.rand(groups, n) * 0.01 + 0.004).half()
    if variant.sparse:
        dropped = torch.rand(k // 4, 4, n).argsort(1).argsort(1) < 2  # two of each four
        codes[dropped.view(k, n)] = 8
        return pack_sparse(codes, scales, group_size=variant.group_size)
    zeros = torch.randint(0, 17, (groups, n)) if variant.zeros else None
    return pack(codes, scales, zeros, group_size=variant.group_size)


def main(argv: list[str] | None = None) -> int:
    """Prints one line per schedule; returns 1 if a run was objected to or its result is wrong."""
    options = _arguments(argv)
    variant, dtype = options.variant, DTYPES[options.variant.dtype]
    torch.manual_seed(0)
    weight = _random_weight(variant, options.n, options.k)
    a = torch.randn(options.m, options.k).to(dtype)
    expected = a.double() @ dequantize(weight, dtype).double()
    failed = False
    print("compiling for the host; the first time takes some seconds", file=sys.stderr, flush=True)
    for seed in range(options.seeds):
        start = time.perf_counter()
        try:
            result = gemm(a, weight, variant, sms=options.sms, seed=seed, debug=options.debug)
        except EmulationError as error:
            print(f"seed {seed}: {error}")
            failed = True
            continue
        error = ((result.c.double() - expected).norm() / expected.norm()).item()
        wrong = not error < TOLERANCE[variant.dtype]
        failed |= wrong
        milliseconds = 1e3 * (time.perf_counter() - start)
        verdict = "WRONG, " if wrong else ""
        print(f"seed {seed}: {verdict}relative error {error:.1e}, {milliseconds:.0f} ms")
        if options.statistics and seed == options.seeds - 1:
            print("\n".join(f"{key:24}{count:>10}" for key, count in result.statistics.items()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
