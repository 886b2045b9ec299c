"""The schedule: every tile and k step exactly once, fixed reduction order, workspace that
suffices.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from generator import legality, space
from generator.arch import ARCHS
from generator.problem import ProblemShape
from generator.schedule import MAX_UNITS, OWNER_STEPS, make_schedule, work
from generator.variant import Variant

CASES = 3000
OTHERS = (
    "w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_split4_c1",
    "w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_hybrid_c1",
    "w4a16_hopper_f16_g128_m64_n128k128_w2x1_p4_hybrid_c1_mc2",
    "w4a16_hopper_f16_g128_m64_n256k128_w4x1_p6_dp_c1_mc2",
    "w4a16_hopper_f16_g128_m32_n128k256_w2x1_p4_dp_c1_mc4",
)


def _random_case(rng: random.Random, variants: list[Variant]):
    problem = ProblemShape(
        m=rng.choice((1, 2, 7, 16, 17, 64, 100, 129, 257, rng.randint(1, 2000))),
        n=rng.choice((1, 63, 64, 65, 1000, 4096, rng.randint(1, 9000))),
        k=rng.choice((128, 256, 384, 4096, 128 * rng.randint(1, 80))),
    )
    return problem, rng.choice(variants), rng.choice((1, 2, 7, 72, 84, 108, 132, 142))


def _variants() -> list[Variant]:
    found = [e.variant for a in ("sm_90a", "sm_86") for e in space.default_space(ARCHS[a])]
    others = [Variant.parse(name) for name in OTHERS]
    for v in others:
        arch = ARCHS["sm_80" if v.family == "ampere" else "sm_90a"]
        assert legality.why_not(v, arch) is None, v.name
    return [*found, *others]


def test_every_tile_and_k_step_exactly_once():
    rng, variants = random.Random(20261129), _variants()
    for _ in range(CASES):
        problem, variant, sms = _random_case(rng, variants)
        schedule = make_schedule(problem, variant, sms)
        pieces = defaultdict(list)
        for cta in range(schedule.grid):
            for s in work(schedule, cta):
                pieces[s.m_index, s.n_index].append((s.k_begin, s.k_end))
        width = 64 if variant.decomposition == "hybrid" else variant.n_sm
        tiles_of_c = {
            (m, n) for m in range(schedule.m_tiles) for n in range(-(-problem.n // width))
        }
        assert tiles_of_c <= set(pieces), (problem, variant.name, sms)
        # Beyond C only the last cluster of CTAs that share activations may reach.
        assert all(n < schedule.n_tiles * max(1, variant.multicast) * 4 for _, n in pieces)
        if variant.multicast == 1:
            assert tiles_of_c == set(pieces)
        for runs in pieces.values():
            position = 0
            for begin, end in sorted(runs):
                assert begin == position, (problem, variant.name, sms)
                position = end
            assert position == schedule.k_steps


def test_tiles_cover_the_problem_and_no_more():
    rng, variants = random.Random(7), _variants()
    for _ in range(500):
        problem, v, sms = _random_case(rng, variants)
        s = make_schedule(problem, v, sms)
        assert (s.m_tiles - 1) * v.m_tile < problem.m <= s.m_tiles * v.m_tile
        width = v.n_sm * v.multicast
        assert (s.n_tiles - 1) * width < problem.n <= s.n_tiles * width
        assert (s.k_steps - 1) * v.k_sm < problem.k <= s.k_steps * v.k_sm


def test_grid_is_resident_where_ctas_wait_for_each_other():
    rng, variants = random.Random(8), _variants()
    for _ in range(500):
        problem, v, sms = _random_case(rng, variants)
        s = make_schedule(problem, v, sms)
        if v.decomposition in ("striped", "stream_k"):
            assert s.grid <= max(sms * v.ctas_per_sm, v.multicast)  # one cluster at least
            assert s.grid == s.workers * v.multicast
            assert all(next(work(s, w * s.multicast), None) for w in range(s.workers)), (
                "a CTA without work would never raise its flag"
            )


def test_owners_of_cut_tiles_have_more_k_steps_than_their_share():
    rng, variants = random.Random(10), [v for v in _variants() if v.decomposition == "stream_k"]
    seen, both = 0, 0
    many_rows = ProblemShape(m=2000, n=2560, k=10240)  # activations exceed SHARED_ACTIVATIONS
    for i in range(600):
        problem, v, sms = _random_case(rng, variants)
        s = make_schedule(problem if i % 10 else many_rows, v, sms)
        assert s.owner_steps in (0, OWNER_STEPS)
        both += s.owner_steps > 0 and s.whole_passes > 0
        if s.owner_steps == 0:
            continue
        seen += 1
        whole = s.whole_passes * s.workers
        assert s.tiles - whole < s.workers
        for worker in range(s.workers):
            # Whole tiles come behind the range.
            mine = list(work(s, worker * s.multicast))[: -s.whole_passes or None]
            owned = sum(segment.k_begin == 0 for segment in mine)
            steps = sum(segment.k_end - segment.k_begin for segment in mine)
            extra = owned * OWNER_STEPS
            assert steps - extra == s.share_each + (worker < s.share_more)
            assert all(s_.k_end > OWNER_STEPS for s_ in mine), "the first steps stay together"
    assert seen > 30 and both > 3


def test_a_cta_hands_over_at_most_one_partial_and_first():
    """Deadlock freedom: what a CTA owes to another comes before anything it waits for."""
    rng, variants = (
        random.Random(9),
        [v for v in _variants() if v.decomposition in ("striped", "stream_k")],
    )
    for _ in range(300):
        problem, v, sms = _random_case(rng, variants)
        s = make_schedule(problem, v, sms)
        for cta in range(s.grid):
            owed = [i for i, segment in enumerate(work(s, cta)) if segment.k_begin > 0]
            assert owed in ([], [0])
        assert s.partials == s.grid * v.m_tile * v.n_sm
        assert s.flags >= s.grid


def test_hybrid_ctas_hand_over_at_most_two_shares_a_pass():
    """The end of one block and the start of the next: two slots of partials, one counter."""
    v = Variant.parse("w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_hybrid_c1")
    for n, k, m in ((28672, 4096, 16), (4096, 4096, 40), (8192, 28672, 8), (64, 4096, 1)):
        s = make_schedule(ProblemShape(m, n, k), v, 132)
        assert s.grid <= 132 and s.hybrid is not None
        for cta in range(s.grid):
            for row in range(s.m_tiles):
                mine = [x for x in work(s, cta) if x.m_index == row]
                cut = [x for x in mine if (x.k_begin, x.k_end) != (0, s.k_steps)]
                assert len(cut) <= 2 and [x.k_begin > 0 for x in cut[1:]] in ([], [False])
        shares = s.m_tiles * s.hybrid.passes_per_row * s.grid
        assert (s.partials, s.flags) == (2 * shares * v.m_tile * 64, shares)


def test_hybrid_shares_are_balanced():
    """28672 columns on 132 CTAs: 448 blocks are three each and 52 cut along k."""
    v = Variant.parse("w4a16_hopper_f16_g128_m16_n256k256_w4x1_p4_hybrid_c1")
    s = make_schedule(ProblemShape(16, 28672, 4096), v, 132)
    assert (s.hybrid.full_passes, s.hybrid.whole_blocks, s.hybrid.left_over) == (0, 3, 52)
    steps = {sum(x.k_end - x.k_begin for x in work(s, cta)) for cta in range(s.grid)}
    assert max(steps) - min(steps) <= 1


def test_no_rows_nothing_to_launch():
    variant = Variant.parse("w4a16_hopper_f16_g128_m16_n128k128_w2x1_p8_dp_c2")
    schedule = make_schedule(ProblemShape(0, 4096, 4096), variant, 132)
    assert schedule.grid == 0 and schedule.partials == 0


def test_raster_keeps_row_tiles_together():
    variant = Variant.parse("w4a16_hopper_f16_g128_m128_n256k128_w2x1_p4_dp_c1")
    s = make_schedule(ProblemShape(128 * 10, 4096, 4096), variant, 132)
    assert s.raster == 8
    first = [next(iter(work(s, cta))) for cta in range(16)]
    assert [(t.m_index, t.n_index) for t in first[:9]] == [(m, 0) for m in range(8)] + [(0, 1)]


def test_counters_that_would_overflow_are_refused():
    variant = Variant.parse("w4a16_ampere_f16_g128_m16_n64k256_w1x4_p4_dp_c1")
    with pytest.raises(ValueError, match=f"m=50000000.*exceed {MAX_UNITS}"):
        make_schedule(ProblemShape(50_000_000, 65536, 65536), variant, 108)
    with pytest.raises(ValueError, match="sms=0 is not positive"):
        make_schedule(ProblemShape(1, 64, 128), variant, 0)
