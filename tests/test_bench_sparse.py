"""benchmarks/sparse.py without a GPU: what it prepares, calls and prints."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from rich.console import Console

from benchmarks import candidates as peers
from benchmarks import sparse
from marlin_cutlass import dispatch
from marlin_cutlass.bench import Budget, Report, Result, make_weight, relative_error
from marlin_cutlass.sparse import check_2_4


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script on the CPU: calls without a forced kernel run, the others count as 10 us."""
    kernels = [fake_cuda.kernel("sparse", m_tile=m) for m in (8, 16, 64, 128)]
    kernels.append(fake_cuda.kernel("hopper_sparse"))
    kernels.append(fake_cuda.kernel("hopper"))
    folder = fake_cuda.write_table(tmp_path, kernels, [fake_cuda.row(kernels[0])])
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    table = dispatch.load_table(folder)

    def measure(candidates, problem):
        results = []
        for c in candidates:
            result = Result(c.name, problem.m, problem.n, problem.k, problem.group_size, "float16")
            result.us, result.note = 10.0, c.note
            if not c.name.startswith("w4a16_"):
                result.rel_error = relative_error(c.calls[0](), problem.reference)
                result.us = 20.0
            results.append(result)
        return results

    def explain(*args, **options):
        return SimpleNamespace(kernel="w4a16_sparse_x", why="")

    monkeypatch.setattr(sparse, "measure", measure)
    monkeypatch.setattr(sparse, "explain", explain)
    monkeypatch.setattr(peers, "chosen_variant", lambda problem: "w4a16_hopper_x")
    for module in (peers, sparse):
        monkeypatch.setattr(module, "our_call", lambda a, w, out, *_: lambda: _cpu(a, w, out))
    monkeypatch.setattr(sparse, "table_for_capability", lambda *capability: table)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        sparse, "make_weight", lambda n, k, **o: make_weight(n, k, device="cpu", **o)
    )
    return sparse


def _cpu(a, w, out):
    from marlin_cutlass import gemm

    return gemm(a, w, out=out)


def test_pruned_codes_are_two_of_four() -> None:
    q, _ = make_weight(64, 256, device="cpu")
    codes = sparse.pruned(q)
    check_2_4(codes.t().int() - 8)
    assert 0.4 < float((codes != 8).float().mean()) < 0.5
    assert bool(((codes == q) | (codes == 8)).all())


def test_a_run_measures_every_column(bench, tmp_path) -> None:
    report, seen = Report("title", {}, method=""), []
    bench.run([(128, 256)], [1, 64], report, Budget(None), 128, torch.float16, seen.append)
    assert len(seen) == 2
    for results in bench.cells(report.results).values():
        for r in results:
            assert r.rel_error is None or r.rel_error < 2e-3, r.candidate
        found = bench.columns(results)
        missing = [name for name, r in found.items() if r is None]
        hopper = "best wgmma.sp" if results[0].m == 64 else None  # its one row tile is 16
        assert set(missing) - {hopper} <= {bench.SEMI}  # needs a GPU
        assert found["best mma.sp"].us == 10.0 and found["sparse"].us == 20.0
    m1, m64 = bench.cells(report.results).values()
    tiles = [r.candidate.split("_m")[1].split("_")[0] for r in m1 if "w4a16_sparse_" in r.candidate]
    assert tiles == ["8", "16"]
    assert {r.candidate.split("_m")[1].split("_")[0] for r in m64 if "_sparse_" in r.candidate} == {
        "64",
        "128",
    }
    console = Console(width=260, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    bench.show(report, console)
    text = console.export_text()
    assert "128 x 256" in text and "0.50" in text and "w4a16_sparse_" in text
    report.save(tmp_path / "r.json")
    again = Report.load(tmp_path / "r.json")
    assert [dataclasses.asdict(r) for r in again.results] == [
        dataclasses.asdict(r) for r in report.results
    ]


def test_the_budget_stops_between_cells(bench) -> None:
    report = Report("title", {}, method="")
    clock = iter([0.0, 0.0, 100.0, 200.0])
    budget = Budget(50, clock=lambda: next(clock))
    bench.run([(64, 128)], [1, 8, 16], report, budget, 128, torch.float16, lambda r: None)
    assert report.finished is False and {r.m for r in report.results} == {1}
