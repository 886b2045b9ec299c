"""How candidates of one shape are compared: checked, timed in short interleaved bursts, medians.

The clock of a loaded GPU falls within some 20 ms (H200, 2026-11-29: 10 % slower), and a burst that
follows another one starts lower. So a burst is a few milliseconds, a pause comes after each, and
the candidates take turns; a second round in reverse order makes what drift is left fall on all
alike. The timer is an interface: tests put a fake one in the GPU's place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from generator.problem import ProblemShape

PDL_OFF, PDL_ON = False, True


@dataclass(frozen=True)
class Format:
    """What a kernel is compiled for besides its geometry; group_size as kernels see it."""

    dtype: str = "f16"
    zeros: bool = False
    group_size: int = 128
    sparse: bool = False

    def __str__(self) -> str:
        kind = " with zero points" if self.zeros else ", 2:4 sparse" if self.sparse else ""
        return f"{self.dtype}{kind}, group {self.group_size}"

    @classmethod
    def of(cls, problem: ProblemShape) -> Format:
        """The format of a call."""
        p = problem
        return cls(p.dtype, p.zeros, p.kernel_group_size, p.sparse)

    def problem(self, m: int, n: int, k: int) -> ProblemShape:
        """A call with this format; ValueError for what no kernel serves."""
        return ProblemShape(m, n, k, self.group_size, self.dtype, self.zeros, self.sparse)


@dataclass(frozen=True)
class DeviceInfo:
    """The GPU that is measured on."""

    name: str
    sms: int
    capability: tuple[int, int]
    l2_bytes: int
    driver: str = ""
    torch: str = ""


class Timer(Protocol):
    """Runs kernels by name. `open` makes a weight, `check` and `capture` refer to it."""

    device: DeviceInfo

    def open(self, n: int, k: int, fmt: Format, max_m: int) -> int:
        """Makes a random [k, n] weight in as many copies as exceed the L2 cache twice; returns
        how many."""

    def check(self, kernel: str, m: int) -> float:
        """Relative error of one call against the fp32 product; inf for what is not finite."""

    def capture(self, kernel: str, m: int, pdl: bool, calls: int, warm: bool = False) -> Any:
        """A graph of `calls` calls over the copies in turn (warm: over one copy)."""

    def burst(self, graph: Any, replays: int) -> list[float]:
        """Microseconds per call of each replay but the first, which warms up."""

    def chain_error(self, graph: Any) -> float:
        """Relative error of the last call of a replayed graph."""

    def rest(self, seconds: float) -> None:
        """Waits until `seconds` have passed since the end of the last burst."""

    def close(self) -> None:
        """Frees the weight."""


@dataclass(frozen=True)
class Settings:
    """How long to measure. Times in microseconds unless the name says otherwise."""

    pass_us: float = 500.0  # a replay: long against the 2-5 us of its start
    burst_us: float = (
        6000.0  # all replays of one burst; well below the 20 ms after which clocks fall
    )
    pause_s: float = 0.012
    rounds: int = 2
    drop_ratio: float = 1.2  # not measured again after a round: slower than the best by more
    min_replays: int = 2
    max_replays: int = 9
    tolerance: tuple[tuple[str, float], ...] = (("f16", 2e-3), ("bf16", 1.6e-2))

    def calls(self, us: float, copies: int) -> int:
        """Calls of a graph: every copy equally often, about `pass_us` in all."""
        return copies * max(1, round(self.pass_us / us / copies))

    def replays(self, us: float, calls: int) -> int:
        """Replays of a burst, the first of which warms up."""
        return min(self.max_replays, max(self.min_replays, int(self.burst_us / (us * calls)))) + 1


@dataclass
class Run:
    """One candidate with one setting of PDL."""

    kernel: str
    pdl: bool
    graph: Any = None
    times: list[float] = field(default_factory=list)
    warm: bool = False

    @property
    def us(self) -> float:
        return statistics.median(self.times)


@dataclass
class Measured:
    """A candidate's figures at one m; `refused` says why there are none."""

    kernel: str
    us: float | None = None
    us_pdl: float | None = None
    us_warm: float | None = None
    rel_error: float | None = None
    refused: str | None = None
    samples: int = 0

    @property
    def score(self) -> float:
        """What ranks: a call in a model lies between a chain with PDL and one without."""
        known = [us for us in (self.us, self.us_pdl) if us is not None]
        return sum(known) / len(known) if known else math.inf


