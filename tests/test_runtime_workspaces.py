"""Workspaces of the launcher library: one per stream or graph, flags always zero between calls."""

from __future__ import annotations

import pytest
import torch

from generator.problem import ProblemShape
from generator.schedule import make_schedule
from generator.variant import Variant


def launch(fake, stream, m=64, n=4096, k=1024, group_size=128):
    """A launch by address that computes nothing: only what reaches the driver matters."""
    a = torch.zeros(m, k).half()
    fake.launcher.launch(
        [a.data_ptr(), a.data_ptr(), a.data_ptr(), 0, 0, stream],
        [k, n, m, n, k, group_size, 0, 0, 0, -1],
    )
    return fake.record.flags


@pytest.fixture
def streamk(fake, kernels):
    kernels("streamk")
    return fake


def test_flags_are_zero_and_streams_share_nothing(streamk):
    # Streams of this test only: a workspace lives as long as the process.
    first, second = launch(streamk, 0xA10), launch(streamk, 0xA20)
    assert first != second and streamk.record.dirty_flags == 0
    assert launch(streamk, 0xA10) == first and launch(streamk, 0xA20) == second
    assert streamk.record.allocations == 2


@pytest.mark.parametrize("shape", ["streamk", "hybrid"])
@pytest.mark.parametrize("m, n, k", [(9, 4096, 4096), (64, 40960, 8192), (200, 36000, 1024)])
def test_kernels_get_the_shares_of_the_schedule(fake, kernels, shape, m, n, k):
    kernels(shape)
    launch(fake, 0xF10, m, n, k)
    variant = Variant.parse(fake.last_kernel)
    schedule = make_schedule(ProblemShape(m, n, k), variant, sms=132)
    for name in ("whole_passes", "owner_steps", "share_each", "share_more"):
        assert getattr(fake.record, name) == getattr(schedule, name), name
    assert fake.record.share_each > 0


def test_a_workspace_grows_and_keeps_its_flags_zero(streamk):
    small = launch(streamk, 0xB10, m=1, n=256, k=256)
    large = launch(streamk, 0xB10)
    assert launch(streamk, 0xB10, m=1, n=256, k=256) == large != small
    assert streamk.record.allocations == 2 and streamk.record.dirty_flags == 0


def test_a_capture_owns_its_workspace_until_its_graph_is_destroyed(streamk):
    eager = launch(streamk, 0xC10)
    streamk.capture(0xC10, 1, 0x9001)
    captured = launch(streamk, 0xC10)
    assert captured != eager and launch(streamk, 0xC10) == captured
    streamk.capture(0xC20, 1, 0x9001)
    assert launch(streamk, 0xC20) not in (captured, eager), "a forked stream has its own"
    streamk.capture(0xC10, 0, 0, active=False)
    streamk.capture(0xC20, 0, 0, active=False)
    assert launch(streamk, 0xC10) == eager
    streamk.capture(0xC10, 2, 0x9002)
    second = launch(streamk, 0xC10)
    assert second != captured, "the first graph still owns its memory"
    allocations = streamk.record.allocations
    streamk.capture(0xC10, 3, 0x9003)
    streamk.destroy_graph(0x9001)
    assert launch(streamk, 0xC10) == captured, "memory of a destroyed graph is used again"
    assert streamk.record.allocations == allocations and streamk.record.dirty_flags == 0
    streamk.destroy_graph(0x9002)
    streamk.destroy_graph(0x9003)


def test_a_first_call_inside_a_capture_works(fake, kernels):
    kernels("streamk", stages=5)
    fake.capture(0xD10, 7, 0x9007)
    assert launch(fake, 0xD10) != 0
    assert fake.record.function_count == 1 and fake.record.relaxed > 0
    fake.destroy_graph(0x9007)


def test_a_full_device_says_what_was_asked_for(streamk):
    streamk.fail("cuMemAlloc", 2)
    with pytest.raises(RuntimeError, match=r"cuMemAlloc failed \(error 2.*bytes of workspace"):
        launch(streamk, 0xE10)
    streamk.fail("", 0)
    assert launch(streamk, 0xE10) != 0
