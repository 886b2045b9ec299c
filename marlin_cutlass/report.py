"""The record of a benchmark run: one Result per cell, the environment, and JSON in and out."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1  # of the JSON file


@dataclass
class Result:
    """One measured cell. us is None where the candidate failed or was wrong (see status)."""

    candidate: str
    m: int
    n: int
    k: int
    group_size: int
    dtype: str
    pdl: bool | None = None
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    rel_error: float | None = None
    limit_us: float | None = None
    copies: int = 0
    calls: int = 0
    status: str = "ok"
    note: str = ""

    @property
    def percent_of_limit(self) -> float | None:
        """100 means as fast as the limit model allows."""
        return None if not self.us or self.limit_us is None else 100.0 * self.limit_us / self.us


def _nvidia_smi() -> dict[str, str]:
    keys = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(keys.split(","), (part.strip() for part in text.split(",")), strict=False))


def environment() -> dict[str, Any]:
    """What a reader needs to judge or repeat a figure: GPU, driver, clocks, date, versions."""
    from marlin_cutlass import __version__

    env: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
        "marlin_cutlass": __version__,
    }
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        env.update(
            gpu=props.name,
            sms=props.multi_processor_count,
            l2_bytes=props.L2_cache_size,
            capability=f"{props.major}.{props.minor}",
            **_nvidia_smi(),
        )
    return env


@dataclass
class Report:
    """Everything one benchmark run produced. `save` writes it, `load` reads it back."""

    title: str
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # candidate -> why it was left out
    finished: bool = True  # False: the time budget ended the run early
    method: str = ""

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(r) | {"percent_of_limit": r.percent_of_limit} for r in self.results]
        return {
            "schema": SCHEMA,
            "title": self.title,
            "environment": self.environment,
            "method": self.method,
            "finished": self.finished,
            "skipped": self.skipped,
            "results": rows,
        }

    def save(self, path: str | Path) -> Path:
        """Write JSON aside and rename it, so that an interrupted run never leaves half a file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(path.suffix + ".part")
        aside.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        aside.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report; ValueError if it is of another schema."""
        data = json.loads(Path(path).read_text())
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema={data.get('schema')} in {path}: this version reads {SCHEMA}")
        names = Result.__dataclass_fields__
        rows = [Result(**{k: v for k, v in row.items() if k in names}) for row in data["results"]]
        return cls(
            data["title"],
            data["environment"],
            rows,
            data["skipped"],
            data["finished"],
            data["method"],
        )
