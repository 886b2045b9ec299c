"""The GPU's timer over CPU tensors: its weights, reference products and bookkeeping are real, only
torch.cuda is replaced."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from marlin_cutlass import explore_gpu
from marlin_cutlass.explore_measure import Format, measure, ranked


class _Clock:
    now = 0.0


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = _Clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


class _Graph:
    def __init__(self) -> None:
        self.capturing, self.calls = False, []
        _Graph.current = self

    def capture_begin(self) -> None:
        self.capturing = True

    def capture_end(self) -> None:
        self.capturing = False

    def replay(self) -> None:
        assert not self.capturing
        self.calls[-1]()
        _Clock.now += 0.004 * len(self.calls)  # ms


@pytest.fixture
def timer(monkeypatch):
    options = []
    launcher = SimpleNamespace(set_option=lambda *pair: options.append(pair))
    env = {"gpu": "NVIDIA H200", "sms": 132, "l2_bytes": 200_000}
    monkeypatch.setattr(explore_gpu.library, "load", lambda: launcher)
    monkeypatch.setattr(explore_gpu.library, "forced_index", lambda *_: -1)
    monkeypatch.setattr(explore_gpu, "environment", lambda: env)
    for name, value in {
        "get_device_capability": lambda: (9, 0),
        "Stream": SimpleNamespace,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "Event": _Event,
        "CUDAGraph": _Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made = explore_gpu.GpuTimer("cpu")
    call = made._call

    def recorded(index: int, m: int, copy: int) -> None:
        graph = getattr(_Graph, "current", None)
        if graph is not None and graph.capturing:
            graph.calls.append(lambda: call(index, m, copy))
        else:
            call(index, m, copy)

    made._call, made.options = recorded, options
    return made


@pytest.mark.parametrize(
    "fmt",
    [
        Format(),
        Format("bf16"),
        Format("f16", True, 64),
        Format("bf16", True, -1),
        Format("f16", False, -1),
        Format("f16", False, 128, True),
        Format("bf16", False, -1, True),
    ],
    ids=str,
)
def test_references_agree_with_the_reference_kernel(timer, fmt):
    copies = timer.open(192, 256, fmt, 8)
    assert copies * timer.weights[0].packed.numel() > 2 * timer.device.l2_bytes
    for m in (1, 8):
        assert timer.check("any", m) < (2e-3 if fmt.dtype == "f16" else 1.6e-2)
    timer.reference[0] += 1
    assert timer.check("any", 1) > 0.1


def test_a_burst_times_all_replays_but_the_first(timer):
    copies = timer.open(64, 128, Format(), 4)
    graph = timer.capture("any", 2, True, 2 * copies)
    assert timer.options[0] == ("pdl", True) and len(timer.options) == 2
    assert timer.burst(graph, 4) == pytest.approx([4.0] * 3)
    assert timer.chain_error(graph) < 2e-3
    assert len(graph.graph.calls) == 2 * copies


def test_the_whole_measurement(timer):
    copies = timer.open(64, 128, Format(), 4)
    found = measure(timer, Format(), 4, {"a": 4.0, "b": 5.0}, copies, warm=True)
    assert [r.refused for r in found] == [None, None]
    assert [found[0].us, found[0].us_pdl, found[0].us_warm] == pytest.approx([4.0] * 3)
    assert len(ranked(found)) == 2
    timer.close()
    assert timer.weights == []


def test_rest_waits_only_for_what_is_left(timer, monkeypatch):
    slept = []
    monkeypatch.setattr(explore_gpu.time, "perf_counter", lambda: 10.0)
    monkeypatch.setattr(explore_gpu.time, "sleep", slept.append)
    timer._last_burst = 9.996
    timer.rest(0.012)
    timer._last_burst = 9.5
    timer.rest(0.012)
    assert slept == pytest.approx([0.008])
