"""Kernel tables: the choice in Python, the launcher and the generator; damaged tables; explain."""

from __future__ import annotations

import json
import random

import fake_cuda
import pytest

import marlin_cutlass as mc
from generator.arch import ARCHS
from marlin_cutlass import dispatch
from marlin_cutlass.errors import TableError, UnsupportedArchError
from marlin_cutlass.manifest import MANIFEST_FORMAT

SMS = 132


def hopper(**fields):
    return fake_cuda.kernel("hopper", **fields)


def variants() -> list[dict]:
    """A few geometries of both families in all formats, so that rows have something to choose."""
    shapes = (
        {"family": "hopper", "m_tile": 16, "decomposition": "split_k", "split": 2},
        {"family": "hopper", "m_tile": 64, "n_sm": 256, "decomposition": "stream_k"},
        {"family": "hopper", "m_tile": 128, "n_sm": 128},
        {"family": "ampere", "m_tile": 8, "k_sm": 64},
        {"family": "ampere", "m_tile": 64, "decomposition": "striped", "ctas_per_sm": 2},
        {"family": "ampere", "m_tile": 32, "decomposition": "split_k", "split": 4},
        {"family": "hopper", "m_tile": 16, "n_sm": 256, "decomposition": "hybrid"},
        {"family": "hopper", "m_tile": 16, "decomposition": "hybrid", "multicast": 2},
        {"family": "hopper", "m_tile": 256, "n_sm": 128, "multicast": 2},
    )
    return [fake_cuda.kernel(**shape, **form) for shape in shapes for form in fake_cuda.formats()]


def rows(entries: list[dict]) -> list[dict]:
    split, streamk, large, small, striped, ampere_split = (entries[16 * i] for i in range(6))
    return [
        fake_cuda.row(split, m=(0, 16), n=(1, 4096), sms=SMS),
        fake_cuda.row(small, m=(0, 8), group_size=32),
        fake_cuda.row(streamk, m=(9, 64), dtype="bf16"),
        fake_cuda.row(striped, m=(17, 256), k=(1024, None), zeros=True),
        fake_cuda.row(ampere_split, m=(17, 64), k=(1, 1023)),
        fake_cuda.row(large),
    ]


@pytest.fixture
def table(tmp_path):
    entries = variants()
    del entries[3]  # one format of the first geometry is not built
    return dispatch.load_table(fake_cuda.write_table(tmp_path, entries, rows(variants())))


def shapes(count: int):
    rng = random.Random(0)
    sizes = [1, 7, 8, 9, 16, 17, 63, 64, 65, 128, 256, 257, 1000, 4096, 10000]
    for _ in range(count):
        n, k = rng.choice([64, 192, 4096, 4097, 28672]), rng.choice([512, 1024, 4096, 8192])
        group = rng.choice([32, 64, 128, 256, -1])
        form = (rng.choice(("f16", "bf16")), rng.choice((False, True)))
        yield rng.choice(sizes), n, k, group, *form, rng.choice([108, SMS])


def test_the_launcher_chooses_what_python_chooses(fake, table):
    fake.launcher.add_table(table, 9, 0)
    for m, n, k, group, dtype, zeros, sms in shapes(400):
        kernel, _ = table.select(m, n, k, group, dtype, zeros, sms)
        stored = 128 if group > 128 else group
        index = fake.launcher.select((9, 0), (m, n, k, stored), dtype, zeros, sms)
        assert table.kernels[index].name == kernel.name


def test_the_generator_chooses_the_same():
    generator_dispatch = pytest.importorskip("generator.dispatch")
    from generator.problem import ProblemShape

    entries = variants()
    names = frozenset(entry["name"] for entry in entries)
    parsed = tuple(generator_dispatch.DispatchRow.from_json(row) for row in rows(entries))
    theirs = generator_dispatch.DispatchTable(parsed, names)
    ours = dispatch.parse_table(_manifest(entries, rows(entries)), ".")
    for m, n, k, group, dtype, zeros, sms in shapes(400):
        problem = ProblemShape(m, n, k, group, dtype, zeros)
        kernel, row = ours.select(m, n, k, group, dtype, zeros, sms)
        variant, their_row = theirs.select(problem, sms)
        assert kernel.name == variant.name and row.geometry == their_row.geometry


