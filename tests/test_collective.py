"""Family collective, build side: names, rules, emitted source, manifest, build.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_build_cli import FAKE_NVCC, Cli

from generator import collective, manifest, space
from generator.arch import ARCHS
from generator.collective import CollectiveVariant
from generator.compile import Compiler, Job, Record, compile_all, file_name
from generator.render import render
from generator.space import Entry
from generator.toolchain import BuildError, cutlass_include, find_nvcc, flags
from marlin_cutlass import dispatch
from marlin_cutlass.collective import Call

ROOT = Path(__file__).parent.parent
HOPPER = ARCHS["sm_90a"]
ONE = "w4a16_collective_f16_m64_n128k64_coop_streamk"
TWO = "w4a16_collective_bf16_m128_n64k64_pingpong_dp"
HOPPER_ONE = "w4a16_hopper_f16_g128_m8_n64k256_w1x4_p8_dp_c1"
DECLARED = [variant for variant, _ in collective.declared(HOPPER)]


# ---- names and rules -----------------------------------------------------------------------------


def test_names_are_bijective():
    every = list(collective.every(HOPPER))
    assert len({v.name for v in every}) == len(every) > 50
    for v in every:
        assert CollectiveVariant.parse(v.name) == v
        assert v.name.replace(f"_{v.dtype}_", "_", 1) == v.geometry
    assert {v.name for v in DECLARED} <= {v.name for v in every}


@pytest.mark.parametrize(
    "name",
    [
        "w4a16_collective_m64_n128k64_coop_dp",  # a geometry
        "w4a16_collective_f16_g128_m64_n128k64_coop_dp",  # group sizes are those of a launch
        "w4a16_collective_f16_m64_n128k64_w2x1_p4_dp_c1",
        "w4a16_collective_f32_m64_n128k64_coop_dp",
        "w4a16_collective_f16_m064_n128k64_coop_dp",
        "w4a16_collective_f16_m64_n128k64_coop_dp_mc1",
        "w4a16_hopper_f16_m64_n128k64_coop_dp",
    ],
)
def test_other_names_are_malformed(name):
    with pytest.raises(ValueError, match="is malformed"):
        CollectiveVariant.parse(name)


@pytest.mark.parametrize(
    "name, arch, rule",
    [
        ("m64_n128k64_coop_dp", "sm_86", r"does not run on sm_86 \(only on sm_90a\)"),
        ("m8_n128k64_coop_dp", "sm_90a", "m_tile=8 is not one of 16, 32"),
        ("m64_n128k128_coop_dp", "sm_90a", "k_sm=128 is not one of 64"),
        ("m64_n64k64_coop_dp", "sm_90a", "n_sm=64: two cooperating warpgroups"),
        ("m64_n64k64_pingpong_streamk", "sm_90a", "stream_k needs schedule=cooperative"),
        ("m256_n256k64_coop_dp", "sm_90a", "are 256 sums a thread"),
        ("m256_n128k64_pingpong_dp", "sm_90a", "are 256 sums a thread"),
        ("m64_n128k64_coop_dp_mc3", "sm_90a", "multicast=3 is not one of 1, 2"),
    ],
)
def test_a_broken_rule_is_named(name, arch, rule):
    variant = CollectiveVariant.parse(f"w4a16_collective_f16_{name}")
    assert re.search(rule, collective.why_not(variant, ARCHS[arch]))


def test_it_is_opt_in():
    for arch in ARCHS.values():
        assert collective.FAMILY not in arch.families
        assert not any(e.variant.family == collective.FAMILY for e in space.default_space(arch))
    assert collective.families(HOPPER) == (collective.FAMILY,)
    assert collective.families(ARCHS["sm_86"]) == ()
    asked = space.default_space(HOPPER, (collective.FAMILY,))
    assert [e.variant for e in asked] == DECLARED and all(e.reason for e in asked)
    assert {v.schedule for v in DECLARED} == set(collective.SCHEDULES)
    assert {v.decomposition for v in DECLARED} == set(collective.DECOMPOSITIONS)
    with pytest.raises(ValueError, match="does not run on sm_80"):
        space.default_space(ARCHS["sm_80"], (collective.FAMILY,))


# ---- emission ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", DECLARED, ids=lambda v: v.name)
def test_the_source_is_what_cutlass_library_emits(variant):
    from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance

    from generator.collective_source import operation

    source = render(variant)
    emitted = EmitGemmUniversal3xInstance().emit(operation(variant))
    lines = [line.rstrip() for line in emitted.strip().splitlines()]
    assert "\n".join(lines) in source
    assert source.startswith(f"// {variant.name}\n")
    assert source.endswith(f"COLLECTIVE_API({operation(variant).procedural_name()})\n")


def test_emitted_types():
    text = render(CollectiveVariant.parse(ONE))
    for piece in (
        "cute::tuple<cutlass::int4b_t, cutlass::half_t>",
        "cute::Shape<cute::_128, cute::_64, cute::_64>",
        "cute::Shape<cute::_1, cute::_1, cute::_1>",
        "cutlass::gemm::KernelTmaWarpSpecializedCooperative",
        "cutlass::epilogue::TmaWarpSpecializedCooperative",
        "cutlass::gemm::StreamKScheduler",
        "cutlass::gemm::collective::StageCountAutoCarveout",
        "cutlass::compute_memory_reordering_atom<cutlass::half_t",
        "cutlass::half_t, cutlass::layout::ColumnMajor, 8",
        '#include "marlin_cutlass/collective_api.cuh"',
    ):
        assert piece in text, piece
    text = render(CollectiveVariant.parse(TWO + "_mc2"))
    for piece in (
        "cute::tuple<cutlass::int4b_t, cutlass::bfloat16_t>",
        "cute::Shape<cute::_64, cute::_128, cute::_64>",
        "cute::Shape<cute::_2, cute::_1, cute::_1>",
        "cutlass::gemm::KernelTmaWarpSpecializedPingpong",
        "_epilogue,\n    void>",  # CUTLASS's default: persistent tiles
    ):
        assert piece in text, piece
    assert "half_t" not in text


def test_emission_is_the_same_in_every_process():
    code = "import sys; from generator.render import render;"
    code += (
        f"from generator.collective import CollectiveVariant as V; print(render(V.parse({ONE!r})))"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert run.stdout == render(CollectiveVariant.parse(ONE)) + "\n", run.stderr


def test_the_call_has_the_fields_of_the_header():
    header = (ROOT / "templates/include/marlin_cutlass/collective_api.cuh").read_text()
    body = re.search(r"struct CollectiveCall \{(.*?)\};", header, re.S)[1]
    body = re.sub(r"//.*", "", body)
    spelled = []
    for kind, names in re.findall(r"([\w ]+\*?) ([\w, ]+);", body):
        spelled += [(name.strip(), kind.strip()) for name in names.split(",")]
    words = {"c_void_p": "*", "c_long": "int64_t", "c_int": "int32_t", "c_float": "float"}
    mirrored = [(name, words[kind.__name__]) for name, kind in Call._fields_]
    assert [(n, "*" if k.endswith("*") else k) for n, k in spelled] == mirrored


ATOM_PROGRAM = """
#include <cstdio>
#include "cute/tensor.hpp"
#include "cute/arch/mma_sm90.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cutlass/numeric_types.h"
#include "marlin_cutlass/collective_reorder.cuh"
namespace theirs {
%s
}
int main() {
  using namespace cute;
  using Order = Layout<Shape<_2, _4>, Stride<_4, _1>>;
  using Atoms = Layout<Shape<_1, Int<1>>>;
  auto check = theirs::compute_memory_reordering_atom<cutlass::half_t, Atoms, Order>();
  auto mine = cutlass::compute_memory_reordering_atom<cutlass::bfloat16_t, Atoms, Order>();
  static_assert(is_same_v<decltype(check), decltype(mine)>, "not CUTLASS's layout");
  auto whole = tile_to_shape(mine, make_shape(48, 64, 1));
  for (int n = 0; n < 48; ++n)
    for (int k = 0; k < 64; ++k) std::printf("%%d\\n", int(whole(n, k, 0)));
}
"""


def test_the_weight_order_is_cutlass_own(tmp_path):
    """Our constant against the function of CUTLASS's utilities, evaluated by the host compiler, and
    the formula of collective_weight.reorder against both."""
    try:
        nvcc = find_nvcc()
    except BuildError:
        pytest.skip("needs nvcc")
    utilities = cutlass_include().parent / "tools/util/include/cutlass/util/mixed_dtype_utils.hpp"
    text = utilities.read_text()
    start = text.index("constexpr auto compute_memory_reordering_atom")
    start = text.rindex("template <class ElementMma", 0, start)
    end = text.index("\n}", start) + 2
    source = tmp_path / "atom.cpp"
    source.write_text(ATOM_PROGRAM % text[start:end])
    includes = [flag for flag in flags(HOPPER, {}) if flag.startswith("-I")]
    command = [nvcc, "-x", "c++", "-std=c++17", "-O0", "-w", *includes, source, "-o"]
    subprocess.run([*command, tmp_path / "atom"], check=True)
    places = subprocess.run([tmp_path / "atom"], capture_output=True, text=True, check=True)
    found = iter(map(int, places.stdout.split()))
    for n in range(48):
        for k in range(64):
            inside = 32 * (n % 8) + 8 * (k // 2 % 4) + 4 * (k % 2) + 2 * (k % 16 // 8) + n % 16 // 8
            assert next(found) == (k // 16 * 3 + n // 16) * 256 + inside


# ---- compiling and the manifest ------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path) -> Cli:
    return Cli(tmp_path)


def test_list(cli):
    run = cli("--arch", "sm_90a", "--list", "--family", "collective")
    lines = [line for line in run.stdout.splitlines() if line.startswith("w4a16_")]
    assert [line.split()[0] for line in lines] == [v.name for v in DECLARED]
    assert all(" 384 " in line for line in lines)
    assert cli("--arch", "sm_90a", "--list").stdout.count("w4a16_collective") == 0


def test_a_unit_is_a_library_with_a_list_of_its_own(cli):
    arguments = ("--arch", "sm_90a", "--out", "out", "--jobs", "1")
    run = cli(*arguments, "--only", ONE, "--only", TWO, "--only", HOPPER_ONE, "--report")
    assert run.returncode == 0, run.stderr
    assert "3 compiled, 0 up to date, 0 failed; 3 listed" in run.stdout
    folder = cli.folder / "out" / "sm_90a"
    assert sorted(path.name for path in folder.glob("w4a16*")) == sorted(
        [f"{ONE}.so", f"{TWO}.so", f"{HOPPER_ONE}.cubin"]
    )
    written = cli.manifest("sm_90a")
    assert [row["name"] for row in written["variants"]] == [HOPPER_ONE]
    assert [row["name"] for row in written["collective"]] == [ONE, TWO]
    assert "collective" not in json.dumps(written["dispatch"])
    table = dispatch.load_table(folder)  # the runtime's table does not see them
    assert [kernel.name for kernel in table.kernels] == [HOPPER_ONE]
    again = cli(*arguments, "--family", "collective", "--filter", "*f16_m64_n128k64_coop_streamk")
    assert "0 compiled, 1 up to date, 0 failed; 3 listed" in again.stdout
    assert cli.manifest("sm_90a") == written


def test_a_failure_is_shown_and_leaves_nothing(cli):
    arguments = ("--arch", "sm_90a", "--out", "out", "--only", ONE, "--only", TWO)
    run = cli(*arguments, FAIL=TWO)
    assert run.returncode == 1
    assert f"failed {TWO}" in run.stderr and "something is undefined" in run.stderr
    assert [row["name"] for row in cli.manifest("sm_90a")["collective"]] == [ONE]
    assert not (cli.folder / "out" / "sm_90a" / f"{TWO}.so").exists()


def test_an_illegal_unit_is_refused_with_the_rule(cli):
    name = "w4a16_collective_f16_m64_n64k64_coop_dp"
    run = cli("--arch", "sm_90a", "--only", name, "--dry-run")
    assert run.returncode == 2 and "two cooperating warpgroups" in run.stderr
    run = cli("--arch", "sm_86", "--family", "collective", "--dry-run")
    assert run.returncode == 2 and "does not run on sm_86" in run.stderr


def test_host_code_has_options_of_its_own(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    compiler = Compiler.for_arch(HOPPER, {"NVCC": str(nvcc), "PATH": os.environ["PATH"]})
    assert "-cubin" in compiler.options(HOPPER_ONE) and "-shared" not in compiler.options(
        HOPPER_ONE
    )
    options = compiler.options(ONE)
    assert "-shared" in options and "-cubin" not in options and "-DNDEBUG" in options
    assert "-gencode=arch=compute_90a,code=sm_90a" in options
    assert compiler.key("source", ONE) != compiler.key("source", HOPPER_ONE)
    assert file_name(ONE) == f"{ONE}.so" and file_name(HOPPER_ONE) == f"{HOPPER_ONE}.cubin"


def test_the_manifest_names_only_what_exists(tmp_path):
    entry = Entry(CollectiveVariant.parse(ONE), "why")
    record = Record(ONE, "key", "0" * 64, 80.0, 168, 0, 0)
    with pytest.raises(FileNotFoundError, match=rf"{ONE}\.so is missing"):
        manifest.write_manifest(tmp_path, HOPPER, [(entry, record)], [])
    (tmp_path / f"{ONE}.so").touch()
    manifest.write_manifest(tmp_path, HOPPER, [(entry, record)], [])
    row = json.loads((tmp_path / "manifest.json").read_text())["collective"][0]
    assert (row["schedule"], row["decomposition"]) == ("cooperative", "stream_k")
    assert (row["registers"], row["file"], row["reason"]) == (168, f"{ONE}.so", "why")
    assert manifest.listed_names(tmp_path) == [ONE]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.environ.get("BUILD_EVERYTHING"), reason="set BUILD_EVERYTHING=1")
def test_a_unit_compiles_and_loads_without_a_driver(tmp_path):
    """Two minutes and 4.7 GB."""
    from marlin_cutlass import collective as runtime

    variant = CollectiveVariant.parse(ONE)
    job = Job(ONE, render(variant), tmp_path, 0, 168)
    (outcome,) = compile_all(Compiler.for_arch(HOPPER), [job], 1)
    assert outcome.error is None
    assert outcome.record.registers == 168 and outcome.record.spills == 0
    assert job.binary.stat().st_size < 2 << 20
    record = (Entry(variant, "why"), outcome.record)
    manifest.write_manifest(tmp_path, HOPPER, [record], [])
    library = runtime.load(runtime.units(tmp_path)[ONE])
    threads, shared, stages = library.facts()
    assert threads == variant.threads and shared <= variant.shared_bytes and stages >= 4
