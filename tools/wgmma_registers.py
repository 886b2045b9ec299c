#!/usr/bin/env python3
"""Whether compiled Hopper kernels leave the registers of a wgmma in flight alone.

    python tools/wgmma_registers.py build/sm_90a/*.cubin

A wgmma reads its row operand, and the metadata of a sparse one, while it executes. ptxas 13.0 keeps
the registers of the former until the wait, but gives those of the latter to the next instruction;
on an H200 that made wrong results. The source prevents it; this follows every path from a wgmma to
its wait and names what writes there. Exit status: 1 if anything does.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?(\S.*?)\s*;")
PRODUCT = re.compile(
    r"HGMMA\S* R\d+, R(\d+), gdesc\[\w+\], (?:R\d+|RZ)(?:, !?UPT)?(?:, R(\d+), 0x)?"
)
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
BRANCH = re.compile(r"BRA\S*\s+(!?U?P\w+,\s*)?0x([0-9a-f]+)")
# Instructions whose first register is read, or that write none.
READERS = ("ST", "RED", "SYNCS", "ISETP", "FSETP", "HSETP2", "R2UR", "R2P", "UTMA", "UBLK", "HGMMA")
ENDS = ("EXIT", "BPT")
MAX_GROUPS = 4  # commit groups of a wgmma in flight; a kernel has two


@dataclass(frozen=True)
class Step:
    address: int
    guarded: bool  # runs under a predicate
    text: str

    @property
    def written(self) -> range:
        """Numbers of the registers that it writes."""
        match = re.match(r"(\S+)\s+R(\d+)", self.text)
        if match is None or self.text.startswith(READERS):
            return range(0)
        name, first = match[1], int(match[2])
        wide = ".64" in name or name.startswith("IMAD.WIDE") or name == "CS2R"
        return range(first, first + (4 if ".128" in name else 2 if wide else 1))


def overwritten(sass: str) -> list[str]:
    """A line for each register of a wgmma that something writes before the wait. sass: the output
    of cuobjdump -sass for one kernel.
    """
    steps = [Step(int(a, 16), bool(p), text) for a, p, text in INSTRUCTION.findall(sass)]
    places = {step.address: i for i, step in enumerate(steps)}
    faults = []
    for i, step in enumerate(steps):
        match = PRODUCT.match(step.text)
        if match is None:
            continue
        registers = set(range(int(match[1]), int(match[1]) + 4))
        registers |= {int(match[2])} if match[2] else set()
        for other in _in_flight(steps, places, i):
            if registers & set(other.written):
                faults.append(f"{step.address:#x} {step.text}: {other.address:#x} {other.text}")
    return faults


def _in_flight(steps: list[Step], places: dict[int, int], first: int) -> Iterator[Step]:
    """Steps that some path from product `first` reaches before that product is waited for."""
    seen: set[tuple[int, int]] = set()
    # (step, commits from the product's own on)
    todo = [(first + 1, int("gsb0" in steps[first].text))]
    while todo:
        i, commits = todo.pop()
        if i >= len(steps) or (i, commits) in seen or commits > MAX_GROUPS:
            continue
        seen.add((i, commits))
        step = steps[i]
        wait = WAIT.match(step.text)
        if wait is not None and commits > int(wait[1], 16):
            continue
        yield step
        commits += step.text.startswith("HGMMA") and "gsb0" in step.text
        if step.text.startswith(ENDS) and not step.guarded:
            continue
        branch = BRANCH.match(step.text)
        if branch is not None and int(branch[2], 16) in places:
            todo.append((places[int(branch[2], 16)], commits))
            if not step.guarded and branch[1] is None:
                continue
        todo.append((i + 1, commits))


def disassemble(cubin: Path) -> str:
    """What cuobjdump prints; FileNotFoundError if there is none in the environment or on PATH."""
    spec = importlib.util.find_spec("nvidia.cu13")
    folders = [f"{f}/bin" for f in (spec.submodule_search_locations or ())] if spec else []
    env = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")])}
    command = ["cuobjdump", "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout


def main(paths: list[str]) -> int:
    faulty = 0
    for path in paths:
        faults = overwritten(disassemble(Path(path)))
        faulty += bool(faults)
        for fault in faults:
            print(f"{Path(path).name}: {fault}")
    print(f"{len(paths)} kernels, {faulty} that overwrite registers of a wgmma in flight")
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
