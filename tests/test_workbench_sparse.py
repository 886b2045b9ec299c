"""The workbench on 2:4-sparse weights: explore, tune, profile and explain as for dense ones."""

from __future__ import annotations

import json

import pytest
import workbench_fakes as fakes
from test_workbench_profile import csv_text, make_ncu
from typer.testing import CliRunner

from generator import rows
from generator.arch import ARCHS
from generator.variant import Variant
from marlin_cutlass import dispatch, tune
from marlin_cutlass.cli import app
from marlin_cutlass.explain import explain
from marlin_cutlass.explore_measure import Format
from marlin_cutlass.explore_model import model_report
from marlin_cutlass.explore_shapes import WeightShape
from marlin_cutlass.explore_tuning import TuningFile, geometry_of
from marlin_cutlass.limits import limit, packed_bytes

SHAPE = WeightShape(4096, 4096)
SPARSE = Format(sparse=True)


@pytest.fixture
def table(tmp_path):
    return dispatch.load_table(fakes.write_manifest(tmp_path / "before"))


def make_tuner(table, fmt=SPARSE, **factors) -> tune.Tuner:
    timer = fakes.FakeTimer(factors=factors)
    file = TuningFile.for_device("sm_90a", timer.device, "2026-11-29T00:00:00+00:00")
    return tune.Tuner(timer, table, file, fmt, margin=10.0)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_tune_measures_sparse_kernels_and_its_figures_decide(table, tmp_path):
    out = tmp_path / "tuning" / "h200.json"
    unexpected = "w4a16_sparse_f16_g128_m16_n128k256_w2x2_p4_split4_c1"
    tuner = make_tuner(table, **{unexpected: 0.2})
    assert tune.tune(tuner, [SHAPE], [16], out, None)
    entries = json.loads(out.read_text())["entries"]
    assert len(entries) > 1
    for entry in entries:
        assert entry["sparse"] is True and entry["geometry"].startswith("w4a16_sparse_")
        assert entry["cubin"] == fakes.fake_record(_named(entry, SPARSE)).sha256[:12]
    after = dispatch.load_table(fakes.write_manifest(tmp_path / "after", out.parent))
    kernel, row = after.select(16, 4096, 4096, 128, "f16", False, 132, sparse=True)
    assert kernel.name == unexpected and row.source == "measured H200 2026-11-29"
    dense = [t.select(16, 4096, 4096, 128, "f16", False, 132) for t in (table, after)]
    assert dense[0][0].name == dense[1][0].name and dense[1][1].source == "model"


def _named(entry: dict, fmt: Format) -> str:
    return dispatch.with_format(entry["geometry"], fmt.dtype, fmt.zeros, fmt.group_size)


def test_sparse_and_dense_figures_share_a_file(table, tmp_path):
    out = tmp_path / "h200.json"
    for fmt in (SPARSE, Format(), Format("bf16", False, 64, True)):
        tuner = make_tuner(table, fmt)
        assert tune.tune(tuner, [SHAPE], [16, 64], out, None)
    file = TuningFile.load(out)
    for fmt in (SPARSE, Format(), Format("bf16", False, 64, True)):
        known = file.known(4096, 4096, 16, fmt)
        assert known and {("_sparse_" in geometry) for geometry in known} == {fmt.sparse}
        assert set(known) == {geometry_of(n, fmt) for n in make_tuner(table, fmt).wanted(SHAPE, 16)}
    again = make_tuner(table)
    again.file.entries = file.entries
    assert tune.tune(again, [SHAPE], [16, 64], out, None) and again.timer.log == []
    assert f"{len(file.entries)} measurements" in model_report(file)
    found = rows.read_measurements(ARCHS["sm_90a"], tmp_path)
    assert {x.sparse for x in found} == {True, False}


def test_check_compares_sparse_kernels(table):
    cells, wrong = tune.check(make_tuner(table), [SHAPE], [16], None)
    assert not wrong and "_sparse_" in cells[0].choice and "_sparse_" in cells[0].best


