"""The oracle itself: right against Python integers, failing on every fault it is there for."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch


def test_weights_against_plain_integers():
    rng = np.random.default_rng(0)
    k, n, group = 8, 8, 4
    q = rng.integers(0, 16, (k, n))
    scales = 2.0 ** rng.integers(-3, 3, (k // group, n))
    zeros = rng.integers(0, 17, (k // group, n))
    got = reference.weights(q, scales, zeros, group_size=group)
    product = reference.product(np.eye(k), got)
    for row in range(k):
        for column in range(n):
            z = int(zeros[row // group][column])
            want = (int(q[row][column]) - z) * float(scales[row // group][column])
            assert got[row, column] == want == product[row, column]


def test_product_against_plain_integers():
    rng = np.random.default_rng(1)
    a, w = rng.integers(-9, 9, (3, 8)), rng.integers(-9, 9, (8, 5))
    got = reference.product(a, w, bias=np.arange(5))
    for row in range(3):
        for column in range(5):
            want = sum(int(a[row][i]) * int(w[i][column]) for i in range(8)) + column
            assert got[row, column] == want


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_matches_torch(dtype):
    values = torch.cat([torch.randn(2000) * 10.0**e for e in (-6, -3, 0, 3)])
    want = values.to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(reference.round_to(values.numpy(), dtype), want)


def case(m=32, k=256, n=64):
    rng = np.random.default_rng(2)
    a, w = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    right = reference.round_to(reference.product(a, w), "float16")
    return right.copy(), a, w


def test_a_right_product_passes():
    out, a, w = case()
    assert reference.complaints(out, a, w, dtype="float16") == []


def scaled(out):
    out *= 0.5


def swapped(out):
    out[:, [4, 5]] = out[:, [5, 4]]


def zeroed(out):
    out[8:16] = 0


def one_bad_column(out):
    out[:, 7] *= 1.02


def one_nan(out):
    out[3, 3] = np.nan


def one_infinite(out):
    out[0, 0] = np.inf


def poisoned(out):
    out[-1, -1] = 1e4


@pytest.mark.parametrize(
    "fault", [scaled, swapped, zeroed, one_bad_column, one_nan, one_infinite, poisoned]
)
def test_every_fault_is_found(fault):
    out, a, w = case()
    fault(out)
    assert reference.complaints(out, a, w, dtype="float16")


def test_a_wrong_shape_is_found():
    out, a, w = case()
    assert reference.complaints(out[:, :-1], a, w, dtype="float16")


def test_cancellation_is_judged_by_magnitudes():
    a = np.ones((1, 2))
    w = np.array([[1000.0], [-1000.0]])
    assert reference.complaints(np.array([[0.5]]), a, w, dtype="float16") == []
    assert reference.complaints(np.array([[50.0]]), a, w, dtype="float16")
