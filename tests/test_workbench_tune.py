"""tune: what is measured, how, and what the tuning file keeps."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import workbench_fakes as fakes
from typer.testing import CliRunner

from generator import rows
from generator.arch import ARCHS, GPUS
from generator.problem import ProblemShape
from generator.variant import Variant
from marlin_cutlass import dispatch, tune
from marlin_cutlass.explore_candidates import candidates, gpu_for, gpu_named, sensible_rows
from marlin_cutlass.explore_measure import Format, Measured, Settings, measure, ranked
from marlin_cutlass.explore_shapes import Architecture, WeightShape, parse_numbers, plan_shapes
from marlin_cutlass.explore_tuning import TuningFile, geometry_of, score

SHAPE = WeightShape(4096, 4096)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("workbench")
    fakes.write_manifest(root)
    return root


@pytest.fixture
def table(built):
    return dispatch.load_table(built / "sm_90a")


def make_tuner(table, timer=None, **options) -> tune.Tuner:
    timer = timer or fakes.FakeTimer()
    file = TuningFile.for_device("sm_90a", timer.device, "2026-11-29T00:00:00+00:00")
    return tune.Tuner(timer, table, file, **{"margin": 4.0, **options})


# ---- shapes --------------------------------------------------------------------------------------


def test_layers_of_a_model_are_fused_and_shared_out():
    assert [str(s) for s in plan_shapes(models="llama3-8b").shapes] == [
        "6144x4096",
        "4096x4096",
        "28672x4096",
        "4096x14336",
    ]
    shared = plan_shapes(models="llama3-70b", tp="8").shapes
    assert [str(s) for s in shared] == ["1280x8192", "8192x1024", "7168x8192", "8192x3584"]
    separate = plan_shapes(models="llama3-8b", layers="separate").shapes
    assert WeightShape(1024, 4096) in separate and WeightShape(14336, 4096) in separate


def test_a_config_json_is_read(tmp_path):
    config = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 768,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    shapes = [str(s) for s in plan_shapes(models=str(tmp_path)).shapes]
    assert shapes == ["4096x2048", "2048x2048", "12288x2048", "2048x6144", "1536x2048", "2048x768"]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        plan_shapes(models=str(tmp_path))


def test_what_cannot_be_measured_is_named():
    plan = plan_shapes("4096x4000,64x128", "llama3-8b", tp="64")
    assert plan.shapes == [WeightShape(64, 128)]
    assert "k is not a multiple of group_size=128" in plan.left_out[0]
    assert "heads=32 is not a multiple of tp=64" in plan.left_out[1]
    with pytest.raises(ValueError, match="NxK"):
        plan_shapes("4096")
    with pytest.raises(ValueError, match=r"neither a config\.json nor one of llama3-8b"):
        plan_shapes(models="gpt-5")
    with pytest.raises(ValueError, match="ms='1,x'"):
        parse_numbers("1,x", "ms")


def test_fewer_key_heads_than_devices_are_replicated():
    layers = {name: n for name, n, _ in Architecture(4096, 8192, 32, 2, 128).layers(8, True)}
    assert layers["qkv"] == 4 * 128 + 2 * 128


# ---- candidates ----------------------------------------------------------------------------------


def test_candidates_are_near_the_best_prediction_and_fit_the_rows(table):
    variants = [Variant.parse(k.name) for k in table.kernels]
    problem, gpu = ProblemShape(16, 4096, 4096), GPUS["H200"]
    found = candidates(problem, variants, gpu, margin=2.5)
    best = min(found.values())
    assert list(found.values()) == sorted(found.values()) and 1 < len(found) < len(variants)
    assert all(us <= 2.5 * best for us in found.values())
    assert all(sensible_rows(16, Variant.parse(name).m_tile) for name in found)
    kept = next(v.name for v in variants if v.m_tile == 256 and "_f16_g128_" in v.name)
    assert list(candidates(problem, variants, gpu, keep=[kept], top=1))[1:] == [kept]
    with pytest.raises(ValueError, match="margin"):
        candidates(problem, variants, gpu, margin=0.5)


def test_row_tiles_that_suit_a_number_of_rows():
    tiles = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert [t for t in tiles if sensible_rows(1, t)] == [8, 16]
    assert [t for t in tiles if sensible_rows(33, t)] == [16, 24, 32, 48, 64]
    assert [t for t in tiles if sensible_rows(1024, t)] == [64, 96, 128, 192, 256]


def test_gpus_by_name():
    assert gpu_for("NVIDIA H200", ARCHS["sm_90a"], 132) is GPUS["H200"]
    assert gpu_for("NVIDIA H100 80GB HBM3", ARCHS["sm_90a"], 132) is GPUS["H100"]
    assert gpu_named("rtx4090") is gpu_named("RTX 4090") is GPUS["RTX 4090"]
    with pytest.raises(ValueError, match="A10"):
        gpu_named("TPU")


# ---- measuring -----------------------------------------------------------------------------------


def _measure(timer, names, m=16, **options) -> dict[str, Measured]:
    copies = timer.open(4096, 4096, Format(), m)
    guesses = {name: timer.true_us(name, m) for name in names}
    return {r.kernel: r for r in measure(timer, Format(), m, guesses, copies, **options)}


def names_of(table, m_tile=16) -> list[str]:
    return [k.name for k in table.kernels if k.m_tile == m_tile and k.name.find("_f16_g128") > 0]


def test_two_interleaved_rounds_in_short_bursts_with_pauses(table):
    names = names_of(table)[:3]
    timer = fakes.FakeTimer(times=dict.fromkeys(names, 6.0))
    found = _measure(timer, names)
    bursts = [entry[1:3] for entry in timer.log if entry[0] == "burst"]
    order = [(name, pdl) for name in names for pdl in (False, True)]
    assert bursts == order + order[::-1]
    assert all(entry[3] < 15_000 for entry in timer.log if entry[0] == "burst")  # us
    for name in names:
        assert found[name].us == pytest.approx(timer.true_us(name, 16), rel=0.02)
        assert found[name].us_pdl == pytest.approx(timer.true_us(name, 16, pdl=True), rel=0.02)
        assert found[name].samples >= 10


def test_hopeless_candidates_get_one_round(table):
    names = names_of(table)[:3]
    timer = fakes.FakeTimer(times=dict(zip(names, (18.0, 6.0, 6.5))))
    found = _measure(timer, names)
    counts = {n: sum(e[:2] == ("burst", n) for e in timer.log) for n in names}
    assert counts[names[0]] == 2 and counts[names[1]] == counts[names[2]] == 4
    assert found[names[0]].us == pytest.approx(timer.true_us(names[0], 16), rel=0.02)


def test_wrong_and_broken_candidates_have_no_figure(table):
    names = names_of(table)[:4]
    timer = fakes.FakeTimer(
        wrong=frozenset(names[:1]),
        wrong_in_chain=frozenset(names[1:2]),
        broken=frozenset(names[2:3]),
    )
    found = _measure(timer, names)
    assert "relative error inf" in found[names[0]].refused
    assert "chain" in found[names[1]].refused
    assert found[names[2]].refused == "failed: launch failed: too many resources"
    assert all(found[n].us is found[n].us_pdl is None for n in names[:3])
    assert [r.kernel for r in ranked(found.values())] == names[3:]


def test_a_median_survives_an_outlier(table):
    timer, (name, *_) = fakes.FakeTimer(), names_of(table)
    bursts = iter(range(100))

    def burst(graph, replays):
        times = fakes.FakeTimer.burst(timer, graph, replays)
        return [times[0] * 50, *times[1:]] if next(bursts) == 0 else times

    timer.burst = burst
    found = _measure(timer, [name])
    true = timer.true_us(name, 16)
    assert found[name].us == pytest.approx(true, rel=0.03)


def test_calls_of_a_graph_use_every_copy_equally_often():
    s = Settings()
    assert s.calls(5.0, 14) % 14 == 0 and 400 < 5 * s.calls(5.0, 14) < 700
    assert s.calls(5000.0, 2) == 2
    assert s.replays(5.0, 98) == 10 and s.replays(5000.0, 2) == 3


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run_writes_what_build_reads(table, tmp_path, capsys):
    out = tmp_path / "h200.json"
    tuner = make_tuner(table)
    assert tune.tune(tuner, [SHAPE], [8, 64], out, None)
    data = json.loads(out.read_text())
    assert {"arch", "gpu", "sms", "driver", "torch", "date", "method"} <= set(data)
    assert [e[0] for e in tuner.timer.log].count("open") == 1, "the weight is packed once"
    found = rows.read_measurements(ARCHS["sm_90a"], tmp_path)
    assert len(found) == len(data["entries"]) and found[0].source == "measured H200 2026-11-29"
    for m in (8, 64):
        here = [x for x in found if x.m == m]
        assert {x.geometry for x in here} == {
            geometry_of(n, Format()) for n in tuner.wanted(SHAPE, m)
        }
    best = min((x for x in found if x.m == 64), key=lambda x: x.decisive_us)
    variants = [Variant.parse(k.name) for k in table.kernels]
    after = rows.build_table(ARCHS["sm_90a"], variants, tmp_path)
    chosen, row = after.select(ProblemShape(64, 4096, 4096), 132)
    assert chosen.geometry().name == best.geometry and row.source == best.source
    assert "4096x4096 m=64" in capsys.readouterr().out


def test_a_second_run_measures_only_what_is_missing(table, tmp_path):
    out = tmp_path / "h200.json"
    tune.tune(make_tuner(table), [SHAPE], [8], out, None)
    first = TuningFile.load(out)
    again = make_tuner(table)
    again.file.entries = TuningFile.load(out).entries
    assert tune.tune(again, [SHAPE], [8], out, None)
    assert again.timer.log == [], "nothing was left to do"
    assert again.tune_shape(SHAPE, [8, 16]) == 1
    assert set(first.entries) < set(again.file.entries)


def test_a_new_or_rebuilt_kernel_is_measured_beside_the_best_known(table, tmp_path):
    out = tmp_path / "h200.json"
    tuner = make_tuner(table)
    tune.tune(tuner, [SHAPE], [8], out, None)
    stale = min(tuner.file.entries, key=lambda key: tuner.file.entries[key]["us"])
    tuner.file.entries[stale]["cubin"] = "other"
    missing = {geometry_of(n, Format()) for n in tuner.missing(SHAPE, 8)}
    assert stale[-1] in missing and len(missing) == 1 + tune.ANCHORS
    assert make_tuner(table, keep_stale=True).keep_stale
    tuner.keep_stale = True
    assert tuner.missing(SHAPE, 8) == {}


def test_the_budget_ends_a_run_cleanly_and_the_next_one_goes_on(table, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    out = tmp_path / "h200.json"
    timer = fakes.FakeTimer(on_burst=lambda: now.__setitem__(0, now[0] + 1.0))
    tuner = make_tuner(table, timer)
    shapes = [SHAPE, WeightShape(8192, 8192), WeightShape(1024, 4096)]
    assert not tune.tune(tuner, shapes, [8, 16], out, 45.0)
    assert now[0] <= 47.0, "the end of the budget is asked for between bursts"
    kept = TuningFile.load(out).entries
    assert kept
    assert tune.tune(tuner, shapes, [8, 16], out, 1e6)
    assert set(kept) < set(TuningFile.load(out).entries)


def test_an_interrupt_keeps_what_was_measured(table, tmp_path, capsys):
    out, bursts = tmp_path / "h200.json", iter(range(1000))

    def interrupt():
        if next(bursts) == 60:
            raise KeyboardInterrupt

    tuner = make_tuner(table, fakes.FakeTimer(on_burst=interrupt))
    assert not tune.tune(tuner, [SHAPE], [8, 16, 32, 64, 128], out, None)
    assert "interrupted" in capsys.readouterr().out
    assert {key[2] for key in TuningFile.load(out).entries} >= {8}


def test_excluded_candidates_are_recorded_and_not_tried_again(table, tmp_path, capsys):
    tuner = make_tuner(table)
    bad = next(iter(tuner.wanted(SHAPE, 16)))
    tuner.timer.wrong = frozenset([bad])
    out = tmp_path / "h200.json"
    assert tune.tune(tuner, [SHAPE], [16], out, None)
    (entry,) = json.loads(out.read_text())["excluded"]
    assert entry["geometry"] == geometry_of(bad, Format()) and "wrong" in entry["why"]
    assert "EXCLUDED" in capsys.readouterr().out
    assert all(e["geometry"] != entry["geometry"] for e in tuner.file.entries.values())
    assert tuner.missing(SHAPE, 16) == {}


def test_other_formats_are_kept_apart(table):
    fmt = Format("bf16", True, 32)
    tuner = make_tuner(table, fmt=fmt)
    tuner.tune_shape(SHAPE, [16])
    entries = list(tuner.file.entries.values())
    assert entries and all(
        (e["dtype"], e["zeros"], e["group_size"]) == ("bf16", True, 32) for e in entries
    )
    assert tuner.file.known(4096, 4096, 16, Format()) == {}


def test_what_another_run_added_is_kept(table, tmp_path):
    out = tmp_path / "t.json"
    first, second = make_tuner(table), make_tuner(table)
    first.tune_shape(SHAPE, [8])
    second.tune_shape(SHAPE, [64])
    first.file.save(out)
    second.file.save(out)
    kept = TuningFile.load(out).entries
    assert {key[2] for key in kept} == {8, 64}
    name = next(iter(first.wanted(SHAPE, 8)))
    first.file.add(4096, 4096, 8, Format(), Measured(name, refused="wrong"), "x")
    first.file.save(out)
    last = TuningFile.load(out)
    assert len(last.entries) == len(kept) - 1 and len(last.excluded) == 1


def test_a_file_of_another_gpu_is_refused(table, tmp_path):
    other = replace(fakes.H200, name="NVIDIA H100", sms=114)
    file = TuningFile.for_device("sm_90a", other, "2026-11-29")
    path = tmp_path / "t.json"
    file.save(path)
    with pytest.raises(ValueError, match=r"114 SMs.*--out"):
        TuningFile.load(path).check_device("sm_90a", fakes.H200, path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a tuning file"):
        TuningFile.load(path)


def test_pdl_is_not_measured_where_the_gpu_lacks_it(built, table):
    timer = fakes.FakeTimer(device=replace(fakes.H200, capability=(8, 6)))
    assert make_tuner(table, timer).pdl == (False,)


# ---- check ---------------------------------------------------------------------------------------


def test_check_says_how_far_the_choice_is_from_the_best(table, capsys):
    tuner = make_tuner(table, margin=10.0)
    choice = tuner.choice(SHAPE, 16)
    tuner.timer.factors[choice] = 3.0
    cells, wrong = tune.check(tuner, [SHAPE], [16, 64], None)
    assert wrong == [] and [c.m for c in cells] == [16, 64]
    assert cells[0].choice == choice and cells[0].best != choice and cells[0].behind > 0.2
    checks = [e for e in tuner.timer.log if e[0] == "check" and e[2] == 16]
    assert len(checks) == 1 + tune.CHECKED
    assert tuner.file.entries == {}, "checking writes nothing"
    summary = tune.check_summary(cells)
    assert "2 cells" in summary and "within 10 % in 50%" in summary


def test_rivals_are_first_what_was_measured_fast(table, tmp_path):
    tuner = make_tuner(table, margin=10.0)
    slowest = list(tuner.wanted(SHAPE, 16))[-1]
    assert slowest not in tune.rivals(tuner, SHAPE, 16)
    tuner.file.add(4096, 4096, 16, Format(), Measured(slowest, 1.0, 0.9), "x")
    assert list(tune.rivals(tuner, SHAPE, 16))[:2] == [tuner.choice(SHAPE, 16), slowest]


# ---- hanging kernels -----------------------------------------------------------------------------


def test_the_watchdog_names_what_hangs(table):
    heard = []
    dog = tune.Watchdog(heard.append, seconds=0.1)
    for _ in range(5):
        dog("working")
        time.sleep(0.03)
    assert heard == []
    dog("4096x4096 kernel m=8")
    time.sleep(0.3)
    assert heard == ["4096x4096 kernel m=8"]
    dog.close()


def test_a_kernel_that_hung_is_excluded(table):
    tuner = make_tuner(table)
    name = next(iter(tuner.wanted(SHAPE, 8)))
    tune.exclude_hung(tuner, f"4096x4096 {name} m=8: first call")
    (entry,) = tuner.file.excluded.values()
    assert entry["why"].startswith("hung") and entry["m"] == 8
    tune.exclude_hung(tuner, "saving")
    assert len(tuner.file.excluded) == 1
    assert name not in tuner.missing(SHAPE, 8)


# ---- command line --------------------------------------------------------------------------------


@pytest.fixture
def runner(built, monkeypatch):
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(built))
    monkeypatch.setattr(tune, "gpu_timer", fakes.FakeTimer)
    monkeypatch.setattr(tune, "Watchdog", lambda handler: lambda what: None)
    return lambda *args: CliRunner().invoke(tune.app, list(args), catch_exceptions=False)


def test_command_line(runner, tmp_path):
    out = tmp_path / "t.json"
    first = runner("--shapes", "4096x4096", "--ms", "8,16", "--out", str(out), "--budget", "600")
    assert first.exit_code == 0 and "2 cells measured" in first.output
    second = runner("--shapes", "4096x4096", "--ms", "8,16", "--out", str(out))
    assert "0 cells measured" in second.output
    copy = tmp_path / "copy.json"
    third = runner("--shapes", "2048x4096", "--ms", "8", "--from", str(out), "--out", str(copy))
    assert third.exit_code == 0
    assert set(TuningFile.load(out).entries) < set(TuningFile.load(copy).entries)


def test_command_line_check(runner, tmp_path):
    cells = tmp_path / "cells.json"
    flags = ("--shapes", "4096x4096", "--ms", "8,32", "--margin", "10")
    done = runner("--check", *flags, "--json", str(cells))
    assert done.exit_code == 0 and "2 cells: the table's choice is within 5 %" in done.output
    assert len(json.loads(cells.read_text())["cells"]) == 2


def test_report_compares_the_cost_model_with_a_file(runner, tmp_path):
    out = tmp_path / "t.json"
    runner("--shapes", "4096x4096,8192x1024", "--ms", "8,64", "--out", str(out))
    report = runner("--report", str(out))
    assert report.exit_code == 0 and "median error" in report.output
    assert "within 10 %" in report.output


def test_the_file_of_a_gpu_is_found_whatever_its_name():
    assert tune.default_out("NVIDIA H200").name.endswith("h200.json")
    for name, file in (
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090.json"),
        ("NVIDIA A10", "nvidia_a10.json"),
    ):
        assert tune.default_out(name).name == file
        assert tune.default_out(name).parent == rows.TUNING


def test_scores_are_means():
    assert score({"us": 4.0, "us_pdl": 2.0}) == Measured("x", 4.0, 2.0).score == 3.0
    assert score({"us": 4.0}) == 4.0