def _manifest(entries, table_rows, **changes) -> dict:
    head = {"format": MANIFEST_FORMAT, "arch": "sm_90a", "layout_version": 1}
    return {**head, "variants": entries, "dispatch": table_rows, **changes}


def test_schedules_agree(fake, table):
    generator = pytest.importorskip("generator.schedule")
    from generator.problem import ProblemShape
    from generator.variant import Variant

    for kernel in table.kernels[::7]:
        for m, n, k, group, _, _, sms in shapes(60):
            ours = dispatch.schedule(kernel, m, n, k, sms)
            assert fake.launcher.schedule(kernel, m, n, k, sms) == ours
            theirs = generator.make_schedule(
                ProblemShape(m, n, k, group), Variant.parse(kernel.name), sms
            )
            for name in dispatch.Schedule.__dataclass_fields__:
                assert getattr(ours, name) == getattr(theirs, name), (kernel.name, name)


def test_names_agree_with_the_generator(table):
    variant = pytest.importorskip("generator.variant")
    for kernel in table.kernels:
        parsed = variant.Variant.parse(kernel.name)
        assert parsed.geometry().name == kernel.geometry
        assert parsed.cluster == kernel.cluster
        for name in ("family", "dtype", "zeros", "group_size", "split", "decomposition"):
            assert getattr(parsed, name) == getattr(kernel, name)


def test_a_schedule_beyond_int32_is_refused(fake, table):
    kernel = table.kernels[0]
    with pytest.raises(RuntimeError, match="exceed 2147483647; split the rows"):
        fake.launcher.schedule(kernel, 2**31 - 1, 65536, 65536, SMS)


# ---- forced kernels ----


def test_a_forced_kernel_is_found_by_name_and_geometry(table):
    kernel = table.kernels[94]
    form = (kernel.dtype, kernel.zeros, kernel.group_size)
    assert table.find(kernel.name, *form) == 94
    assert table.find(kernel.geometry, *form) == 94
    other = table.find(kernel.geometry, "f16", False, 256)
    assert table.kernels[other].name.startswith("w4a16_ampere_f16_g128_")


def test_a_forced_kernel_that_is_not_built_or_not_fit_is_refused(table):
    name = table.kernels[0].name
    with pytest.raises(
        ValueError, match="serves f16, symmetric, group_size=32: this call has bf16"
    ):
        table.find(name, "bf16", False, 32)
    with pytest.raises(
        ValueError, match=r"not built for sm_90a.*build.py --arch sm_90a --only w4a16"
    ):
        table.find(name.replace("_p4_", "_p5_"), "f16", False, 32)
    with pytest.raises(ValueError, match="is malformed"):
        table.find("fastest", "f16", False, 32)


def test_the_launcher_refuses_a_forced_index_that_does_not_fit(fake, table):
    fake.launcher.add_table(table, 9, 0)
    with pytest.raises(
        RuntimeError, match="is for float16, symmetric, group_size=32: it cannot serve"
    ):
        fake.launcher.select((9, 0), (1, 64, 128, 128), "f16", False, SMS, variant=0)
    with pytest.raises(RuntimeError, match="variant=5000 is not an index"):
        fake.launcher.select((9, 0), (1, 64, 128, 128), "f16", False, SMS, variant=5000)


def test_batch_invariant_kernels_cut_k_the_same_way_for_every_m(fake, table):
    chosen = table.batch_invariant()
    dense = dispatch.format_index("bf16", True, -1) + 1
    assert set(chosen[dense:]) == {-1}  # the table has no kernel for 2:4-sparse weights
    chosen = chosen[:dense]
    assert all(index >= 0 for index in chosen)
    kernels = {table.kernels[index].geometry for index in chosen}
    # Data-parallel beats a cluster split; here the only such Hopper geometry has 128 rows.
    assert kernels == {"w4a16_hopper_m128_n128k128_w4x1_p4_dp_c1"}
    fake.launcher.add_table(table, 9, 0)
    for m in (1, 16, 64, 257):
        index = fake.launcher.select((9, 0), (m, 512, 4096, 128), "f16", False, SMS, variant=-2)
        assert index == chosen[dispatch.format_index("f16", False, 128)]


