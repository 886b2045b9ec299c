"""The artifact between build time and run time: build/<arch>/manifest.json beside the cubins."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from generator.arch import Arch
from generator.compile import Record
from generator.render import write_if_changed
from generator.space import Entry

FORMAT = 1
LAYOUT_VERSION = 1


def variant_row(entry: Entry, record: Record) -> dict:
    """One manifest entry: the variant's fields, what the launcher needs, what ptxas reported."""
    v = entry.variant
    return {
        "name": v.name,
        **asdict(v),
        "threads": v.threads,
        "shared_bytes": v.shared_bytes,
        "cluster": v.cluster,
        "registers": record.registers,
        "spills": record.spills,
        "file": f"{v.name}.cubin",
        "sha256": record.sha256,
        "reason": entry.reason,
    }


def write_manifest(
    folder: Path, arch: Arch, built: list[tuple[Entry, Record]], dispatch: list[dict]
) -> bool:
    """Writes manifest.json if it changed; every file it names exists."""
    for entry, _ in built:
        if not (folder / f"{entry.variant.name}.cubin").is_file():
            raise FileNotFoundError(f"{folder / entry.variant.name}.cubin is missing")
    manifest = {
        "format": FORMAT,
        "arch": arch.name,
        "layout_version": LAYOUT_VERSION,
        "variants": [variant_row(entry, record) for entry, record in built],
        "dispatch": dispatch,
    }
    return write_if_changed(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def listed_names(folder: Path) -> list[str]:
    """Names of the variants an existing manifest lists; empty if there is none that can be read."""
    try:
        rows = json.loads((folder / "manifest.json").read_bytes())["variants"]
        return [row["name"] for row in rows if isinstance(row["name"], str)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
