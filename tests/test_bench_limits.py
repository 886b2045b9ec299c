"""The limit model: it must return the measured points and behave between and beyond them."""

import itertools

import pytest

from marlin_cutlass import layout
from marlin_cutlass.limits import DEVICE_LIMITS, device_limits, limit, packed_bytes


@pytest.mark.parametrize(
    ("n", "k", "no_pdl", "pdl"),
    [
        (4096, 4096, 4.1, 2.4),
        (8192, 8192, 10.3, 8.5),
        (28672, 4096, 16.5, 14.8),
        (57344, 8192, 57.6, 56.8),
    ],
)
def test_measured_points_come_back(n, k, no_pdl, pdl):
    assert limit(1, n, k) == pytest.approx(no_pdl, rel=0.01)
    assert limit(1, n, k, pdl=True) == pytest.approx(pdl, rel=0.01)


def test_large_batches_are_bound_by_the_tensor_cores():
    expected = 2 * 4096 * 28672 * 4096 / 790e12 * 1e6
    assert limit(4096, 28672, 4096) == pytest.approx(expected)
    assert limit(4096, 28672, 4096, pdl=True) == pytest.approx(expected)


@pytest.mark.parametrize("pdl", [False, True])
def test_streaming_time_grows_with_bytes_and_is_continuous(pdl):
    limits = DEVICE_LIMITS["H200"]
    sizes = [0.1 * i for i in range(1, 4000)]
    times = [limits.stream_us(size, pdl) for size in sizes]
    steps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] > 0
    assert all(0 < step < 0.06 for step in steps)  # 0.1 MB at 1.7 TB/s or better


def test_rate_never_exceeds_the_memory_of_the_gpu():
    limits = DEVICE_LIMITS["H200"]
    for megabytes in (8.65, 20, 34.6, 60.6, 100, 242.2, 1000):
        assert megabytes / limits.stream_us(megabytes, pdl=True) < 4.8  # TB/s


def test_unknown_gpu_has_no_limit():
    assert device_limits("NVIDIA A10") is None
    assert limit(1, 4096, 4096, device="NVIDIA A10") is None
    assert device_limits("NVIDIA H200") is DEVICE_LIMITS["H200"]


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_packed_bytes_is_the_layout_without_slack(group_size, has_zeros):
    n, k = 200, 512
    slack = layout.SLACK_BLOCKS * layout.block_bytes(group_size, has_zeros)
    whole = layout.packed_bytes(k, n, group_size, has_zeros)
    assert packed_bytes(n, k, group_size, has_zeros) == whole - slack