def test_excluded_kernels_are_passed_over(tmp_path, monkeypatch):
    entries = variants()
    folder = fake_cuda.write_table(tmp_path, entries, rows(entries))
    call = (8, 64, 512, 128, "f16", False, SMS)
    assert "split2" in dispatch.load_table(folder).select(*call)[0].name
    monkeypatch.setenv("MARLIN_CUTLASS_EXCLUDE", "*_split2_*, *_m8_*")
    table = dispatch.load_table(folder)
    assert table.select(*call)[0].geometry == "w4a16_hopper_m128_n128k128_w4x1_p4_dp_c1"
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    found = mc.explain(*call[:4], arch=90)
    assert ("excluded by MARLIN_CUTLASS_EXCLUDE") in found.refused[0][1]


# ---- damaged tables ----


def damage(**changes):
    entry = fake_cuda.kernel()
    return _manifest([{**entry, **changes}], [fake_cuda.row(entry)])


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list instead of a JSON object"),
        (_manifest([], [], format=1), f"format=1, this release reads {MANIFEST_FORMAT}"),
        (_manifest([], [], layout_version=2), "layout_version=2"),
        (_manifest([], [], arch="../sm"), "arch='../sm' is malformed"),
        (_manifest([fake_cuda.kernel()] * 2, []), "listed twice"),
        (damage(m_tile=32), "its fields spell"),
        (damage(m_tile="16"), "m_tile='16' is not int"),
        (damage(zeros=0), "zeros=0 is not bool"),
        (damage(family="volta"), "family='volta' is not one of"),
        (damage(group_size=16), "group_size=16 is not one of"),
        (damage(threads=0), "not positive"),
        (damage(file="../../etc/passwd"), "not a plain file name"),
        (damage(sha256=None), "sha256=None is not str"),
        (_manifest([{"name": "x"}], []), "lacks 'family'"),
        (_manifest([], [{**fake_cuda.row(fake_cuda.kernel()), "m": [5, 1]}]), r"has m=\[5, 1\]"),
        (_manifest([], [{"m": [0, None]}]), "lacks 'n'"),
    ],
)
def test_a_damaged_manifest_names_the_file_and_the_fault(tmp_path, manifest, text):
    path = tmp_path / "manifest.json"
    path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    with pytest.raises(TableError, match=text) as caught:
        dispatch.load_table(tmp_path)
    assert str(path) in str(caught.value) and "run build.py again" in str(caught.value)


# ---- devices without a table ----


def test_a_device_takes_only_a_table_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    for arch in ("sm_80", "sm_90a"):
        fake_cuda.write_table(tmp_path, [], [], arch)
    assert dispatch.arch_for(8, 0) == "sm_80" and dispatch.arch_for(9, 0) == "sm_90a"
    with pytest.raises(
        UnsupportedArchError, match=r"built for \[sm_80, sm_90a\], device sm_86; run"
    ):
        dispatch.arch_for(8, 6)
    with pytest.raises(UnsupportedArchError, match="needs sm_80 or newer, found sm_75"):
        dispatch.arch_for(7, 5)
    with pytest.raises(UnsupportedArchError, match=r"run python build\.py --arch sm_120$"):
        dispatch.arch_for(12, 0)
    for capability in ((12, 1), (8, 7), (9, 1)):  # build.py would refuse these
        with pytest.raises(UnsupportedArchError, match=r"not one of sm_80, .*, sm_120$"):
            dispatch.arch_for(*capability)


def test_advice_to_build_is_what_build_takes():
    assert tuple(ARCHS) == dispatch.BUILDABLE


def test_the_launcher_says_the_same(fake, table):
    fake.launcher.set_built_archs(["sm_80", "sm_90a"])
    fake.launcher.add_table(table, 9, 0)
    call = ((1, 64, 128, 128), "f16", False, SMS)
    for capability in ((8, 0), (8, 6), (7, 5), (10, 0), (12, 0), (12, 1)):
        with pytest.raises(RuntimeError) as caught:
            fake.launcher.select(capability, *call)
        names = {"sm_80": None, "sm_90a": None}
        assert str(caught.value) == dispatch.missing_text(*capability, names)


# ---- explain ----


@pytest.fixture
def built(tmp_path, monkeypatch):
    entries = variants()
    del entries[3]
    fake_cuda.write_table(tmp_path, entries, rows(variants()))
    monkeypatch.setenv("MARLIN_CUTLASS_BUILD", str(tmp_path))
    monkeypatch.delenv("MARLIN_CUTLASS_KERNEL", raising=False)
    return dispatch.load_table(tmp_path / "sm_90a")


