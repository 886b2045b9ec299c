"""Built units of the family `collective` as candidates of explore: CUTLASS beside our kernels.

The cost model does not know them. Where a guess is needed (how often to call, the column
`predicted`) it is the model's figure for our Hopper kernel with the same tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from generator.arch import Gpu
from generator.collective import FAMILY, CollectiveVariant, is_collective
from generator.cost import Cost, estimate
from generator.legality import why_not_for
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass.collective import units
from marlin_cutlass.collective_weight import GROUP_SIZES
from marlin_cutlass.explore_candidates import sensible_rows
from marlin_cutlass.explore_rows import Row, row_of
from marlin_cutlass.json_file import read_object

WHY = "CUTLASS's own; predicted: ours with this tile"


def collective_rows(
    problem: ProblemShape, gpu: Gpu, folder: Path | None, overrides: Mapping[str, tuple]
) -> dict[str, Row]:
    """Rows by name of the built units that can serve the problem and have the values of --set."""
    if folder is None or problem.sparse or problem.zeros:
        return {}
    if problem.kernel_group_size not in GROUP_SIZES:
        return {}
    found, built = {}, units(folder)  # this checks the manifest
    facts = {entry["name"]: entry for entry in _entries(folder)}
    for name, unit in built.items():
        if unit.dtype != problem.dtype or not sensible_rows(problem.m, unit.m_tile):
            continue
        row = _row(problem, CollectiveVariant.parse(name), gpu)
        row.registers, row.spill_bytes = facts[name]["registers"], facts[name]["spills"]
        if all(row.knobs.get(knob) in values for knob, values in overrides.items()):
            found[name] = row
    return found


def _entries(folder: Path) -> list[dict]:
    return read_object(folder / "manifest.json").get(FAMILY, [])


def _row(problem: ProblemShape, v: CollectiveVariant, gpu: Gpu) -> Row:
    cost = _guess(problem, v, gpu)
    row = row_of(v, v.geometry, _knobs(v), cost, WHY)
    row.ctas_per_sm = 1
    return row


def _knobs(v: CollectiveVariant) -> dict:
    """Our knobs as far as the unit has them."""
    return {
        "family": FAMILY,
        "m_tile": v.m_tile,
        "n_sm": v.n_sm,
        "k_sm": v.k_sm,
        "warps_n": 2 if v.schedule == "cooperative" else 1,
        "warps_k": 1,
        "stages": 0,  # CUTLASS's choice
        "decomposition": v.decomposition,
        "split": 1,
        "ctas_per_sm": 1,
        "multicast": v.multicast,
    }


def _guess(problem: ProblemShape, v: CollectiveVariant, gpu: Gpu) -> Cost:
    knobs = {**_knobs(v), "family": "hopper", "k_sm": 128, "stages": 4}
    form = {"dtype": problem.dtype, "zeros": False, "group_size": problem.kernel_group_size}
    twin = Variant(**form, **knobs)
    assert why_not_for(twin, problem) is None
    return estimate(problem, twin, gpu)


def ours(rows: list[Row]) -> list[Row]:
    """Rows of kernels that the cost model knows."""
    return [row for row in rows if not is_collective(row.name)]
