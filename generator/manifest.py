"""The artifact between build time and run time: build/<arch>/manifest.json beside the cubins.

Units of the opt-in family `collective` have a list of their own: they are libraries that the
launcher does not load, and the dispatch table never names them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from generator.arch import Arch
from generator.collective import FAMILY, is_collective
from generator.compile import Record, file_name
from generator.render import write_if_changed
from generator.space import Entry

FORMAT = 4  # what kernels find in GemmParams and in the workspace: launchers must agree
LAYOUT_VERSION = 1


def variant_row(entry: Entry, record: Record) -> dict:
    """One manifest entry: the variant's fields, what the launcher needs, what ptxas reported."""
    v = entry.variant
    return _row(entry, record, shared_bytes=v.shared_bytes, cluster=v.cluster)


def collective_row(entry: Entry, record: Record) -> dict:
    """An entry of the list of collective units; group sizes are those of a launch."""
    return _row(entry, record)


def _row(entry: Entry, record: Record, **launch: int) -> dict:
    v = entry.variant
    return {
        "name": v.name,
        **asdict(v),
        "threads": v.threads,
        **launch,
        "registers": record.registers,
        "spills": record.spills,
        "file": file_name(v.name),
        "sha256": record.sha256,
        "reason": entry.reason,
    }


def write_manifest(
    folder: Path, arch: Arch, built: list[tuple[Entry, Record]], dispatch: list[dict], key: str = ""
) -> bool:
    """Writes manifest.json if it changed; every file it names exists. key: what `dispatch` was made
    from (rows.table_key)."""
    for entry, _ in built:
        binary = folder / file_name(entry.variant.name)
        if not binary.is_file():
            raise FileNotFoundError(f"{binary} is missing")
    kernels = [(e, r) for e, r in built if not is_collective(e.variant.name)]
    units = [collective_row(e, r) for e, r in built if is_collective(e.variant.name)]
    manifest = {
        "format": FORMAT,
        "arch": arch.name,
        "layout_version": LAYOUT_VERSION,
        "variants": [variant_row(entry, record) for entry, record in kernels],
        "dispatch": dispatch,
        "dispatch_key": _dispatch_key(key, dispatch),
        **({FAMILY: units} if units else {}),
    }
    return write_if_changed(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _dispatch_key(key: str, dispatch: list[dict]) -> str:
    return f"{key}:{hashlib.sha256(json.dumps(dispatch).encode()).hexdigest()}"


def earlier_dispatch(folder: Path, key: str) -> list[dict] | None:
    """The rows of an existing manifest if they were made from the same `key` and are intact."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        rows = manifest["dispatch"]
        return rows if manifest["dispatch_key"] == _dispatch_key(key, rows) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def listed_names(folder: Path) -> list[str]:
    """Names of the variants an existing manifest lists; empty if there is none that can be read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        rows = [*manifest["variants"], *manifest.get(FAMILY, [])]
        return [row["name"] for row in rows if isinstance(row["name"], str)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
