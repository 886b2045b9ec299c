"""The ranking: one row a variant, with figures, model and static facts; as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from generator.arch import Arch, Gpu
from generator.cost import Cost, estimate
from generator.legality import occupancy
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass.explore_measure import Format, Measured
from marlin_cutlass.jit import read_record
from marlin_cutlass.limits import SPARSE_SPEED_UP, device_limits
from marlin_cutlass.limits import limit as measured_limit

WIDTH = 200  # whole rows even in a narrow terminal or a pipe


@dataclass
class Row:
    """One variant at one problem. None: not measured, or not compiled."""

    name: str
    geometry: str
    why: str
    knobs: dict[str, Any]
    predicted_us: float
    bound: str  # memory or compute, by the model
    waves: float
    shared_bytes: int
    threads: int
    ctas_per_sm: int | None = None  # that fit, from the compiled registers
    registers: int | None = None
    spill_bytes: int | None = None
    us: float | None = None
    us_pdl: float | None = None
    us_warm: float | None = None
    gb_s: float | None = None  # packed weight over the time
    tflop_s: float | None = None
    percent_of_limit: float | None = None
    rel_error: float | None = None
    refused: str | None = None
    choice: bool = False  # the dispatch table's

    @property
    def score(self) -> float:
        """What ranks: measured where there is a figure, else after all of those by prediction."""
        known = [us for us in (self.us, self.us_pdl) if us is not None]
        return sum(known) / len(known) if known else math.inf


@dataclass
class Exploration:
    """Everything one run of explore found."""

    problem: ProblemShape
    arch: str
    gpu: str
    measured_on: str | None
    limit_us: float
    rows: list[Row]
    space: dict[str, Any] = field(default_factory=dict)
    near_misses: list[dict[str, Any]] = field(default_factory=list)
    sweep: list[dict[str, Any]] = field(default_factory=list)  # {name, m, us, predicted_us}
    roofline: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data; not-a-number free."""
        data = asdict(self)
        data["schema"] = 1
        return data

    def save_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def make_row(problem: ProblemShape, variant: Variant, gpu: Gpu, why: str) -> Row:
    """What is known of a variant before it is compiled."""
    geometry = variant.geometry()
    cost = estimate(problem, variant, gpu)
    return row_of(variant, geometry.name, asdict(geometry), cost, why)


def row_of(variant: Any, geometry: str, knobs: dict, cost: Cost, why: str) -> Row:
    """A row of a Variant or CollectiveVariant with nothing measured."""
    return Row(
        name=variant.name,
        geometry=geometry.removeprefix("w4a16_"),
        why=why,
        knobs=knobs,
        predicted_us=cost.total,
        bound=cost.bound,
        waves=cost.waves,
        shared_bytes=variant.shared_bytes,
        threads=variant.threads,
    )


def add_facts(row: Row, arch: Arch, facts: Mapping[str, tuple[int, int]]) -> None:
    """Registers and spills of the cubin, and the CTAs that then fit on an SM."""
    if row.name in facts:
        row.registers, row.spill_bytes = facts[row.name]
        row.ctas_per_sm = occupancy(Variant.parse(row.name), arch, row.registers)


def add_figures(row: Row, found: Measured, problem: ProblemShape, limit_us: float) -> None:
    """Times and what follows from them."""
    row.rel_error, row.refused = found.rel_error, found.refused
    if row.rel_error is not None and not math.isfinite(row.rel_error):
        row.rel_error = None
    if found.refused:
        return
    row.us, row.us_pdl, row.us_warm = found.us, found.us_pdl, found.us_warm
    us = row.us or row.us_pdl
    if us:
        row.gb_s = problem.weight_bytes / us / 1e3
        row.tflop_s = 2.0 * problem.m * problem.n * problem.k / us / 1e6
        row.percent_of_limit = 100.0 * limit_us / us


def limit_us(problem: ProblemShape, gpu: Gpu, device: str) -> float:
    """Shortest possible time: measured streaming where the device's is known, else data sheet."""
    p = problem
    if device_limits(device) is not None:
        form = {"group_size": p.kernel_group_size, "has_zeros": p.zeros, "sparse": p.sparse}
        found = measured_limit(p.m, p.n, p.k, **form, device=device)
        if found is not None:
            return found
    rate = gpu.tensor_flops * (SPARSE_SPEED_UP if p.sparse else 1)
    return max(p.weight_bytes / gpu.bandwidth, 2.0 * p.m * p.n * p.k / rate) * 1e6


def cubin_facts(folders: Iterable[Path], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """(registers, spilled bytes) by name, from the records beside cubins or from a manifest."""
    found: dict[str, tuple[int, int]] = {}
    wanted = set(names)
    for folder in folders:
        try:
            listed = json.loads((folder / "manifest.json").read_text())["variants"]
            rows = {row["name"]: (row["registers"], row["spills"]) for row in listed}
        except (OSError, ValueError, KeyError, TypeError):
            rows = {}
        for name in wanted - set(found):
            if name in rows:
                found[name] = rows[name]
                continue
            record = read_record(folder, name)
            if record is not None:
                found[name] = (record["registers"], record["spills"])
    return found


def sort_rows(rows: list[Row]) -> list[Row]:
    """Measured ones first, by time; then by prediction; refused ones last."""
    return sorted(rows, key=lambda r: (r.refused is not None, r.score, r.predicted_us))


# ---- the table -----------------------------------------------------------------------------------

_COLUMNS = (
    ("us", lambda r: _number(r.us, 2)),
    ("PDL", lambda r: _number(r.us_pdl, 2)),
    ("warm", lambda r: _number(r.us_warm, 2)),
    ("GB/s", lambda r: _number(r.gb_s, 0)),
    ("TFLOP/s", lambda r: _number(r.tflop_s, 1)),
    ("% limit", lambda r: _number(r.percent_of_limit, 0)),
    ("predicted", lambda r: _number(r.predicted_us, 2)),
    ("bound", lambda r: r.bound),
    ("registers", lambda r: _number(r.registers, 0)),
    ("spills", lambda r: _number(r.spill_bytes, 0)),
    ("KiB", lambda r: _number(r.shared_bytes / 1024, 0)),
    ("CTAs/SM", lambda r: _number(r.ctas_per_sm, 0)),
    ("waves", lambda r: _number(r.waves, 2)),
)


def _number(x: float | None, digits: int) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def print_table(found: Exploration, console: Console, limit: int | None = None) -> None:
    """The ranking; columns that nothing fills are left out."""
    shown = found.rows[:limit]
    columns = [(title, cell) for title, cell in _COLUMNS if any(cell(r) for r in shown)]
    p = found.problem
    source = (
        f"measured on {found.measured_on}" if found.measured_on else f"modelled for {found.gpu}"
    )
    fmt = Format(p.dtype, p.zeros, p.group_size, p.sparse)
    table = Table(
        title=f"{p.m} x {p.n} x {p.k}, {fmt}; {source}; limit {found.limit_us:.2f} us",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("#", justify="right")
    table.add_column("variant", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right")
    table.add_column("why in", no_wrap=True)
    for i, row in enumerate(shown, 1):
        why = f"EXCLUDED: {row.refused}" if row.refused else row.why
        mark = " *" if row.choice else ""
        table.add_row(str(i), row.geometry + mark, *(cell(row) for _, cell in columns), why)
    Console(
        file=console.file,
        width=max(console.width, WIDTH),
        highlight=False,
        no_color=console.no_color,
    ).print(table)
    if any(row.choice for row in shown):
        console.print("* what the dispatch table chooses", highlight=False)
