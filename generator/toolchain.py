"""nvcc and its options: where the compiler is found and how every kernel is compiled."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from generator.arch import Arch
from generator.render import INCLUDE

ERROR_LINES = 20  # of the compiler's output in an error


class BuildError(Exception):
    """A failure the user can act on; its text is the whole message."""


# ---- the compiler --------------------------------------------------------------------------------


def find_nvcc(env: Mapping[str, str] = os.environ) -> Path:
    """nvcc from $NVCC, $CUDA_HOME/bin, PATH, or PyPI's CUDA packages; BuildError lists where it
    looked.
    """
    looked = []
    for where, candidate in _nvcc_candidates(env):
        looked.append(f"  {where}")
        if candidate is not None and candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise BuildError(
        "nvcc was not found. Looked at:\n"
        + "\n".join(looked)
        + '\nInstall it with: pip install "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"'
    )


def _nvcc_candidates(env: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    nvcc, home, path = env.get("NVCC"), env.get("CUDA_HOME"), env.get("PATH", "")
    named = shutil.which(nvcc, path=path) if nvcc else None
    yield f"$NVCC ({nvcc or 'not set'})", Path(named) if named else None
    yield f"$CUDA_HOME/bin ({home or 'not set'})", Path(home) / "bin" / "nvcc" if home else None
    found = shutil.which("nvcc", path=path)
    yield f"PATH ({path})", Path(found) if found else None
    for site in dict.fromkeys(sysconfig.get_paths()[k] for k in ("purelib", "platlib")):
        pypi = Path(site) / "nvidia" / "cu13" / "bin" / "nvcc"
        yield f"PyPI packages ({pypi})", pypi


@functools.cache
def nvcc_version(nvcc: Path) -> str:
    run = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    match = re.search(r"release (\S+), (V\S+)", run.stdout)
    if run.returncode or match is None:
        raise BuildError(f"{nvcc} --version failed:\n{last_lines(run.stdout + run.stderr)}")
    return match[2]


def cutlass_include() -> Path:
    """Headers of the nvidia-cutlass wheel."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise BuildError(
            "cutlass_library was not found; install it with: "
            "pip install --no-deps nvidia-cutlass==4.2.0.0"
        )
    return Path(spec.origin).parent / "source" / "include"


def flags(arch: Arch, env: Mapping[str, str] = os.environ) -> list[str]:
    """Options of every compilation of a cubin for `arch`."""
    return [*_options(arch), "-cubin", *_include_folders(), *_host_compiler(env)]


def library_flags(arch: Arch, env: Mapping[str, str] = os.environ) -> list[str]:
    """Options for a kernel with its host code: a small shared library that brings its CUDA runtime,
    loads without a driver and shows nothing but what it exports.
    """
    host = ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-cudart", "static"]
    link = ["-Xlinker", "--strip-all,--gc-sections,--exclude-libs=ALL"]
    return [*_options(arch), "-shared", *host, *link, *_include_folders(), *_host_compiler(env)]


def _options(arch: Arch) -> list[str]:
    return [
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",  # asserts are calls, and a call serialises wgmma (C7510)
        "-Xptxas",
        "-v",
        f"-gencode=arch={arch.compute},code={arch.name}",
    ]


def _include_folders() -> list[str]:
    return [f"-I{INCLUDE}", f"-I{cutlass_include()}"]


def _host_compiler(env: Mapping[str, str]) -> list[str]:
    words = [
        w
        for w in shlex.split(env.get("CXX", ""))
        if os.path.basename(w) not in ("ccache", "sccache")
    ]
    if not words:
        return []
    if shutil.which(words[0], path=env.get("PATH")) is None:
        raise BuildError(f"CXX={env['CXX']!r}: {words[0]} was not found")
    return ["-ccbin", words[0]]


def default_jobs(env: Mapping[str, str] = os.environ) -> int:
    """Parallel compilations: the CPUs this process may use, at most MAX_JOBS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = env.get("MAX_JOBS")
    if limit is None:
        return cpus
    if not limit.isdigit() or int(limit) < 1:
        raise BuildError(f"MAX_JOBS={limit!r} is not a positive number")
    return min(cpus, int(limit))


def last_lines(text: str) -> str:
    """The end of a compiler's output, where its errors are."""
    return "\n".join(text.strip().splitlines()[-ERROR_LINES:])
