"""The workbench on a real GPU: plausible figures, a tuning file that resumes, explore in time."""

from __future__ import annotations

import json
import time

import pytest
import torch

import marlin_cutlass as mc

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from generator.problem import ProblemShape
    from marlin_cutlass import explore, library, tune
    from marlin_cutlass.explore_measure import Format, measure
    from marlin_cutlass.explore_shapes import WeightShape

SHAPE = (4096, 4096)


@pytest.fixture(scope="module")
def timer():
    return tune.gpu_timer()


def test_a_burst_is_near_what_an_event_around_many_calls_says(timer):
    copies = timer.open(*SHAPE, Format(), 16)
    table = library.table_for_capability(*timer.device.capability)
    kernel = table.select(16, *SHAPE, 128, "f16", False, timer.device.sms)[0].name
    (found,) = measure(timer, Format(), 16, {kernel: 10.0}, copies, warm=True)
    assert found.refused is None and found.rel_error < 2e-3
    weight_us = timer.weights[0].packed.numel() / 20e12 * 1e6  # faster than any memory
    assert weight_us < found.us < 200
    assert found.us_warm <= found.us * 1.2
    if found.us_pdl is not None:
        assert 0.4 < found.us_pdl / found.us < 1.1
    timer.close()


def test_a_second_measurement_agrees(timer):
    copies = timer.open(*SHAPE, Format(), 64)
    table = library.table_for_capability(*timer.device.capability)
    kernel = table.select(64, *SHAPE, 128, "f16", False, timer.device.sms)[0].name
    first, second = (measure(timer, Format(), 64, {kernel: 10.0}, copies)[0] for _ in range(2))
    assert first.us == pytest.approx(second.us, rel=0.08)
    timer.close()


def test_tune_writes_a_file_and_goes_on(timer, tmp_path):
    out = tmp_path / "tuning.json"
    tuner = tune.make_tuner(timer, Format(), None, out)
    started = time.monotonic()
    assert tune.tune(tuner, [WeightShape(*SHAPE)], [8, 64], out, 120.0)
    seconds = time.monotonic() - started
    data = json.loads(out.read_text())
    assert data["gpu"] == timer.device.name and data["entries"]
    assert seconds / len(data["entries"]) < 0.3, "about 0.1 s a candidate"
    again = tune.make_tuner(timer, Format(), None, out)
    assert tune.tune(again, [WeightShape(*SHAPE)], [8, 64], out, 120.0)
    assert json.loads(out.read_text())["entries"] == data["entries"]


def test_the_tables_choice_is_near_the_best_of_its_rivals(timer):
    tuner = tune.make_tuner(timer, Format(), None, None)
    cells, wrong = tune.check(tuner, [WeightShape(*SHAPE)], [16, 128], 60.0)
    assert wrong == []
    assert all(cell.behind < 0.25 for cell in cells), tune.check_summary(cells)


def test_explore_ranks_what_is_built(timer):
    arch, gpu = explore.target(timer, None, None)
    problem = ProblemShape(16, *SHAPE)
    started = time.monotonic()
    explorer = explore.Explorer(problem, arch, gpu, {}, timer, 40, 0)
    found = explorer.run()
    assert time.monotonic() - started < 40
    measured = [row for row in found.rows if row.us is not None]
    assert measured and all(row.refused is None for row in measured)
    assert all(0 < row.percent_of_limit < 130 for row in measured)
    assert any(row.choice for row in found.rows)


def test_a_forced_variant_is_compiled_or_refused_by_rule():
    w = mc.pack(
        torch.randint(0, 16, (256, 128), dtype=torch.uint8, device="cuda"),
        torch.rand(2, 128, device="cuda").half() * 0.01,
        group_size=128,
    )
    a = torch.randn(4, 256, device="cuda").half()
    name = "w4a16_ampere_m16_n64k256_w1x4_p2_dp_c1"
    try:
        result = mc.gemm(a, w, kernel=name)
    except ValueError as error:
        assert "cannot be compiled here" in str(error) or "build.py" in str(error)
        return
    expected = a.float() @ mc.dequantize(w, torch.float16).float()
    assert ((result.float() - expected).norm() / expected.norm()).item() < 2e-3
