"""Compiling: finding nvcc, reading ptxas, the cache, and what a failure leaves behind."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from pathlib import Path

import pytest

from generator import compile as compiling
from generator import toolchain
from generator.arch import ARCHS
from generator.compile import Compiler, Job, PtxasReport, complaint, parse_ptxas
from generator.toolchain import BuildError

# A stand-in for nvcc: reports what comments of the source ask for, and copies the source.
FAKE_NVCC = f"""#!{sys.executable}
import re, sys, time
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit(0)
text = open(sys.argv[-1]).read()
for line in re.findall(r"^//say (.*)$", text, re.M):
    print(line)
if "//fail" in text:
    sys.exit(2)
open(sys.argv[sys.argv.index("-o") + 1], "w").write("cubin of " + text)
"""

USED = "ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size"
NO_SPILL = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
SPILL = "    8 bytes stack frame, 24 bytes spill stores, 72 bytes spill loads"
SERIAL = (
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the function 'k'"
)
GOOD = f"//say {NO_SPILL}\n//say {USED}\n"


@pytest.fixture
def fake_nvcc(tmp_path) -> Path:
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(FAKE_NVCC)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def compiler(fake_nvcc) -> Compiler:
    return Compiler.for_arch(ARCHS["sm_86"], {"NVCC": str(fake_nvcc), "PATH": os.environ["PATH"]})


def _job(folder: Path, source: str = GOOD, name: str = "k", **limits) -> Job:
    return Job(name, source, folder, **limits)


def _compile(compiler: Compiler, *jobs: Job):
    return compiling.compile_all(compiler, jobs, 1)


# ---- finding the compiler ------------------------------------------------------------------------


def test_nvcc_is_found_in_order(tmp_path, fake_nvcc):
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    other = home / "bin" / "nvcc"
    other.write_text(FAKE_NVCC)
    other.chmod(0o755)
    by_home = {"CUDA_HOME": str(home), "PATH": str(fake_nvcc.parent)}
    assert toolchain.find_nvcc({"NVCC": str(fake_nvcc), **by_home}) == fake_nvcc
    assert toolchain.find_nvcc(by_home) == other
    assert toolchain.find_nvcc({"PATH": str(fake_nvcc.parent)}) == fake_nvcc


def test_nvcc_from_pypi(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    paths = {"purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: paths)
    assert toolchain.find_nvcc({"PATH": ""}) == nvcc


def test_a_missing_nvcc_lists_where_it_was_sought(tmp_path, monkeypatch):
    paths = {"purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(BuildError) as error:
        toolchain.find_nvcc({"NVCC": "/no/nvcc", "CUDA_HOME": "/no/cuda", "PATH": "/no/bin"})
    for where in ("/no/nvcc", "/no/cuda", "/no/bin", str(tmp_path / "nvidia"), "pip install"):
        assert where in str(error.value)


def test_a_broken_nvcc_shows_its_output(tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho cannot run >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="cannot run"):
        toolchain.nvcc_version(broken)


def test_flags():
    flags = toolchain.flags(ARCHS["sm_90a"], {})
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert "-DNDEBUG" in flags and "-cubin" in flags and "-ccbin" not in flags
    assert any(f.endswith("templates/include") for f in flags)
    assert any(f.endswith("cutlass_library/source/include") for f in flags)


def test_cxx_becomes_ccbin():
    path = os.environ["PATH"]
    flags = toolchain.flags(ARCHS["sm_86"], {"CXX": "ccache g++ -m64", "PATH": path})
    assert flags[-2:] == ["-ccbin", "g++"]
    with pytest.raises(BuildError, match="CXX='no-such-cxx'"):
        toolchain.flags(ARCHS["sm_86"], {"CXX": "no-such-cxx", "PATH": path})


def test_max_jobs():
    assert toolchain.default_jobs({"MAX_JOBS": "1"}) == 1
    assert toolchain.default_jobs({"MAX_JOBS": "100000"}) == toolchain.default_jobs({})
    for bad in ("0", "-1", "many"):
        with pytest.raises(BuildError, match="MAX_JOBS"):
            toolchain.default_jobs({"MAX_JOBS": bad})


# ---- ptxas ---------------------------------------------------------------------------------------


def test_ptxas_output_is_read():
    report = parse_ptxas("\n".join((SPILL, USED, SERIAL)))
    assert (report.registers, report.stack) == (96, 8)
    assert (report.spill_stores, report.spill_loads, report.spills) == (24, 72, 96)
    assert report.warnings == [SERIAL]


def test_complaints():
    assert complaint(PtxasReport(96)) is None
    assert "C7512" in complaint(parse_ptxas(SERIAL))
    spilled = parse_ptxas(f"{SPILL}\n{USED}")
    assert "24 bytes of spill stores and 72 of loads" in complaint(spilled)
    assert complaint(spilled, allowed_spill_bytes=96) is None
    assert "more than 80" in complaint(PtxasReport(96), max_registers=80)


# ---- compiling -----------------------------------------------------------------------------------


def test_a_good_kernel_leaves_cubin_and_record(compiler, tmp_path):
    folder = tmp_path / "out"
    (outcome,) = _compile(compiler, _job(folder))
    assert outcome.error is None and outcome.record.registers == 96
    assert (folder / "k.cubin").read_text() == "cubin of " + GOOD
    assert compiling.read_record(folder, "k") == outcome.record
    assert sorted(p.name for p in folder.iterdir()) == ["k.cubin", "records", "src"]


def test_the_cache_follows_the_content(compiler, tmp_path):
    job = _job(tmp_path / "out")
    assert compiling.cached(compiler, job) is None
    _compile(compiler, job)
    assert compiling.cached(compiler, job) is not None
    changed = {
        "source": dataclasses.replace(job, source=GOOD + "//"),
        "limit": dataclasses.replace(job, max_registers=80),
    }
    assert {k: compiling.cached(compiler, j) for k, j in changed.items()} == dict.fromkeys(changed)
    for change in ({"version": "V13.1.0"}, {"flags": (*compiler.flags, "-g")}, {"env_flags": "x"}):
        assert compiling.cached(dataclasses.replace(compiler, **change), job) is None


def test_a_damaged_cubin_is_built_again(compiler, tmp_path):
    job = _job(tmp_path / "out")
    _compile(compiler, job)
    (job.folder / "k.cubin").write_text("half a cubin")
    assert compiling.cached(compiler, job) is None
    (job.folder / "k.cubin").unlink()
    assert compiling.cached(compiler, job) is None


def test_a_moved_checkout_is_up_to_date(compiler, tmp_path, monkeypatch):
    keys = []
    for place in ("one", "two"):
        include = tmp_path / place
        include.mkdir()
        (include / "a.cuh").write_text("// the same\n")
        monkeypatch.setattr(compiling, "INCLUDE", include)
        compiling._header_bytes.cache_clear()
        here = dataclasses.replace(compiler, flags=("-O3", f"-I{include}"))
        keys.append(here.key('#include "a.cuh"\n'))
    compiling._header_bytes.cache_clear()
    assert keys[0] == keys[1]


def test_the_cache_follows_headers_that_are_included(compiler, tmp_path, monkeypatch):
    include = tmp_path / "include"
    include.mkdir()
    (include / "a.cuh").write_text('#include "b.cuh"\n')
    (include / "b.cuh").write_text("// one\n")
    (include / "other.cuh").write_text("// one\n")
    monkeypatch.setattr(compiling, "INCLUDE", include)
    source = '#include "a.cuh"\n#include "cuda_fp16.h"\n'
    assert compiling.reachable_headers(source) == ["a.cuh", "b.cuh"]

    def key() -> str:
        compiling._header_bytes.cache_clear()
        return compiler.key(source)

    first = key()
    (include / "other.cuh").write_text("// two\n")
    assert key() == first
    (include / "b.cuh").write_text("// two\n")
    assert key() != first
    compiling._header_bytes.cache_clear()


def test_a_failure_shows_the_last_lines_and_spares_the_others(compiler, tmp_path):
    noise = "".join(f"//say line {i}\n" for i in range(100))
    bad = _job(tmp_path / "out", noise + "//say error: identifier is undefined\n//fail\n", "bad")
    good = _job(tmp_path / "out", name="good")
    seen = []
    outcomes = compiling.compile_all(compiler, [bad, good], 2, lambda o: seen.append(o.name))
    assert [o.name for o in outcomes] == ["bad", "good"] and sorted(seen) == ["bad", "good"]
    assert outcomes[1].record is not None
    assert "identifier is undefined" in outcomes[0].error and "line 99" in outcomes[0].error
    assert "line 5\n" not in outcomes[0].error
    assert not (tmp_path / "out" / "bad.cubin").exists()


@pytest.mark.parametrize("said, complaint", [(SPILL, "spill stores"), (SERIAL, "C7512")])
def test_a_kernel_that_ptxas_spoils_is_refused(compiler, tmp_path, said, complaint):
    job = _job(tmp_path / "out")
    _compile(compiler, job)
    (outcome,) = _compile(compiler, dataclasses.replace(job, source=f"{GOOD}//say {said}\n"))
    assert complaint in outcome.error
    assert not (job.folder / "k.cubin").exists(), "the cubin of the old source is stale"
    assert not compiling.record_path(job.folder, "k").exists()


# ---- the real compiler ---------------------------------------------------------------------------

TINY = """
extern "C" __global__ void tiny(const float* a, float* c) {
  c[threadIdx.x] = 2.f * a[threadIdx.x];
}
"""
# 64 values live across a barrier in 24 registers.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) tiny(const float* a, float* c) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = a[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) c[threadIdx.x + 1024 * i] = v[(7 * i + 3) % 64] - v[i];
}
"""


@pytest.fixture(scope="module")
def real_compiler() -> Compiler:
    try:
        return Compiler.for_arch(ARCHS["sm_86"])
    except BuildError as error:
        pytest.skip(str(error).splitlines()[0])


def test_nvcc_compiles_a_tiny_kernel(real_compiler, tmp_path):
    (outcome,) = _compile(real_compiler, _job(tmp_path, TINY, "tiny"))
    assert outcome.error is None, outcome.error
    assert 0 < outcome.record.registers < 64 and outcome.record.spills == 0
    assert (tmp_path / "tiny.cubin").read_bytes()[:4] == b"\x7fELF"


def test_nvcc_reports_a_spill(real_compiler, tmp_path):
    (outcome,) = _compile(real_compiler, _job(tmp_path, SPILLING, "tiny"))
    assert "spill stores" in outcome.error


def test_nvcc_reports_an_error(real_compiler, tmp_path):
    (outcome,) = _compile(real_compiler, _job(tmp_path, TINY + "int x = y;", "tiny"))
    assert '"y" is undefined' in outcome.error and "tiny.cu" in outcome.error