def test_explain_names_the_kernel_the_row_and_the_launch(built):
    found = mc.explain(16, 4096, 4096, 128, "f16", arch="sm_90a")
    assert found.kernel == "w4a16_hopper_f16_g128_m16_n128k128_w4x1_p4_split2_c1"
    assert found.source == "made by hand" and "row 0 of 6" in found.why
    assert found.schedule.grid == 64 and found.schedule.cluster == 2
    text = str(found)
    assert all(part in text for part in (found.kernel, "M=16, K=4096, N=4096", "grid=64"))


def test_explain_lists_what_was_passed_over(built):
    found = mc.explain(4, 64, 512, -1, "f16", arch=90)
    assert found.kernel.startswith("w4a16_hopper_f16_gcol_m128")
    assert found.refused == (
        (
            "w4a16_hopper_m16_n128k128_w4x1_p4_split2_c1",
            "row 0: w4a16_hopper_f16_gcol_m16_n128k128_w4x1_p4_split2_c1 is not built",
        ),
    )


def test_explain_agrees_with_select(built):
    for m, n, k, group, dtype, zeros, sms in shapes(100):
        found = mc.explain(m, n, k, group, dtype, 90, zeros, sms=sms)
        assert found.kernel == built.select(m, n, k, group, dtype, zeros, sms)[0].name


def test_explain_of_forced_and_batch_invariant_calls(built, monkeypatch):
    name = built.kernels[-1].geometry
    assert mc.explain(8, 64, 512, arch=90, kernel=name).kernel == built.kernels[-1].name.replace(
        "bf16z_gcol", "f16_g128"
    )
    assert "not built" in mc.explain(8, 64, 512, arch=90, kernel=name.replace("_p4", "_p6")).why
    monkeypatch.setenv("MARLIN_CUTLASS_KERNEL", name)
    assert mc.explain(8, 64, 512, arch=90).why == "forced by name"
    monkeypatch.delenv("MARLIN_CUTLASS_KERNEL")
    assert "every number of rows" in mc.explain(8, 64, 512, arch=90, batch_invariant=True).why


def test_explain_without_a_kernel_says_why(built):
    assert mc.explain(8, 1536, 1024, g=128, arch=75).kernel is None
    assert "sm_75 unsupported" in mc.explain(8, 1536, 1024, g=128, arch=75).why
    assert "sm_121 unsupported" in mc.explain(8, 1536, 1024, arch=121).why
    assert "the result is empty" in mc.explain(0, 1536, 1024, arch=90).why
    for bad, text in [
        ({"group_size": 16}, "group_size=16 is not supported"),
        ({"group_size": 100}, "K=1024, N=1536, group_size=100"),
        ({"dtype": "f32"}, "dtype='f32'"),
        ({"arch": "volta"}, "arch='volta' is malformed"),
    ]:
        with pytest.raises(ValueError, match=text):
            mc.explain(8, 1536, 1024, **{"arch": 90, **bad})
    with pytest.raises(TypeError, match="n='1536' must be an int"):
        mc.explain(8, "1536", 1024, arch=90)
    with pytest.raises(ValueError, match="sms=0 must be at least 1"):
        mc.explain(8, 1536, 1024, arch=90, sms=0)


def test_build_info_lists_tables_tools_and_settings(built, monkeypatch, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / "bin").mkdir(parents=True)
        tool = tmp_path / name / "bin" / "nvcc"
        tool.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release 1{len(name)}.0, V1"\n')
        tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "first"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'second' / 'bin'}:/usr/bin:/bin")
    (tmp_path / "sm_86").mkdir()
    (tmp_path / "sm_86" / "manifest.json").write_text("{}")
    info = mc.build_info()
    assert info["tables"]["sm_90a"]["kernels"] == 143 and info["tables"]["sm_90a"]["rows"] == 6
    assert "lacks 'format'" in info["tables"]["sm_86"]["error"]
    assert [tool["path"] for tool in info["nvcc"][:2]] == [
        str(tmp_path / name / "bin" / "nvcc") for name in ("first", "second")
    ]
    assert "release 15.0" in info["nvcc"][0]["version"]
    assert info["settings"]["MARLIN_CUTLASS_BUILD"] == str(tmp_path)
