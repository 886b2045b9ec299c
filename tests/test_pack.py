"""pack and dequantize against the oracle, bit for bit, and what pack refuses."""

from __future__ import annotations

import time

import numpy as np
import pytest
import reference
import torch

from marlin_cutlass import dequantize, pack
from marlin_cutlass.pack import unpack

DTYPES = (torch.float16, torch.bfloat16)


def problem(k, n, group_size, zeros=False, dtype=torch.float16, low=0.01, high=1.0):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    sign = torch.randint(0, 2, (rows, n)) * 2 - 1
    scales = ((torch.rand(rows, n) * (high - low) + low) * sign).to(dtype)
    return q, scales, torch.randint(0, 17, (rows, n)) if zeros else None


def assert_bits(tensor: torch.Tensor, want: np.ndarray) -> None:
    got = reference.to_numpy(tensor)
    assert got.shape == want.shape
    wrong = got != want
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.size} weights differ"


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_is_the_documented_arithmetic(group_size, zeros, scale_dtype):
    for k, n in [(256, 64), (512, 72)]:
        q, scales, z = problem(k, n, group_size, zeros, scale_dtype)
        w = pack(q, scales, z, group_size=group_size)
        for dtype in DTYPES:
            want = reference.kernel_weights(
                q,
                reference.to_numpy(scales),
                z,
                group_size=group_size,
                dtype=str(dtype).removeprefix("torch."),
            )
            assert_bits(dequantize(w, dtype), want)
        assert dequantize(w).dtype == (
            torch.bfloat16 if scale_dtype == torch.bfloat16 else torch.float16
        )


@pytest.mark.parametrize(
    ("k", "n", "group_size"),
    [(192, 192, 64), (64, 8, 64), (7392, 8, 32), (200, 70, -1), (1, 1, -1)],
)
def test_any_size_keeps_its_logical_shape(k, n, group_size):
    q, scales, _ = problem(k, n, group_size)
    w = pack(q, scales, group_size=group_size)
    assert w.shape == (k, n) and (w.size_k, w.size_n) == (k, n)
    want = reference.weights(q, scales, group_size=group_size)
    got = reference.to_numpy(dequantize(w))
    assert got.shape == (k, n)
    np.testing.assert_allclose(got, want, rtol=2**-10, atol=0)


def test_float32_is_the_exact_product():
    q, scales, z = problem(256, 64, 64, zeros=True)
    scales = torch.rand(4, 64).mul(0.5).add(0.5).half()  # one binade: normalisation loses nothing
    got = dequantize(pack(q, scales, z, group_size=64), torch.float32)
    assert_bits(got, reference.weights(q, scales, z, group_size=64).astype(np.float32))


def test_group_scales_that_span_many_binades():
    k, n = 1024, 64
    q, _, _ = problem(k, n, 128)
    scales = torch.tensor([2.0**-i for i in range(8)]).view(8, 1).expand(8, n).half().contiguous()
    w = pack(q, scales, group_size=128)
    assert_bits(dequantize(w), reference.weights(q, scales, group_size=128).astype(np.float32))


def test_tiny_and_huge_scales():
    q, _, _ = problem(128, 4, 128)
    scales = torch.tensor([[1e-30, 6e-8, 3e4, 2.0**119]], dtype=torch.float32)
    w = pack(q, scales, group_size=128)
    got = dequantize(w, torch.float32).double()
    want = torch.from_numpy(reference.weights(q, scales.numpy(), group_size=128))
    assert ((got - want).abs() <= want.abs() * 2.0**-11).all()


def test_a_column_of_zero_scales():
    q, scales, _ = problem(256, 64, 128)
    scales[:, 5] = 0
    got = dequantize(pack(q, scales, group_size=128))
    assert not got[:, 5].any() and got[:, 6].any()


def test_rounding_up_to_the_next_power_of_two():
    # 0.9998 of a power of two rounds up to it in fp16, where the normalised scale must stay below.
    q = torch.full((128, 64), 15, dtype=torch.uint8)
    scales = torch.full((1, 64), 2.0 * (1 - 2.0**-13))
    w = pack(q, scales, group_size=128)
    assert torch.isfinite(dequantize(w)).all()
    assert_bits(dequantize(w), np.full((128, 64), 14.0, np.float32))


