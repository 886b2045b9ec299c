"""build.py as a user runs it, with a stand-in for nvcc, and one real kernel per architecture."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from generator import manifest as made
from generator import rows, space
from generator.arch import ARCHS
from generator.dispatch import DispatchRow, DispatchTable
from generator.toolchain import BuildError, find_nvcc
from generator.variant import Variant

ROOT = Path(__file__).parent.parent
ONE = "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1"
TWO = "w4a16_ampere_bf16_g128_m16_n128k128_w2x2_p4_striped_c1"

FAKE_NVCC = f"""#!{sys.executable}
import os, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit(0)
if os.environ.get("FAIL", "none") in sys.argv[-1]:
    print("error: something is undefined")
    sys.exit(2)
print("ptxas info    : Used 96 registers, used 1 barriers")
open(sys.argv[sys.argv.index("-o") + 1], "w").write("cubin " + sys.argv[-1])
"""


class Cli:
    """Runs build.py in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        nvcc = folder / "nvcc"
        nvcc.write_text(FAKE_NVCC)
        nvcc.chmod(0o755)
        self.env = {**os.environ, "NVCC": str(nvcc), "COLUMNS": "80"}
        self.env.pop("CXX", None)

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "build.py"), *arguments]
        run = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env={**self.env, **env}
        )
        assert "Traceback" not in run.stderr, run.stderr
        return run

    def build(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        return self("--arch", "sm_86", "--out", "out", "--jobs", "2", *arguments, **env)

    def manifest(self, arch: str = "sm_86") -> dict:
        return json.loads((self.folder / "out" / arch / "manifest.json").read_text())

    def names(self) -> list[str]:
        return [row["name"] for row in self.manifest()["variants"]]


@pytest.fixture
def cli(tmp_path) -> Cli:
    return Cli(tmp_path)


# ---- looking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_list_shows_every_variant_and_why(cli, arch):
    run = cli("--arch", arch, "--list")
    assert run.returncode == 0
    for entry in space.default_space(ARCHS[arch]):
        v = entry.variant
        line = next(x for x in run.stdout.splitlines() if x.startswith(f"{v.name} "))
        assert f" {v.threads} " in line and f" {v.shared_bytes} " in line
        assert line.rstrip().endswith(entry.reason)


def test_list_of_the_full_space_can_be_filtered(cli):
    run = cli("--arch", "sm_86", "--list", "--space", "full", "--filter", "*_f16_g128_m8_n64*_p2_*")
    names = [line.split()[0] for line in run.stdout.splitlines() if line.startswith("w4a16")]
    assert len(names) > 5
    assert all("_p2_" in n and Variant.parse(n).m_tile == 8 for n in names)


def test_90_means_90a_with_a_notice(cli):
    run = cli("--arch", "90", "--list", "--filter", "*_f16_g128_*")
    assert run.returncode == 0
    assert "notice" in run.stderr and "sm_90a" in run.stderr
    assert run.stdout.startswith("sm_90a:")


def test_help_lists_the_options_of_build(cli):
    run = cli("--help")
    assert run.returncode == 0 and "--filter" in run.stdout and "sm_120" in run.stdout


def test_a_python_without_the_packages_is_told_what_to_do():
    line = [sys.executable, "-S", str(ROOT / "build.py"), "--list"]  # -S: no site-packages
    run = subprocess.run(line, capture_output=True, text=True)
    assert run.returncode == 2 and "has no typer" in run.stderr
    assert "make install" in run.stderr and "Traceback" not in run.stderr


def test_dry_run_writes_nothing(cli):
    run = cli.build("--dry-run", "--only", ONE)
    assert run.returncode == 0 and f"would compile {ONE}" in run.stdout
    assert not (cli.folder / "out").exists()


def test_without_a_gpu_the_default_is_sm_86(cli):
    run = cli("--list")
    if "no GPU found" in run.stderr:
        assert run.stdout.startswith("sm_86:")
    else:
        assert run.stdout.startswith("sm_")


def test_list_is_quick(cli):
    """CPU time, so that a busy machine does not fail it."""
    assert min(_cpu_seconds(lambda: cli("--arch", "sm_90a", "--list")) for _ in range(3)) < 1.0


def _cpu_seconds(call) -> float:
    """Of the processes that `call` starts."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    call()
    return spent() - before


# ---- building ------------------------------------------------------------------------------------


def test_the_default_table_builds_and_is_listed(cli):
    run = cli.build()
    assert run.returncode == 0, run.stderr
    manifest = cli.manifest()
    head = [manifest[name] for name in ("format", "arch", "layout_version")]
    assert head == [made.FORMAT, "sm_86", 1]
    declared = [e.variant.name for e in space.default_space(ARCHS["sm_86"])]
    assert cli.names() == declared, "declaration order"
    for row in manifest["variants"]:
        v = Variant.parse(row["name"])
        assert (cli.folder / "out" / "sm_86" / row["file"]).is_file()
        assert row["threads"] == v.threads and row["shared_bytes"] == v.shared_bytes
        assert row["cluster"] == v.cluster and row["registers"] == 96 and row["spills"] == 0
        assert re.fullmatch(r"[0-9a-f]{64}", row["sha256"])
        assert all(row[field] == getattr(v, field) for field in ("dtype", "group_size", "split"))
    _check_dispatch(manifest)

    before = _stamps(cli.folder / "out")
    assert _cpu_seconds(cli.build) < 2.0
    again = cli.build()
    assert f"0 compiled, {len(declared)} up to date" in again.stdout
    assert _stamps(cli.folder / "out") == before, "a second build touches nothing"


def _check_dispatch(manifest: dict) -> None:
    names = frozenset(row["name"] for row in manifest["variants"])
    rows = tuple(DispatchRow.from_json(row) for row in manifest["dispatch"])
    table = DispatchTable(rows, names)
    assert table.gaps() == [] and table.unreachable() == []


def _stamps(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_partial_builds_add_up(cli):
    assert cli.build("--only", ONE).returncode == 0
    assert cli.names() == [ONE]
    assert cli.build("--filter", TWO).returncode == 0
    assert sorted(cli.names()) == sorted([ONE, TWO])
    _check_dispatch(cli.manifest())


def test_a_plain_build_keeps_other_families(cli):
    sparse = space.default_space(ARCHS["sm_86"], ("sparse",))[0].variant.name
    assert cli.build("--only", sparse).returncode == 0
    assert cli.names() == [sparse]
    assert cli.build().returncode == 0
    declared = [e.variant.name for e in space.default_space(ARCHS["sm_86"])]
    assert sorted(cli.names()) == sorted([sparse, *declared])


def test_a_lost_cubin_leaves_the_manifest(cli):
    cli.build("--only", ONE)
    (cli.folder / "out" / "sm_86" / f"{ONE}.cubin").unlink()
    cli.build("--only", TWO)
    assert cli.names() == [TWO]


def test_a_failure_is_shown_and_the_rest_is_built(cli):
    run = cli.build("--only", ONE, "--only", TWO, FAIL=ONE)
    assert run.returncode == 1
    assert f"failed {ONE}" in run.stderr and "error: something is undefined" in run.stderr
    assert "1 compiled, 0 up to date, 1 failed" in run.stdout
    assert cli.names() == [TWO]
    assert cli.build("--only", ONE).returncode == 0, "a failure is not cached"
    assert sorted(cli.names()) == sorted([ONE, TWO])


def test_report_shows_resources(cli):
    run = cli.build("--only", ONE, "--report")
    line = next(x for x in run.stdout.splitlines() if x.startswith(ONE))
    assert line.split()[1:7] == ["96", "0", "128", "50176", "2", "8"]


def test_several_architectures(cli):
    run = cli(
        *("--arch", "sm_80", "--arch", "sm_89", "--arch", "80", "--out", "out", "--only", ONE)
    )
    assert run.returncode == 0
    assert sorted(p.name for p in (cli.folder / "out").iterdir()) == ["sm_80", "sm_89"]


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arch", "sm_75"], "arch='sm_75' is not one of sm_80"),
        (["--arch", "sm_86", "--only", "marlin"], "'marlin' is malformed: at 'marlin' it should"),
        (["--arch", "sm_86", "--only", ONE.replace("_p4_", "_p9_")], "illegal on sm_86"),
        (["--arch", "sm_86", "--filter", "nothing*"], "'nothing*' matches no variant of sm_86"),
        (["--arch", "sm_86", "--family", "volta"], "'volta' is not one of ampere"),
        (["--arch", "sm_86", "--family", "hopper", "--list"], "family=hopper does not run"),
        (["--arch", "sm_86", "--space", "huge"], "'huge' is not default or full"),
        (["--arch", "sm_86", "--space", "full"], "narrow them with --filter"),
    ],
)
def test_mistakes_are_explained(cli, arguments, message):
    run = cli(*arguments)
    assert run.returncode == 2
    assert message in run.stderr and run.stderr.startswith("error:")


def test_a_missing_compiler_is_explained(cli):
    env = {"NVCC": "/no/nvcc", "CUDA_HOME": "/no/cuda", "PATH": "/no/bin"}
    run = cli.build("--only", ONE, **env)
    if run.returncode == 0:
        pytest.skip("nvcc is in this environment's site-packages")
    assert run.returncode == 2 and "Looked at" in run.stderr and "/no/cuda" in run.stderr


def test_bad_max_jobs_is_explained(cli):
    run = cli("--arch", "sm_86", "--only", ONE, "--out", "out", MAX_JOBS="lots")
    assert run.returncode == 2 and "MAX_JOBS='lots'" in run.stderr


# ---- real kernels --------------------------------------------------------------------------------

SAMPLE = {
    "sm_80": ONE,
    "sm_86": "w4a16_ampere_bf16z_g32_m64_n128k128_w2x2_p3_striped_c1",
    "sm_89": "w4a16_ampere_f16z_gcol_m128_n128k128_w4x2_p2_striped_c1",
    "sm_90a": "w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split2_c1",
    "sm_100": ONE,
    "sm_120": ONE,
}


def _real(cli: Cli, arch: str, *arguments: str) -> subprocess.CompletedProcess:
    try:
        nvcc = find_nvcc()
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])
    return cli("--arch", arch, "--out", "out", "--jobs", "1", *arguments, NVCC=str(nvcc))


@pytest.mark.parametrize("arch", SAMPLE)
def test_a_real_kernel_compiles(cli, arch):
    run = _real(cli, arch, "--only", SAMPLE[arch])
    assert run.returncode == 0, run.stderr
    (row,) = cli.manifest(arch)["variants"]
    assert row["name"] == SAMPLE[arch] and row["spills"] == 0
    cubin = (cli.folder / "out" / arch / row["file"]).read_bytes()
    assert cubin[:4] == b"\x7fELF" and row["name"].encode() in cubin


@pytest.mark.slow
@pytest.mark.skipif("BUILD_EVERYTHING" not in os.environ, reason="set BUILD_EVERYTHING=1")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_the_whole_default_table_compiles(cli, arch):
    families = [x for family in ARCHS[arch].families for x in ("--family", family)]
    run = _real(cli, arch, *families)
    assert run.returncode == 0, run.stderr


def test_dispatch_rows_stay_until_something_behind_them_changes(cli):
    cli.build("--only", ONE)
    path = cli.folder / "out" / "sm_86" / "manifest.json"
    first = json.loads(path.read_text())
    variants = [Variant.parse(ONE)]
    key = rows.table_key(ARCHS["sm_86"], variants)
    assert made.earlier_dispatch(path.parent, key) == first["dispatch"]
    assert rows.table_key(ARCHS["sm_80"], variants) != key
    assert rows.table_key(ARCHS["sm_86"], [*variants, Variant.parse(TWO)]) != key
    assert made.earlier_dispatch(path.parent, "another key") is None
    path.write_text(json.dumps({**first, "dispatch": first["dispatch"][1:]}))
    assert made.earlier_dispatch(path.parent, key) is None, "rows were lost"
    cli.build("--only", ONE)
    assert json.loads(path.read_text()) == first
