"""The peer `collective`: CUTLASS's own mixed-input GEMM, this project's family of that name.

One column: for each cell the fastest of the units that are built for the activation type, chosen by
a short measurement beforehand, as libraries that tune themselves do. The note names it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from marlin_cutlass.bench import Candidate, Problem, capture, replay_interleaved
from marlin_cutlass.collective import Unit, built, dtype_name, repack, run
from marlin_cutlass.errors import UnsupportedArchError
from marlin_cutlass.explore_candidates import sensible_rows


class Collective:
    """What the CUTLASS Python interface gives unaided, on a repacked weight."""

    name = "CUTLASS collective"
    max_m: int | None = None

    def missing(self) -> str | None:
        try:
            found = built() if torch.cuda.is_available() else {}
        except UnsupportedArchError as error:
            return str(error)
        if not found:
            return "no unit is built: python build.py --arch sm_90a --family collective"
        return None

    def prepare(self, weight) -> None:
        from marlin_cutlass import pack

        packed = pack(weight.q, weight.scales, group_size=weight.group_size)
        dtype = weight.scales.dtype
        first = repack(packed, dtype)
        more = weight.copies(first.nbytes) - 1
        self.weights = [first] + [first.clone() for _ in range(more)]
        self.units = [u for u in built().values() if u.dtype == dtype_name(dtype)]

    def release(self) -> None:
        self.weights = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        suiting = [u for u in self.units if sensible_rows(problem.m, u.m_tile)] or self.units
        unit = self._fastest(problem, suiting)
        return (
            []
            if unit is None
            else [Candidate(self.name, self._calls(problem, unit), note=unit.name)]
        )

    def _calls(self, problem: Problem, unit: Unit) -> list[Callable[[], torch.Tensor]]:
        out = torch.full_like(problem.reference, float("nan"), dtype=problem.dtype)
        return [lambda w=w: run(unit, problem.a, w, out) for w in self.weights]

    def _fastest(self, problem: Problem, units: list[Unit]) -> Unit | None:
        """The unit with the shortest median; one that cannot run is left out."""
        graphs = {}
        for unit in units:
            try:
                graphs[unit] = capture(self._calls(problem, unit))
            except RuntimeError as error:
                print(f"{unit.name} at M = {problem.m}: {error}")
        replay_interleaved(list(graphs.values()))
        return min(graphs, key=lambda unit: statistics.median(graphs[unit].times), default=None)
