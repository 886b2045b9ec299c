"""Kernels compiled on demand: `gemm(..., kernel="name")` on a variant that is not built, and
explore.

A cubin lies in the JIT cache beside a digest of the source and the headers that it came from.
Where both agree no compiler runs, in this process or another. An illegal variant is refused with
the rule.

    python -m marlin_cutlass.jit NAME ... --arch sm_90a     fills the cache without a GPU
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from marlin_cutlass import dispatch, settings
from marlin_cutlass.manifest import MANIFEST_FORMAT

# A kernel that spills is right, only slower; what it spills is shown, not forbidden.
ALLOWED_SPILL_BYTES = 1 << 20


class CannotCompile(Exception):
    """Nothing can be compiled here: no nvcc, no folder, or a package is missing."""


def enabled() -> bool:
    """Whether gemm may compile what is not built: MARLIN_CUTLASS_JIT=0 forbids it."""
    return settings.switch("MARLIN_CUTLASS_JIT", True)


def cache_folders(arch: str) -> list[Path]:
    """Where compiled kernels may lie, in order: $MARLIN_CUTLASS_JIT_CACHE alone, or the build
    folder and the user's cache; apart for each format, since kernels of another have other
    parameters."""
    version = f"v{MANIFEST_FORMAT}"
    given = os.environ.get("MARLIN_CUTLASS_JIT_CACHE")
    if given:
        return [Path(given) / version / arch]
    roots = dict.fromkeys([*dispatch.build_roots(), *dispatch.default_roots()[:1]])
    return [root / "jit" / version / arch for root in (*roots, *settings.cache_folders())]


def writable_folder(arch: str) -> Path:
    """The first cache folder that can be written; OSError if there is none."""
    for folder in cache_folders(arch):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    raise OSError(f"no folder can be written: {', '.join(map(str, cache_folders(arch)))}")


# ---- the cache -----------------------------------------------------------------------------------


def digest(source: str) -> str:
    """Identifies a source and our headers behind it, whatever the compiler."""
    from generator.compile import reachable_headers
    from generator.render import INCLUDE

    found = hashlib.sha256(source.encode())
    for header in reachable_headers(source):
        found.update(header.encode() + b"\0" + (INCLUDE / header).read_bytes())
    return found.hexdigest()


def _digest_path(folder: Path, name: str) -> Path:
    return folder / "records" / f"{name}.digest"


def find(variant, arch: str) -> dispatch.Kernel | None:
    """The cached kernel of a variant, if its cubin is whole and its source has not changed.

    Where sources cannot be rendered (no jinja2 or cutlass_library) a whole cubin is trusted.
    """
    try:
        from generator.render import render

        wanted = digest(render(variant))
    except ImportError:
        wanted = None
    for folder in cache_folders(arch):
        record = read_record(folder, variant.name)
        if record is None:
            continue
        path = _digest_path(folder, variant.name)
        if wanted is None or (path.is_file() and path.read_bytes().strip() == wanted.encode()):
            return kernel_of(variant, record, folder)
    return None


def read_record(folder: Path, name: str) -> dict[str, Any] | None:
    """What generator.compile wrote beside a cubin that is there and unchanged, else None.

    Read here, so that a machine that only runs kernels needs nothing that compiles them.
    """
    try:
        record = json.loads((folder / "records" / f"{name}.json").read_bytes())
        cubin = (folder / f"{name}.cubin").read_bytes()
        return record if hashlib.sha256(cubin).hexdigest() == record["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def kernel_of(variant, record: Mapping[str, Any], folder: Path) -> dispatch.Kernel:
    """A table's entry for a cubin outside the table's folder."""
    row = {
        **asdict(variant),
        "name": variant.name,
        "threads": variant.threads,
        "shared_bytes": variant.shared_bytes,
        "cluster": variant.cluster,
        "file": str((folder / f"{variant.name}.cubin").resolve()),
        "sha256": record["sha256"],
    }
    names = {f.name for f in fields(dispatch.Kernel)}
    return dispatch.Kernel(**{key: value for key, value in row.items() if key in names})


# ---- compiling -----------------------------------------------------------------------------------


def compile_variants(
    variants: Iterable,
    arch,
    parallel: int | None = None,
    done: Callable[[str, str | None], None] = lambda name, error: None,
) -> tuple[dict[str, dispatch.Kernel], dict[str, str]]:
    """Compiles legal variants into the cache: kernels and errors by name.

    parallel: None is a process for each CPU, at most $MAX_JOBS. done(name, error) is called as each
    is finished. Raises CannotCompile where nothing can be.
    """
    try:
        from generator import compile as compiling
        from generator.legality import max_registers
        from generator.render import render, write_if_changed
        from generator.toolchain import BuildError, default_jobs

        compiler = compiling.Compiler.for_arch(arch)
        folder = writable_folder(arch.name)
    except (ImportError, OSError) as error:
        raise CannotCompile(str(error)) from error
    except BuildError as error:
        raise CannotCompile(str(error)) from error
    by_name = {v.name: v for v in variants}
    sources = {name: render(v) for name, v in by_name.items()}
    digests = {name: digest(source) for name, source in sources.items()}
    jobs = [
        compiling.Job(
            name, sources[name], folder, ALLOWED_SPILL_BYTES, max_registers(by_name[name], arch)
        )
        for name in by_name
    ]
    kernels: dict[str, dispatch.Kernel] = {}
    errors: dict[str, str] = {}

    def finish(outcome: compiling.Outcome) -> None:
        if outcome.record is None:
            errors[outcome.name] = outcome.error or "failed"
        else:
            write_if_changed(_digest_path(folder, outcome.name), digests[outcome.name] + "\n")
            record = asdict(outcome.record)
            kernels[outcome.name] = kernel_of(by_name[outcome.name], record, folder)
        done(outcome.name, outcome.error)

    compiling.compile_all(compiler, jobs, parallel or default_jobs(), finish)
    return kernels, errors


def obtain(name: str, arch_name: str) -> dispatch.Kernel:
    """The kernel called `name` from the cache, else compiled now.

    Raises ValueError with the rule that an illegal variant breaks, or with what the compiler said.
    """
    from generator.arch import ARCHS
    from generator.legality import why_not
    from generator.variant import Variant

    variant, arch = Variant.parse(name), ARCHS[arch_name]
    reason = why_not(variant, arch)
    if reason is not None:
        raise ValueError(f"it is illegal there: {reason}")
    kernel = find(variant, arch_name)
    if kernel is not None:
        return kernel
    try:
        kernels, errors = compile_variants([variant], arch)
    except CannotCompile as error:
        raise ValueError(f"it cannot be compiled here: {error}") from error
    if errors:
        raise ValueError(f"compiling it failed: {errors[name]}")
    return kernels[name]


def complete(name: str, table: dispatch.Table, form: tuple[str, bool, int]):
    """The kernel that a forced name or geometry means for a format, if it is not in `table`.

    None where the table has it, where compiling on demand is off, or without the generator. Raises
    ValueError where it can never exist.
    """
    wanted = table.full_name(name, *form)
    if table.index(wanted) >= 0 or not enabled():
        return None
    try:
        return obtain(wanted, table.arch)
    except ModuleNotFoundError:  # an installed package has no generator
        return None
    except ValueError as error:
        raise ValueError(f"kernel={name!r} is not built for {table.arch}, and {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Compiles variants into the cache and prints their cubins."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m marlin_cutlass.jit", description=main.__doc__)
    text = "names of variants, or geometries, which mean f16 and group 128"
    parser.add_argument("names", nargs="+", help=text)
    parser.add_argument("--arch", required=True, help="such as sm_90a")
    options = parser.parse_args(arguments)
    for name in options.names:
        try:
            from generator.arch import resolve_arch  # not in every installation

            full = name if "_g" in name else dispatch.with_format(name, "f16", False, 128)
            print(obtain(full, resolve_arch(options.arch)[0].name).file)
        except (ValueError, ModuleNotFoundError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
