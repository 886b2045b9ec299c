"""Packing in C++ on the host gives the bits of torch, and its absence is no failure."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from marlin_cutlass import host_library, pack
from marlin_cutlass.formats.bits import AWQ_ORDER, PLAIN_ORDER, pack_nibbles, unpack_nibbles


@pytest.fixture(scope="module", autouse=True)
def library():
    if host_library.load(build=True) is None:
        pytest.skip("no C++ compiler, or no folder for what it makes")


@pytest.fixture
def without(monkeypatch):
    """A function that runs another one as on a machine without the library."""

    def run(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(host_library, "_library", None)
            patch.setattr(host_library, "_failed", True)
            return function(*args, **kwargs)

    return run


def problem(k, n, group_size, zeros):
    rows = 1 if group_size < 0 else k // group_size
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    scales = (torch.rand(rows, n) + 0.1).half()
    return q, scales, torch.randint(0, 17, (rows, n)) if zeros else None


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("k", "n", "group_size"),
    [(128, 64, 128), (256, 192, 32), (192, 72, 64), (1000, 70, -1), (1, 1, -1), (640, 8, 128)],
)
def test_packed_bits_are_those_of_torch(without, k, n, group_size, zeros):
    q, scales, z = problem(k, n, group_size, zeros)
    expected = without(pack, q, scales, z, group_size=group_size)
    assert pack(q, scales, z, group_size=group_size) == expected


def test_rows_apart_columns_apart_and_act_order(without):
    q, scales, _ = problem(256, 128, 64, False)
    wide = torch.randint(0, 16, (256, 300), dtype=torch.uint8)
    wide[:, 100:228] = q
    expected = without(pack, q, scales, group_size=64)
    assert pack(wide[:, 100:228], scales, group_size=64) == expected
    assert pack(q.t().contiguous().t(), scales, group_size=64) == expected
    odd = torch.cat((q.new_zeros(1), q.flatten()))[1:].view(256, 128)  # starts between words
    assert without(pack, odd, scales, group_size=64) == expected
    assert pack(odd, scales, group_size=64) == expected
    index = (torch.arange(256) // 64)[torch.randperm(256)]
    expected = without(pack, q, scales, group_size=64, g_idx=index)
    assert pack(q, scales, group_size=64, g_idx=index) == expected


def test_many_threads_and_one_give_the_same_bits(monkeypatch):
    q, scales, _ = problem(640, 1024, 128, False)
    monkeypatch.setattr(host_library, "THREAD_CODES", 1 << 30)
    expected = pack(q, scales, group_size=128)
    monkeypatch.setattr(host_library, "_threads", lambda codes: 64)  # more than there are blocks
    assert pack(q, scales, group_size=128) == expected


@pytest.mark.parametrize("order", [PLAIN_ORDER, AWQ_ORDER])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", [(8, 16), (3, 7), (1, 1), (40, 129)])
def test_fields_of_checkpoints(without, order, dim, shape):
    words = torch.randint(-(2**31), 2**31, shape).int()
    expected = without(unpack_nibbles, words, dim, order)
    found = unpack_nibbles(words, dim, order)
    assert found.dtype == torch.uint8 and torch.equal(found, expected)
    assert torch.equal(unpack_nibbles(words.t().contiguous().t(), dim, order), expected)
    assert torch.equal(pack_nibbles(found, dim, order), words)


def test_threads_of_a_program_pack_at_once():
    q, scales, _ = problem(512, 512, 128, False)
    expected = pack(q, scales, group_size=128)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(pack(q, scales, group_size=128)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(w == expected for w in found)


NO_COMPILER = """
import torch
from marlin_cutlass import host_library, pack
host_library._path_name = lambda: "absent.so"
q = torch.randint(0, 16, (2048, 2048), dtype=torch.uint8)
w = pack(q, torch.ones(16, 2048).half(), group_size=128)
assert host_library.load(build=True) is None
print(w.shape)
"""


def test_without_a_compiler_torch_packs(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    run = subprocess.run([sys.executable, "-c", NO_COMPILER], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "(2048, 2048)"