def measure(
    timer: Timer,
    fmt: Format,
    m: int,
    expected_us: dict[str, float],
    copies: int,
    *,
    settings: Settings | None = None,
    pdl: Sequence[bool] = (PDL_OFF, PDL_ON),
    warm: bool = False,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[str], None] = lambda what: None,
    into: dict[str, Measured] | None = None,
) -> list[Measured]:
    """Checks and times the kernels of `expected_us` (name -> a guess of its us) on the open weight.

    stop: asked between bursts; once true, candidates that have no full round stay without figures.
    watch: told what is about to run, for a watchdog. warm: also with one copy of the weight,
    which then stays in L2. into: filled as results come, for callers that an interrupt ends.
    Results are in the order of `expected_us`.
    """
    settings = settings or Settings()
    limit = dict(settings.tolerance)[fmt.dtype]
    results = {} if into is None else into
    results.update({name: Measured(name) for name in expected_us})
    sound = [r for r in results.values() if _is_sound(timer, r, m, limit, watch)]
    if not sound:
        return list(results.values())
    guess = min(expected_us[r.kernel] for r in sound)
    calls = settings.calls(guess, copies)
    runs = [Run(r.kernel, on) for r in sound for on in pdl]
    runs += [Run(r.kernel, pdl[0], warm=True) for r in sound if warm]
    for number in range(settings.rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            if stop() and (number > 0 or not run.graph):
                break
            watch(f"{run.kernel} m={m}")
            _burst(timer, run, m, calls, expected_us, settings, results[run.kernel], limit)
        runs = _worth_more(runs, results, settings)
    for run in runs:
        run.graph = None
    return list(results.values())


def _is_sound(timer: Timer, result: Measured, m: int, limit: float, watch) -> bool:
    watch(f"{result.kernel} m={m}: first call")
    try:
        result.rel_error = timer.check(result.kernel, m)
    except (RuntimeError, ValueError) as error:
        result.refused = f"failed: {str(error).splitlines()[0][:160]}"
        return False
    if not result.rel_error <= limit:
        result.refused = f"wrong: relative error {result.rel_error:.1e}, at most {limit:.0e}"
        return False
    return True


def _burst(
    timer: Timer,
    run: Run,
    m: int,
    calls: int,
    expected_us: dict[str, float],
    settings: Settings,
    result: Measured,
    limit: float,
) -> None:
    """One burst of a run; its figures go into `result`."""
    if result.refused:
        return
    first = run.graph is None
    if first:  # capturing loads only the host: it is part of the pause
        try:
            run.graph = timer.capture(run.kernel, m, run.pdl, calls, warm=run.warm)
        except RuntimeError as error:
            result.refused = f"cannot be captured: {str(error).splitlines()[0][:160]}"
            return
    timer.rest(settings.pause_s)
    us = run.us if run.times else expected_us[run.kernel]
    run.times += timer.burst(run.graph, settings.replays(us, calls))
    if first and not run.warm:
        error = timer.chain_error(run.graph)
        result.rel_error = max(result.rel_error or 0.0, error)
        if not error <= limit:
            result.refused = f"wrong in a chain of calls: relative error {error:.1e}"
            result.us = result.us_pdl = result.us_warm = None
            return
    name = "us_warm" if run.warm else "us_pdl" if run.pdl else "us"
    setattr(result, name, run.us)
    result.samples = len(run.times)


def _worth_more(runs: list[Run], results: dict[str, Measured], settings: Settings) -> list[Run]:
    """Runs of the candidates that are near the best in one setting or the other."""
    good = [r for r in results.values() if not r.refused]
    best = {
        name: min((getattr(r, name) for r in good if getattr(r, name) is not None), default=None)
        for name in ("us", "us_pdl")
    }

    def near(r: Measured) -> bool:
        pairs = ((getattr(r, name), best[name]) for name in best)
        return any(us is not None and us <= settings.drop_ratio * top for us, top in pairs)

    return [run for run in runs if near(results[run.kernel]) and not results[run.kernel].refused]


def ranked(results: Iterable[Measured]) -> list[Measured]:
    """Those with figures, fastest first."""
    return sorted((r for r in results if r.score < math.inf and not r.refused), key=_score)


def _score(result: Measured) -> float:
    return result.score
