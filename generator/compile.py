"""From a rendered source to a checked cubin: nvcc, what ptxas said, and a cache by content."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from generator.arch import Arch
from generator.collective import is_collective
from generator.render import INCLUDE, write_if_changed
from generator.toolchain import find_nvcc, flags, last_lines, library_flags, nvcc_version

ASIDE = ".building-"  # prefix of the folders in which nvcc writes
ABANDONED_SECONDS = 24 * 3600

# ---- what ptxas said -----------------------------------------------------------------------------


@dataclass
class PtxasReport:
    """Resources of one kernel as `ptxas -v` prints them."""

    registers: int = 0
    spill_stores: int = 0  # bytes
    spill_loads: int = 0
    stack: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


def parse_ptxas(text: str) -> PtxasReport:
    """Reads registers, spills and performance warnings (C75xx: wgmma serialised) from the
    compiler's output.
    """
    report = PtxasReport()
    # A device function that was not inlined has lines of its own: nothing of it may be missed.
    report.registers = max((int(n) for n in re.findall(r"Used (\d+) registers", text)), default=0)
    frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    for stack, stores, loads in re.findall(frame, text):
        report.stack += int(stack)
        report.spill_stores += int(stores)
        report.spill_loads += int(loads)
    for line in text.splitlines():
        if re.search(r"\bC75\d\d\b", line) or ("warning" in line.lower() and "ptxas" in line):
            report.warnings.append(line.strip())
    return report


def complaint(
    report: PtxasReport, allowed_spill_bytes: int = 0, max_registers: int = 255
) -> str | None:
    """Why a kernel that compiled is still refused, or None."""
    serious = [w for w in report.warnings if re.search(r"\bC75\d\d\b", w)]
    if serious:
        return "ptxas serialises wgmma, which costs 15 %:\n" + "\n".join(dict.fromkeys(serious))
    if report.spills > allowed_spill_bytes:
        return (
            f"{report.spill_stores} bytes of spill stores and {report.spill_loads} of loads at "
            f"{report.registers} registers; allowed are {allowed_spill_bytes}"
        )
    if report.registers > max_registers:
        return (
            f"{report.registers} registers a thread; with more than {max_registers} fewer CTAs fit "
            "on an SM than ctas_per_sm says, and CTAs that wait for each other would hang"
        )
    return None


# ---- one compilation -----------------------------------------------------------------------------


def file_name(name: str) -> str:
    """The file of a kernel: a cubin, or a library where CUTLASS's host code launches it."""
    return f"{name}.so" if is_collective(name) else f"{name}.cubin"


@dataclass(frozen=True)
class Job:
    """A kernel to compile into `folder`/`file_name(name)`."""

    name: str
    source: str
    folder: Path
    allowed_spill_bytes: int = 0
    max_registers: int = 255  # beyond this fewer CTAs fit on an SM than the variant declares

    @property
    def binary(self) -> Path:
        return self.folder / file_name(self.name)


@dataclass
class Record:
    """What is known of a built cubin; kept beside it as JSON."""

    name: str
    key: str
    sha256: str
    seconds: float
    registers: int
    spills: int
    stack: int


