"""Wheels with kernels in them; everything else is in pyproject.toml.

    python build.py --arch all && pip wheel --no-deps --no-build-isolation .

packs the tables of build/ (or of $MARLIN_CUTLASS_BUILD) and the compiled launcher into the package,
so that an installation needs neither nvcc nor a C++ compiler. Not in an isolated build environment,
which has no torch to compile the launcher against. Without tables the wheel has none,
and an installation compiles its launcher and names the command that builds kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHARED_HEADERS = ("params.h", "sparse_layout.h")  # of templates/, part of the launcher


def tables() -> dict[str, Path]:
    """Folder of each built architecture."""
    root = Path(os.environ.get("MARLIN_CUTLASS_BUILD") or ROOT / "build")
    return {path.parent.name: path.parent for path in sorted(root.glob("sm_*/manifest.json"))}


def copy_table(source: Path, target: Path) -> None:
    """The manifest and the cubins it lists. Units of the opt-in family `collective` stay behind."""
    manifest = json.loads((source / "manifest.json").read_text())
    manifest.pop("collective", None)
    target.mkdir(parents=True, exist_ok=True)
    for variant in manifest["variants"]:
        shutil.copy2(source / variant["file"], target)
    (target / "manifest.json").write_text(json.dumps(manifest, separators=(",", ":")))


def compile_launcher(target: Path) -> None:
    """The launcher and the host library, as the package would compile them at its first call."""
    sys.path.insert(0, str(ROOT))
    try:
        from marlin_cutlass import host_library, library
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"a wheel with kernels carries a compiled launcher, which needs {error.name}: build it "
            "where that is installed, with pip wheel --no-build-isolation or "
            "python -m build --wheel --no-isolation"
        ) from error
    target.mkdir(parents=True, exist_ok=True)
    library.build(folder=target)
    host_library.build(folder=target)


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        package = Path(self.build_lib) / "marlin_cutlass"
        headers = package / "csrc" / "marlin_cutlass"
        headers.mkdir(parents=True, exist_ok=True)
        for name in SHARED_HEADERS:
            shutil.copy2(ROOT / "templates" / "include" / "marlin_cutlass" / name, headers)
        if tables():
            for name, folder in tables().items():
                copy_table(folder, package / "data" / name)
            compile_launcher(package / "data" / "runtime")


class Wheel(bdist_wheel):
    """With tables: for this platform and any Python 3, as the launcher knows nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not tables()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(tables())


# setuptools' own build folder would be build/, where the kernels are.
setup(
    distclass=Package,
    cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel},
    options={"build": {"build_base": "dist/.build"}},
)
