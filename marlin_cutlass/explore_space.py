"""Which variants explore looks at: every legal one, the near misses with their rule, and a choice
of a few tens that is worth compiling."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from generator import legality
from generator.arch import Arch, Gpu
from generator.cost import estimate
from generator.problem import ProblemShape
from generator.space import default_space
from generator.variant import DECOMPOSITIONS, FAMILIES, SPARSE_FAMILIES, Geometry, Variant
from marlin_cutlass.explore_candidates import sensible_rows

KNOBS = tuple(f.name for f in fields(Geometry))  # what --set takes
MAX_COMBINATIONS = 400_000  # more is a slip: --set narrows them
STAGES = range(legality.MIN_STAGES, 11)
CTAS = (1, 2, 3, 4)
# Bytes on their way to an SM beyond which more does not help (measured H200 2026-11-29).
ENOUGH_IN_FLIGHT = 128 * 1024
ALIKE = 3  # at most so many of the chosen differ in nothing but depth and CTAs per SM
SPLITS = (2, 4, 8)
MULTICASTS = (1, 2, 4)
TILE_KNOBS = ("m_tile", "n_sm", "k_sm", "warps_n", "warps_k", "stages", "ctas_per_sm")
PLAIN = {"decomposition": "data_parallel", "split": 1, "multicast": 1}
# Decompositions in which CTAs may share activations.
SHARING = ("data_parallel", "stream_k", "hybrid")
Overrides = Mapping[str, tuple]


@dataclass
class Space:
    """What was enumerated for one problem on one GPU; predictions are microseconds by name."""

    problem: ProblemShape
    arch: Arch
    gpu: Gpu
    legal: list[Variant]
    predicted: dict[str, float]
    reasons: Counter = field(default_factory=Counter)  # rule with numbers left out -> combinations

    @property
    def ranked(self) -> list[Variant]:
        """Best prediction first; among equal ones those with more bytes in flight, up to enough."""

        def key(v: Variant) -> tuple:
            weights = v.blocks_per_stage * v.block_bytes
            in_flight = min(ENOUGH_IN_FLIGHT, v.stages * weights * v.ctas_per_sm)
            return round(self.predicted[v.name], 2), -in_flight, -v.stages, v.name

        return sorted(self.legal, key=key)


@dataclass(frozen=True)
class NearMiss:
    """A variant that differs from the best prediction in one knob, and why it cannot exist."""

    knob: str
    value: object
    name: str
    reason: str


def parse_overrides(texts: Sequence[str]) -> dict[str, tuple]:
    """{'n_sm': (128, 256), 'stages': (3, 4, 5)} from ['n_sm=128,256', 'stages=3..5'].

    Raises ValueError naming the knobs, or what a knob takes.
    """
    found: dict[str, tuple] = {}
    for text in texts:
        knob, equals, values = text.partition("=")
        knob = knob.strip()
        if not equals or knob not in KNOBS:
            raise ValueError(f"--set {text!r}: write KNOB=VALUES with one of {', '.join(KNOBS)}")
        parsed: list = []
        for part in filter(None, (p.strip() for p in values.split(","))):
            parsed += _values(knob, part)
        if not parsed:
            raise ValueError(f"--set {text!r} names no value")
        found[knob] = tuple(dict.fromkeys(parsed))
    return found


def _values(knob: str, text: str) -> list:
    if knob in ("family", "decomposition"):
        known = FAMILIES if knob == "family" else tuple(DECOMPOSITIONS)
        short = {name: word for word, name in DECOMPOSITIONS.items()}  # as in variants' names
        text = short.get(text, text) if knob == "decomposition" else text
        if text not in known:
            raise ValueError(f"--set {knob}={text}: one of {', '.join(known)} is needed")
        return [text]
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise ValueError(f"--set {knob}={text}: numbers such as 2,4 or 2..4 are needed")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"--set {knob}={text} is an empty range: {last}..{first} is meant?")
    return list(range(first, last + 1))


# ---- enumeration ---------------------------------------------------------------------------------


def enumerate_space(problem: ProblemShape, arch: Arch, gpu: Gpu, overrides: Overrides) -> Space:
    """Every combination of knob values, sorted into legal variants and reasons.

    The declared rows of generator/space.py are always among them unless --set excludes them. Raises
    ValueError where nothing is legal.
    """
    for family in overrides.get("family", ()):
        if (family in SPARSE_FAMILIES) != problem.sparse:
            kind, option = ("dense", "without") if problem.sparse else ("2:4-sparse", "with")
            raise ValueError(f"--set family={family}: it is for {kind} weights, {option} --sparse")
    legal = {v.name: v for v in declared(problem, arch, overrides)}
    reasons: Counter = Counter()
    examples: dict[str, str] = {}
    for variant, count, reason in judged(problem, arch, overrides):
        if reason is None:
            legal.setdefault(variant.name, variant)
        else:
            rule = re.sub(r"\d+", "#", reason)
            reasons[rule] += count
            examples.setdefault(rule, reason)
    if not legal:
        most = [f"{examples[rule]} ({count} like it)" for rule, count in reasons.most_common(3)]
        raise ValueError(
            f"no legal variant on {arch.name}: {'; '.join(most) or 'nothing to enumerate'}"
        )
    variants = list(legal.values())
    predicted = {v.name: estimate(problem, v, gpu).total for v in variants}
    return Space(problem, arch, gpu, variants, predicted, reasons)


def declared(problem: ProblemShape, arch: Arch, overrides: Overrides) -> Iterator[Variant]:
    """Variants of the default table that have the problem's format and the values of --set."""
    fmt = (problem.dtype, problem.zeros, problem.kernel_group_size)
    for entry in default_space(arch, arch.families):
        v = entry.variant
        if (v.dtype, v.zeros, v.group_size, v.sparse) == (*fmt, problem.sparse) and all(
            getattr(v, knob) in values for knob, values in overrides.items()
        ):
            yield v


