"""The walk-throughs of docs/ run as they are written, in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from generator.toolchain import BuildError, find_nvcc

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("generator", "templates", "marlin_cutlass", "emulator", "build.py")


def has_nvcc() -> bool:
    try:
        return find_nvcc().is_file()
    except BuildError:
        return False


def shell_blocks(document: str) -> list[str]:
    """The ```sh blocks in order; other blocks are not meant to run without a GPU."""
    text = (ROOT / "docs" / document).read_text()
    return re.findall(r"^```sh\n(.*?)^```$", text, flags=re.M | re.S)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the commands touch; the emulator's compiled runtime comes along."""
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    for name in COPIED:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, tmp_path / name, **({"ignore": skip} if source.is_dir() else {}))
    runtimes = sorted((ROOT / "build" / "emulator").glob("runtime-*.so"))
    (tmp_path / "build" / "emulator").mkdir(parents=True)
    for runtime in runtimes:
        shutil.copy2(runtime, tmp_path / "build" / "emulator")
    return tmp_path


def run(block: str, folder: Path) -> str:
    """Output of one block under bash; every command must succeed."""
    bin_folder = folder / ".bin"
    bin_folder.mkdir(exist_ok=True)
    python = bin_folder / "python"
    if not python.exists():
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("MARLIN_CUTLASS")}
    env |= {
        "PATH": f"{bin_folder}:{env['PATH']}",
        "PYTHONPATH": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "MAX_JOBS": "1",
    }
    argv = ["bash", "-euo", "pipefail", "-c", block]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_a_family_is_added_as_the_page_says(checkout):
    outputs = [run(block, checkout) for block in shell_blocks("add_a_family.md")]
    text = "\n".join(outputs)
    name = "w4a16_demo_f16_g128_m16_n128k128_w2x2_p4_striped_c1"
    assert "the walk-through's only row" in text
    assert "is illegal on sm_86: k_sm=128 over warps_k=4 is not a multiple of 64" in text
    assert (checkout / "build" / "sm_86" / f"{name}.cubin").is_file()
    assert "2 compiled, 0 up to date, 0 failed" in text
    assert "demo_m16_n128k128_w2x2_p4_striped_c1" in outputs[-1]
    schedule = (checkout / "marlin_cutlass" / "csrc" / "schedule.h").read_text()
    (enum,) = re.findall(r"enum class Family \{ (.*?) \}", schedule)
    kernel = (checkout / "marlin_cutlass" / "kernel.py").read_text()
    (families,) = re.findall(r"^FAMILIES = \((.*?)\)", kernel, flags=re.M)
    names = [family.strip(' "') for family in families.split(",")]
    named = ["k" + name.replace("_", " ").title().replace(" ", "") for name in names]
    assert enum.split(", ") == named and named[-1] == "kDemo"


def test_the_papers_figures_are_those_of_the_model():
    """docs/workbench.md states the error per point: within 2 percent of what the command prints."""
    from generator.arch import GPUS
    from marlin_cutlass.explore_paper import points

    text = (ROOT / "docs" / "workbench.md").read_text()
    rows = re.findall(r"^\| (\d+, \w+) \| (.+?) \| ([\d.e+]+) \| ([\d.e+]+) \|", text, flags=re.M)
    written = {(figure, where): (float(p), float(m)) for figure, where, p, m in rows}
    found = points(GPUS["A10"])
    assert len(written) == len(found)
    for point in found:
        paper, model = written[point.figure, point.where]
        assert paper == pytest.approx(point.paper, rel=1e-3)
        assert model == pytest.approx(point.model, rel=0.02), (
            "python -m marlin_cutlass explore --paper prints the table again"
        )


def test_the_models_error_is_what_the_report_says():
    """docs/workbench.md states it: within 1.5 points, and the good choices within 5."""
    from marlin_cutlass.explore_model import model_report
    from marlin_cutlass.explore_tuning import TuningFile

    text = (ROOT / "docs" / "workbench.md").read_text()
    pattern = r"median error ([\d.]+) ?%.*? within 10 % of the best in (\d+) ?%"
    stated = re.search(pattern, text)
    report = model_report(TuningFile.load(ROOT / "generator" / "tuning" / "nvidia_h200.json"))
    found = re.search(pattern, report)
    assert float(stated[1]) == pytest.approx(float(found[1]), abs=1.5)
    assert int(stated[2]) == pytest.approx(int(found[2]), abs=5)


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="needs nvcc")
def test_the_workbench_page(checkout):
    outputs = [run(block, checkout) for block in shell_blocks("workbench.md")]
    text = "\n".join(outputs)
    assert "modelled for A10" in text and "figure 1, ms: median error" in text
    assert (checkout / "build" / "report.html").is_file()
    assert "trying a deeper pipeline" in text
