"""The dispatch table: total, no unreachable row, first match, measurements before the model."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from generator import rows, space
from generator.arch import ARCHS, GPUS
from generator.cost import estimate, reference_gpu
from generator.dispatch import DispatchRow, DispatchTable, Range
from generator.problem import DTYPES, ProblemShape
from generator.variant import Geometry, Variant

TESTED = ("sm_80", "sm_86", "sm_89", "sm_90a")
SHORT = "w4a16_ampere_m16_n128k128_w2x2_p4_striped_c1"
WIDE = "w4a16_ampere_m64_n256k128_w4x2_p3_striped_c1"
SYM = ("f16", False, 128)


def _variants(arch: str) -> list[Variant]:
    return [e.variant for e in space.default_space(ARCHS[arch], ARCHS[arch].families)]


@pytest.fixture(scope="module", params=TESTED)
def table(request) -> DispatchTable:
    return rows.build_table(ARCHS[request.param], _variants(request.param))


def _problem(rng: random.Random) -> ProblemShape:
    group = rng.choice((32, 64, 128, 256, 512, -1))
    k = rng.randint(1, 300) * (group if group > 0 else 64)
    m = rng.choice((0, 1, 5, 16, 17, 33, 64, 65, 200, 1024, rng.randint(1, 20000)))
    n = rng.choice((1, 64, 4096, 11008, 28672, rng.randint(1, 100000)))
    return ProblemShape(m, n, k, group, rng.choice(DTYPES), rng.random() < 0.5)


def test_table_is_total(table):
    assert table.gaps() == []
    assert len(table.formats()) == 16


def test_no_row_is_unreachable(table):
    assert table.unreachable() == []


def test_every_problem_finds_a_variant_of_its_format(table):
    rng = random.Random(3)
    for _ in range(2000):
        problem = _problem(rng)
        variant, row = table.select(problem, rng.choice((72, 84, 108, 132, 142, 999)))
        assert variant.name in table.variants
        assert row.matches(problem, row.sms or 1)
        wanted = (problem.dtype, problem.zeros, problem.kernel_group_size)
        assert (variant.dtype, variant.zeros, variant.group_size) == wanted


def test_table_survives_json(table):
    text = json.dumps(table.to_json())
    again = tuple(DispatchRow.from_json(row) for row in json.loads(text))
    assert again == table.rows
    assert set(table.to_json()[0]) == {
        "m", "n", "k", "group_size", "dtype", "zeros", "sms", "geometry", "source",
    }  # fmt: skip


def test_table_is_repeatable():
    first, second = (rows.build_table(ARCHS["sm_80"], _variants("sm_80")) for _ in range(2))
    assert first == second


def test_every_row_says_where_it_comes_from(table):
    assert {r.source.split()[0] for r in table.rows} <= {"model", "measured"}


def test_sizes_stay_readable(table):
    """Of the default families. The launcher scans rows once for each new shape: 1 ns a row. On
    sm_90a eight sets of kernels, of which formats have one each, share them: 139 weights timed.
    """
    assert len(table.rows) < 15000


# ---- the checks themselves can fail --------------------------------------------------------------


def _table(*given: DispatchRow, names: tuple[str, ...] = (SHORT, WIDE)) -> DispatchTable:
    built = [rows.Geometry.parse(n).with_format(*SYM).name for n in names]
    return DispatchTable(given, frozenset(built))


def _row(m: Range, geometry: str = SHORT, **conditions) -> DispatchRow:
    defaults = {"n": Range(1, None), "k": Range(1, None), "source": "test"}
    return DispatchRow(m=m, geometry=geometry, **{**defaults, **conditions})


def test_a_gap_in_m_is_found():
    table = _table(_row(Range(0, 16)), _row(Range(18, None), WIDE))
    assert [cell[1] for _, cell in table.gaps()] == [17]
    with pytest.raises(LookupError, match="m=17"):
        table.select(ProblemShape(17, 64, 128), 72)


def test_a_gap_on_one_device_is_found():
    assert _table(_row(Range(0, None), sms=72)).gaps()
    assert not _table(_row(Range(0, None), sms=72), _row(Range(0, None))).gaps()


def test_a_gap_in_a_corner_is_found():
    low = _row(Range(0, None), n=Range(1, 4096))
    rest = _row(Range(0, None), n=Range(4097, None), k=Range(1, 8192))
    assert {cell[2:] for _, cell in _table(low, rest).gaps()} == {(4097, 8193)}


def test_a_row_for_a_variant_that_is_not_built_is_skipped():
    table = _table(_row(Range(0, None), WIDE), _row(Range(0, None)), names=(SHORT,))
    variant, row = table.select(ProblemShape(4, 64, 128), 72)
    assert variant.geometry().name == SHORT and row is table.rows[1]
    assert table.unreachable() == [table.rows[0]]


def test_an_unreachable_row_is_found_and_removed():
    covered = _row(Range(4, 8), WIDE)
    table = _table(_row(Range(0, None)), covered)
    assert table.unreachable() == [covered]
    assert table.without_unreachable().rows == table.rows[:1]


def test_a_repeated_row_goes_but_its_first_copy_stays():
    row = _row(Range(0, None))
    assert _table(row, row).without_unreachable().rows == (row,)


def test_first_match_wins():
    table = _table(_row(Range(0, 16)), _row(Range(0, None), WIDE))
    assert table.select(ProblemShape(16, 64, 128), 1)[0].geometry().name == SHORT
    assert table.select(ProblemShape(17, 64, 128), 1)[0].geometry().name == WIDE


def test_format_conditions():
    row = _row(Range(0, None), dtype="f16", zeros=False, group_size=128)
    assert row.matches(ProblemShape(1, 64, 256, 256), 1)  # stored as 128
    assert not row.matches(ProblemShape(1, 64, 128, 128, "bf16"), 1)
    assert not row.matches(ProblemShape(1, 64, 128, 128, zeros=True), 1)


# ---- measurements --------------------------------------------------------------------------------


def _entry(m: int, geometry: str, us: float, n: int = 4096, k: int = 4096) -> dict:
    return {"sms": 72, "n": n, "k": k, "m": m, "geometry": geometry, "us": us}


def _write(folder, entries, arch="sm_86"):
    data = {"arch": arch, "gpu": "A10", "date": "2026-11-29", "entries": entries}
    (folder / "a10.json").write_text(json.dumps(data))


def test_the_fastest_measured_geometry_wins_near_its_shape(tmp_path):
    entries = [
        _entry(m, g, us) for m, g, us in ((1, SHORT, 20.0), (1, WIDE, 10.0), (64, SHORT, 9.0))
    ]
    _write(tmp_path, entries)
    table = rows.build_table(ARCHS["sm_86"], _variants("sm_86"), tmp_path)
    assert table.gaps() == [] and table.unreachable() == []

    def chosen(m: int, n: int = 4096, k: int = 4096, sms: int = 72):
        variant, row = table.select(ProblemShape(m, n, k), sms)
        return variant.geometry().name, row.source

    assert chosen(1) == (WIDE, "measured A10 2026-11-29")
    assert chosen(64) == chosen(40) == (SHORT, "measured A10 2026-11-29")
    assert chosen(1, n=4096 + 64)[1].startswith("measured")
    for far in (chosen(20), chosen(1, n=8192), chosen(1, k=16384), chosen(1, sms=84), chosen(65)):
        assert far[1] == "model"


def test_measured_rows_of_neighbours_meet_half_way():
    a = rows._around(4096, [4096, 4608], 1.12)
    b = rows._around(4608, [4096, 4608], 1.12)
    assert a.hi + 1 == b.lo and 4096 in a and 4608 in b


def test_neighbouring_measurements_with_one_winner_become_one_row(tmp_path):
    _write(tmp_path, [_entry(m, WIDE, 5.0) for m in (16, 32, 64)])
    names = frozenset(v.name for v in _variants("sm_86"))
    found = rows.measured_rows(rows.read_measurements(ARCHS["sm_86"], tmp_path), names)
    assert [r.m for r in found] == [Range(0, 64)]


def test_a_measured_format_decides_before_the_default_one(tmp_path):
    m16, m64 = (
        f"w4a16_ampere_{g}_striped_c1" for g in ("m16_n128k128_w2x2_p4", "m64_n128k128_w2x2_p3")
    )
    zeros = [
        {**_entry(16, g, us), "zeros": True, "group_size": 32} for g, us in ((m64, 3.0), (m16, 4.0))
    ]
    _write(tmp_path, [_entry(16, m16, 2.0), *zeros])
    table = rows.build_table(ARCHS["sm_86"], _variants("sm_86"), tmp_path)

    def chosen(**fmt) -> str:
        return table.select(ProblemShape(16, 4096, 4096, **fmt), 72)[0].geometry().name

    assert chosen(zeros=True, group_size=32) == m64
    assert chosen() == chosen(dtype="bf16") == chosen(zeros=True, group_size=64) == m16


def test_a_format_timed_without_the_default_choice_does_not_decide(tmp_path):
    """Its timings are older than that kernel, or left it out: bf16 at M = 32 took 1.4-1.75 times
    as long as it need (H200, 2026-12-01)."""
    m16, m64 = (
        f"w4a16_ampere_{g}_striped_c1" for g in ("m16_n128k128_w2x2_p4", "m64_n128k128_w2x2_p3")
    )
    older = {**_entry(16, m64, 3.0), "dtype": "bf16"}
    alone = {**_entry(16, m64, 3.0, k=8192), "dtype": "bf16"}
    _write(tmp_path, [_entry(16, m16, 2.0), older, alone])
    table = rows.build_table(ARCHS["sm_86"], _variants("sm_86"), tmp_path)

    def chosen(k: int) -> str:
        return table.select(ProblemShape(16, 4096, k, dtype="bf16"), 72)[0].geometry().name

    assert chosen(4096) == m16
    assert chosen(8192) == m64  # nothing else was timed there


def test_a_measured_format_leaves_out_rows_that_the_default_one_measured(tmp_path):
    """Zero points measured at 112 and 144 rows, the default format at 128 as well: tiles of 144
    rows are not for 128."""
    tiles = {
        m: f"w4a16_hopper_m{m}_n128k128_w2x1_p{p}_streamk_c1_mc2"
        for m, p in ((112, 5), (128, 5), (144, 4))
    }
    default = [{**_entry(m, g, 2.0), "sms": 132} for m, g in tiles.items()]
    zeros = [{**e, "zeros": True} for e in default if e["m"] != 128]
    small = {**_entry(8, tiles[112], 3.0), "sms": 132}
    one = {**_entry(1, tiles[128], 3.0), "sms": 132}
    _write(tmp_path, [*default, *zeros, one, {**small, "zeros": True}], "sm_90a")
    names = frozenset(v.name for v in _variants("sm_90a"))
    found = rows.measured_rows(rows.read_measurements(ARCHS["sm_90a"], tmp_path), names)

    def chosen(m: int, zeros: bool) -> str:
        problem = ProblemShape(m, 4096, 4096, zeros=zeros)
        return next(row.geometry for row in found if row.matches(problem, 132))

    for with_zeros in (False, True):
        for m, tile in ((112, 112), (113, 128), (128, 128), (129, 144), (144, 144)):
            assert chosen(m, with_zeros) == tiles[tile], (m, with_zeros)
    # Nor are 16 rows measured in a format for the eight that the default one measured.
    ten = [{**_entry(m, tiles[112 + 2 * m], 2.0), "sms": 132} for m in (8, 16)]
    _write(tmp_path, [*ten, {**ten[1], "zeros": True}], "sm_90a")
    few = rows.measured_rows(rows.read_measurements(ARCHS["sm_90a"], tmp_path), names)
    by_zeros = {row.zeros: row.m for row in few if row.geometry == tiles[144]}
    assert by_zeros == {True: Range(9, 16), None: Range(9, 16)}
    # Up to eight rows take the same time: the format's own measurement at 8 decides for 1.
    assert chosen(1, True) == tiles[112] and chosen(1, False) == tiles[128]


def test_beyond_the_most_rows_measured_only_what_was_timed_there_is_asked(tmp_path):
    """More rows than were measured: the model, as far off as it was at the last measurement. Half
    way up a wave of large tiles the choice may be another one than at its end."""
    large, small = (
        f"w4a16_hopper_{g}_dp_c1_mc2" for g in ("m256_n128k128_w2x1_p3", "m128_n128k128_w2x1_p5")
    )
    times = {large: 100.0, small: 103.0}
    entries = [{**_entry(2048, g, us), "sms": 132} for g, us in times.items()]
    _write(tmp_path, [*entries, {**_entry(64, small, 9.0), "sms": 132}], arch="sm_90a")
    found = rows.rows_beyond(
        ARCHS["sm_90a"],
        rows.read_measurements(ARCHS["sm_90a"], tmp_path),
        frozenset(v.name for v in _variants("sm_90a")),
    )
    assert found[0].m.lo == 2049 and found[-1].m.hi is None
    assert all(a.m.hi + 1 == b.m.lo for a, b in itertools.pairwise(found))
    by_m = {m: next(r.geometry for r in found if m in r.m) for m in (2305, 4096, 6145, 20000)}
    assert by_m == {2305: small, 4096: large, 6145: small, 20000: large}
    assert all(r.source == "measured A10 2026-11-29 at m=2048, beyond it the model" for r in found)


def test_formats_with_fewer_kernels_take_the_best_of_what_they_have(tmp_path):
    """A cell is measured in one format. Of the kernels that another has some were timed there, and
    the model has the others, as far off as it is for the fastest.
    """
    halves, split, wide, untimed = (
        f"w4a16_hopper_{g}"
        for g in (
            "m16_n64k256_w1x2_p6_split2_c2",
            "m16_n64k256_w1x4_p12_split2_c1",
            "m16_n256k256_w4x1_p4_dp_c1",
            "m24_n128k256_w2x2_p6_streamk_c1",
        )
    )
    times = {halves: 5.0, split: 5.5, wide: 9.0}
    _write(tmp_path, [{**_entry(16, g, us), "sms": 132} for g, us in times.items()], "sm_90a")
    measurements = rows.read_measurements(ARCHS["sm_90a"], tmp_path)
    names = frozenset(v.name for v in _variants("sm_90a"))

    def choice(*geometries: str) -> DispatchRow:
        parsed = [Geometry.parse(g) for g in geometries]
        (row,) = rows.rows_of_fewer(ARCHS["sm_90a"], measurements, names, parsed)
        return row

    row = choice(wide, split)
    assert row.geometry == split and row.m == Range(0, 16) and row.takes(("bf16", True, 32))
    assert row.source == "measured A10 2026-11-29, of fewer kernels"
    assert choice(wide).geometry == wide
    gpu = reference_gpu(ARCHS["sm_90a"], 132)
    model = {
        g: estimate(ProblemShape(16, 4096, 4096), Geometry.parse(g).with_format(*SYM), gpu).total
        for g in (halves, untimed)
    }
    assert 5.5 < model[untimed] * 5.0 / model[halves] < 9.0
    assert choice(wide, untimed).geometry == untimed
    assert choice(untimed, split).geometry == split
    model_row = choice(wide, untimed)
    assert model_row.source == "measured A10 2026-11-29, of fewer kernels by the model"
    named = rows.rows_of_fewer(
        ARCHS["sm_90a"], measurements, names, [Geometry.parse(wide)], [("bf16", True, 32)]
    )
    assert [r.takes(("bf16", True, 32)) for r in named] == [True]
    assert not named[0].takes(SYM)
    other = [Geometry.parse("w4a16_ampere_m16_n128k256_w2x4_p4_striped_c2")]
    assert rows.rows_of_fewer(ARCHS["sm_90a"], measurements, names, other) == []


def test_few_rows_say_nothing_about_many(tmp_path):
    entry = {**_entry(512, "w4a16_hopper_m256_n128k128_w2x1_p3_dp_c1_mc2", 9.0), "sms": 132}
    _write(tmp_path, [entry], arch="sm_90a")
    names = frozenset(v.name for v in _variants("sm_90a"))
    measurements = rows.read_measurements(ARCHS["sm_90a"], tmp_path)
    assert rows.rows_beyond(ARCHS["sm_90a"], measurements, names) == []


def test_measurements_of_unbuilt_variants_are_left_out(tmp_path):
    _write(tmp_path, [_entry(1, "w4a16_ampere_m16_n128k128_w2x2_p6_striped_c1", 1.0)])
    table = rows.build_table(ARCHS["sm_86"], _variants("sm_86"), tmp_path)
    assert all(r.source == "model" for r in table.rows)


def test_measurements_of_another_arch_are_ignored(tmp_path):
    _write(tmp_path, [_entry(1, WIDE, 1.0)], arch="sm_80")
    assert rows.read_measurements(ARCHS["sm_86"], tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": "w4a16_m16"},
        {"colour": 1},
        {"k": 100},
        {"us": 5e-324},
        {"us": 10**400},
        {"us_pdl": 1e300},
    ],
    ids=str,
)
def test_a_malformed_measurement_is_named(tmp_path, change):
    _write(tmp_path, [_entry(1, WIDE, 1.0), {**_entry(2, WIDE, 1.0), **change}])
    with pytest.raises(ValueError, match=r"a10\.json, entry 1"):
        rows.read_measurements(ARCHS["sm_86"], tmp_path)


def test_the_shipped_measurements_can_be_read():
    for arch in ARCHS.values():
        for x in rows.read_measurements(arch):
            assert x.us > 0 and x.n > 0 and x.k > 0 and x.m > 0


# ---- the model -----------------------------------------------------------------------------------

# us on an H200 without dependent launch, the best of each cell in the tuner's runs, 2026-11-30
# (docs/performance.md).
H200_MEASURED = {
    (4096, 4096): {1: 5.2, 16: 5.4, 64: 6.8, 128: 10.2, 256: 14.5, 1024: 45.0},
    (28672, 4096): {1: 16.7, 16: 17.2, 32: 20.3, 64: 27.2, 128: 44.4, 256: 81.9, 1024: 304.8},
    (8192, 28672): {1: 30.9, 16: 31.7, 64: 53.4, 128: 84.5, 256: 157.4, 1024: 580.8},
}


@pytest.mark.parametrize("shape", H200_MEASURED)
def test_the_model_is_within_a_sixth_of_measurements(shape):
    n, k = shape
    dense = [v for v in _variants("sm_90a") if not v.sparse]
    variants = [v for v in dense if (v.dtype, v.zeros, v.group_size) == SYM]
    for m, measured in H200_MEASURED[shape].items():
        best = min(estimate(ProblemShape(m, n, k), v, GPUS["H200"]).total for v in variants)
        assert measured / 1.17 < best < measured * 1.17, (m, best)


def test_the_model_knows_what_binds():
    short = Variant.parse("w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1")
    tall = Variant.parse("w4a16_ampere_f16_g128_m64_n256k128_w4x2_p3_striped_c1")
    gpu = GPUS["A10"]
    assert estimate(ProblemShape(1, 16384, 16384), short, gpu).bound == "memory"
    assert estimate(ProblemShape(4096, 16384, 16384), tall, gpu).bound == "compute"


def test_the_model_never_beats_the_memory():
    rng = random.Random(4)
    for arch in TESTED:
        gpu = reference_gpu(ARCHS[arch])
        for v in rng.sample(_variants(arch), 20):
            problem = ProblemShape(rng.randint(1, 300), 64 * rng.randint(1, 500), 4096)
            floor = problem.weight_bytes / gpu.bandwidth * 1e6
            assert estimate(problem, v, gpu).total > floor


def test_reference_gpu_follows_the_number_of_sms():
    assert reference_gpu(ARCHS["sm_86"], 72).name == "A10"
    assert reference_gpu(ARCHS["sm_90a"], 132).name == "H200"
    assert reference_gpu(ARCHS["sm_90a"], 114).name == "H200"


def test_ctas_that_share_an_sm_share_its_time():
    name = "w4a16_hopper_f16_g128_m16_n64k128_w1x2_p6_split4_c{}"
    problem = ProblemShape(16, 8192, 4096)
    one, three = (estimate(problem, Variant.parse(name.format(c)), GPUS["H200"]) for c in (1, 3))
    assert three.waves < one.waves
    assert three.compute >= 0.9 * one.compute  # fewer rounds, each as much longer
