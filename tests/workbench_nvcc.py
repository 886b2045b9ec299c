"""A stand-in for nvcc: counts its runs beside itself and copies the source into the cubin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from marlin_cutlass import library

SCRIPT = f"""#!{sys.executable}
import pathlib, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit(0)
folder = pathlib.Path(__file__).parent
with open(folder / "runs", "a") as runs:
    runs.write(sys.argv[-1] + chr(10))
print("ptxas info    : Used 96 registers, used 1 barriers")
print("    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads")
if (folder / "fail").exists():
    print("error: no such thing")
    sys.exit(2)
open(sys.argv[sys.argv.index("-o") + 1], "w").write(open(sys.argv[-1]).read())
"""


class Nvcc:
    """The stand-in and what it compiled."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "nvcc"
        self.path.write_text(SCRIPT)
        self.path.chmod(0o755)
        (folder / "runs").touch()

    @classmethod
    def in_use(cls, folder: Path, tables: Path, monkeypatch: pytest.MonkeyPatch) -> Nvcc:
        """The stand-in as the compiler of this process, with the tables of `tables`, an empty cache
        and nothing compiled on demand."""
        nvcc = cls(folder / "bin")
        monkeypatch.setenv("NVCC", str(nvcc.path))
        monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tables))
        monkeypatch.setenv("MARLIN_CUTLASS_JIT_CACHE", str(folder / "cache"))
        monkeypatch.setattr(library, "_on_demand", {})
        return nvcc

    @property
    def compiled(self) -> list[str]:
        """Names in the order in which they were compiled."""
        lines = self.path.with_name("runs").read_text().splitlines()
        return [Path(line).stem for line in lines]

    @property
    def runs(self) -> int:
        return len(self.compiled)

    def fails(self) -> None:
        """From now on."""
        self.path.with_name("fail").touch()
