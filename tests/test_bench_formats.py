"""benchmarks/formats.py without a GPU: what it prepares, calls and prints."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import formats
from marlin_cutlass import dequantize
from marlin_cutlass.bench import Budget, Report, Result, make_problem, make_weight, relative_error

TIMES = {"f16.s.128": 10.0, "f16.z.32": 11.0, "bf16.s.-1": 10.4, "f16.s.64": 12.0}


@pytest.fixture
def bench(monkeypatch):
    """The script on the CPU: calls run, and take what TIMES says, half of it with PDL."""

    def measure(candidates, problem):
        results = []
        for c in candidates:
            dtype = str(problem.a.dtype).removeprefix("torch.")
            r = Result(c.name, problem.m, problem.n, problem.k, problem.group_size, dtype)
            r.rel_error, r.note = relative_error(c.calls[0](), problem.reference), c.note
            r.us = TIMES[c.name.removesuffix(formats.PDL_SUFFIX)] * (0.5 if c.pdl else 1)
            results.append(r)
        return results

    def call(a, w, out, pdl, kernel):
        return lambda: (a.float() @ dequantize(w).float()).to(a.dtype)

    monkeypatch.setattr(formats, "measure", measure)
    monkeypatch.setattr(formats, "our_call", call)
    monkeypatch.setattr(formats, "explain", lambda *a, **o: SimpleNamespace(kernel="w4", why=""))
    monkeypatch.setattr(
        formats, "make_weight", lambda n, k, **o: make_weight(n, k, device="cpu", **o)
    )
    properties = SimpleNamespace(L2_cache_size=1000, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return formats


def _report() -> Report:
    return Report("Weight formats", {}, method="")


def test_every_format_gives_the_same_product_and_a_ratio(bench):
    report, saved = _report(), []
    chosen = bench.parse_formats("f16.z.32,bf16.s.-1,f16.s.64")
    shapes = [(128, 256), (256, 256)]
    bench.run(shapes, [1, 3], chosen, report, Budget(None), lambda r: saved.append(len(r.results)))
    assert saved == [8, 16, 24, 32] and report.finished
    limits = {r.candidate: r.limit_us for r in report.results if r.m == 1 and r.n == 256}
    assert limits["f16.z.32"] > limits["f16.s.64"] > limits["f16.s.128"]  # more bytes
    assert "interleaved in one process" not in formats.METHOD
    assert all(r.rel_error < (1e-2 if r.dtype == "bfloat16" else 1e-3) for r in report.results)
    found = bench.ratios(report)
    assert set(found) == {f"{f.name}{pdl}" for f in chosen for pdl in ("", " PDL")}
    assert all(set(r) == {(n, k, m) for n, k in shapes for m in (1, 3)} for r in found.values())
    assert set(found["f16.z.32 PDL"].values()) == {1.1}
    lines = list(bench.summary(report))
    assert lines[0] == (
        "f16.z.32: geometric mean 1.100, median 1.100, worst 1.10; "
        "0 of 4 cells within 5 %, 4 within 12 %"
    )
    console = Console(record=True, width=200, file=io.StringIO())
    bench.show(report, console)
    text = console.export_text()
    assert "256 x 256" in text and "1.20" in text and "time budget" not in text


def test_zero_points_are_stored_and_equal_eight(bench):
    q, scales = make_weight(64, 128, group_size=32, device="cpu")
    problem = make_problem(2, q, scales, 32)
    packed = formats.pack(q, scales, torch.full_like(scales, 8, dtype=torch.uint8), group_size=32)
    assert packed.has_zeros
    product = problem.a.float() @ dequantize(packed).float()
    assert relative_error(product, problem.reference) < 1e-3


def test_a_spent_budget_is_said(bench):
    report = _report()
    ticks = iter(range(100))
    budget = Budget(1.5, clock=lambda: next(ticks))
    bench.run([(128, 256)], [1, 2, 3], bench.parse_formats("f16.s.64"), report, budget)
    assert not report.finished and {r.m for r in report.results} == {1}
    assert len(report.results) == 4  # whole cells
    console = Console(record=True, width=200, file=io.StringIO())
    bench.show(report, console)
    assert "the time budget ended the run" in console.export_text()


def test_parse_formats():
    names = [f.name for f in formats.parse_formats(" bf16.z.-1, f16.s.128,bf16.z.-1,f16.s.32 ")]
    assert names == ["bf16.z.-1", "f16.s.32"]  # the base is always there
    assert len(formats.parse_formats(formats.DEFAULT)) == 9
    for text, part in (("f16.s.48", "f16.s.48"), ("f8.s.64", "f8.s.64"), ("f16.64", "f16.64")):
        with pytest.raises(ValueError, match=f"formats: '{part}' is not dtype.zeros.group"):
            formats.parse_formats(text)
    with pytest.raises(ValueError, match="at least one"):
        formats.parse_formats(" , ")


def test_command_line(monkeypatch, tmp_path):
    app = typer.Typer()
    app.command()(formats.main)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runner = CliRunner()
    assert "no GPU here" in runner.invoke(app, []).output
    assert runner.invoke(app, ["--formats", "f16.q.64"]).exit_code == 2
    report = _report()
    for name, us in (("f16.s.128", 10.0), ("f16.s.64", 10.5)):
        r = Result(name, 1, 128, 256, 128, "float16")
        r.us = us
        report.results.append(r)
    report.save(tmp_path / "formats.json")
    result = runner.invoke(app, ["--replot", str(tmp_path / "formats.json")])
    assert result.exit_code == 0 and "f16.s.64: geometric mean 1.050" in result.output