def judged(
    problem: ProblemShape, arch: Arch, overrides: Overrides
) -> Iterator[tuple[Variant, int, str | None]]:
    """(variant, combinations it stands for, why not) over all values of the knobs.

    Row tiles that do not suit the rows are left out unless asked for. A tile that is illegal as
    plain data_parallel, which asks for least, is not tried with the other decompositions.
    """
    fmt = (problem.dtype, problem.zeros, problem.kernel_group_size)
    suiting = tuple(f for f in arch.families if (f in SPARSE_FAMILIES) == problem.sparse)
    for family in overrides.get("family", suiting):
        values = {**_domain(problem, family), **overrides}
        ways = list(_ways(values))
        count = len(ways) * math.prod(len(values[knob]) for knob in TILE_KNOBS)
        if count > MAX_COMBINATIONS:
            raise ValueError(f"{count} combinations of {family} are too many: narrow --set")
        for numbers in itertools.product(*(values[knob] for knob in TILE_KNOBS)):
            tile = dict(zip(TILE_KNOBS, numbers))
            plain = Geometry(family=family, **PLAIN, **tile).with_format(*fmt)
            if legality.why_not_for(plain, problem) is not None:
                break  # a family for other weights
            reason = legality.why_not(plain, arch)
            if reason is not None and not reason.startswith("decomposition="):
                yield plain, len(ways), reason
                continue
            for way in ways:
                variant = replace(plain, **way)
                yield variant, 1, legality.why_not(variant, arch)


def _domain(problem: ProblemShape, family: str) -> dict[str, tuple]:
    tiles = legality.M_TILES[family]
    suiting = tuple(t for t in tiles if sensible_rows(problem.m, t)) or tiles[-1:]
    return {
        "m_tile": suiting,
        "n_sm": legality.N_SMS,
        "k_sm": legality.K_SMS[family],
        "warps_n": legality.WARPS_N[family],
        "warps_k": legality.WARPS_K[family],
        "stages": tuple(STAGES),
        "ctas_per_sm": CTAS,
        "decomposition": tuple(DECOMPOSITIONS),
        "split": (1, *SPLITS),
        "multicast": MULTICASTS,
    }


