"""Wheels: kernels and launcher inside, usable where there is no compiler; sdists that build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import workbench_fakes as fakes

ROOT = Path(__file__).parent.parent
HAS_COMPILER = any(shutil.which(name) for name in ("g++", "c++", "clang++"))
# What an installation does on its first day, with nothing on the path that compiles.
SMOKE = """
import shutil, torch
assert not any(shutil.which(name) for name in ("g++", "c++", "clang++", "nvcc"))
import marlin_cutlass as mc
from marlin_cutlass import host_library, library
w = mc.quantize(torch.randn(64, 256), group_size=128)
out = mc.gemm(torch.randn(3, 256).half(), w)
assert out.shape == (3, 64)
print(mc.__file__)
print(",".join(mc.build_info()["tables"]))
print(library.find_library())
print(mc.explain(16, 4096, 4096, arch="sm_90a").kernel)
"""


def source(folder: Path) -> Path:
    """A copy of what is tracked or new, so that nothing is built inside the checkout."""
    skipped = shutil.ignore_patterns(".*", "build", "dist", "results", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder, ignore=skipped))


def fake_table(root: Path) -> Path:
    folder = fakes.write_manifest(root)
    for variant in json.loads((folder / "manifest.json").read_text())["variants"]:
        (folder / variant["file"]).write_bytes(b"a cubin")
    return folder


def backend(call: str, where: Path, **env: str) -> str:
    """Runs a hook of setuptools' build backend in `where`; returns the file it names."""
    code = f"import setuptools.build_meta as b; print('made', b.{call}('out'))"
    (where / "out").mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=where,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.rsplit("made ", 1)[1].strip()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_wheel_with_tables_works_without_a_compiler(tmp_path):
    table = fake_table(tmp_path / "tables")
    checkout = source(tmp_path / "checkout")
    name = backend("build_wheel", checkout, MARLIN_CUTLASS_BUILD=str(table.parent))
    assert name.startswith("marlin_cutlass-") and "-py3-none-linux_" in name
    installed = tmp_path / "installed"
    with zipfile.ZipFile(checkout / "out" / name) as wheel:
        wheel.extractall(installed)
    data = installed / "marlin_cutlass" / "data"
    shipped = json.loads((data / "sm_90a" / "manifest.json").read_text())
    assert all((data / "sm_90a" / v["file"]).is_file() for v in shipped["variants"])
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "MARLIN_CUTLASS_BUILD")}
    env |= {"PYTHONPATH": str(installed), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", SMOKE], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    where, tables, launcher, kernel = run.stdout.split()
    assert Path(where).is_relative_to(installed) and tables == "sm_90a"
    assert Path(launcher).is_relative_to(data / "runtime"), "the sources' hash changed on the way"
    assert kernel in {v["name"] for v in shipped["variants"]}


def test_a_wheel_with_tables_needs_torch(tmp_path):
    """As in an isolated build environment."""
    table = fake_table(tmp_path / "tables")
    checkout = source(tmp_path / "checkout")
    (checkout / "torch.py").write_text("raise ModuleNotFoundError('none', name='torch')")
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=checkout,
        env={**os.environ, "MARLIN_CUTLASS_BUILD": str(table.parent)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "which needs torch: build it where" in run.stderr


@pytest.mark.slow
def test_a_wheel_from_an_sdist_in_a_clean_folder(tmp_path):
    checkout = source(tmp_path / "checkout")
    made = backend("build_sdist", checkout)
    with tarfile.open(checkout / "out" / made) as archive:
        # Python before 3.10.12 and 3.11.4 has no filters.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "clean", **safe)
    (folder,) = (tmp_path / "clean").iterdir()
    for part in ("templates/kernel.cu.jinja", "build.py", "Makefile", "generator/tuning"):
        assert (folder / part).exists()
    name = backend("build_wheel", folder, MARLIN_CUTLASS_BUILD=str(tmp_path / "nothing"))
    assert name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(folder / "out" / name) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "marlin_cutlass/csrc/marlin_cutlass/params.h" in names
    assert not [n for n in names if n.endswith((".cubin", ".so"))]
    assert "Requires-Dist: torch>=2.10" in metadata and "NVIDIA CUDA" in metadata
