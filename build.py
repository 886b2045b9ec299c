#!/usr/bin/env python3
"""Builds kernels: enumerate -> render -> compile -> manifest and dispatch table, into build/<arch>/.

    python build.py --arch sm_86            the default table of one architecture
    python build.py --arch sm_90a --list    what is in it and why
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from generator import arch as archs
from generator import compile as compiling
from generator import dispatch, legality, manifest, render, space
from generator.arch import Arch
from generator.compile import BuildError, Compiler, Job, Outcome
from generator.space import Entry
from generator.variant import FAMILIES, Variant

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)
FULL_SPACE_LIMIT = 400  # more than this is a mistake unless it is only listed


@dataclass(frozen=True)
class Request:
    """What one invocation asks for, per architecture."""

    families: tuple[str, ...] | None
    only: tuple[str, ...]
    filter: str | None
    full: bool

    @property
    def partial(self) -> bool:
        return bool(self.only or self.filter or self.families)


# ---- selection ------------------------------------------------------------------------------------------------------


def resolve_archs(names: list[str]) -> list[Arch]:
    """Architectures of --arch, in order, without repeats; notices go to stderr."""
    chosen: dict[str, Arch] = {}
    for name in names or [_default_arch()]:
        if name == "all":
            found = [archs.ARCHS[a] for a in archs.DEFAULT_ARCHS]
        elif name == "native":
            found = [archs.native_arch()]
        else:
            arch, notice = archs.resolve_arch(name)
            if notice:
                err.print(f"notice: {notice}")
            found = [arch]
        chosen.update((a.name, a) for a in found)
    return list(chosen.values())


def _default_arch() -> str:
    try:
        return archs.native_arch().name
    except ValueError:
        err.print("notice: no GPU found, building sm_86; name another with --arch")
        return "sm_86"


def select(arch: Arch, request: Request) -> list[Entry]:
    """Entries to build; raises ValueError for a name that is unknown or illegal, or a filter that matches nothing."""
    if request.only:
        return [_named(name, arch, request) for name in request.only]
    entries = space.full_space(arch, request.families) if request.full else space.default_space(arch, request.families)
    if request.filter:
        entries = (e for e in entries if fnmatch.fnmatchcase(e.variant.name, request.filter))
    chosen = list(entries)
    if not chosen:
        raise ValueError(f"--filter {request.filter!r} matches no variant of {arch.name}; see --list")
    return chosen


def _named(name: str, arch: Arch, request: Request) -> Entry:
    variant = Variant.parse(name)
    reason = legality.why_not(variant, arch)
    if reason is not None:
        raise ValueError(f"{name} is illegal on {arch.name}: {reason}")
    declared = space.default_space(arch, arch.families)
    return next((e for e in declared if e.variant == variant), Entry(variant, "asked for by name"))


# ---- output ---------------------------------------------------------------------------------------------------------


def print_list(arch: Arch, entries: list[Entry]) -> None:
    table = Table(title=f"{arch.name}: {len(entries)} variants", title_justify="left", box=None, pad_edge=False)
    for column, justify in (("variant", "left"), ("threads", "right"), ("shared bytes", "right"), ("why", "left")):
        table.add_column(column, justify=justify, no_wrap=True)
    for e in entries:
        table.add_row(e.variant.name, str(e.variant.threads), str(e.variant.shared_bytes), e.reason)
    _print_table(table)


def print_report(arch: Arch, entries: list[Entry], folder: Path) -> None:
    """Resources of what is built, and the occupancy they allow."""
    table = Table(title=f"{arch.name}: resources from ptxas", title_justify="left", box=None, pad_edge=False)
    for column in ("variant", "registers", "spill bytes", "threads", "shared bytes", "CTAs/SM", "warps/SM", "s"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for e in entries:
        record = compiling.read_record(folder, e.variant.name)
        if record is not None:
            ctas = occupancy(e.variant, arch, record.registers)
            v = e.variant
            numbers = (record.registers, record.spills, v.threads, v.shared_bytes, ctas, ctas * v.threads // 32)
            table.add_row(v.name, *map(str, numbers), f"{record.seconds:.1f}")
    _print_table(table)


def _print_table(table: Table) -> None:
    """Whole rows even in a narrow terminal or a pipe."""
    console = Console(width=max(out.width, 220))
    console.print(table)


def occupancy(variant: Variant, arch: Arch, registers: int) -> int:
    """CTAs that fit on an SM: shared memory, threads, and registers in units of 256 per warp."""
    per_warp = -(-registers * 32 // 256) * 256
    warps = variant.threads // 32
    return min(
        arch.shared_per_sm // (variant.shared_bytes + archs.RESERVED_SHARED_BYTES),
        arch.threads_per_sm // variant.threads,
        arch.registers_per_sm // (per_warp * warps) if per_warp else 32,
    )


# ---- building -------------------------------------------------------------------------------------------------------


def build_arch(arch: Arch, request: Request, folder: Path, jobs: int, dry_run: bool, report: bool) -> bool:
    """Builds one architecture; returns whether everything asked for is there."""
    entries = select(arch, request)
    if len(entries) > FULL_SPACE_LIMIT:
        raise ValueError(f"{len(entries)} variants of {arch.name}: narrow them with --filter (at most {FULL_SPACE_LIMIT})")
    compiler = Compiler.for_arch(arch)
    work = {e.variant.name: make_job(e, arch, folder) for e in entries}
    stale = [job for job in work.values() if compiling.cached(compiler, job) is None]
    if dry_run:
        for job in stale:
            out.print(f"would compile {job.name}", highlight=False)
        out.print(f"{arch.name}: {len(stale)} of {len(work)} to compile, nothing written", highlight=False)
        return True
    outcomes = _compile(compiler, arch, stale, jobs)
    failed = [o for o in outcomes if o.error is not None]
    built = publish(compiler, arch, request, entries, folder)
    if report:
        print_report(arch, entries, folder)
    for outcome in failed:
        err.print(f"[red]failed[/red] {outcome.name}", highlight=False)
        err.print(outcome.error, highlight=False, markup=False)
    out.print(
        f"{arch.name}: {len(stale) - len(failed)} compiled, {len(work) - len(stale)} up to date, {len(failed)} failed; "
        f"{built} in {folder / 'manifest.json'}",
        highlight=False,
    )
    return not failed


def make_job(entry: Entry, arch: Arch, folder: Path) -> Job:
    v = entry.variant
    registers = legality.max_registers(v, arch)
    return Job(v.name, render.render(v), folder, entry.allowed_spill_bytes, registers)


def _compile(compiler: Compiler, arch: Arch, stale: list[Job], jobs: int) -> list[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=err, disable=not stale) as progress:
        task = progress.add_task(arch.name, total=len(stale), last="")
        return compiling.compile_all(
            compiler, stale, jobs, lambda o: progress.update(task, advance=1, last=("FAILED " if o.error else "") + o.name)
        )


def publish(compiler: Compiler, arch: Arch, request: Request, entries: list[Entry], folder: Path) -> int:
    """Writes the manifest: what was asked for and, after a partial build, what an earlier one left up to date."""
    listed = {e.variant.name: e for e in entries}
    if request.partial:
        for name in manifest.listed_names(folder):
            if name not in listed:
                variant = Variant.parse(name)
                if legality.why_not(variant, arch) is None:
                    listed[name] = _named(name, arch, request)
    built = []
    for entry in listed.values():
        record = compiling.cached(compiler, make_job(entry, arch, folder))
        if record is not None:
            built.append((entry, record))
    table = dispatch.build_table(arch, [entry.variant for entry, _ in built])
    manifest.write_manifest(folder, arch, built, table.to_json())
    return len(built)


def main(
    arch: Annotated[Optional[list[str]], typer.Option(help="sm_80, sm_86, sm_89, sm_90a, native or all; repeatable. Default: the GPU found, else sm_86")] = None,
    family: Annotated[Optional[list[str]], typer.Option(help=f"only these kernel families ({', '.join(FAMILIES)}); repeatable")] = None,
    list_: Annotated[bool, typer.Option("--list", help="print the variants and why each is in; build nothing")] = False,
    only: Annotated[Optional[list[str]], typer.Option(help="only this variant, by full name; repeatable")] = None,
    filter: Annotated[Optional[str], typer.Option(help="only variants whose name matches this glob")] = None,
    space_: Annotated[str, typer.Option("--space", help="default or full")] = "default",
    jobs: Annotated[Optional[int], typer.Option(min=1, help="parallel compilations; default: CPUs, at most $MAX_JOBS")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be compiled; write nothing")] = False,
    out_: Annotated[Path, typer.Option("--out", help="output folder; cubins go to OUT/<arch>")] = Path("build"),
    report: Annotated[bool, typer.Option("--report", help="print registers, spills, shared memory and occupancy")] = False,
) -> None:
    """Compile the INT4 GEMM kernels of one or more GPU architectures."""
    try:
        ok = _run(arch or [], family or [], list_, only or [], filter, space_, jobs, dry_run, out_, report)
    except (ValueError, BuildError) as error:
        err.print(f"[red]error:[/red] {str(error)}", highlight=False)
        raise typer.Exit(2) from None
    if not ok:
        raise typer.Exit(1)


def _run(arch, family, list_, only, filter, space_, jobs, dry_run, out_, report) -> bool:
    if space_ not in ("default", "full"):
        raise ValueError(f"--space {space_!r} is not default or full")
    for name in family:
        if name not in FAMILIES:
            raise ValueError(f"--family {name!r} is not one of {', '.join(FAMILIES)}")
    request = Request(tuple(dict.fromkeys(family)) or None, tuple(dict.fromkeys(only)), filter, space_ == "full")
    ok = True
    for target in resolve_archs(arch):
        if list_:
            print_list(target, select(target, request))
        else:
            ok &= build_arch(target, request, out_ / target.name, jobs or compiling.default_jobs(), dry_run, report)
    return ok


if __name__ == "__main__":
    typer.run(main)
