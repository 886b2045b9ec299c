"""The measuring method, as far as a machine without a GPU can run it."""

import json
from types import SimpleNamespace

import pytest
import torch

from marlin_cutlass import bench
from marlin_cutlass.bench import Budget, Candidate, Report, Result


def test_copies_exceed_twice_the_cache():
    for weight_bytes in (135_168, 8_650_752, 60_555_264, 242_221_056):
        copies = bench.copies_for(weight_bytes, 60 << 20)
        assert copies >= 2
        assert copies * weight_bytes > 2 * (60 << 20) or copies == bench.MAX_COPIES
    with pytest.raises(ValueError, match="weight_bytes=0"):
        bench.copies_for(0, 60 << 20)


def test_budget_ends_when_the_clock_says_so():
    now = [100.0]
    budget = Budget(10, clock=lambda: now[0])
    assert not budget.spent()
    now[0] = 109.0
    assert not budget.spent()
    assert budget.spent(reserve=2)
    now[0] = 110.0
    assert budget.spent()
    assert not Budget(None).spent()
    with pytest.raises(ValueError, match="budget=0"):
        Budget(0)


def test_reference_is_the_written_formula():
    q, scales = bench.make_weight(8, 256, device="cpu")
    problem = bench.make_problem(3, q, scales)
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for k in range(256):
        row = (q[k].double() - 8) * scales[k // 128].double()
        expected += problem.a[:, k].double()[:, None] * row
    assert torch.allclose(problem.reference.double(), expected, rtol=1e-4, atol=1e-5)
    assert int(q.min()) == 0 and int(q.max()) == 15
    assert scales.dtype == torch.float16 and problem.a.dtype == torch.float16


def test_weights_are_the_same_every_time_and_differ_by_shape():
    first, again = (bench.make_weight(16, 128, device="cpu")[0] for _ in range(2))
    other = bench.make_weight(32, 128, device="cpu")[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other[:, :16])


def test_relative_error_of_an_unwritten_output_is_infinite():
    reference = torch.ones(2, 2)
    out = reference.clone().half()
    assert bench.relative_error(out, reference) == 0
    out[0, 1] = float("nan")
    assert bench.relative_error(out, reference) == float("inf")


class FakeGraph:
    """Runs the captured calls again, as a replay does."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def no_gpu(monkeypatch):
    """bench.measure without CUDA: capture keeps the calls, replays take a set time."""

    def capture(calls, least=bench.MIN_CALLS):
        return bench._Captured(FakeGraph(calls), len(calls), calls[-1]())

    def replay(captured, replays=bench.REPLAYS, pause_s=bench.PAUSE_S):
        for index, item in enumerate(captured):
            item.times += [10.0 * (index + 1) + 0.1 * i for i in range(replays)]

    monkeypatch.setattr(bench, "capture", capture)
    monkeypatch.setattr(bench, "replay_interleaved", replay)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def _problem():
    q, scales = bench.make_weight(64, 128, device="cpu")
    return bench.make_problem(4, q, scales)


def test_measure_times_right_candidates_and_names_wrong_ones(no_gpu):
    problem = _problem()
    good = torch.full((4, 64), float("nan"), dtype=torch.float16)

    def right():
        return good.copy_(problem.reference)

    def wrong():
        return problem.reference.half() * 1.01

    def raises():
        raise RuntimeError("no kernel for this shape\nsecond line")

    once = iter([True])

    def right_only_once():
        out = problem.reference.half()
        return out if next(once, False) else out * 0

    candidates = [
        Candidate("ours", [right, right], pdl=False),
        Candidate("wrong", [wrong]),
        Candidate("raises", [raises]),
        Candidate("broken chain", [right_only_once]),
    ]
    results = {r.candidate: r for r in bench.measure(candidates, problem)}
    ours = results["ours"]
    assert ours.status == "ok" and ours.rel_error < 1e-3
    assert ours.us == pytest.approx(10.55) and ours.us_min == 10.0 and ours.calls == 2
    assert ours.percent_of_limit == pytest.approx(100 * ours.limit_us / ours.us)
    assert results["wrong"].us is None and "relative error 1.0e-02" in results["wrong"].status
    assert results["raises"].status == "failed: no kernel for this shape"
    assert results["broken chain"].us is None and "chain" in results["broken chain"].status


def test_an_output_nobody_writes_in_the_chain_is_wrong(no_gpu):
    problem = _problem()
    stale = problem.reference.half()
    (result,) = bench.measure([Candidate("stale", [lambda: stale])], problem)
    assert result.us is None and "chain" in result.status


def test_graphs_of_long_calls_have_fewer_of_them():
    assert bench.least_calls(None) == bench.least_calls(5.0) == bench.MIN_CALLS
    assert bench.least_calls(100.0) == 20 and bench.least_calls(1e6) == 1


def test_the_method_says_whether_there_are_pauses():
    assert "a pause of 6 ms and an untimed replay before each" in bench.METHOD
    assert "without pauses" in bench.method(0.0)


@pytest.mark.parametrize("pause, expected", [(0.25, [0.25, "replay", "replay"]), (0, ["replay"])])
def test_a_pause_and_a_replay_come_before_the_timed_one(monkeypatch, pause, expected):
    steps = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self): ...

        def synchronize(self): ...

        def elapsed_time(self, end):
            return 0.048

    class Graph:
        def replay(self):
            steps.append("replay")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(bench.time, "sleep", steps.append)
    items = [bench._Captured(Graph(), 48, torch.empty(1)) for _ in range(2)]
    bench.replay_interleaved(items, pause_s=pause)
    assert steps == expected * 2 * (bench.REPLAYS + 1)
    assert all(item.times == [1.0] * bench.REPLAYS for item in items)


def test_fewer_replays_than_the_method_says_are_refused():
    with pytest.raises(ValueError, match="replays=3"):
        bench.replay_interleaved([], replays=3)


def _report():
    results = [
        Result(
            "ours",
            1,
            4096,
            4096,
            128,
            "float16",
            pdl=False,
            us=5.0,
            us_min=4.9,
            us_max=5.2,
            rel_error=3e-4,
            limit_us=4.1,
            copies=15,
            calls=60,
        ),
        Result("cuBLAS fp16", 1, 4096, 4096, 128, "float16", us=13.5, limit_us=4.1),
        Result("gemlite", 1, 4096, 4096, 128, "float16", status="failed: out of shared memory"),
    ]
    return Report("test", {"gpu": "NVIDIA H200"}, results, {"humming": "not installed"}, False, "m")


def test_report_survives_json(tmp_path):
    path = _report().save(tmp_path / "deep" / "run.json")
    assert Report.load(path) == _report()
    data = json.loads(path.read_text())
    assert data["schema"] == 1 and data["finished"] is False
    assert set(data) == {
        "schema",
        "title",
        "environment",
        "method",
        "finished",
        "skipped",
        "results",
    }
    assert data["results"][0]["percent_of_limit"] == pytest.approx(82.0)
    assert data["results"][2]["us"] is None
    assert list(path.parent.iterdir()) == [path]  # nothing left aside


def test_report_of_another_schema_is_refused(tmp_path):
    path = _report().save(tmp_path / "run.json")
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(ValueError, match="schema=7"):
        Report.load(path)


def test_environment_names_versions():
    env = bench.environment()
    assert env["torch"] == torch.__version__
    assert {"date", "python", "cuda", "gpu"} <= set(env)


@pytest.mark.gpu
def test_method_on_a_gpu():
    """A small dense product: captured, replayed, validated, and timed within reason."""
    q, scales = bench.make_weight(1024, 1024)
    problem = bench.make_problem(16, q, scales)
    dense = bench.dense_weight(q, scales).half()
    out = torch.empty(16, 1024, device="cuda", dtype=torch.float16)
    copies = [dense.clone() for _ in range(4)]
    calls = [lambda w=w: torch.mm(problem.a, w.t(), out=out) for w in copies]
    (result,) = bench.measure([Candidate("dense", calls)], problem)
    assert result.status == "ok" and result.calls >= bench.MIN_CALLS
    assert 0.5 < result.us < 500
    assert result.us_min <= result.us <= result.us_max
    env = bench.environment()
    assert env["gpu"] and env["l2_bytes"] > 0


def test_pdl_setting_holds_inside_the_block_only(monkeypatch):
    from marlin_cutlass import library

    said = []
    launcher = SimpleNamespace(set_option=lambda name, value: said.append((name, value)))
    monkeypatch.setattr(library, "load", lambda: launcher)
    monkeypatch.delenv("MARLIN_CUTLASS_PDL", raising=False)
    with bench.pdl_setting(False):
        assert said == [("pdl", False)]
    assert said[1:] == [("pdl", True)]
    monkeypatch.setenv("MARLIN_CUTLASS_PDL", "0")
    with pytest.raises(KeyError), bench.pdl_setting(True):
        raise KeyError
    assert said[2:] == [("pdl", True), ("pdl", False)]


def test_host_time_is_that_of_the_fastest_loop(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = iter([0.0, 3.0, 10.0, 11.0])  # two loops: 3 s and 1 s
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    counted = []
    assert bench.host_time_us(lambda: counted.append(1), repeats=2, calls=4) == 0.25e6
    assert len(counted) == 8
