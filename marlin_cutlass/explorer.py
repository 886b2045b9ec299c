"""One run of `marlin-cutlass explore`: what is looked at, compiled, checked and timed.

What is not built is compiled into the JIT cache. Wrong kernels are named and excluded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from generator.arch import Arch, Gpu
from generator.cost import estimate
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass import dispatch, jit
from marlin_cutlass.collective import is_collective
from marlin_cutlass.explore_collective import collective_rows, ours
from marlin_cutlass.explore_measure import Format, Measured, Timer, measure
from marlin_cutlass.explore_rows import (
    Exploration,
    Row,
    add_facts,
    add_figures,
    cubin_facts,
    limit_us,
    make_row,
    sort_rows,
)
from marlin_cutlass.explore_space import Space, choose, enumerate_space, near_misses
from marlin_cutlass.explore_watch import HANG_S, HUNG, Watchdog

COUNT = 40  # variants that are looked at closely
COMPILED_WITHOUT_GPU = 4  # their static facts; more when asked
SWEPT = 3  # variants whose time is shown against M
SWEEP_MS = (1, 8, 16, 32, 64, 128, 256, 512)
BUILT = 10  # of the kernels that are built, so many of the best predicted ones are always in
err = Console(stderr=True, soft_wrap=True, highlight=False)


@dataclass
class Explorer:
    """One run: what is asked for, and where it is measured (timer None: nowhere)."""

    problem: ProblemShape
    arch: Arch
    gpu: Gpu
    overrides: dict[str, tuple] = field(default_factory=dict)
    timer: Timer | None = None
    count: int = COUNT
    compile_count: int | None = None  # None: all with a GPU, a few without
    jobs: int | None = None
    sweep: bool = True
    spent: Callable[[], bool] = lambda: False
    watched: bool = False  # a hanging kernel ends the process
    watch: Callable[[str], None] = lambda what: None
    skip: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def format(self) -> Format:
        return Format.of(self.problem)

    def run(self) -> Exploration:
        """Enumerates, compiles, measures; an interrupt ends the step and keeps what there is."""
        space = enumerate_space(self.problem, self.arch, self.gpu, self.overrides)
        table = self._table()
        chosen = choose(space, self.count, self._built(space, table), self.overrides)
        chosen = {name: why for name, why in chosen.items() if name not in self.skip}
        variants = [Variant.parse(name) for name in chosen]
        kernels = self._kernels(variants, table)
        rows = {v.name: make_row(self.problem, v, self.gpu, chosen[v.name]) for v in variants}
        self._mark_choice(rows, table)
        folders = [Path(k.file).parent for k in kernels.values() if Path(k.file).is_absolute()]
        folders += [table.folder] if table else []
        facts = cubin_facts(dict.fromkeys(folders), rows)
        found = self._result(space, rows)
        for row in rows.values():
            add_facts(row, self.arch, facts)
        if self.timer is not None:
            rows |= self._collective_rows(table)
            self._measure(rows, kernels, found.limit_us)
        found.rows = sort_rows(list(rows.values()))
        found.sweep = self._sweep(found.rows, kernels)
        if isinstance(self.watch, Watchdog):
            self.watch.close()
        return found

    # ---- what there is ---------------------------------------------------------------------------

    def _table(self) -> dispatch.Table | None:
        folder = dispatch.built_archs().get(self.arch.name)
        return None if folder is None else dispatch.current_table(folder)

    def _collective_rows(self, table: dispatch.Table | None) -> dict[str, Row]:
        """CUTLASS's own units that are built; only a measurement says how fast they are."""
        folder = None if table is None else table.folder
        found = collective_rows(self.problem, self.gpu, folder, self.overrides)
        return {name: row for name, row in found.items() if name not in self.skip}

    def _built(self, space: Space, table: dispatch.Table | None) -> list[str]:
        """Kernels of the table that are in the space: the table's choice and the likeliest."""
        if table is None:
            return []
        names = [k.name for k in table.kernels if k.name in space.predicted]
        names.sort(key=lambda name: space.predicted[name])
        choice = self._choice(table)
        first = [choice] if choice in space.predicted else []
        return list(dict.fromkeys([*first, *names[:BUILT]]))

    def _choice(self, table: dispatch.Table | None) -> str | None:
        p = self.problem
        try:
            form = (p.kernel_group_size, p.dtype, p.zeros, self.gpu.sms, p.sparse)
            return table.select(p.m, p.n, p.k, *form)[0].name if table else None
        except LookupError:
            return None

    def _mark_choice(self, rows: dict[str, Row], table: dispatch.Table | None) -> None:
        choice = self._choice(table)
        if choice in rows:
            rows[choice].choice = True

    def _result(self, space: Space, rows: dict[str, Row]) -> Exploration:
        leader = space.ranked[0]
        device = self.timer.device.name if self.timer else None
        return Exploration(
            problem=self.problem,
            arch=self.arch.name,
            gpu=self.gpu.name,
            measured_on=device,
            limit_us=limit_us(self.problem, self.gpu, self._device()),
            rows=list(rows.values()),
            space={
                "legal": len(space.legal),
                "illegal": sum(space.reasons.values()),
                "reasons": dict(space.reasons.most_common()),
                "set": {knob: list(values) for knob, values in self.overrides.items()},
            },
            near_misses=[asdict(miss) for miss in near_misses(space, leader)],
            roofline={
                "bandwidth": self.gpu.bandwidth,
                "tensor_flops": self.gpu.tensor_flops,
                "bytes": self.problem.weight_bytes
                + 2 * self.problem.m * (self.problem.k + self.problem.n),
            },
            environment=asdict(self.timer.device) if self.timer else {},
            notes=self.notes,
        )

    # ---- compiling -------------------------------------------------------------------------------

    def _kernels(
        self, variants: list[Variant], table: dispatch.Table | None
    ) -> dict[str, dispatch.Kernel]:
        """Kernels by name: of the table, of the cache, or compiled now."""
        built = {k.name: k for k in table.kernels} if table else {}
        kernels = {v.name: built[v.name] for v in variants if v.name in built}
        missing = []
        for variant in variants:
            cached = None if variant.name in kernels else jit.find(variant, self.arch.name)
            if cached is not None:
                kernels[variant.name] = cached
            elif variant.name not in kernels:
                missing.append(variant)
        without_gpu = COMPILED_WITHOUT_GPU if self.timer is None else None
        limit = without_gpu if self.compile_count is None else self.compile_count
        wanted = missing[:limit]
        if wanted:
            kernels |= self._compile(wanted)
        if self.timer is not None and len(kernels) < len(variants):
            self.notes.append(
                f"{len(variants) - len(kernels)} variants are not compiled: not measured"
            )
        return kernels

    def _compile(self, variants: list[Variant]) -> dict[str, dispatch.Kernel]:
        columns = (
            TextColumn("compiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        try:
            with Progress(*columns, console=err) as progress:
                task = progress.add_task("compile", total=len(variants), last="")

                def done(name: str, error: str | None) -> None:
                    last = f"{'FAILED ' if error else ''}{name}"
                    progress.update(task, advance=1, last=last)

                kernels, errors = jit.compile_variants(variants, self.arch, self.jobs, done)
        except KeyboardInterrupt:
            self.notes.append("interrupted while compiling")
            found = {v.name: jit.find(v, self.arch.name) for v in variants}
            return {name: kernel for name, kernel in found.items() if kernel is not None}
        except jit.CannotCompile as error:
            self.notes.append(f"nothing was compiled: {str(error).splitlines()[0]}")
            return {}
        for name, text in errors.items():
            self.notes.append(f"not compiled: {name}: {text.splitlines()[0]}")
        return kernels

    # ---- measuring -------------------------------------------------------------------------------

    def _measure(
        self, rows: dict[str, Row], kernels: dict[str, dispatch.Kernel], limit: float
    ) -> None:
        """Checks and times every kernel that is there; figures go into the rows."""
        timer, p = self.timer, self.problem
        self._register(kernels)
        if self.watched:
            self.watch = Watchdog(_on_hang)
        copies = timer.open(p.n, p.k, self.format, max(p.m, max(SWEEP_MS) if self.sweep else 0))
        named = [name for name in rows if name in kernels or is_collective(name)]
        guesses = {name: rows[name].predicted_us for name in named}
        results: dict[str, Measured] = {}
        pdl = (False, True) if timer.device.capability >= (9, 0) else (False,)
        try:
            measure(
                timer,
                self.format,
                p.m,
                guesses,
                copies,
                pdl=pdl,
                warm=True,
                stop=self.spent,
                watch=self.watch,
                into=results,
            )
        except KeyboardInterrupt:
            self.notes.append("interrupted: what was measured is shown")
            self.sweep = False
        for name, found in results.items():
            add_figures(rows[name], found, p, limit)
        if self.spent():
            self.notes.append("the time budget ended the measurement")
        self.watch("sweep")

    def _register(self, kernels: dict[str, dispatch.Kernel]) -> None:
        from marlin_cutlass import library

        more = [k for k in kernels.values() if Path(k.file).is_absolute()]
        if more:
            library.add_kernels(more, self.timer.device.capability)

    def _sweep(self, rows: list[Row], kernels: dict[str, dispatch.Kernel]) -> list[dict[str, Any]]:
        """Time against M of the best variants: the model's, and measured where there is a GPU."""
        points = []
        best = _different([r for r in ours(rows) if not r.refused])
        for row in best:
            for m in sorted({*SWEEP_MS, self.problem.m}):
                problem = replace(self.problem, m=m)
                predicted = estimate(problem, Variant.parse(row.name), self.gpu).total
                point = {"name": row.name, "m": m, "predicted_us": predicted, "us": None}
                points.append(point | {"limit_us": limit_us(problem, self.gpu, self._device())})
        if self.timer is None or not self.sweep:
            return points
        try:
            self._measure_sweep(points, [row.name for row in best if row.us is not None])
        except KeyboardInterrupt:
            self.notes.append("interrupted: time against M is not complete")
        return points

    def _device(self) -> str:
        """Name by which measured limits are looked up."""
        return self.timer.device.name if self.timer else self.gpu.name

    def _measure_sweep(self, points: list[dict[str, Any]], names: list[str]) -> None:
        timer, p = self.timer, self.problem
        copies = timer.open(p.n, p.k, self.format, max(*SWEEP_MS, p.m))
        for m in sorted({point["m"] for point in points}):
            if self.spent():
                break
            here = {x["name"]: x for x in points if x["m"] == m and x["name"] in names}
            guesses = {name: x["predicted_us"] for name, x in here.items()}
            found = measure(
                timer,
                self.format,
                m,
                guesses,
                copies,
                pdl=(False,),
                stop=self.spent,
                watch=self.watch,
            )
            for result in found:
                here[result.kernel]["us"] = result.us


def _on_hang(what: str) -> None:
    """Names the kernel that hangs and leaves: nothing else ends it."""
    print(f"HANG: no progress for {HANG_S:.0f} s in {what}; leave it out with --skip", flush=True)
    os._exit(HUNG)


def _different(rows: list[Row]) -> list[Row]:
    """The first SWEPT rows whose tiles or way of cutting the work differ."""
    kinds: dict[tuple, Row] = {}
    for row in rows:
        kind = tuple(row.knobs[knob] for knob in ("m_tile", "n_sm", "decomposition", "split"))
        kinds.setdefault(kind, row)
    return list(kinds.values())[:SWEPT]