def _ways(values: Overrides) -> Iterator[dict]:
    """Decomposition, split and multicast that make sense together."""
    for decomposition in values["decomposition"]:
        splits = [s for s in values["split"] if (s > 1) == (decomposition == "split_k")]
        multicasts = [c for c in values["multicast"] if c == 1 or decomposition in SHARING]
        for split, multicast in itertools.product(splits, multicasts):
            yield {"decomposition": decomposition, "split": split, "multicast": multicast}


# ---- near misses ---------------------------------------------------------------------------------


def near_misses(space: Space, leader: Variant) -> list[NearMiss]:
    """For each knob the illegal values next to the leader's, above and below it."""
    found = []
    for knob, domain in _knob_domains(leader).items():
        here = domain.index(getattr(leader, knob)) if getattr(leader, knob) in domain else 0
        for side in (domain[here + 1 :], domain[:here][::-1]):
            for value in side:
                other = replace(leader, **{knob: value})
                reason = legality.why_not(other, space.arch)
                if reason is not None:
                    found.append(NearMiss(knob, value, other.name, reason))
                    break
    return found


def neighbours(space: Space, leader: Variant) -> list[Variant]:
    """Legal variants that differ from the leader in one knob, the knobs taking turns."""
    by_knob = []
    for knob, domain in _knob_domains(leader).items():
        others = [replace(leader, **{knob: value}) for value in domain]
        mine = [v for v in others if v != leader and legality.why_not(v, space.arch) is None]
        by_knob.append(sorted(mine, key=lambda v: space.predicted.get(v.name, float("inf"))))
    turns = itertools.zip_longest(*by_knob)
    return [variant for turn in turns for variant in turn if variant is not None]


def _knob_domains(leader: Variant) -> dict[str, tuple]:
    family = leader.family
    domains: dict[str, tuple] = {
        "m_tile": legality.M_TILES[family],
        "n_sm": legality.N_SMS,
        "k_sm": legality.K_SMS[family],
        "warps_n": legality.WARPS_N[family],
        "warps_k": legality.WARPS_K[family],
        "stages": tuple(range(legality.MIN_STAGES, legality.MAX_STAGES + 1)),
        "ctas_per_sm": CTAS,
    }
    if leader.decomposition == "split_k":
        domains["split"] = SPLITS
    else:
        domains["decomposition"] = tuple(d for d in DECOMPOSITIONS if d != "split_k")
    if leader.decomposition in SHARING:
        domains["multicast"] = MULTICASTS
    return domains


# ---- what is worth compiling ---------------------------------------------------------------------


def choose(
    space: Space, count: int, keep: Sequence[str] = (), overrides: Overrides | None = None
) -> dict[str, str]:
    """At most `count` names and why each is in, best prediction first.

    The best prediction and `keep` (the table's choice, what is built) come first, then one-knob
    neighbours for a third, then further good predictions, so that every knob's influence shows.
    """
    ranked = space.ranked
    legal = {v.name for v in ranked}
    chosen = {ranked[0].name: "best prediction"}
    chosen |= {name: "built" for name in keep if name in legal and name not in chosen}
    near = [
        v
        for v in neighbours(space, ranked[0])
        if v.name in legal
        and sensible_rows(space.problem.m, v.m_tile)
        and all(getattr(v, knob) in values for knob, values in (overrides or {}).items())
    ]
    for variant in near[: count // 3]:
        chosen.setdefault(variant.name, "one knob from the best prediction")
    alike: Counter = Counter()
    for variant in ranked:
        if len(chosen) >= count:
            break
        kind = replace(variant, stages=2, ctas_per_sm=1)
        alike[kind] += 1
        if alike[kind] <= ALIKE:
            chosen.setdefault(variant.name, "predicted fast")
    names = sorted(list(chosen)[:count], key=lambda name: space.predicted[name])
    return {name: chosen[name] for name in names}