def test_codes_and_scales_survive_unpack():
    q, scales, z = problem(384, 130, 128, zeros=True)
    codes, stored, zeros = unpack(pack(q, scales, z, group_size=128))
    assert torch.equal(codes[:384, :130], q)
    assert torch.equal(zeros[:, :130].long(), z)
    factor = scales.abs().amax(0) / stored[:, :130].abs().amax(0)
    assert torch.equal(factor, 2.0 ** factor.float().log2().round().to(factor.dtype))


# ---- zero points ----


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32]
)
def test_zero_points_of_any_type(dtype):
    q, scales, z = problem(256, 64, 64, zeros=True)
    assert pack(q, scales, z.to(dtype), group_size=64) == pack(q, scales, z, group_size=64)


def test_fractional_zero_points_are_refused_not_rounded():
    q, scales, _ = problem(128, 64, 128)
    zeros = torch.full((1, 64), 7.0)
    zeros[0, 3] = 7.37
    with pytest.raises(ValueError, match=r"zeros\[0, 3\]=7.37.* is fractional"):
        pack(q, scales, zeros, group_size=128)


@pytest.mark.parametrize("value", [-1, 17])
def test_zero_points_out_of_range_are_refused(value):
    q, scales, _ = problem(128, 64, 128)
    with pytest.raises(ValueError, match=r"zero points must be 0..16"):
        pack(q, scales, torch.full((1, 64), value), group_size=128)


def test_symmetric_is_zero_point_eight():
    q, scales, _ = problem(256, 64, 64)
    eight = pack(q, scales, torch.full((4, 64), 8), group_size=64)
    assert torch.equal(dequantize(pack(q, scales, group_size=64)), dequantize(eight))


# ---- act-order ----


