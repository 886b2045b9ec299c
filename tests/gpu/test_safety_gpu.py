"""Safety on a GPU: random cases, foreign rows, odd scales, refusals.

SAFETY_SECONDS (default 15) is the time of the random cases; everything else, with threads, occupied
SMs and sizes beyond 32 bits (test_safety_*_gpu.py), takes about 15 s on an H200.
`python -m pytest tests/gpu/test_safety_gpu.py`; a failing random case prints its seed, and
SAFETY_SEED=<seed> SAFETY_SECONDS=1 starts with it.
"""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest
import reference
import torch
from safety_cases import DEVICE, DTYPES, KERNELS, Weight, is_right, make_weight, one_of_each, weight

import marlin_cutlass as mc
from generator.variant import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
SECONDS = float(os.environ.get("SAFETY_SECONDS", "15"))
SEED = int(os.environ.get("SAFETY_SEED", "0"))
GUARD = 2048  # elements around an output


# ---- random cases ----

INPUTS = ("plain", "plain", "columns", "odd", "transposed", "skipped", "repeated", "3-D", "1-D")
OUTPUTS = ("new", "guarded", "strided", "strided odd")
BIASES = (None, None, "float32", "same", "strided")


def activations(rng: random.Random, kind: str, m: int, k: int, dtype) -> torch.Tensor:
    """[m, k] (or [2, m, k], [k]) random numbers in memory of the given kind."""
    options = {"dtype": dtype, "device": DEVICE}
    if kind == "columns":
        start, width = rng.randrange(9), k + rng.randrange(17)
        return torch.randn(m, start + width, **options)[:, start : start + k]
    if kind == "odd":
        return torch.randn(m * k + 1, **options)[1:].view(m, k)
    if kind == "transposed":
        return torch.randn(k, m, **options).t()
    if kind == "skipped":
        return torch.randn(2 * m, k, **options)[::2]
    if kind == "repeated":
        return torch.randn(1, k, **options).expand(m, k)
    if kind == "3-D":
        return torch.randn(m, 2, k, **options).transpose(0, 1)
    if kind == "1-D":
        return torch.randn(k, **options)
    return torch.randn(m, k, **options)


def output(rng: random.Random, kind: str, a: torch.Tensor, n: int):
    """(out or None, a function that says whether everything around it is untouched)."""
    shape = (*a.shape[:-1], n)
    if kind == "new" or a.dim() == 3:
        return None, lambda: torch.ones((), dtype=torch.bool, device=DEVICE)
    options = {"dtype": a.dtype, "device": DEVICE}
    if kind == "guarded" or a.dim() == 1:
        count = a.numel() // a.shape[-1] * n
        region = torch.full((count + 2 * GUARD,), float("nan"), **options)
        around = (region[:GUARD], region[GUARD + count :])
        return region[GUARD : GUARD + count].view(shape), lambda: torch.stack(
            [part.isnan().all() for part in around]
        ).all()
    start = rng.choice((0, 4, 8)) if kind == "strided" else rng.choice((1, 2, 3))
    big = torch.full((shape[0] + 2, start + n + rng.randrange(1, 9)), float("nan"), **options)
    out = big[1:-1, start : start + n]

    def untouched() -> torch.Tensor:
        inside = torch.zeros_like(big, dtype=torch.bool)
        inside[1:-1, start : start + n] = True
        return (big.isnan() | inside).all()

    return out, untouched


def rows_of(rng: random.Random) -> int:
    """Few rows, edges of row tiles, and now and then many."""
    edge = rng.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256))
    return rng.choice((0, 1, 1, 2, rng.randrange(1, 70), edge - 1, edge, edge + 1, 2 * edge + 3))


