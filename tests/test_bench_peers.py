"""What the benchmarks hand to the peers, how a run copes with absent ones and with its budget."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from benchmarks import candidates, host, peers
from benchmarks.packing import pack_rows
from marlin_cutlass import bench
from marlin_cutlass.bench import Budget, Candidate, Report, Result


def test_codes_of_eight_rows_share_a_word():
    q = torch.randint(0, 16, (24, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words = pack_rows(q)
    assert words.dtype == torch.int32 and words.shape == (3, 5)
    for k in range(24):
        for n in range(5):
            assert (int(words[k // 8, n]) >> (k % 8 * 4)) & 15 == int(q[k, n])


def test_gptq_tensors_mean_the_same_weight():
    q, scales = bench.make_weight(16, 256, device="cpu")
    tensors = candidates.gptq_tensors(q, scales, 128)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "qweight": (32, 16),
        "scales": (2, 16),
        "qzeros": (2, 2),
        "g_idx": (256,),
    }
    zero = (int(tensors["qzeros"][0, 0]) & 15) + 1  # GPTQ stores z - 1
    group = tensors["g_idx"][200]
    code = (int(tensors["qweight"][200 // 8, 3]) >> (200 % 8 * 4)) & 15
    value = (code - zero) * float(tensors["scales"][group, 3])
    assert value == pytest.approx(float(bench.dense_weight(q, scales)[3, 200]))


def test_an_absent_peer_is_a_line_and_no_candidate(monkeypatch):
    found = importlib.util.find_spec
    gone = ("humming", "gemlite")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else found(name)
    )
    report = Report("t", {})
    usable = peers.available(["cublas", "humming", "gemlite"], report)
    assert [p.name for p in usable] == ["cuBLAS fp16"]
    assert report.skipped["humming"] == "the package humming is not installed"
    assert "gemlite" in report.skipped


class Provider:
    """A peer that counts what is asked of it."""

    def __init__(self, name, max_m=None, fails=False):
        self.name, self.max_m, self.fails = name, max_m, fails
        self.prepared, self.asked = [], []

    def prepare(self, weight):
        if self.fails:
            raise AssertionError("n % 128 != 0")
        self.prepared.append((weight.n, weight.k))

    def release(self):
        self.prepared.append("released")

    def candidates(self, problem):
        self.asked.append(problem.m)
        return [Candidate(self.name, [])]


@pytest.fixture
def cpu_run(monkeypatch):
    """peers.run on CPU tensors, with a measurement that only records the cell."""

    def measure(items, problem, pause_s):
        return [Result(c.name, problem.m, problem.n, problem.k, 128, "float16") for c in items]

    props = SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        peers, "make_weight", lambda n, k, **kw: bench.make_weight(n, k, device="cpu", **kw)
    )
    monkeypatch.setattr(peers, "measure", measure)


def test_every_cell_is_measured_and_a_peer_leaves_where_it_cannot_follow(cpu_run):
    narrow, broken, plain = (
        Provider("narrow", max_m=16),
        Provider("broken", fails=True),
        Provider("p"),
    )
    report, saved = Report("t", {}), []
    peers.run(
        [(64, 128), (128, 128)],
        [1, 64],
        [plain, narrow, broken],
        report,
        Budget(None),
        done=lambda r: saved.append(len(r.results)),
    )
    assert [(r.candidate, r.n, r.m) for r in report.results] == [
        ("p", 64, 1),
        ("narrow", 64, 1),
        ("p", 64, 64),
        ("p", 128, 1),
        ("narrow", 128, 1),
        ("p", 128, 64),
    ]
    assert report.finished and saved == [2, 3, 5, 6]
    assert plain.prepared == [(64, 128), "released", (128, 128), "released"]
    assert report.skipped["broken at 64 x 128"] == "AssertionError: n % 128 != 0"


def test_a_spent_budget_ends_the_run_and_keeps_what_was_measured(cpu_run):
    now = [0.0]
    provider = Provider("p")
    report = Report("t", {})

    def done(partial):
        now[0] += 6

    peers.run([(64, 128)], [1, 2, 4, 8], [provider], report, Budget(10, lambda: now[0]), done=done)
    assert [r.m for r in report.results] == [1, 2]
    assert report.finished is False


@pytest.mark.gpu
@pytest.mark.parametrize("key", list(candidates.PEERS))
def test_peer_agrees_with_the_reference_on_a_gpu(key):
    """The calls that are timed compute the same product: what a peer gets is the same weight."""
    provider = candidates.PEERS[key]()
    if provider.missing():
        pytest.skip(provider.missing())
    q, scales = bench.make_weight(1024, 1024)
    weight = candidates.Weight(q, scales, 128, l2_bytes=1 << 20)
    provider.prepare(weight)
    problem = bench.make_problem(8, q, scales)
    for candidate in provider.candidates(problem):
        assert len(candidate.calls) >= 2
        for call in candidate.calls[:2]:
            out = call()
            torch.cuda.synchronize()
            assert bench.relative_error(out, problem.reference) < bench.TOLERANCE[out.dtype]


def test_what_the_host_benchmark_times_is_the_same_product():
    timed = host.calls(64, 128, 2, device="cpu")
    op = timed["torch.ops.marlin_cutlass.gemm"]()
    ours = [call() for name, call in timed.items() if "marlin_cutlass" in name]
    assert len(ours) == 4 and all(torch.equal(op, out) for out in ours) and op.shape == (2, 64)
    for name in (host.LINEAR, "torch.nn.Linear, fp16"):
        assert (op.float() - timed[name]().float()).norm() / op.float().norm() < 2e-3
    shown = host.table({host.LINEAR: 20.0, "x": 10.0}, "t")
    assert list(shown.columns[2].cells) == ["1.00", "0.50"]


@pytest.mark.gpu
def test_our_candidates_agree_with_the_reference_in_a_chain_on_a_gpu():
    """With and without PDL, validated, captured and timed as peers.py does it."""
    q, scales = bench.make_weight(1024, 1024)
    ours = candidates.Ours()
    ours.prepare(candidates.Weight(q, scales, 128, l2_bytes=4 << 20))
    problem = bench.make_problem(8, q, scales)
    results = bench.measure(ours.candidates(problem), problem)
    assert [r.candidate for r in results] == ["ours", "ours PDL"]
    assert [r.status for r in results] == ["ok", "ok"]
    assert all(r.rel_error < 1e-3 and r.note.startswith("w4a16_") for r in results)