@dataclass
class Outcome:
    name: str
    record: Record | None = None
    error: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class Compiler:
    """nvcc with fixed options; `key` identifies everything that decides the bits of a cubin."""

    nvcc: Path
    flags: tuple[str, ...]
    version: str
    env_flags: str = ""
    library_flags: tuple[str, ...] = ()  # instead of `flags` for a kernel with host code

    @classmethod
    def for_arch(cls, arch: Arch, env: Mapping[str, str] = os.environ) -> Compiler:
        nvcc = find_nvcc(env)
        extra = "".join(
            f"{k}={env.get(k, '')};" for k in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
        )
        with_host = tuple(library_flags(arch, env))
        return cls(nvcc, tuple(flags(arch, env)), nvcc_version(nvcc), extra, with_host)

    def options(self, name: str) -> tuple[str, ...]:
        """Options for the kernel called `name`."""
        return self.library_flags if is_collective(name) else self.flags

    def key(self, source: str, name: str = "") -> str:
        # Of our headers the texts count, not where they lie: a moved checkout is up to date.
        options = "\0".join(self.options(name)).replace(str(INCLUDE), "our headers")
        digest = hashlib.sha256()
        for text in (self.version, self.env_flags, options, source):
            digest.update(text.encode() + b"\0")
        for header in reachable_headers(source):
            digest.update(header.encode() + b"\0" + _header_bytes(header))
        return digest.hexdigest()

    def compile(self, job: Job) -> Outcome:
        """Compiles aside and renames; a refused or failed kernel leaves no cubin behind."""
        source = job.folder / "src" / f"{job.name}.cu"
        write_if_changed(source, job.source)
        binary = job.binary
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=job.folder, prefix=ASIDE) as aside:
            temporary = Path(aside) / binary.name
            options = self.options(job.name)
            command = [str(self.nvcc), *options, "-o", str(temporary), str(source)]
            run = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            report = parse_ptxas(run.stdout)
            error = None
            if run.returncode:
                how = "failed" if run.returncode > 0 else "was killed by a signal"
                error = (
                    f"nvcc {how} ({run.returncode}); its last lines:\n{last_lines(run.stdout)}\n"
                    f"command: {shlex.join(command)}"
                )
            elif not temporary.is_file() or not temporary.stat().st_size:
                error = f"nvcc wrote no {binary.suffix[1:]}; command: {shlex.join(command)}"
            elif source.read_text() != job.source:
                error = f"{source} was changed by another build while it was compiled"
            else:
                error = complaint(report, job.allowed_spill_bytes, job.max_registers)
            if error is not None:
                discard(job)
                return Outcome(job.name, error=error)
            seconds = time.monotonic() - started
            return Outcome(job.name, self._keep(job, temporary, report, seconds))

    def _keep(self, job: Job, temporary: Path, report: PtxasReport, seconds: float) -> Record:
        record = Record(
            name=job.name,
            key=self.key(job.source, job.name),
            sha256=hashlib.sha256(temporary.read_bytes()).hexdigest(),
            seconds=round(seconds, 2),
            registers=report.registers,
            spills=report.spills,
            stack=report.stack,
        )
        os.replace(temporary, job.binary)
        write_if_changed(
            record_path(job.folder, job.name), json.dumps(asdict(record), indent=1) + "\n"
        )
        return record


def record_path(folder: Path, name: str) -> Path:
    return folder / "records" / f"{name}.json"


def read_record(folder: Path, name: str) -> Record | None:
    """The record of a cubin that is there and unchanged, else None."""
    try:
        record = Record(**json.loads(record_path(folder, name).read_bytes()))
        binary = (folder / file_name(name)).read_bytes()
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = (record.seconds, record.registers, record.spills, record.stack)
    if not all(type(value) in (int, float) for value in numbers):
        return None
    return record if hashlib.sha256(binary).hexdigest() == record.sha256 else None


def discard(job: Job) -> None:
    job.binary.unlink(missing_ok=True)
    record_path(job.folder, job.name).unlink(missing_ok=True)


def cached(compiler: Compiler, job: Job) -> Record | None:
    """The record of `job` if its cubin is up to date and within the spills allowed now."""
    record = read_record(job.folder, job.name)
    if record is None or record.key != compiler.key(job.source, job.name) or _refused(record, job):
        return None
    return record


def _refused(record: Record, job: Job) -> bool:
    return record.spills > job.allowed_spill_bytes or record.registers > job.max_registers


def compile_all(
    compiler: Compiler,
    jobs: Iterable[Job],
    parallel: int,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Outcomes in the order of `jobs`; `done` is called as each finishes. One failure does not stop
    the others.
    """
    jobs = list(jobs)
    for folder in {job.folder for job in jobs}:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
    outcomes: dict[int, Outcome] = {}
    pool = ThreadPoolExecutor(max_workers=parallel)
    try:
        futures = {pool.submit(compiler.compile, job): i for i, job in enumerate(jobs)}
        for future in as_completed(futures):
            outcomes[futures[future]] = future.result()
            done(future.result())
    finally:
        pool.shutdown(cancel_futures=True)
    return [outcomes[i] for i in range(len(jobs))]


def _remove_abandoned(folder: Path) -> None:
    """What killed builds have left: no compilation takes a day."""
    for path in folder.glob(f"{ASIDE}*"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


# ---- headers -------------------------------------------------------------------------------------


def reachable_headers(source: str) -> list[str]:
    """Our headers that `source` includes, directly or through others, sorted. CUTLASS's are covered
    by its version in the path and by nvcc's version; they never change inside one environment."""
    seen: set[str] = set()
    queue = _includes(source)
    while queue:
        header = queue.pop()
        if header not in seen and (INCLUDE / header).is_file():
            seen.add(header)
            queue += _includes(_header_bytes(header).decode())
    return sorted(seen)


def _includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M)


@functools.cache
def _header_bytes(header: str) -> bytes:
    return (INCLUDE / header).read_bytes()
