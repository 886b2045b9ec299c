"""Kernels whose blocks wait for each other, on a device that holds only a few blocks at a time.

The launcher asks for room for the whole grid, but it cannot see SMs that another kernel occupies: a
persistent kernel, another stream of another priority, a green context. What must hold then is
progress: blocks start in order, and nobody may wait for a block that only starts when the waiting
one has ended. The emulator starts blocks as others end; here it holds fewer than the grid has.
"""

from __future__ import annotations

import functools
import importlib
import shutil

import pytest
import reference
import torch

import marlin_cutlass as mc

pytest.importorskip("jinja2")
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)
emulated = importlib.import_module("emulator.gemm")  # the package's attribute is the function
STREAMK = "w4a16_hopper_f16_g128_m8_n128k256_w2x2_p8_streamk_c1"
HYBRID = "w4a16_hopper_f16_g128_m8_n256k256_w4x1_p5_hybrid_c1"
STRIPED = "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1"
SPLIT = "w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split2_c1"


@functools.cache
def weight(k: int, n: int) -> mc.PackedWeight:
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    return mc.pack(q, (torch.rand(k // 128, n) * 0.1 + 0.01).half(), group_size=128)


def run(monkeypatch, name: str, m: int, n: int, k: int, sms: int, resident: int) -> None:
    """Multiplies with `resident` blocks at a time on an imagined device of `sms` SMs."""
    launch = emulated.runtime.Launch

    def limited(**arguments):
        assert arguments["grid"] > resident, "nothing would be held back"
        return launch(**{**arguments, "resident": resident})

    monkeypatch.setattr(emulated.runtime, "Launch", limited)
    a, w = torch.randn(m, k).half(), weight(k, n)
    reference.check(emulated.gemm(a, w, name, sms=sms).c, a, mc.dequantize(w))


@pytest.mark.parametrize("resident", [2, 3])
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "sms"),
    [
        pytest.param(STREAMK, 48, 384, 1280, 7, id="stream-K, tiles cut in the middle"),
        pytest.param(STREAMK, 8, 128, 2048, 7, id="stream-K, one tile over all blocks"),
        pytest.param(STRIPED, 40, 256, 1280, 7, id="striped, tiles cut in the middle"),
        pytest.param(STRIPED, 16, 128, 1280, 7, id="striped, one tile over all blocks"),
        pytest.param(HYBRID, 8, 256, 1280, 6, id="hybrid, one row tile"),
    ],
)
def test_two_blocks_at_a_time_are_enough(monkeypatch, name, m, n, k, sms, resident):
    run(monkeypatch, name, m, n, k, sms, resident)


def test_clusters_need_room_for_one(monkeypatch):
    run(monkeypatch, SPLIT, 16, 192, 1024, 4, 2)


@pytest.mark.parametrize("resident", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(48, 256, 1280, id="every row tile cut"),
        pytest.param(96, 640, 1280, id="whole blocks and shares"),
        pytest.param(8, 64, 2048, id="one block over all"),
    ],
)
def test_hybrid_kernels_wait_for_nobody(monkeypatch, m, n, k, resident):
    """The last sharer of a block adds all sums, so one block at a time is enough."""
    run(monkeypatch, HYBRID, m, n, k, 6, resident)
