"""explore: what is enumerated and chosen, what is compiled, how results rank, interrupts, files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import workbench_fakes as fakes
from typer.testing import CliRunner
from workbench_nvcc import Nvcc

from generator import space as declared_space
from generator.arch import ARCHS, GPUS
from generator.legality import why_not, why_not_for
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass import dispatch, explore, explore_paper, jit, library
from marlin_cutlass.cli import app as whole
from marlin_cutlass.explore_rows import limit_us, sort_rows
from marlin_cutlass.explore_space import (
    choose,
    enumerate_space,
    near_misses,
    neighbours,
    parse_overrides,
)

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = ProblemShape(16, 4096, 4096)
HOPPER, H200 = ARCHS["sm_90a"], GPUS["H200"]
NARROW = {
    "family": ("hopper",),
    "m_tile": (16,),
    "n_sm": (128, 256),
    "k_sm": (128,),
    "warps_n": (2,),
    "warps_k": (1,),
    "stages": (3, 4, 5, 12),
    "ctas_per_sm": (1, 2),
    "decomposition": ("data_parallel", "split_k"),
    "split": (1, 2),
    "multicast": (1,),
}
CHOICE = "w4a16_hopper_f16_g128_m16_n256k128_w2x1_p4_dp_c2"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("explore")
    fakes.write_manifest(root)
    return root


@pytest.fixture
def nvcc(tmp_path, built, monkeypatch):
    nvcc = Nvcc.in_use(tmp_path, built, monkeypatch)
    return nvcc


@pytest.fixture
def space():
    return enumerate_space(PROBLEM, HOPPER, H200, NARROW)


def explorer(timer=None, **options) -> explore.Explorer:
    made = explore.Explorer(PROBLEM, HOPPER, H200, dict(NARROW), timer, count=12)
    return replace(made, **options)


# ---- enumeration ---------------------------------------------------------------------------------


def test_values_of_knobs():
    found = parse_overrides(["n_sm=128,256", "stages=3..5,8", "decomposition=stream_k"])
    assert found == {
        "n_sm": (128, 256),
        "stages": (3, 4, 5, 8),
        "decomposition": ("stream_k",),
    }
    for text, words in (
        ("colour=3", "m_tile"),
        ("stages", "KNOB=VALUES"),
        ("stages=many", "2..4"),
        ("decomposition=fast", "stream_k"),
        ("stages=", "no value"),
    ):
        with pytest.raises(ValueError, match=words.replace("..", r"\.\.")):
            parse_overrides([text])


def test_only_legal_variants_with_the_values_asked_for(space):
    assert space.legal and all(why_not(v, HOPPER) is None for v in space.legal)
    for knob, values in NARROW.items():
        assert {getattr(v, knob) for v in space.legal} <= set(values), knob
    assert {v.split for v in space.legal} == {1, 2}
    assert sum(space.reasons.values()) > 0
    assert any("shared" in reason for reason in space.reasons)


def test_nothing_legal_says_why():
    with pytest.raises(ValueError, match=r"no legal variant on sm_90a: n_sm=96 is not one of"):
        enumerate_space(PROBLEM, HOPPER, H200, {**NARROW, "n_sm": (96,)})
    with pytest.raises(ValueError, match="too many: narrow --set"):
        enumerate_space(PROBLEM, HOPPER, H200, {"m_tile": tuple(range(8, 2048))})


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_a_space_with_its_declared_rows(gpu):
    arch = ARCHS[gpu.arch]
    narrow = {"k_sm": (128,), "ctas_per_sm": (1, 2), "stages": (2, 3, 4, 5, 6)}
    found = enumerate_space(PROBLEM, arch, gpu, narrow)
    assert all(why_not(v, arch) is None for v in found.legal)
    declared = {v.name for v in declared_variants(arch, narrow)}
    assert declared and declared <= set(found.predicted)
    assert near_misses(found, found.ranked[0]) and choose(found, 10)


def declared_variants(arch, knobs) -> list[Variant]:
    every = [e.variant for e in declared_space.default_space(arch, arch.families)]
    return [
        v
        for v in every
        if why_not_for(v, PROBLEM) is None
        and all(getattr(v, knob) in values for knob, values in knobs.items())
    ]


def test_a_tile_that_is_illegal_alone_is_illegal_in_every_way():
    """What judged() leaves out by its shortcut."""
    narrow = {"family": ("hopper",), "n_sm": (128,), "k_sm": (256,), "ctas_per_sm": (1, 2)}
    full = [
        Variant("hopper", "f16", False, 128, m, 128, 256, wn, wk, p, d, s, c, mc)
        for m in (8, 16)
        for wn in (1, 2, 4)
        for wk in (1, 2, 4)
        for p in range(2, 11)
        for d, s, mc in (
            ("data_parallel", 1, 1), ("data_parallel", 1, 2), ("data_parallel", 1, 4),
            ("stream_k", 1, 1), ("stream_k", 1, 2), ("stream_k", 1, 4),
            ("split_k", 2, 1), ("split_k", 4, 1),
            ("hybrid", 1, 1), ("hybrid", 1, 2), ("hybrid", 1, 4),
        )
        for c in (1, 2)
    ]  # fmt: skip
    found = enumerate_space(PROBLEM, HOPPER, H200, {**narrow, "m_tile": (8, 16)})
    assert {v.name for v in full if why_not(v, HOPPER) is None} == set(found.predicted)


def test_a_row_added_to_the_declared_space_is_looked_at(monkeypatch):
    row = declared_space.Row("m16_n128k128_w2x1_p7_dp_c2", declared_space.SYM128, "a new idea")
    monkeypatch.setattr(declared_space, "HOPPER", (*declared_space.HOPPER, row))
    found = enumerate_space(PROBLEM, HOPPER, H200, {"stages": (7,), "m_tile": (16,)})
    assert "w4a16_hopper_f16_g128_m16_n128k128_w2x1_p7_dp_c2" in found.predicted


def test_near_misses_name_the_rule(space):
    leader = space.ranked[0]
    found = near_misses(space, leader)
    assert found
    for miss in found:
        other = Variant.parse(miss.name)
        assert why_not(other, HOPPER) == miss.reason
        differing = [knob for knob in NARROW if getattr(other, knob) != getattr(leader, knob)]
        assert differing == [miss.knob]


def test_the_choice_shows_every_knob_and_few_twins():
    space = enumerate_space(PROBLEM, HOPPER, H200, {"family": ("hopper",)})
    chosen = choose(space, 30, [CHOICE])
    assert len(chosen) == 30 and chosen[CHOICE] == "built"
    assert list(chosen.values()).count("best prediction") == 1
    predicted = [space.predicted[name] for name in chosen]
    assert predicted == sorted(predicted)
    near = [name for name, why in chosen.items() if why == "one knob from the best prediction"]
    legal = {v.name for v in neighbours(space, space.ranked[0])}
    assert near and set(near) <= legal
    fast = [Variant.parse(n) for n, why in chosen.items() if why == "predicted fast"]
    twins = [replace(v, stages=2, ctas_per_sm=1) for v in fast]
    assert max(twins.count(t) for t in twins) <= 3


# ---- without a GPU -------------------------------------------------------------------------------


def test_without_a_gpu_the_model_ranks_and_cubins_give_facts(nvcc):
    found = explorer(compile_count=2).run()
    assert nvcc.runs == 2 and found.measured_on is None
    predicted = [row.predicted_us for row in found.rows]
    assert predicted == sorted(predicted) and len(found.rows) == 12
    compiled = [row for row in found.rows if row.name in nvcc.compiled]
    assert [(r.registers, r.spill_bytes) for r in compiled] == [(96, 16)] * 2
    built = [row for row in found.rows if row.why == "built"]
    assert built and all(row.registers == 96 and row.ctas_per_sm >= 1 for row in built)
    assert sum(row.choice for row in found.rows) <= 1
    assert {point["us"] for point in found.sweep} == {None}
    assert found.limit_us == pytest.approx(limit_us(PROBLEM, H200, "H200"))


def test_the_cache_is_used_the_second_time(nvcc):
    explorer(compile_count=3).run()
    explorer(compile_count=0).run()
    assert nvcc.runs == 3
    assert len([r for r in explorer(compile_count=0).run().rows if r.registers]) >= 3


def test_a_failing_compiler_does_not_end_the_run(nvcc, monkeypatch):
    nvcc.fails()
    found = explorer(compile_count=2).run()
    assert any("no such thing" in n or "not compiled" in n for n in found.notes) and found.rows
    monkeypatch.setenv("NVCC", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": "/n", "platlib": "/n"})
    found = explorer(compile_count=2).run()
    assert any(note.startswith("nothing was compiled: nvcc") for note in found.notes)


def test_an_interrupt_while_compiling_keeps_what_was_compiled(nvcc, monkeypatch):
    real = jit.compile_variants

    def interrupted(variants, *rest):
        real(variants[:1], *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(jit, "compile_variants", interrupted)
    found = explorer(compile_count=3).run()
    assert "interrupted while compiling" in found.notes
    assert len([r for r in found.rows if r.name in nvcc.compiled and r.registers]) == 1


# ---- with a (fake) GPU ---------------------------------------------------------------------------


def test_every_variant_is_compiled_checked_and_timed(nvcc):
    timer = fakes.FakeTimer()
    found = explorer(timer).run()
    assert found.measured_on == "NVIDIA H200"
    assert all(row.us and row.us_pdl and row.us_warm for row in found.rows)
    assert [r.score for r in found.rows] == sorted(r.score for r in found.rows)
    best = found.rows[0]
    assert best.us == pytest.approx(best.predicted_us, rel=0.02)
    assert best.gb_s == pytest.approx(PROBLEM.weight_bytes / best.us / 1e3)
    assert best.tflop_s == pytest.approx(2 * 16 * 4096**2 / best.us / 1e6)
    assert best.percent_of_limit == pytest.approx(100 * found.limit_us / best.us)
    on_demand = library._on_demand[9, 0]
    assert set(on_demand) == set(nvcc.compiled), "what was compiled is known to the launcher"
    measured = [x for x in found.sweep if x["us"] is not None]
    assert {x["m"] for x in measured} == {1, 8, 16, 32, 64, 128, 256, 512}
    assert all(x["limit_us"] > 0 for x in found.sweep)


def test_wrong_variants_are_named_and_last(nvcc):
    names = list(choose(enumerate_space(PROBLEM, HOPPER, H200, NARROW), 12))
    found = explorer(fakes.FakeTimer(wrong=frozenset(names[:1])), sweep=False).run()
    assert found.rows[-1].refused.startswith("wrong: relative error inf")
    assert found.rows[-1].us is None and all(row.refused is None for row in found.rows[:-1])
    json.dumps(found.to_json(), allow_nan=False)


def test_an_interrupt_keeps_what_was_measured(nvcc):
    bursts = iter(range(10_000))

    def interrupt():
        if next(bursts) == 12:
            raise KeyboardInterrupt

    found = explorer(fakes.FakeTimer(on_burst=interrupt)).run()
    measured = [row for row in found.rows if row.us is not None]
    assert 0 < len(measured) < len(found.rows)
    assert found.rows[: len(measured)] == measured, "measured ones come first"
    assert any("interrupted" in note for note in found.notes)
    assert all(point["us"] is None for point in found.sweep)


def test_the_budget_ends_measuring(nvcc):
    count = [0]
    timer = fakes.FakeTimer(on_burst=lambda: count.__setitem__(0, count[0] + 1))
    found = explorer(timer, spent=lambda: count[0] >= 10).run()
    assert count[0] <= 11 and any("budget" in note for note in found.notes)
    assert any(row.us for row in found.rows)


def test_the_tables_choice_is_marked(nvcc, built):
    table = dispatch.load_table(built / "sm_90a")
    choice = table.select(16, 4096, 4096, 128, "f16", False, 132)[0]
    found = explore.Explorer(PROBLEM, HOPPER, H200, {"family": ("hopper",)}, None, 30, 0).run()
    assert [row.name for row in found.rows if row.choice] == [choice.name]


def test_rows_sort_measured_before_modelled(nvcc):
    rows = explorer(compile_count=0).run().rows[:3]
    rows[2].us, rows[1].refused = 99.0, "wrong"
    assert sort_rows(rows) == [rows[2], rows[0], rows[1]]


# ---- command line --------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(whole, ["explore", *arguments])


SET = [f"--set={knob}={','.join(map(str, values))}" for knob, values in NARROW.items()]


def test_command_line(nvcc, tmp_path):
    files = [tmp_path / "out" / name for name in ("e.json", "e.html")]
    done = run(
        "16x4096x4096", "--gpu", "H200", "--compile", "0", "--count", "8", *SET,
        "--json", str(files[0]), "--html", str(files[1]),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "modelled for H200" in done.output and "legal variants on sm_90a" in done.output
    assert "  no " in done.output and 'gemm(a, w, kernel="w4a16_' in done.output
    data = json.loads(files[0].read_text())
    assert data["schema"] == 1 and len(data["rows"]) == 8 and data["problem"]["m"] == 16
    assert files[1].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["16x4096x4096"], "no GPU here: name one with --gpu"),
        (["16x4096", "--gpu", "A10"], "MxNxK"),
        (["16x4096x4096", "--gpu", "TPU"], "is not one of A100, A10"),
        (["16x4096x4096", "--gpu", "A10", "--arch", "sm_90a"], "--gpu A10 is sm_86, not sm_90a"),
        (["16x4096x4096", "--gpu", "A10", "--budget", "soon"], "60s or 2m"),
        (["16x4096x4000", "--gpu", "A10"], "k=4000 is not a multiple of group_size=128"),
        (["--gpu", "A10"], "a problem MxNxK is needed"),
        (["16x4096x4096", "--arch", "native"], "no GPU here says which; name one, such as sm_86"),
        (["16x4096x4096", "--gpu", "A10", "--set", "n_sm=9..3"], "an empty range: 3..9 is meant?"),
        (["16x4096x4096", "--gpu", "A10", "--set", "n_sm=96"], "n_sm=96 is not one of 64, 128"),
        (["16x4096x4096", "--gpu", "A10", "--skip", "m16"], "kernel='w4a16_m16' is malformed"),
        (["16x4096x4096", "--gpu", "A10", "--html", "pyproject.toml/x.html"], "cannot be written"),
        (["16x4096x4096", "--gpu", "A10", "--json", "."], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(nvcc, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_names_as_the_ranking_shows_them_can_be_left_out(tmp_path):
    options = ["16x4096x4096", "--gpu", "A10", "--compile", "0", "--count", "6", "--json"]
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    assert run(*options, str(first)).exit_code == 0
    best = json.loads(first.read_text())["rows"][0]
    assert run(*options, str(second), "--skip", best["geometry"]).exit_code == 0
    assert best["name"] not in {row["name"] for row in json.loads(second.read_text())["rows"]}


def test_names_that_errors_suggest_are_legal():
    for parse in (Variant.parse, lambda text: dispatch.with_format(text, "f16", False, 128)):
        with pytest.raises(ValueError) as error:
            parse("w4a16_x")
        example = re.findall(r"w4a16_\w+", str(error.value))[-1]
        name = example if "_g128_" in example else dispatch.with_format(example, "f16", False, 128)
        assert why_not(Variant.parse(name), HOPPER) is None


def test_a_gpu_that_stands_in_is_named():
    done = run("16x4096x4096", "--arch", "sm_120", "--compile", "0", "--count", "2")
    assert done.exit_code == 0 and "no GPU of sm_120 is modelled" in " ".join(done.output.split())


def test_decompositions_have_short_names():
    found = parse_overrides(["decomposition=dp,streamk,split_k"])
    assert found == {"decomposition": ("data_parallel", "stream_k", "split_k")}


def test_a_machine_that_only_runs_kernels_needs_no_compiling_packages(nvcc):
    """No jinja2, no cutlass_library: ranking, cached kernels and forced names work."""
    name = enumerate_space(PROBLEM, HOPPER, H200, NARROW).ranked[0].name
    jit.obtain(name, "sm_90a")
    geometry = Variant.parse(name).geometry().name.removeprefix("w4a16_")
    code = (
        "import sys\n"
        "sys.modules.update({'jinja2': None, 'cutlass_library': None})\n"
        "from marlin_cutlass import explore, jit, library, profile, tune\n"
        f"print(library.forced_index({name!r}, (9, 0), 'f16', False, 128))\n"
        "from marlin_cutlass.cli import app\n"
        f"app(['explore', '16x4096x4096', '--gpu', 'H200', '--count', '24', *{SET!r}])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "modelled for H200" in run.stdout
    assert "nothing was compiled: import of" in run.stdout
    row = next(x for x in run.stdout.splitlines() if geometry in x)
    assert " 96 " in row, "registers of the cached cubin"


def test_budgets():
    assert [explore.parse_seconds(t) for t in ("60", "60s", "2m", "1.5 min")] == [60, 60, 120, 90]


# ---- the paper's figures -------------------------------------------------------------------------


def test_the_papers_figures_from_the_model():
    points = explore_paper.points(GPUS["A10"])
    assert len(points) == 9 + 8 + 5 + 36
    for figure, limit in (
        ("1, ms", 0.06),
        ("1, speedup", 0.06),
        ("9, speedup", 0.10),
        ("11, us", 0.08),
    ):
        errors = sorted(abs(p.error) for p in points if p.figure == figure)
        assert errors[len(errors) // 2] <= limit, figure
    text = run("--paper", "--gpu", "A10").output
    assert "| 1, ms | batch 64 | 1.54 |" in text and "figure 11, us: median error" in text
    with pytest.raises(ValueError, match="no figure for H200; it has A10"):
        explore_paper.points(H200)
