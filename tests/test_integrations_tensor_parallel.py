"""Tensor parallelism over gloo ranks on the CPU; tests/gpu has the same over NCCL."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import tensor_parallel_checks as checks


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    return checks.run(world, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("check", [c.__name__ for c in checks.CHECKS if c is not checks.graph])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_do_what_one_does(world, check):
    assert results(world)[check] == ["ok"] * world
