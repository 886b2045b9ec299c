"""Kernels compiled on demand: found, compiled once, cached for other processes, refused by rule."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import workbench_fakes as fakes
from workbench_nvcc import Nvcc

import marlin_cutlass as mc
from generator.arch import ARCHS
from generator.variant import Variant
from marlin_cutlass import dispatch, jit, library
from marlin_cutlass.manifest import MANIFEST_FORMAT

ROOT = Path(__file__).resolve().parents[1]
UNBUILT = "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p6_dp_c2"
GEOMETRY = "w4a16_hopper_m16_n128k128_w2x1_p6_dp_c2"
FORM = ("f16", False, 128)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("jit")
    fakes.write_manifest(root)
    return root


@pytest.fixture
def nvcc(tmp_path, built, monkeypatch):
    nvcc = Nvcc.in_use(tmp_path, built, monkeypatch)
    monkeypatch.delenv("MARLIN_CUTLASS_JIT", raising=False)
    for cached in (library.table_for_capability, library.forced_index):
        cached.cache_clear()
    yield nvcc
    for cached in (library.table_for_capability, library.forced_index):
        cached.cache_clear()


def index(name: str) -> int:
    return library.forced_index(name, (9, 0), *FORM)


def test_an_unbuilt_variant_is_compiled_once(nvcc):
    before = library.table_for_capability(9, 0)
    found = index(UNBUILT)
    table = library.table_for_capability(9, 0)
    assert table.kernels[found].name == UNBUILT and nvcc.runs == 1
    assert table.kernels[:found] == before.kernels, "indices given out before stay valid"
    assert index(GEOMETRY) == index(UNBUILT) == found and nvcc.runs == 1
    built = before.kernels[0]
    form = (built.dtype, built.zeros, built.group_size)
    assert library.forced_index(built.name, (9, 0), *form) == 0 and nvcc.runs == 1


def test_nothing_chooses_it_by_itself(nvcc):
    before = library.table_for_capability(9, 0)
    index("w4a16_hopper_f16_g128_m64_n256k128_w2x1_p3_dp_c1")
    after = library.table_for_capability(9, 0)
    assert len(after.kernels) == len(before.kernels) + 1 and after.on_demand == 1
    assert after.batch_invariant() == before.batch_invariant() and after.rows == before.rows


def test_the_cache_serves_a_process_without_a_compiler(nvcc, monkeypatch):
    index(UNBUILT)
    call = f"library.forced_index({UNBUILT!r}, (9, 0), *{FORM})"
    code = f"from marlin_cutlass import library; print({call})"
    env = {**os.environ, "NVCC": "/nonexistent", "PATH": "/usr/bin:/bin", "CUDA_HOME": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == index(UNBUILT) and nvcc.runs == 1


def test_a_changed_header_compiles_again(nvcc, monkeypatch):
    index(UNBUILT)
    variant = Variant.parse(UNBUILT)
    assert jit.find(variant, "sm_90a") is not None
    monkeypatch.setattr(jit, "digest", lambda source: "other")
    assert jit.find(variant, "sm_90a") is None
    jit.obtain(UNBUILT, "sm_90a")
    assert nvcc.runs == 2
    assert jit.find(variant, "sm_90a") is not None


def test_the_digest_covers_source_and_headers(monkeypatch, tmp_path):
    from generator import compile as compiling
    from generator import render

    (tmp_path / "inner.cuh").write_text("int a;")
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"')
    monkeypatch.setattr(render, "INCLUDE", tmp_path)
    monkeypatch.setattr(compiling, "INCLUDE", tmp_path)
    compiling._header_bytes.cache_clear()
    source = '#include "outer.cuh"'
    first = jit.digest(source)
    assert first == jit.digest(source) != jit.digest(source + " ")
    (tmp_path / "inner.cuh").write_text("int b;")
    assert jit.digest(source) != first
    compiling._header_bytes.cache_clear()


def test_a_damaged_cubin_is_not_used(nvcc):
    kernel = jit.obtain(UNBUILT, "sm_90a")
    Path(kernel.file).write_text("broken")
    assert jit.find(Variant.parse(UNBUILT), "sm_90a") is None
    jit.obtain(UNBUILT, "sm_90a")
    assert nvcc.runs == 2


@pytest.mark.parametrize(
    "name, rule",
    [
        ("w4a16_hopper_f16_g128_m16_n128k128_w2x1_p40_dp_c2", "stages=40 is not one of 2..16"),
        ("w4a16_hopper_f16_g128_m256_n256k128_w2x1_p4_dp_c1", "shared_bytes=329856"),
        ("w4a16_ampere_f16_g128_m8_n64k64_w1x1_p2_dp_c1", "k_sm=64 is not one of"),
    ],
)
def test_an_illegal_variant_is_refused_with_the_rule(nvcc, name, rule):
    with pytest.raises(ValueError, match=r"is not built for sm_90a, and it is illegal") as error:
        index(name)
    assert rule in str(error.value) and nvcc.runs == 0


def test_what_the_compiler_says_is_shown(nvcc):
    nvcc.fails()
    with pytest.raises(ValueError, match="no such thing"):
        index(UNBUILT)
    with pytest.raises(ValueError, match="malformed"):
        index("w4a16_hopper_fastest")


def test_without_a_compiler_the_message_says_so(nvcc, monkeypatch):
    monkeypatch.setenv("NVCC", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": "/n", "platlib": "/n"})
    with pytest.raises(ValueError, match=r"cannot be compiled here: nvcc was not found"):
        index(UNBUILT)


def test_it_can_be_switched_off(nvcc, monkeypatch):
    monkeypatch.setenv("MARLIN_CUTLASS_JIT", "0")
    with pytest.raises(ValueError, match=r"build\.py --arch sm_90a --only"):
        index(UNBUILT)
    assert nvcc.runs == 0


def test_folders_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("MARLIN_CUTLASS_JIT_CACHE", raising=False)
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = jit.cache_folders("sm_86")
    version = f"v{MANIFEST_FORMAT}"
    assert folders[0] == tmp_path / "build" / "jit" / version / "sm_86"
    assert folders[-1] == tmp_path / "cache" / "marlin_cutlass" / "jit" / version / "sm_86"
    assert jit.writable_folder("sm_86") == folders[0]
    monkeypatch.setenv("MARLIN_CUTLASS_JIT_CACHE", str(tmp_path / "own"))
    assert jit.cache_folders("sm_86") == [tmp_path / "own" / version / "sm_86"]


def test_the_launcher_takes_it(nvcc, fake):
    """The launcher runs a kernel that was added after its table was known."""
    table = library.table_for_capability(9, 0)
    fake.launcher.add_table(table, 9, 0)
    kernel = jit.obtain(UNBUILT, "sm_90a")
    more = table.with_kernels([kernel])
    assert more.with_kernels([kernel]) == more
    fake.launcher.add_table(more, 9, 0)
    w = mc.pack(
        torch.randint(0, 16, (256, 128), dtype=torch.uint8), torch.rand(2, 128), group_size=128
    )
    form = (w.packed, w.col_scale, None, None, w.n, w.k, 128, False)
    torch.ops.marlin_cutlass_host.gemm(torch.randn(4, 256).half(), *form, more.index(UNBUILT))
    assert fake.last_kernel == UNBUILT


def test_command_line(nvcc, capsys):
    assert jit.main([UNBUILT, "--arch", "sm_90a"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    assert jit.main(["w4a16_x", "--arch", "sm_90a"]) == 2


def test_a_kernel_of_the_cache_is_whole(nvcc):
    kernel = jit.obtain(UNBUILT, "sm_90a")
    v = Variant.parse(UNBUILT)
    assert (kernel.threads, kernel.shared_bytes, kernel.cluster) == (
        v.threads,
        v.shared_bytes,
        v.cluster,
    )
    assert isinstance(kernel, dispatch.Kernel) and ARCHS["sm_90a"].name == "sm_90a"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nonsense", "--arch", "sm_90a"], "kernel='nonsense' is malformed"),
        (["w4a16_hopper_m16_n128k128_w2x1_p8_dp_c2", "--arch", "sm_99"], "arch='sm_99' is not one"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, words, capsys):
    assert jit.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_geometry_on_the_command_line_means_the_default_format(nvcc, capsys):
    assert jit.main(["w4a16_hopper_m16_n128k128_w2x1_p8_dp_c2", "--arch", "90a"]) == 0
    assert "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p8_dp_c2.cubin" in capsys.readouterr().out
