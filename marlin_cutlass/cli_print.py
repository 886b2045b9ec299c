"""What the command line prints: JSON, reports and tables on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

out = Console()


def print_json(data: Any) -> None:
    print(data if isinstance(data, str) else json.dumps(data, indent=1))


def print_report(report, target: Path, as_json: bool) -> None:
    if as_json:
        return print_json(report.to_json())
    rate = report.bytes_in / max(report.seconds, 1e-9) / 1e6
    out.print(
        f"{report.source_format} -> marlin_cutlass: {len(report.layers)} layers packed,"
        f" {report.passed} tensors copied, {report.bytes_in / 1e6:.1f} MB read,"
        f" {report.bytes_out / 1e6:.1f} MB written in {report.seconds:.1f} s ({rate:.0f} MB/s)",
        highlight=False,
    )
    for note in report.notes:
        out.print(f"note: {note}", markup=False, highlight=False)
    out.print(f"wrote {target}", highlight=False, soft_wrap=True)


def layer_table(layers) -> Table:
    table = Table()
    sparse = any(x.sparse for x in layers)  # a column only where there is something to say
    for title in ("layer", "K", "N", "group", "zeros", "order", *(["2:4"] if sparse else [])):
        table.add_column(title, overflow="fold")
    rows = sorted(layers[0].kernels)
    for m in rows:
        table.add_column(f"m={m}", overflow="fold")
    word = {True: "yes", False: "-", None: "?"}
    for x in layers:
        name = x.name if x.experts is None else f"{x.name} (x{x.experts})"
        table.add_row(
            name,
            str(x.k),
            str(x.n),
            str(x.group_size),
            word[x.zeros],
            word[x.act_order],
            *([word[x.sparse]] if sparse else []),
            *(x.kernels[m] for m in rows),
        )
    return table
