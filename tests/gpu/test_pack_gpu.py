"""Packing on a GPU: the bits of the CPU's, no more than one wait for the device, and the time.

`python -m pytest -m gpu -s tests/gpu/test_pack_gpu.py` prints the time; `python
tests/gpu/test_pack_gpu.py` prints it for several formats without pytest.
"""

from __future__ import annotations

import json

import pytest
import torch

import marlin_cutlass as mc

pytestmark = pytest.mark.gpu

SIZE = 4096
FORMATS = [
    (128, False, False),
    (128, True, False),
    (32, False, False),
    (64, True, True),
    (256, False, False),
    (-1, False, False),
    (-1, True, False),
]
TARGET_MS = 2.0  # on an H200


def problem(group_size: int, zeros: bool, act_order: bool, k: int = SIZE, n: int = SIZE) -> dict:
    """Arguments of `pack` on the CPU."""
    gen = torch.Generator().manual_seed(group_size + 2)
    rows = 1 if group_size < 0 else k // group_size
    sign = torch.randint(0, 2, (rows, n), generator=gen) * 2 - 1
    index = (torch.arange(k) // group_size)[torch.randperm(k, generator=gen)] if act_order else None
    return {
        "q": torch.randint(0, 16, (k, n), generator=gen, dtype=torch.uint8),
        "scales": ((torch.rand(rows, n, generator=gen) * 0.02 + 0.001) * sign).half(),
        "zeros": torch.randint(0, 17, (rows, n), generator=gen) if zeros else None,
        "group_size": group_size,
        "g_idx": index,
    }


def on_gpu(arguments: dict) -> dict:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def pack_milliseconds(arguments: dict, repeats: int = 20) -> dict[str, float]:
    """Least and median time of one `pack`, from the call to the last byte (events around a call
    on an idle device, checks and their wait for the device included)."""
    for _ in range(3):
        mc.pack(**arguments)
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        mc.pack(**arguments)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return {"least": min(times), "median": sorted(times)[len(times) // 2]}


@pytest.mark.parametrize(("group_size", "zeros", "act_order"), FORMATS)
def test_the_gpu_packs_the_bits_of_the_cpu(group_size, zeros, act_order):
    arguments = problem(group_size, zeros, act_order)
    expected = mc.pack(**arguments)
    packed = mc.pack(**on_gpu(arguments))
    assert packed.device.type == "cuda"
    assert packed.cpu() == expected


def test_odd_sizes_and_strides_too():
    arguments = problem(-1, True, False, k=200, n=70)
    assert mc.pack(**on_gpu(arguments)).cpu() == mc.pack(**arguments)
    arguments = problem(64, True, False, k=512, n=320)
    strided = {
        k: v.t().contiguous().t() if isinstance(v, torch.Tensor) else v
        for k, v in on_gpu(arguments).items()
    }
    assert mc.pack(**strided).cpu() == mc.pack(**arguments)


@pytest.mark.parametrize("zeros", [False, True])
def test_packing_waits_for_the_device_once(zeros):
    arguments = on_gpu(problem(128, zeros, False, k=512, n=256))
    mc.pack(**arguments)
    with pytest.warns(UserWarning) as caught:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            mc.pack(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The first warning of a process comes with one about the mode itself.
    waits = [text for w in caught if "called a synchronizing" in (text := str(w.message))]
    assert len(waits) == 1, waits


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("q", 16, "is not a 4-bit code"), ("scales", float("nan"), "must be finite")],
)
def test_values_on_the_gpu_are_checked(name, value, text):
    arguments = on_gpu(problem(128, False, False, k=256, n=64))
    arguments[name][1, 3] = value
    with pytest.raises(ValueError, match=text):
        mc.pack(**arguments)


def test_time(record_property):
    times = pack_milliseconds(on_gpu(problem(128, False, False)))
    record_property("pack_4096_ms", times)
    verdict = "met" if times["median"] <= TARGET_MS else "missed"
    print(f"\npack {SIZE} x {SIZE}: {times['median']:.3f} ms (target {TARGET_MS} ms: {verdict})")


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, pack {SIZE} x {SIZE}, ms")
    for case in FORMATS:
        form = dict(zip(("group_size", "zeros", "act_order"), case, strict=True))
        print(json.dumps({**form, **pack_milliseconds(on_gpu(problem(*case)))}))
