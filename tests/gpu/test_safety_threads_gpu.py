"""Safety on a GPU: threads, streams, graphs and devices that share a weight."""

from __future__ import annotations

import threading

import pytest
import torch
from safety_cases import DEVICE, is_right, names_to_try, weight

import marlin_cutlass as mc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def in_threads(count: int, work) -> None:
    """Runs work(i) in `count` threads; raises the first error."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            torch.cuda.set_device(DEVICE)
            work(i)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread did not come back"
    if errors:
        raise errors[0]


def test_four_streams_and_eight_threads_share_a_weight():
    """The streams are the same ones in all threads, so that launches of threads interleave."""
    w = weight(4096, 1024).packed
    streams = [torch.cuda.Stream() for _ in range(4)]
    for name in names_to_try():
        inputs = [
            torch.randn(m, 4096, device=DEVICE).half() for m in (1, 5, 16, 17, 33, 64, 70, 130)
        ]
        want = [mc.gemm(a, w, kernel=name) for a in inputs]
        torch.cuda.synchronize()

        def work(i: int, name=name, inputs=inputs, want=want) -> None:
            bad = torch.zeros(4, dtype=torch.bool, device=DEVICE)
            torch.cuda.synchronize()
            for round_ in range(8):
                a, right = inputs[(i + round_) % 8], want[(i + round_) % 8]
                for s, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        bad[s] |= (mc.gemm(a, w, kernel=name) != right).any()
            torch.cuda.synchronize()
            assert not bad.any(), name or "the table's choice"

        in_threads(8, work)


def test_graphs_captured_in_parallel_and_replayed_a_thousand_times():
    """Four threads capture at the same time; the replays interleave, with other activations each
    time, next to calls outside of graphs."""
    w = weight(4096, 1024).packed
    pool = [torch.randn(16, 4096, device=DEVICE).half() for _ in range(8)]
    for name in names_to_try():
        want = [mc.gemm(a, w, kernel=name) for a in pool]
        inputs = [pool[0].clone() for _ in range(4)]
        outs = [torch.empty_like(want[0]) for _ in range(4)]
        graphs = [torch.cuda.CUDAGraph() for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in range(4)]
        barrier = threading.Barrier(4)
        torch.cuda.synchronize()

        def capture(
            i: int,
            name=name,
            inputs=inputs,
            outs=outs,
            graphs=graphs,
            streams=streams,
            barrier=barrier,
        ) -> None:
            with torch.cuda.stream(streams[i]):
                barrier.wait(30)
                graphs[i].capture_begin(capture_error_mode="thread_local")
                mc.gemm(inputs[i], w, out=outs[i], kernel=name)
                mc.gemm(inputs[i], w, out=outs[i], kernel=name)
                graphs[i].capture_end()

        in_threads(4, capture)
        bad = torch.zeros(5, dtype=torch.bool, device=DEVICE)
        torch.cuda.synchronize()
        for turn in range(1000):
            for i, stream in enumerate(streams):
                at = (turn + i) % 8
                with torch.cuda.stream(stream):
                    inputs[i].copy_(pool[at])
                    graphs[i].replay()
                    bad[i] |= (outs[i] != want[at]).any()
            bad[4] |= (mc.gemm(pool[turn % 8], w, kernel=name) != want[turn % 8]).any()
        torch.cuda.synchronize()
        assert not bad.any(), f"{name or 'the choice of the table'}: {bad.tolist()}"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_on_two_devices_share_nothing():
    """Each thread alternates between devices; the current device stays what it was."""
    per_device = [weight(4096, 1024).packed.to(f"cuda:{i}") for i in range(2)]
    names = names_to_try()

    def work(i: int) -> None:
        torch.cuda.set_device(i % 2)
        for turn in range(6 * len(names)):
            device = (i + turn) % 2
            a = torch.randn(16, 4096, device=f"cuda:{device}").half()
            out = mc.gemm(a, per_device[device], kernel=names[turn % len(names)])
            assert out.device.index == device and torch.cuda.current_device() == i % 2
            dense = mc.dequantize(per_device[device], torch.float16).double()
            assert bool(is_right(out, a, dense))

    in_threads(4, work)