def shuffled_groups(k, group_size):
    return (torch.arange(k) // group_size)[torch.randperm(k)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_order_is_dequantized_in_natural_order(dtype):
    q, scales, z = problem(256, 64, 64, zeros=True)
    g_idx = shuffled_groups(256, 64)
    w = pack(q, scales, z, group_size=64, g_idx=g_idx)
    name = str(dtype).removeprefix("torch.")
    want = reference.kernel_weights(q, scales, z, group_size=64, dtype=name, g_idx=g_idx)
    assert_bits(dequantize(w, dtype), want)
    assert torch.equal(w.perm.long(), torch.argsort(g_idx, stable=True))


def test_group_indices_of_either_type_give_the_same_bytes():
    q, scales, _ = problem(256, 64, 64)
    g_idx = shuffled_groups(256, 64)
    assert pack(q, scales, group_size=64, g_idx=g_idx.int()) == pack(
        q, scales, group_size=64, g_idx=g_idx
    )


@pytest.mark.parametrize("g_idx", [torch.arange(256) // 64, torch.full((256,), -1)])
def test_natural_order_needs_no_permutation(g_idx):
    q, scales, _ = problem(256, 64, 64)
    w = pack(q, scales, group_size=64, g_idx=g_idx)
    assert w.perm is None and w == pack(q, scales, group_size=64)


def test_per_column_weights_ignore_act_order():
    q, scales, _ = problem(256, 64, -1)
    w = pack(q, scales, group_size=-1, g_idx=torch.zeros(256, dtype=torch.int32))
    assert w.perm is None


@pytest.mark.parametrize(
    ("g_idx", "error", "text"),
    [
        (torch.zeros(256), TypeError, "g_idx has dtype float32"),
        (torch.zeros(255, dtype=torch.int32), ValueError, r"must be \[K\] = \(256,\)"),
        (torch.arange(256) // 32, ValueError, "groups 0..3"),
        (torch.arange(256) // 64 % 3, ValueError, "gives group 0 128 rows"),
        (torch.full((256,), -2), ValueError, "spans -2..-2"),
    ],
)
def test_bad_group_indices_are_refused(g_idx, error, text):
    q, scales, _ = problem(256, 64, 64)
    with pytest.raises(error, match=text):
        pack(q, scales, group_size=64, g_idx=g_idx)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": torch.zeros(256, 64)}, TypeError, "q has dtype float32"),
        ({"q": torch.zeros(2, 256, 64, dtype=torch.uint8)}, ValueError, "3-D weight one by one"),
        ({"q": torch.full((256, 64), 16, dtype=torch.uint8)}, ValueError, r"q\[0, 0\]=16"),
        (
            {"scales": torch.ones(4, 64, dtype=torch.float64)},
            TypeError,
            "scales have dtype float64",
        ),
        ({"scales": torch.ones(4, 64, dtype=torch.int32)}, TypeError, "scales have dtype int32"),
        ({"scales": torch.ones(2, 64)}, ValueError, r"needs \[K/group_size, N\] = \(4, 64\)"),
        ({"scales": torch.full((4, 64), float("nan"))}, ValueError, r"scales\[0, 0\]=nan"),
        ({"scales": torch.full((4, 64), float("inf"))}, ValueError, "must be finite"),
        ({"scales": torch.full((4, 64), 1e37)}, ValueError, "below 2"),
        ({"zeros": torch.zeros(4, 65)}, ValueError, "they must be equal"),
        ({"zeros": torch.zeros(4, 64, dtype=torch.bool)}, TypeError, "zeros have dtype bool"),
        (
            {"group_size": 16},
            ValueError,
            "K=256, N=64, group_size=16: group_size=16 is not supported",
        ),
        ({"group_size": 96}, ValueError, "use 32, 64, 128"),
        ({"group_size": 0}, ValueError, "group_size=0 is not supported"),
        ({"group_size": 512}, ValueError, "K=256 is not a multiple of group_size=512"),
    ],
)
def test_bad_arguments_are_refused(change, error, text):
    q, scales, _ = problem(256, 64, 64)
    arguments = {"q": q, "scales": scales, "zeros": None, "group_size": 64, **change}
    with pytest.raises(error, match=text):
        pack(arguments.pop("q"), arguments.pop("scales"), arguments.pop("zeros"), **arguments)


# ---- cost ----


def test_packing_a_large_layer_is_quick_and_lean():
    k = n = 4096
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = torch.rand(k // 128, n).half()
    best = min(_seconds(q, scales) for _ in range(3))
    assert best < 1.0, f"{best:.2f} s"


def _seconds(q, scales):
    start = time.process_time()
    pack(q, scales, group_size=128)
    return (time.process_time() - start) / max(1, torch.get_num_threads())


def test_peak_memory_of_packing():
    k = n = 2048
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = torch.rand(k // 128, n).half()
    with torch.profiler.profile(profile_memory=True) as profile:
        pack(q, scales, group_size=128)
    assert _peak(profile) <= 2 * (2 * k * n), "more than twice the fp16 layer"


def _peak(profile) -> int:
    """Largest number of bytes alive at once, from the allocation events."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


# ---- shards ----


@pytest.mark.parametrize("parts", [2, 4])
def test_column_and_row_shards_equal_the_whole(parts):
    q, scales, z = problem(512, 512, 64, zeros=True)
    whole = dequantize(pack(q, scales, z, group_size=64), torch.float16)
    columns = [
        dequantize(pack(*(x.chunk(parts, 1)[i] for x in (q, scales, z)), group_size=64))
        for i in range(parts)
    ]
    assert torch.equal(torch.hstack(columns), whole)
    rows = [
        dequantize(pack(*(x.chunk(parts, 0)[i] for x in (q, scales, z)), group_size=64))
        for i in range(parts)
    ]
    assert torch.equal(torch.vstack(rows), whole)


def test_strided_inputs():
    q, scales, z = problem(256, 64, 64, zeros=True)
    views = (x.t().contiguous().t() for x in (q, scales, z))
    assert pack(*views, group_size=64) == pack(q, scales, z, group_size=64)
