"""The README is right: its code runs, its files exist, and its six steps add a variant."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKDOWN = sorted(
    p
    for p in ROOT.rglob("*.md")
    if not {".venv", "build", "shared"} & set(p.relative_to(ROOT).parts)
)


def section(title: str) -> str:
    return re.split(r"^## ", README, flags=re.M)[
        [s.split("\n")[0] for s in re.split(r"^## ", README, flags=re.M)].index(title)
    ]


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of one language, with the indentation of a list item removed."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.M | re.S)
    return ["\n".join(line[len(indent) :] for line in body.splitlines()) for indent, body in found]


def test_first_example_runs():
    (code,) = blocks(section("Use"), "python")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["c"].shape == (3, 512)
    assert names["y"].shape == (3, 512)
    expected = names["a"].float() @ dequantised(names["weight"])
    error = (names["c"].float() - expected).norm() / expected.norm()
    assert error < 2e-3


def dequantised(weight):
    from marlin_cutlass import dequantize, quantize

    return dequantize(quantize(weight, group_size=128)).float()


def test_two_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^    make (\w+)", section("Two commands"), flags=re.M):
        assert re.search(rf"^{command}:", makefile, flags=re.M), command


def test_files_of_the_reading_order_exist():
    paths = re.findall(
        r"`([\w./*<>]+)`",
        "\n".join(
            line.split("|")[1]
            for line in section("How it is built: reading order").splitlines()
            if line.startswith("| `")
        ),
    )
    assert len(paths) >= 15
    missing = [p for p in paths if not list(ROOT.glob(p.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(
        r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")
    ):
        assert (page.parent / target).exists(), target


def steps() -> list[str]:
    return re.split(r"^\d\. ", section("Adding a variant"), flags=re.M)[1:]


def test_there_are_at_most_six_steps():
    numbers = re.findall(r"^(\d)\. ", section("Adding a variant"), flags=re.M)
    assert numbers == [str(i + 1) for i in range(len(numbers))]
    assert 1 < len(numbers) <= 6


@pytest.mark.slow
def test_the_steps_add_a_variant(tmp_path):
    """A copy of the tree, the commands of the steps in order; only `make test` is left out."""
    for name in ("build.py", "generator", "templates"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignore)
        else:
            shutil.copy(source, tmp_path / name)
    outputs = []
    for step in steps():
        for line in blocks(step, "python"):
            add_row(tmp_path / "generator" / "space.py", line)
        for line in blocks(step, "sh"):
            if not line.startswith("make "):
                outputs.append(run(line, tmp_path))
    name = re.search(r"--only (\S+)", README)[1]
    geometry = name.split("_g128_")[1]
    listed, legal, report, built = outputs
    assert name not in listed
    assert f"would compile {name}" in legal
    assert re.search(rf"{name} +\d+ +0 ", report), "registers, no spills"
    assert "0 failed" in built
    manifest = (tmp_path / "build" / "sm_86" / "manifest.json").read_text()
    assert name in manifest and f"bf16_g128_{geometry}" in manifest
    assert name in run("python build.py --arch sm_86 --list", tmp_path)


def add_row(path: Path, row: str) -> None:
    """Append a row to the AMPERE table."""
    text = path.read_text()
    start = text.index("AMPERE = (")
    end = text.index("\n)\n", start)
    path.write_text(f"{text[:end]}\n    {row}{text[end:]}")


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