@pytest.mark.parametrize(
    "entry, reason",
    [
        ({"sparse": True}, "sparse=True: w4a16_hopper_m16"),
        ({"sparse": "yes"}, "sparse='yes' is not true or false"),
        ({"geometry": "w4a16_sparse_m16_n128k128_w2x1_p4_dp_c2"}, "sparse=False: w4a16_sparse_m16"),
    ],
)
def test_an_entry_must_say_which_weights_it_is_about(tmp_path, entry, reason):
    base = {"sms": 132, "n": 4096, "k": 4096, "m": 16, "us": 5.0}
    base["geometry"] = "w4a16_hopper_m16_n256k128_w2x1_p4_dp_c2"
    data = {"arch": "sm_90a", "gpu": "H200", "date": "2026-11-29", "entries": [base | entry]}
    (tmp_path / "h200.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"h200\.json, entry 0: " + reason):
        rows.read_measurements(ARCHS["sm_90a"], tmp_path)


def test_tune_names_the_family_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(fakes, "SPARSE_GEOMETRIES", ())
    fakes.write_manifest(tmp_path)
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    monkeypatch.setattr(tune, "gpu_timer", fakes.FakeTimer)
    done = run("tune", "--shapes", "4096x4096", "--sparse", "--out", str(tmp_path / "x.json"))
    text = " ".join(done.output.split())
    assert done.exit_code == 2 and "Traceback" not in text
    assert "no kernel for f16, 2:4 sparse, group 128 is built for sm_90a" in text
    assert "--family sparse" in text


def test_explore_ranks_sparse_variants(tmp_path):
    path = tmp_path / "r.json"
    done = run(
        "explore", "16x4096x4096", "--sparse", "--gpu", "A10", "--compile", "0", "--count", "8",
        "--json", str(path), "--html", str(tmp_path / "r.html"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "f16, 2:4 sparse, group 128" in done.output
    data = json.loads(path.read_text())
    assert data["problem"]["sparse"] is True and len(data["rows"]) == 8
    assert all(Variant.parse(row["name"]).sparse for row in data["rows"])
    assert data["sweep"] and all("_sparse_" in point["name"] for point in data["sweep"])
    dense = run("explore", "16x4096x4096", "--gpu", "A10", "--compile", "0", "--count", "4",
                "--json", str(tmp_path / "d.json"))  # fmt: skip
    assert dense.exit_code == 0
    ratio = data["limit_us"] / json.loads((tmp_path / "d.json").read_text())["limit_us"]
    assert ratio == pytest.approx(3200 / 4224, rel=1e-6)


@pytest.mark.parametrize("command", ["explore", "tune", "profile"])
def test_formats_that_do_not_exist_are_refused(command, monkeypatch):
    monkeypatch.setattr(tune, "gpu_timer", fakes.FakeTimer)
    where = ["--shapes", "4096x4096"] if command == "tune" else ["16x4096x4096"]
    for more in (["--zeros"], ["--group-size", "32"]):
        done = run(command, *where, "--sparse", *more)
        text = " ".join(done.output.split())
        assert done.exit_code == 2 and "sparse needs zeros=False and group_size 64" in text


@pytest.mark.parametrize(
    ("family", "more", "rule"),
    [
        ("hopper", ["--sparse"], "it is for dense weights, without --sparse"),
        ("hopper_sparse", [], "it is for 2:4-sparse weights, with --sparse"),
    ],
)
def test_explore_names_a_family_for_the_other_weights(family, more, rule):
    done = run("explore", "16x4096x4096", "--gpu", "H200", "--set", f"family={family}", *more)
    assert done.exit_code == 2 and rule in " ".join(done.output.split())


def test_profile_passes_the_kind_of_weight_on(tmp_path, monkeypatch):
    argv = make_ncu(tmp_path, monkeypatch, csv_text())
    assert run("profile", "16x4096x4096", "--sparse").exit_code == 0
    assert "--sparse" in json.loads(argv.read_text())


def test_limits_of_a_sparse_weight():
    assert packed_bytes(4096, 4096, 128, sparse=True) == 64 * 32 * 3200
    dense, sparse = (limit(4096, 8192, 8192, sparse=sparse) for sparse in (False, True))
    assert sparse == pytest.approx(dense / 2)
    assert limit(1, 8192, 8192, sparse=True) < 0.85 * limit(1, 8192, 8192)


def test_explain_says_which_family_to_build(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    fakes.write_manifest(tmp_path)
    found = explain(16, 4096, 4096, arch="sm_90a", sparse=True)
    assert found.kernel.startswith("w4a16_sparse_f16_g128_") and "2:4 sparse" in str(found)
    forced = "w4a16_hopper_m16_n256k128_w2x1_p4_dp_c2"
    refused = explain(16, 4096, 4096, arch="sm_90a", sparse=True, kernel=forced)
    assert refused.kernel is None and "this call has" in refused.why
    monkeypatch.setattr(fakes, "SPARSE_GEOMETRIES", ())
    fakes.write_manifest(tmp_path / "dense")
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path / "dense"))
    missing = explain(16, 4096, 4096, arch="sm_90a", sparse=True)
    assert missing.kernel is None and missing.why.endswith("--arch sm_90a --family sparse")
