#!/usr/bin/env python3
"""Builds kernels: enumerate -> render -> compile -> manifest with dispatch table.

    python build.py --arch sm_86            the default table of one architecture
    python build.py --arch sm_90a --list    what is in it and why

Output goes to build/<arch>/: one cubin per variant (of the opt-in family collective: one library)
and manifest.json. Exit status: 0 all built, 1 a kernel failed (the others are built and listed),
2 the request is wrong.
"""

from __future__ import annotations

import fnmatch
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from generator import arch as archs
    from generator import collective, legality, manifest, render, rows, space
    from generator import compile as compiling
    from generator.arch import Arch
    from generator.collective import CollectiveVariant
    from generator.compile import Compiler, Job, Outcome, Record
    from generator.space import Entry
    from generator.toolchain import BuildError, default_jobs
    from generator.variant import FAMILIES, SPARSE_FAMILIES, Variant
except ModuleNotFoundError as error:
    print(
        f"error: {sys.executable} has no {error.name}: run make install and use .venv/bin/python,"
        ' or pip install -e ".[build]"',
        file=sys.stderr,
    )
    sys.exit(2)

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)
BUILDABLE_FAMILIES = (*FAMILIES, collective.FAMILY)
MAX_VARIANTS = 1000  # per architecture and build; a larger request is a slip


@dataclass(frozen=True)
class Request:
    """What one invocation asks for, on every architecture."""

    families: tuple[str, ...] = ()  # empty: those of the default table
    only: tuple[str, ...] = ()
    pattern: str | None = None
    full: bool = False

    @property
    def partial(self) -> bool:
        """Whether what an earlier build left stays in the manifest."""
        return bool(self.only or self.pattern or self.families)


# ---- selection -----------------------------------------------------------------------------------


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
    """Entries to build.

    Raises ValueError for a name that is malformed or illegal, or a filter that matches nothing.
    """
    if request.only:
        return [named(name, arch) for name in request.only]
    choose = space.full_space if request.full else space.default_space
    entries = list(choose(arch, _families_of(arch, request) or None))
    if request.pattern is not None:
        entries = [e for e in entries if fnmatch.fnmatchcase(e.variant.name, request.pattern)]
    if not entries:
        raise ValueError(
            f"--filter {request.pattern!r} matches no variant of {arch.name}; see --list"
        )
    return entries


def _families_of(arch: Arch, request: Request) -> tuple[str, ...]:
    """The families asked for: `sparse` stands for every family of sparse weights that runs here."""
    sparse = tuple(f for f in arch.families if f in SPARSE_FAMILIES)
    groups = (sparse if family == "sparse" else (family,) for family in request.families)
    return tuple(dict.fromkeys(family for group in groups for family in group))


def named(name: str, arch: Arch) -> Entry:
    """The entry called `name`: declared, or any other that is legal."""
    rules = collective if collective.is_collective(name) else legality
    variant = (CollectiveVariant if rules is collective else Variant).parse(name)
    reason = rules.why_not(variant, arch)
    if reason is not None:
        raise ValueError(f"{name} is illegal on {arch.name}: {reason}")
    declared = space.default_space(arch, (*arch.families, *collective.families(arch)))
    return next((e for e in declared if e.variant == variant), Entry(variant, "asked for by name"))


# ---- output --------------------------------------------------------------------------------------


def _print_table(title: str, columns: list[str], lines: list[tuple], right: range) -> None:
    """Columns in `right` end at the same place. Rich's tables take half a second for 600 lines."""
    rows = [tuple(columns), *(tuple(map(str, line)) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(title)
    for row in rows:
        cells = (
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))
        )
        print("  ".join(cells).rstrip())


def print_list(arch: Arch, entries: list[Entry]) -> None:
    """Name, threads, shared memory of every entry, and why it is in."""
    lines = [(e.variant.name, e.variant.threads, e.variant.shared_bytes, e.reason) for e in entries]
    columns = ["variant", "threads", "shared bytes", "why"]
    _print_table(f"{arch.name}: {len(entries)} variants", columns, lines, range(1, 3))


