"""The shipped sm_90a table on shapes that nobody measured: close to the model's best, no cliffs.

Times are the cost model's: what is tested is the table, its steps and the reach of measurements.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from generator.arch import ARCHS, GPUS
from generator.cost import estimate
from generator.dispatch import DispatchTable
from generator.problem import ProblemShape
from generator.rows import build_table
from generator.space import default_space
from generator.variant import Variant

SMS = 132
STEP = 1.4  # from one m, n or k to the next; measured cliffs are tune --check's business
SHAPES = 120


@pytest.fixture(scope="module")
def hopper() -> tuple[DispatchTable, list[Variant]]:
    variants = [entry.variant for entry in default_space(ARCHS["sm_90a"])]
    default = [v for v in variants if (v.dtype, v.zeros, v.group_size) == ("f16", False, 128)]
    return build_table(ARCHS["sm_90a"], variants), default


def time_of(table: DispatchTable, m: int, n: int, k: int) -> float:
    problem = ProblemShape(m, n, k)
    return estimate(problem, table.select(problem, SMS)[0], GPUS["H200"]).total


def shapes() -> list[tuple[int, int, int]]:
    draw = random.Random(20261129)
    return [
        (
            int(2 ** draw.uniform(0, 12)),
            draw.randrange(512, 40000, 8),
            draw.randrange(512, 20000, 128),
        )
        for _ in range(SHAPES)
    ]


def test_the_choice_is_near_the_models_best(hopper):
    table, variants = hopper
    ratios = []
    for shape in shapes():
        problem = ProblemShape(*shape)
        best = min(estimate(problem, v, GPUS["H200"]).total for v in variants)
        ratios.append(time_of(table, *shape) / best)
    ratios.sort()
    assert sum(ratios) / SHAPES < 1.05 and ratios[int(0.95 * SHAPES)] < 1.2, ratios[-8:]


def test_no_cliff_from_one_step_to_the_next(hopper):
    table, _ = hopper
    for m, n, k in shapes():
        here = time_of(table, m, n, k)
        for step in ((m + 1, n, k), (m, n + 64, k), (m, n, k + 128)):
            assert time_of(table, *step) <= STEP * here, (m, n, k, step)


LAYERS = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192)),
    *((57344, 8192), (8192, 28672), (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    *((3456, 14080), (9728, 2560), (7680, 5120), (13440, 4096)),  # in no model that was measured
)
ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


@pytest.mark.parametrize(
    ("fmt", "mean"),
    [
        (("f16", False, 64), 1.03),
        (("bf16", False, 32), 1.03),
        (("f16", False, -1), 1.03),
        (("bf16", True, 64), 1.035),
        (("f16", True, 32), 1.045),
        (("f16", True, -1), 1.045),
    ],
    ids=str,
)
def test_formats_with_fewer_kernels_lack_little(hopper, fmt, mean):
    """What other formats' choices would take in the default format, over its own choice."""
    table, _ = hopper
    dtype, zeros, group = fmt
    ratios = []
    for (n, k), m in itertools.product(LAYERS, ROWS):
        problem = ProblemShape(m, n, k)
        geometry = table.select(ProblemShape(m, n, k, group, dtype, zeros), SMS)[0].geometry()
        mine = estimate(problem, geometry.with_format("f16", False, 128), GPUS["H200"]).total
        ratios.append(mine / time_of(table, m, n, k))
    ratios.sort()
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert middle < mean and ratios[-1] < 1.5, (middle, ratios[-5:])
