"""What the emulator reports, with places in the kernel's source."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_SITE = re.compile(r"\[@([0-9a-f]+)\]")


class EmulationError(RuntimeError):
    """A kernel broke a rule that hardware does not check.

    kind: "bounds", "alignment", "race", "deadlock", "divergence", "mbarrier", "wgmma", "trap" or
    "launch".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


def resolve_sites(text: str, library: Path) -> str:
    """Replaces "[@offset]" by the source lines (innermost kernel line first) that the offset in
    `library` belongs to."""
    offsets = sorted(set(_SITE.findall(text)))
    lines = _source_lines(offsets, library) if offsets else {}
    return _SITE.sub(lambda match: f"({lines.get(match[1], match[0])})", text)


def _source_lines(offsets: list[str], library: Path) -> dict[str, str]:
    if shutil.which("addr2line") is None:
        return {}
    command = ["addr2line", "-a", "-i", "-e", str(library), *(f"0x{offset}" for offset in offsets)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    chains: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("0x"):
            chain = chains.setdefault(f"{int(line, 16):x}", [])
        else:
            chain.append(Path(line.split(" ")[0]).name)
    return {offset: " < ".join(_kernel_lines(chain)) for offset, chain in chains.items()}


def _kernel_lines(chain: list[str]) -> list[str]:
    """Leaves out the primitives and keeps two levels of callers."""
    lines = [line for line in chain if not line.startswith(("prims_", "??"))]
    return (lines or chain)[:3]