def print_report(arch: Arch, entries: list[Entry], folder: Path) -> None:
    """Resources of what is built, and the occupancy they allow."""
    lines = []
    for v in (e.variant for e in entries):
        record = compiling.read_record(folder, v.name)
        if record is not None:
            ctas = legality.occupancy(v, arch, record.registers)
            warps = ctas * v.threads // 32
            resources = (record.registers, record.spills, v.threads, v.shared_bytes)
            lines.append((v.name, *resources, ctas, warps, f"{record.seconds:.1f}"))
    columns = ["variant", "registers", "spill bytes", "threads", "shared bytes"]
    columns += ["CTAs/SM", "warps/SM", "seconds"]
    _print_table(f"{arch.name}: resources from ptxas", columns, lines, range(1, len(columns)))


def print_failures(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        err.print(f"[red]failed[/red] {outcome.name}")
        err.print(outcome.error, markup=False)


# ---- building ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Builder:
    """One architecture's output folder and compiler."""

    arch: Arch
    folder: Path
    compiler: Compiler

    def job(self, entry: Entry) -> Job:
        v = entry.variant
        registers = legality.max_registers(v, self.arch)
        return Job(v.name, render.render(v), self.folder, entry.allowed_spill_bytes, registers)

    def cached(self, entry: Entry) -> Record | None:
        return compiling.cached(self.compiler, self.job(entry))

    def compile(self, stale: list[Entry], parallel: int) -> list[Outcome]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with Progress(*columns, console=err, disable=not stale) as progress:
            task = progress.add_task(self.arch.name, total=len(stale), last="")

            def done(outcome: Outcome) -> None:
                last = f"{'FAILED ' if outcome.error else ''}{outcome.name}"
                progress.update(task, advance=1, last=last)

            jobs = [self.job(e) for e in stale]
            return compiling.compile_all(self.compiler, jobs, parallel, done)

    def publish(self, entries: list[Entry], keep_others: bool) -> int:
        """Writes the manifest over everything that is up to date; returns how many that are.

        What an earlier build listed of families that this one did not build stays if its cubin is
        still current; with `keep_others`, of all families.
        """
        listed = {e.variant.name: e for e in entries}
        families = {e.variant.family for e in entries}
        for name in manifest.listed_names(self.folder):
            try:
                earlier = named(name, self.arch)
            except ValueError:  # malformed, or no longer legal
                continue
            if keep_others or earlier.variant.family not in families:
                listed.setdefault(name, earlier)
        records = ((entry, self.cached(entry)) for entry in listed.values())
        built = [(entry, record) for entry, record in records if record is not None]
        kernels = (entry.variant for entry, _ in built)
        variants = [v for v in kernels if v.family != collective.FAMILY]
        manifest.write_manifest(self.folder, self.arch, built, *self.dispatch(variants))
        return len(built)

    def dispatch(self, variants: list[Variant]) -> tuple[list[dict], str]:
        """The rows of the dispatch table, and the key of what they were made from. Those of the
        manifest that is there if nothing changed: making them takes seconds."""
        key = rows.table_key(self.arch, variants)
        earlier = manifest.earlier_dispatch(self.folder, key)
        if earlier is not None:
            return earlier, key
        # A row's geometry says which kind of weight it is for, so the order of the two is free.
        tables = [rows.build_table(self.arch, variants, sparse=sparse) for sparse in (False, True)]
        return [row for table in tables for row in table.to_json()], key


def build(arch: Arch, request: Request, folder: Path, jobs: int, report: bool) -> bool:
    """Builds one architecture; returns whether everything asked for is there."""
    entries = select(arch, request)
    builder = _builder(arch, entries, folder)
    stale = [e for e in entries if builder.cached(e) is None]
    failed = [o for o in builder.compile(stale, jobs) if o.error is not None]
    listed = builder.publish(entries, request.partial)
    if report:
        print_report(arch, entries, folder)
    print_failures(failed)
    out.print(
        f"{arch.name}: {len(stale) - len(failed)} compiled, {len(entries) - len(stale)} up to "
        f"date, {len(failed)} failed; {listed} listed in {folder / 'manifest.json'}"
    )
    return not failed


def plan(arch: Arch, request: Request, folder: Path) -> None:
    """Prints what `build` would compile; writes nothing."""
    entries = select(arch, request)
    builder = _builder(arch, entries, folder)
    stale = [e for e in entries if builder.cached(e) is None]
    for entry in stale:
        out.print(f"would compile {entry.variant.name}")
    out.print(f"{arch.name}: {len(stale)} of {len(entries)} to compile, nothing written")


def _builder(arch: Arch, entries: list[Entry], folder: Path) -> Builder:
    if len(entries) > MAX_VARIANTS:
        raise ValueError(
            f"{len(entries)} variants of {arch.name} are more than {MAX_VARIANTS}: "
            "narrow them with --filter or --family"
        )
    return Builder(arch, folder, Compiler.for_arch(arch))


# ---- command line --------------------------------------------------------------------------------

ARCH_HELP = (
    f"{', '.join(archs.ARCHS)}, native or all ({', '.join(archs.DEFAULT_ARCHS)}); repeatable. "
    "Default: the GPU's, else sm_86"
)
FAMILY_HELP = (
    f"only these kernel families ({', '.join(BUILDABLE_FAMILIES)}); repeatable; sparse stands for "
    "every family of 2:4-sparse weights of the architecture"
)
Strings = list[str] | None


def main(
    arch: Annotated[Strings, typer.Option(help=ARCH_HELP)] = None,
    family: Annotated[Strings, typer.Option(help=FAMILY_HELP)] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="print the variants and why each is in; build nothing")
    ] = False,
    only: Annotated[Strings, typer.Option(help="this variant, by full name; repeatable")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", help="only variants whose name matches this glob")
    ] = None,
    space_: Annotated[str, typer.Option("--space", help="default or full")] = "default",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="parallel compilations; default: CPUs, <= $MAX_JOBS")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be compiled; write nothing")
    ] = False,
    out_: Annotated[
        Path, typer.Option("--out", help="output folder; cubins go to OUT/<arch>")
    ] = Path("build"),
    report: Annotated[
        bool, typer.Option("--report", help="registers, spills, shared memory and occupancy")
    ] = False,
) -> None:
    """Compile the INT4 GEMM kernels of one or more GPU architectures."""
    try:
        request = _request(family or [], only or [], pattern, space_)
        targets = resolve_archs(arch or [])
        if list_:
            for target in targets:
                print_list(target, select(target, request))
        elif dry_run:
            for target in targets:
                plan(target, request, out_ / target.name)
        else:
            parallel = jobs or (1 if collective.FAMILY in request.families else default_jobs())
            results = [build(t, request, out_ / t.name, parallel, report) for t in targets]
            raise typer.Exit(0 if all(results) else 1)
    except (ValueError, BuildError, OSError) as error:
        err.print("[red]error:[/red]", end=" ")
        err.print(str(error), markup=False)
        raise typer.Exit(2) from None


def _request(family: list[str], only: list[str], pattern: str | None, which: str) -> Request:
    if which not in ("default", "full"):
        raise ValueError(f"--space {which!r} is not default or full")
    for name in family:
        if name not in BUILDABLE_FAMILIES:
            raise ValueError(f"--family {name!r} is not one of {', '.join(BUILDABLE_FAMILIES)}")
    unique = tuple(dict.fromkeys(only))
    return Request(tuple(dict.fromkeys(family)), unique, pattern, which == "full")


if __name__ == "__main__":
    typer.run(main)
