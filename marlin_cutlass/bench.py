"""How this project measures: cold-L2 CUDA-graph timing of validated candidates, interleaved.

One measurement is one CUDA graph that calls a kernel once per *weight copy*. The copies together
are more than twice the L2 cache, so every call reads its weight from memory, as decoding does. Gaps
between kernels are inside the figure: decoding pays them too. Candidates are replayed in turn, so
that drift of clock and temperature touches them alike, and the median over the replays is kept. A
GPU at its power limit lowers its clock for some 20 ms, so that a candidate behind a hot one would
look slow: bursts are short, and a pause comes before each.
Every candidate is checked against an fp32 product before it is timed and once more in a chain.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from marlin_cutlass.limits import limit, packed_bytes
from marlin_cutlass.report import Report, Result, environment

__all__ = [
    "Budget",
    "Candidate",
    "Problem",
    "Report",
    "Result",
    "capture",
    "copies_for",
    "dense_weight",
    "environment",
    "limit",
    "make_problem",
    "make_weight",
    "host_time_us",
    "measure",
    "packed_bytes",
    "pdl_setting",
    "relative_error",
    "replay_interleaved",
]

REPLAYS = 12  # at least; the median of these is the figure
MIN_CALLS = 48  # per graph: the cost of starting one replay (2-5 us) must vanish in the mean
LONG_US = 2000.0  # a graph that takes this long may have fewer calls
PAUSE_S = 0.006  # before each replay: longer than most of them, so that the GPU mostly rests
MAX_COPIES = 1536  # a weight of 0.1 MB against an L2 of 60 MB; more would only slow the capture
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # a larger relative error is a bug


def method(pause_s: float = PAUSE_S) -> str:
    """How `measure` measures, for a record."""
    pause = "without pauses"
    if pause_s:
        pause = f"a pause of {pause_s * 1e3:g} ms and an untimed replay before each"
    return (
        f"CUDA graph with one call per weight copy (at least {MIN_CALLS} calls or "
        f"{LONG_US / 1e3:g} ms), copies > 2x L2 so that weights come from memory; random data; "
        f"median of {REPLAYS} replays or more, {pause}, candidates interleaved in one process; "
        "microseconds per call, gaps between kernels included; each candidate validated against "
        "fp32 before it is timed and in a chain of calls afterwards"
    )


METHOD = method()


class Budget:
    """A wall-clock allowance; once `spent()` is true a run stops cleanly with what it has."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if seconds is not None and seconds <= 0:
            raise ValueError(f"budget={seconds} must be positive seconds")
        self._clock, self._start, self._seconds = clock, clock(), seconds

    def elapsed(self) -> float:
        return self._clock() - self._start

    def spent(self, reserve: float = 0.0) -> bool:
        return self._seconds is not None and self.elapsed() + reserve >= self._seconds


@dataclass(frozen=True)
class Problem:
    """One multiply with data: a [m, k], q uint8 [k, n], scales [k/g, n], fp32 reference [m, n]."""

    m: int
    n: int
    k: int
    group_size: int
    a: torch.Tensor
    q: torch.Tensor
    scales: torch.Tensor
    reference: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype


