"""Tensor parallelism over NCCL: every check of the CPU tests, and CUDA graphs with collectives.

python -m pytest tests/gpu/test_tensor_parallel_gpu.py -m gpu -q     # at least two GPUs
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tensor_parallel_checks as checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    return checks.run(world, "cuda")


@pytest.mark.parametrize("check", [c.__name__ for c in checks.CHECKS])
def test_two_gpus_together_do_what_one_does(check):
    assert results(2)[check] == ["ok"] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("check", [c.__name__ for c in checks.CHECKS])
def test_four_gpus_together_do_what_one_does(check):
    assert results(4)[check] == ["ok"] * 4