def random_case(seed: int, w: Weight) -> tuple[torch.Tensor, str]:
    """(whether the case is right, as a tensor on the device; what it is)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    p = w.packed
    name = rng.choice(("f16", "bf16"))
    dtype, m = DTYPES[name], rows_of(rng)
    form = (name, p.has_zeros, p.stored_group_size)
    fits = [x.name for x in KERNELS if (x.dtype, x.zeros, x.group_size) == form]
    kernel = rng.choice(fits) if fits and rng.random() < 0.5 else None
    invariant = kernel is None and rng.random() < 0.1
    kinds = rng.choice(INPUTS), rng.choice(OUTPUTS), rng.choice(BIASES)
    a = activations(rng, kinds[0], m, p.k, dtype)
    bias = None
    if kinds[2] is not None:
        bias = torch.randn(2 * p.n, device=DEVICE, dtype=dtype if kinds[2] == "same" else None)
        bias = bias[::2] if kinds[2] == "strided" else bias[: p.n]
    out, untouched = output(rng, kinds[1], a, p.n)
    got = mc.gemm(a, p, bias, out=out, kernel=kernel, batch_invariant=invariant)
    added = None if bias is None else bias.to(dtype).double()
    right = is_right(got, a, w.dense[dtype], added) & untouched()
    text = f"{p}, M={m}, {name}, a {kinds[0]}, out {kinds[1]}, bias {kinds[2]}, kernel {kernel}"
    return right, text + (", batch-invariant" if invariant else "")


def random_weight(rng: random.Random) -> Weight:
    group = rng.choice((32, 64, 128, 256, 384, -1))
    unit = 1 if group < 0 else group
    k = rng.choice((unit, unit * rng.randint(1, max(1, 3000 // unit))))
    n = rng.choice((1, 8, 63, 64, 65, 200, rng.randint(1, 1200), 64 * rng.randint(1, 20)))
    return make_weight(
        k, n, group, rng.random() < 0.5, rng.random() < 0.25, seed=rng.randrange(2**31)
    )


def test_random_cases(capsys):
    """As many as SAFETY_SECONDS allows; the number is printed."""
    end, count, seed = time.monotonic() + SECONDS, 0, SEED
    while time.monotonic() < end:
        w = random_weight(random.Random(seed))
        seeds = range(seed, seed + 100)
        results = [random_case(s, w) for s in seeds]
        verdicts = torch.stack([right for right, _ in results]).tolist()
        wrong = [
            f"seed {seed}, case {s}: {t}"
            for s, (_, t), ok in zip(seeds, results, verdicts)
            if not ok
        ]
        assert not wrong, f"{len(wrong)} of {count + 100} cases are wrong:\n" + "\n".join(wrong[:8])
        count, seed = count + 100, seed + 100
    with capsys.disabled():
        print(f"{count} random cases, none wrong")


# ---- numbers ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_row_that_is_not_finite_stays_alone(value):
    """Every kernel: the other rows keep their bits, and the row itself is not finite."""
    for kernel in KERNELS:
        dtype, m = DTYPES[kernel.dtype], kernel.m_tile + 5
        w = weight(512, 200, kernel.group_size, kernel.zeros).packed
        a = torch.randn(m, 512, dtype=dtype, device=DEVICE)
        clean = mc.gemm(a, w, kernel=kernel.name)
        for row in (0, m // 2, m - 1):
            spoiled = a.clone()
            spoiled[row, 77] = value
            out = mc.gemm(spoiled, w, kernel=kernel.name)
            others = torch.arange(m, device=DEVICE) != row
            same = (out == clean)[others].all() & ~out[row].isfinite().any()
            assert bool(same), f"{kernel.name}, row {row}"


@pytest.mark.parametrize("what", ["zero", "subnormal", "negative", "large", "spread"])
def test_odd_scales(what):
    """Identity activations give the dequantised weight, bit for bit, in every decomposition; with a
    running scale the number nearest to the exact product."""
    k, n = 384, 136
    signs = torch.randint(0, 2, (3, n)) * 2.0 - 1
    scales = {
        "zero": torch.zeros(3, n),
        "subnormal": torch.randint(-1023, 1024, (3, n)) * 2.0**-24,
        "negative": -torch.rand(3, n) * 0.1,
        "large": signs * 4000.0,
        "spread": signs * 2.0 ** torch.randint(-14, 5, (3, n)).float(),
    }[what]
    w = make_weight(k, n, 128, scales=scales.half())
    names = [None, *(kernel.name for kernel in one_of_each())]
    for dtype in DTYPES.values():
        eye = torch.eye(k, device=DEVICE, dtype=dtype)
        want = mc.dequantize(w.packed, dtype)
        assert torch.equal(mc.gemm(eye, w.packed), want)
        for name in names if dtype == torch.float16 else ():
            assert torch.equal(mc.gemm(eye, w.packed, kernel=name), want), name
    exact = mc.dequantize(w.packed, torch.float32).double().cpu().numpy()
    eye = torch.eye(k, device=DEVICE).half()
    for kernel in KERNELS:
        if reference.has_running_scale(kernel) and not kernel.zeros:
            out = reference.to_numpy(mc.gemm(eye, w.packed, kernel=kernel.name))
            assert reference.nearest(out, exact).all(), kernel.name


def test_partial_sums_beyond_float16_stay_finite():
    """64 * 0.125 * (7, then -7) summed over k passes 65 504 and returns to 0, in every kernel."""
    for kernel in KERNELS:
        k, group, zeros = 4096, kernel.group_size, kernel.zeros
        q = torch.full((k, 72), 1, dtype=torch.uint8, device=DEVICE)
        q[: k // 2] = 15
        rows = 1 if group < 0 else k // group
        scales = torch.full((rows, 72), 0.125, device=DEVICE).half()
        z = torch.full((rows, 72), 8, device=DEVICE) if zeros else None
        w = mc.pack(q, scales, z, group_size=group)
        a = torch.full((3, k), 64.0, device=DEVICE, dtype=DTYPES[kernel.dtype])
        assert not mc.gemm(a, w, kernel=kernel.name).any(), kernel.name


@pytest.mark.parametrize("what", ["offset", "outlier", "zero weights"])
def test_what_raw_codes_add_is_subtracted(what):
    """Kernels for few rows multiply codes as they lie and subtract the zero point times the sum of
    the activations: the rest is what docs/layout.md says, however large that sum is."""
    k, n, m, rng = 2048, 136, 8, np.random.default_rng(3)
    for kernel in KERNELS:
        group, dtype = kernel.group_size, DTYPES[kernel.dtype]
        if not Variant.parse(kernel.name).sums_activations:
            continue
        q = rng.integers(0, 16, (k, n), dtype=np.uint8)
        scales = rng.uniform(2.0**-11, 2.0**-10, (k // group, n)).astype(np.float16)
        zeros = rng.integers(0, 17, scales.shape) if kernel.zeros else None
        zero = np.full((k, n), 8) if zeros is None else np.repeat(zeros, group, 0)
        a = torch.randn(m, k, device=DEVICE)
        if what == "outlier":
            a = a * 0.01
            a[:, 5] = 60000
            q[5] = zero[5].clip(max=15)
        else:
            a += 1000
        if what == "zero weights":
            q = zero.clip(max=15).astype(np.uint8)
        a = a.to(dtype)
        z = None if zeros is None else torch.from_numpy(zeros).to(DEVICE)
        tensors = (torch.from_numpy(q).to(DEVICE), torch.from_numpy(scales).to(DEVICE), z)
        out = mc.gemm(a, mc.pack(*tensors, group_size=group), kernel=kernel.name)
        names = {"group_size": group, "dtype": str(dtype).removeprefix("torch.")}
        values = a.double().cpu().numpy()
        want = values @ reference.unrounded_weights(q, scales, zeros, **names)
        unit = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        rest = 2.0**-14 * np.abs(values) @ np.repeat(scales, group, 0).astype(np.float64)
        error = np.abs(out.double().cpu().numpy() - want)
        worst = ((error - unit * np.abs(want)) / rest).max()
        assert worst <= 1, f"{kernel.name}: {worst:.2f} of what is allowed"


# ---- what is refused on a device ----


def test_refusals_leave_the_device_usable():
    """After every refusal the next call is right: nothing reached a launch."""
    w = weight(512, 200)
    p, a = w.packed, torch.randn(4, 512, device=DEVICE).half()
    op = torch.ops.marlin_cutlass.gemm.default
    form = [a, p.packed, p.col_scale, None, None, p.n, p.k, p.group_size, p.has_zeros, -1]
    for index, value in [
        (0, a.cpu()),
        (0, a.to_sparse()),
        (0, a[0, 0]),
        (0, a.float()),
        (1, p.packed.cpu()),
        (1, p.packed[:-1]),
        (1, p.packed.view(torch.int8)),
        (1, torch.cat([p.packed[:3], p.packed])[3:]),
        (2, p.col_scale.half()),
        (3, torch.zeros(200)),
        (3, torch.zeros(199, device=DEVICE)),
        (4, torch.arange(512, device=DEVICE)),
        (5, 2**31),
        (5, 264),
        (6, 640),
        (7, 64),
        (8, True),
        (9, 10**9),
        (9, -3),
    ]:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            op(*form[:index], value, *form[index + 1 :])
        torch.cuda.synchronize()
    assert bool(is_right(op(*form), a, w.dense[torch.float16]))
