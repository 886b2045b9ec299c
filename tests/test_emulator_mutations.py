"""The emulator against planted faults: each must be caught, and the docs must list it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from emulator_cases import TOLERANCE, make_case
from emulator_mutations import (
    HOPPER_GROUPS,
    HOPPER_HYBRID,
    HOPPER_MULTICAST,
    HOPPER_SPARSE,
    HOPPER_STREAM,
    HOPPER_STREAM_GROUPS,
    HOPPER_STREAM_MULTICAST,
    MUTATIONS,
    Edit,
    Mutation,
    table,
)

from emulator import EmulationError
from emulator.build import INCLUDE, ROOT
from generator.variant import Variant

SEEDS = range(4)
CONFLICT_KINDS = ("shared_load", "shared_store", "ldmatrix_access", "cp_async_access")


def mutated_headers(mutation: Mutation, directory: Path) -> Path:
    """A copy of the headers with the fault; fails if the text that it replaces is not there."""
    include = directory / "include"
    shutil.copytree(INCLUDE, include)
    for edit in mutation.edits:
        path = include / "marlin_cutlass" / edit.file
        text = path.read_text()
        assert edit.old in text, f"{edit.file} changed: give {mutation.name!r} the new text"
        path.write_text(text.replace(edit.old, edit.new, 1))
    return include


def caught_by(mutation: Mutation, include: Path | None, seed: int) -> str | None:
    """What objects to one run: the kind of an error, "values", "conflicts", or None."""
    case = make_case(Variant.parse(mutation.variant), *mutation.shape)
    options = {"include": include} if include else {}
    try:
        result = case.run(sms=5, seed=seed, ldc=mutation.ldc, **options)
    except EmulationError as error:
        return error.kind
    if not case.error(result) < TOLERANCE[case.variant.dtype]:
        return "values"
    s = result.statistics
    conflicts = any(s[f"{kind}_waves"] > s[f"{kind}_ideal"] for kind in CONFLICT_KINDS)
    return "conflicts" if conflicts else None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_planted_fault_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    include = mutated_headers(mutation, tmp_path)
    verdicts = [caught_by(mutation, include, seed) for seed in SEEDS]
    caught = set(verdicts) - {None}
    assert caught, "survived"
    assert caught <= set(mutation.caught_by), verdicts


@pytest.mark.parametrize("call", sorted({(m.variant, m.shape, m.ldc) for m in MUTATIONS}, key=str))
def test_the_same_call_without_a_fault_passes(call: tuple) -> None:
    variant, shape, ldc = call
    healthy = Mutation("none", (), variant, (), shape, ldc)
    assert [caught_by(healthy, None, seed) for seed in SEEDS] == [None] * len(SEEDS)


def test_docs_list_every_fault() -> None:
    assert len(MUTATIONS) >= 20
    assert table() in (ROOT / "docs" / "emulation.md").read_text()


@pytest.mark.parametrize(
    "variant",
    [
        HOPPER_GROUPS,
        HOPPER_HYBRID,
        HOPPER_MULTICAST,
        HOPPER_STREAM,
        HOPPER_STREAM_GROUPS,
        HOPPER_STREAM_MULTICAST,
        HOPPER_SPARSE,
    ],
)
def test_kernels_built_for_racecheck_do_the_same(variant: str, tmp_path: Path) -> None:
    every_lane = Edit("hopper_config.cuh", "#ifdef MC_RACECHECK", "#if 1")
    include = mutated_headers(Mutation("none", (every_lane,), variant, ()), tmp_path)
    # Of stream-K tiles must be cut, also where two CTAs of five share activations.
    healthy = Mutation("none", (), variant, (), (5, 1270, 1536))
    assert [caught_by(healthy, include, seed) for seed in SEEDS] == [None] * len(SEEDS)