def dense_weight(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(q - 8) * scale in fp32 as [n, k], from q uint8 [k, n] and scales [groups, n]."""
    k, n = q.shape
    groups = scales.shape[0]
    codes = q.float().view(groups, k // groups, n) - 8.0
    return (codes * scales.float().view(groups, 1, n)).view(k, n).t().contiguous()


def make_weight(
    n: int,
    k: int,
    *,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random symmetric weight: q uint8 [k, n] in 0..15 and scales [k/g, n] in 0.004..0.015.

    Random data matter: a GPU runs a product of zeros faster than one of real numbers.
    """
    gen = torch.Generator(device=device).manual_seed(n * 1_000_003 + k)
    q = torch.randint(0, 16, (k, n), device=device, dtype=torch.uint8, generator=gen)
    groups = 1 if group_size == -1 else k // group_size
    scales = torch.rand(groups, n, device=device, generator=gen) * 0.011 + 0.004
    return q, scales.to(dtype)


def pruned(q: torch.Tensor) -> torch.Tensor:
    """Codes [K, N] with two random ones of each four rows set to 8, which means 0."""
    k, n = q.shape
    gen = torch.Generator(device=q.device).manual_seed(k + n)
    pairs = list(itertools.combinations(range(4), 2))
    masks = torch.tensor([[i in pair for i in range(4)] for pair in pairs], device=q.device)
    chosen = torch.randint(0, len(pairs), (k // 4, n), device=q.device, generator=gen)
    kept = masks[chosen].permute(0, 2, 1).reshape(k, n)
    return torch.where(kept, q, torch.full_like(q, 8))


def make_problem(m: int, q: torch.Tensor, scales: torch.Tensor, group_size: int = 128) -> Problem:
    """Random activations for a weight, and the fp32 reference product.

    The reference is summed in fp32 without TF32, whose error would hide a kernel's.
    """
    k, n = q.shape
    gen = torch.Generator(device=q.device).manual_seed(m)
    a = torch.randn(m, k, device=q.device, generator=gen) * 0.5
    a = a.to(scales.dtype)
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        reference = a.float() @ dense_weight(q, scales).t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
    return Problem(m, n, k, group_size, a, q, scales, reference)


def copies_for(weight_bytes: int, l2_bytes: int) -> int:
    """How many weight copies make more than twice the L2 cache (at least 2, at most MAX_COPIES)."""
    if weight_bytes <= 0:
        raise ValueError(f"weight_bytes={weight_bytes} must be positive")
    return max(2, min(MAX_COPIES, 2 * l2_bytes // weight_bytes + 1))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; inf where the output holds anything not finite."""
    err = ((out.float() - reference).norm() / reference.norm()).item()
    return err if err == err else float("inf")


@dataclass
class Candidate:
    """One kernel to time: calls[i]() runs it on weight copy i and returns the output [m, n]."""

    name: str
    calls: Sequence[Callable[[], torch.Tensor]]
    pdl: bool | None = None  # None: the candidate has no such switch
    note: str = ""


@contextmanager
def pdl_setting(enabled: bool) -> Iterator[None]:
    """Our kernels' programmatic dependent launch, on or off, for the launches inside the block.

    A captured launch keeps the setting it was captured with. Afterwards the setting is again what
    MARLIN_CUTLASS_PDL says.
    """
    from marlin_cutlass import library

    launcher = library.load()
    launcher.set_option("pdl", enabled)
    try:
        yield
    finally:
        launcher.set_option("pdl", os.environ.get("MARLIN_CUTLASS_PDL", "1") != "0")


def host_time_us(call: Callable[[], object], repeats: int = 5, calls: int = 2000) -> float:
    """Time of one eager call on the host in us, launch included: best of `repeats` loops.

    Meaningful where the GPU finishes a call sooner than the host issues the next one.
    """
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6


@dataclass
class _Captured:
    graph: Any
    calls: int
    last: torch.Tensor
    times: list[float] = field(default_factory=list)  # us per call, one per replay


def capture(calls: Sequence[Callable[[], torch.Tensor]], least: int = MIN_CALLS) -> _Captured:
    """Record every call, repeated to at least `least`, as one CUDA graph."""
    rounds = -(-least // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out = None
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                out = call()
    assert out is not None
    return _Captured(graph, rounds * len(calls), out)


def least_calls(limit_us: float | None) -> int:
    """Calls of a graph, each of which takes at least `limit_us` (None: not known)."""
    return MIN_CALLS if not limit_us else max(1, round(min(MIN_CALLS, LONG_US / limit_us)))


def replay_interleaved(
    captured: Sequence[_Captured], replays: int = REPLAYS, pause_s: float = PAUSE_S
) -> None:
    """Replay the graphs in turn, `replays` times after one warm-up round; fills `times`.

    Each time after a pause and a replay that is not timed: a GPU that has rested starts slowly.
    """
    if replays < REPLAYS:
        raise ValueError(f"replays={replays} must be at least {REPLAYS}")
    for round_ in range(replays + 1):
        for item in captured:
            if pause_s:
                time.sleep(pause_s)
                item.graph.replay()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            item.graph.replay()
            end.record()
            end.synchronize()
            if round_ > 0:
                item.times.append(start.elapsed_time(end) * 1e3 / item.calls)


def _prepare(candidate: Candidate, problem: Problem, result: Result) -> _Captured | None:
    """Validate one call, then capture; on failure the reason goes into result.status."""
    try:
        out = candidate.calls[0]()
        torch.cuda.synchronize()
        result.rel_error = relative_error(out, problem.reference)
        if result.rel_error > TOLERANCE[out.dtype]:
            result.status = f"wrong: relative error {result.rel_error:.1e}"
            return None
        return capture(candidate.calls, least_calls(result.limit_us))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result.status = f"failed: {str(error).splitlines()[0][:160]}"
        return None


def _finish(item: _Captured, problem: Problem, result: Result) -> None:
    """Poison the output and replay once more: a chain must be right, not only one call."""
    item.last.fill_(float("nan"))
    item.graph.replay()
    torch.cuda.synchronize()
    chain = relative_error(item.last, problem.reference)
    result.rel_error = max(result.rel_error or 0.0, chain)
    if chain > TOLERANCE[item.last.dtype]:
        result.status = f"wrong in a chain of calls: relative error {chain:.1e}"
        return
    result.us = statistics.median(item.times)
    result.us_min, result.us_max = min(item.times), max(item.times)


def measure(
    candidates: Iterable[Candidate],
    problem: Problem,
    *,
    replays: int = REPLAYS,
    pause_s: float = PAUSE_S,
) -> list[Result]:
    """Validate and time several candidates on one problem, interleaved; one Result for each."""
    name = torch.cuda.get_device_name()
    results, captured = [], []
    for candidate in candidates:
        result = Result(
            candidate.name,
            problem.m,
            problem.n,
            problem.k,
            problem.group_size,
            str(problem.dtype).removeprefix("torch."),
            pdl=candidate.pdl,
            copies=len(candidate.calls),
            note=candidate.note,
            limit_us=limit(
                problem.m,
                problem.n,
                problem.k,
                group_size=problem.group_size,
                pdl=bool(candidate.pdl),
                device=name,
            ),
        )
        results.append(result)
        item = _prepare(candidate, problem, result)
        if item is not None:
            result.calls = item.calls
            captured.append((item, result))
    replay_interleaved([item for item, _ in captured], replays, pause_s)
    for item, result in captured:
        _finish(item, problem, result)
    return results
