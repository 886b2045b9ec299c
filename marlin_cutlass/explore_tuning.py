"""The tuning file: what was measured on one kind of GPU, merged and never silently lost.

generator/rows.py turns the entries into dispatch rows. An entry remembers the cubin it timed, so
that a kernel whose code changed is measured again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlin_cutlass.explore_measure import DeviceInfo, Format, Measured

METHOD = (
    "CUDA graph over copies of the weight that exceed the L2 cache twice, random data, every "
    "candidate checked against an fp32 product first; median of two interleaved rounds of bursts "
    "of a few ms with pauses between them; us: no PDL, us_pdl: with programmatic dependent launch"
)
CUBIN_DIGITS = 12  # of the sha256 that an entry keeps
Key = tuple  # (n, k, m, format, geometry)


@dataclass
class TuningFile:
    """Entries and refusals by key; everything else about the file."""

    arch: str
    gpu: str
    sms: int
    head: dict[str, Any] = field(default_factory=dict)
    entries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    excluded: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def for_device(cls, arch: str, device: DeviceInfo, date: str) -> TuningFile:
        head = {"driver": device.driver, "torch": device.torch, "date": date, "method": METHOD}
        return cls(arch, device.name, device.sms, head)

    @classmethod
    def load(cls, path: Path) -> TuningFile:
        """Reads a file; ValueError naming it where it is not one."""
        try:
            data = json.loads(path.read_text())
            head = {
                key: value
                for key, value in data.items()
                if key not in ("arch", "gpu", "sms", "entries", "excluded")
            }
            entries = {entry_key(e): e for e in data["entries"]}
            excluded = {entry_key(e): e for e in data.get("excluded", ())}
            sms = data.get("sms") or next((e["sms"] for e in data["entries"]), 0)
            return cls(data["arch"], data["gpu"], sms, head, entries, excluded)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a tuning file: {error!r}") from error

    def save(self, path: Path) -> None:
        """Writes aside and renames: an interrupted run never leaves half a file.

        What another run has added to the file in the meantime is kept.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._keep_others(TuningFile.load(path))
        aside = path.with_name(f".{path.name}.{os.getpid()}.part")
        aside.write_text(self.text())
        aside.replace(path)

    def _keep_others(self, other: TuningFile) -> None:
        mine = {**self.excluded, **self.entries}
        self.entries |= {key: e for key, e in other.entries.items() if key not in mine}
        self.excluded |= {key: e for key, e in other.excluded.items() if key not in mine}

    def text(self) -> str:
        """JSON with one entry a line, in an order that does not depend on when they came."""
        head = {"arch": self.arch, "gpu": self.gpu, "sms": self.sms, **self.head}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        for name, rows in (("entries", self.entries), ("excluded", self.excluded)):
            body = ",\n".join(f"  {json.dumps(rows[key])}" for key in sorted(rows))
            lines.append(f' "{name}": [\n{body}\n ]' if body else f' "{name}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def check_device(self, arch: str, device: DeviceInfo, path: Path) -> None:
        """ValueError if the file's figures are of another kind of GPU."""
        mine, theirs = (self.arch, self.gpu, self.sms), (arch, device.name, device.sms)
        if mine != theirs:
            raise ValueError(
                f"{path} holds measurements of {self.gpu} ({self.arch}, {self.sms} SMs), this is "
                f"{device.name} ({arch}, {device.sms} SMs): name another file with --out"
            )

    def add(self, n: int, k: int, m: int, fmt: Format, found: Measured, cubin: str) -> None:
        """Keeps a figure, or a refusal, in place of an older one of the same kernel."""
        shape: dict[str, Any] = {"sms": self.sms, "n": n, "k": k, "m": m}
        shape["geometry"] = geometry_of(found.kernel, fmt)
        if fmt != Format():
            shape |= {"dtype": fmt.dtype, "zeros": fmt.zeros, "group_size": fmt.group_size}
        if fmt.sparse:
            shape["sparse"] = True
        key = entry_key(shape)
        if found.refused:
            self.entries.pop(key, None)
            self.excluded[key] = {**shape, "why": found.refused, "cubin": cubin}
        elif found.us is not None or found.us_pdl is not None:
            self.excluded.pop(key, None)
            us = found.us if found.us is not None else found.us_pdl
            figures = {"us": us, "us_pdl": found.us_pdl}
            rounded = {name: round(x, 3) for name, x in figures.items() if x is not None}
            date = self.head["date"][:10]
            step = self.entries.get(key, {}).get("step")
            said = {"step": step} if step else {}  # by a person, from a run of its own
            self.entries[key] = {**shape, **rounded, "cubin": cubin, "date": date, **said}

    def known(self, n: int, k: int, m: int, fmt: Format) -> dict[str, dict[str, Any]]:
        """Entries and refusals of one cell by geometry."""
        cell = (n, k, m, fmt.dtype, fmt.zeros, fmt.group_size, fmt.sparse)
        both = {**self.excluded, **self.entries}
        return {key[-1]: entry for key, entry in both.items() if key[:-1] == cell}


def entry_key(entry: dict[str, Any]) -> Key:
    fmt = Format()
    return (
        entry["n"],
        entry["k"],
        entry["m"],
        entry.get("dtype", fmt.dtype),
        entry.get("zeros", fmt.zeros),
        entry.get("group_size", fmt.group_size),
        entry.get("sparse", fmt.sparse),
        entry["geometry"],
    )


def geometry_of(kernel: str, fmt: Format) -> str:
    """A kernel's name without its format."""
    group = "col" if fmt.group_size < 0 else fmt.group_size
    return kernel.replace(f"_{fmt.dtype}{'z' if fmt.zeros else ''}_g{group}_", "_", 1)


def score(entry: dict[str, Any]) -> float:
    """What ranks an entry: the mean of its figures, as Measured.score."""
    both = [entry[name] for name in ("us", "us_pdl") if entry.get(name) is not None]
    return sum(both) / len(both)


def cells(entries: Iterable[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    """Entries of each (n, k, m, dtype, zeros, group_size, sparse), fastest first."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for entry in entries:
        found.setdefault(entry_key(entry)[:-1], []).append(entry)
    return {key: sorted(found[key], key=score) for key in sorted(found)}
