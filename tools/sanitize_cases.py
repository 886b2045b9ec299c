"""One small multiply for each family, decomposition, multicast and row tile of the device's table.

Run by tools/sanitize.sh under compute-sanitizer, alone to see that the cases pass. Everything is
prepared on the host and copied: initcheck sees copies, and no kernel but ours runs.
"""

from __future__ import annotations

import argparse
import fnmatch
import time

import torch

import marlin_cutlass as mc
from marlin_cutlass import dispatch, library

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
K, N = 640, 200


def cases(pattern: str) -> list[dispatch.Kernel]:
    """The first kernel of each kind whose name matches."""
    found: dict[tuple, dispatch.Kernel] = {}
    for kernel in library.table_for_capability(*torch.cuda.get_device_capability()).kernels:
        if fnmatch.fnmatchcase(kernel.name, pattern):
            kind = (kernel.family, kernel.decomposition, kernel.multicast, kernel.cluster)
            found.setdefault((*kind, kernel.m_tile), kernel)
    return list(found.values())


def weight(kernel: dispatch.Kernel, k: int, n: int) -> mc.PackedWeight:
    """A random weight of the kernel's format, on the host."""
    group = kernel.group_size
    rows = 1 if group < 0 else k // group
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = torch.rand(rows, n).half() * 0.05 + 0.01
    if kernel.sparse:
        from marlin_cutlass.sparse import pack_sparse

        order = torch.rand(k // 4, 4, n).argsort(1).reshape(k, n)
        return pack_sparse(torch.where(order < 2, q, 8).to(torch.uint8), scales, group_size=group)
    zeros = torch.randint(0, 17, (rows, n)) if kernel.zeros else None
    return mc.pack(q, scales, zeros, group_size=group)


def run(kernel: dispatch.Kernel, rows: int | None, k: int, n: int) -> float:
    """A call and one with SwiGLU, ragged in every direction; the largest error relative to the
    largest value."""
    m, w = rows or kernel.m_tile + 3, weight(kernel, k, n)
    a = torch.randn(m, k).to(DTYPES[kernel.dtype])
    bias = torch.randn(n).to(a.dtype)
    on_device = (a.cuda(), w.cuda(), bias.cuda())
    errors = []
    for swiglu in (False, True):
        want = mc.gemm(a, w, bias, swiglu=swiglu).float()
        out = mc.gemm(*on_device, kernel=kernel.name, swiglu=swiglu).cpu().float()
        errors.append(float((out - want).abs().max() / want.abs().max()))
    return max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", default="*", help="only kernels whose name matches this glob")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that")
    parser.add_argument("--m", type=int, help="rows; default: the row tile and three more")
    parser.add_argument("--n", type=int, default=N, help="columns, a multiple of 4")
    parser.add_argument("--k", type=int, default=K, help="a multiple of 128; less for slow tools")
    parser.add_argument("--list", action="store_true", help="print the cases for build.py")
    options = parser.parse_args()
    if options.m is not None and options.m < 1:
        parser.error(f"--m {options.m}: at least one row")
    if options.k < 128 or options.k % 128:
        parser.error(f"--k {options.k}: a positive multiple of 128")
    if options.n < 4 or options.n % 4:
        parser.error(f"--n {options.n}: a positive multiple of 4")
    if options.list:
        print(*(f"--only={kernel.name}" for kernel in cases(options.filter)))
        return 0
    torch.manual_seed(0)
    torch.set_num_threads(4)
    end, wrong, done = time.monotonic() + options.seconds, 0, 0
    chosen = cases(options.filter)
    for kernel in chosen:
        if time.monotonic() > end:
            break
        error = run(kernel, options.m, options.k, options.n)
        done += 1
        wrong += not error < 2e-2
        print(f"{'wrong' if not error < 2e-2 else 'right'} {error:.1e} {kernel.name}", flush=True)
    print(f"{done} of {len(chosen)} cases, {wrong} wrong")
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    raise SystemExit(main())
