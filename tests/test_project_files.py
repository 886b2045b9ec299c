"""Packaging and entry points: what a newcomer and a CI runner rely on."""

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement_names(lines) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines)
    return {m[0].lower().replace("_", "-") for m in names if m}


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def test_every_direct_dependency_is_pinned():
    project = PROJECT["project"]
    wanted = requirement_names(
        line
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for line in group
    )
    pinned = requirement_names(constraint_lines())
    assert wanted <= pinned
    assert all("==" in line for line in constraint_lines())


def test_every_python_gets_exactly_one_pin_of_each_package():
    for python in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        seen = []
        for line in constraint_lines():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(
                {"python_version": python}
            ):
                seen.append(requirement.name)
        assert len(seen) == len(set(seen)), python
        assert {"torch", "numpy", "pytest"} <= set(seen)


def test_ci_runs_exactly_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [
        line for line in script.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert commands[-1] == "exec make test"
    assert not [line for line in commands if "pytest" in line or "pip" in line]


def test_make_test_runs_the_suite_in_two_workers_without_gpu_tests_where_there_is_no_gpu():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    dry = subprocess.run(
        ["make", "-n", "test", "GPU="],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=env,
    ).stdout
    assert '-m pytest -n 2 -m "not gpu"' in dry
    with_gpu = subprocess.run(
        ["make", "-n", "test", "GPU=H200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=env,
    ).stdout
    assert "not gpu" not in with_gpu


def test_versions_agree():
    import marlin_cutlass

    assert PROJECT["project"]["version"] == marlin_cutlass.__version__


def test_markers_are_declared():
    names = {m.split(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    used = set()
    for path in (ROOT / "tests").rglob("*.py"):
        used |= set(re.findall(r"pytest\.mark\.(\w+)", path.read_text()))
    builtin = {"parametrize", "skipif", "skip", "xfail", "usefixtures", "timeout", "filterwarnings"}
    assert used - builtin <= names


def test_licence_is_apache():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_generated_output_is_ignored():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"build/", ".venv/", "results/"} <= set(ignored)
