"""Compiles the runtime (once) and kernels (about 0.2 s each) with the host compiler, cached by
content."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = Path(__file__).resolve().parent / "runtime"
INCLUDE = ROOT / "templates" / "include"
CACHE = ROOT / "build" / "emulator"

COMMON_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-Wno-psabi")
RUNTIME_FLAGS = ("-O3", "-march=native", "-Wall", "-Wextra", "-g")
# Variables start as 0xfe bytes (NaN as fp16, -1.7e38 as fp32), and one that leaves its scope keeps
# its place: a wgmma in flight may still read it. -g1 is enough for line numbers in messages.
KERNEL_FLAGS = (
    "-O1",
    "-g1",
    "-x",
    "c++",
    "-ftrivial-auto-var-init=pattern",
    "-fstack-reuse=none",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",
)
DEBUG_FLAGS = ("-O0", "-g3")


def compiler() -> str:
    """The host C++ compiler: $CXX or g++."""
    return os.environ.get("CXX", "g++")


@functools.lru_cache(maxsize=1)
def _machine_key() -> str:
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    return version.stdout.splitlines()[0] + platform.processor() + platform.machine() + _cpu_flags()


def _cpu_flags() -> str:
    """-march=native code must not be reused on a CPU with fewer features (a cache may be
    copied)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def _digest(files: list[Path], *texts: str) -> str:
    digest = hashlib.sha256("\0".join((_machine_key(), *texts)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def _compile(target: Path, arguments: list[str], what: str) -> Path:
    """Compiles aside and renames, so that concurrent test processes never load half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        output = Path(directory) / target.name
        done = subprocess.run(
            [compiler(), *arguments, "-o", str(output)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the host compiler rejected {what}:\n{done.stderr[-8000:]}")
        os.replace(output, target)
    return target


def build_runtime() -> Path:
    """The shared library with scheduler, memory and instructions; raises RuntimeError with the
    compiler's output."""
    sources = sorted(RUNTIME.glob("*.cpp"))
    headers = [
        *RUNTIME.glob("*.h"),
        INCLUDE / "marlin_cutlass/emu_api.h",
        INCLUDE / "marlin_cutlass/params.h",
    ]
    flags = [*COMMON_FLAGS, *RUNTIME_FLAGS, *os.environ.get("EMULATOR_RUNTIME_FLAGS", "").split()]
    target = CACHE / f"runtime-{_digest(sources + sorted(headers), *flags)}.so"
    if target.is_file():
        return target
    arguments = [*flags, f"-I{RUNTIME}", f"-I{INCLUDE}", *map(str, sources), "-ldl"]
    return _compile(target, arguments, "the emulator's runtime")


@functools.lru_cache(maxsize=8)
def _headers(include: Path) -> list[Path]:
    return sorted(path for path in include.rglob("*") if path.suffix in (".h", ".cuh"))


def build_kernel(source: str, name: str, include: Path = INCLUDE, debug: bool = False) -> Path:
    """Shared library of one kernel source.

    include: directory that holds marlin_cutlass/*.cuh, changed copies for mutation tests. debug: no
    optimisation and full symbols, for gdb. Raises RuntimeError with the compiler's output.
    """
    flags = [*COMMON_FLAGS, *KERNEL_FLAGS, *(DEBUG_FLAGS if debug else ())]
    target = CACHE / f"{name}-{_digest(_headers(include), source, *flags)}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_suffix(".cu")
    path.write_text(source)
    return _compile(target, [*flags, f"-I{include}", str(path)], name)
