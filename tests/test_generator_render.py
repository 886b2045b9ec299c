"""Rendering: byte-identical, complete (every field of a Variant reaches the source), golden
copies.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from cutlass_library import library as cutlass

from generator import cutlass_types, render, space
from generator.arch import ARCHS
from generator.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = sorted(p.stem for p in GOLDEN.glob("*.cu"))
HOPPER = Variant.parse("w4a16_hopper_f16_g128_m16_n256k256_w4x1_p5_streamk_c1")


def _default_variants() -> list[Variant]:
    return [e.variant for a in ARCHS.values() for e in space.default_space(a, a.families)]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden(name):
    """After a wanted change: write render.render(...) over the file, and read the diff."""
    assert render.render(Variant.parse(name)) == (GOLDEN / f"{name}.cu").read_text()


def test_golden_copies_cover_both_families():
    assert {Variant.parse(n).family for n in GOLDEN_NAMES} == {"ampere", "hopper"}


def test_rendering_twice_gives_the_same_bytes_in_any_process():
    code = (
        "import hashlib; from generator import render, space; from generator.arch import ARCHS;"
        "t = ''.join(render.render(e.variant) for e in space.default_space(ARCHS['sm_90a']));"
        "print(hashlib.sha256(t.encode()).hexdigest())"
    )
    digests = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        digests.add(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True,
                env=environment, cwd=GOLDEN.parent.parent,
            ).stdout
        )  # fmt: skip
    assert len(digests) == 1


# Another value of every field; the rendered configuration must change with it.
OTHER = {
    "family": "ampere",
    "dtype": "bf16",
    "zeros": True,
    "group_size": 64,
    "m_tile": 8,
    "n_sm": 128,
    "k_sm": 128,
    "warps_n": 2,
    "warps_k": 2,
    "stages": 4,
    "decomposition": "split_k",
    "split": 2,
    "ctas_per_sm": 2,
    "multicast": 2,
}


def _without_names(variant: Variant) -> str:
    """The source without comments and without the kernel's name, which contain every field."""
    text = re.sub(r"^//.*$", "", render.render(variant), flags=re.M)
    text = re.sub(r"^static_assert.*$", "", text, flags=re.M)
    return text.replace(variant.name, "NAME")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Variant)])
def test_every_field_reaches_the_source(field):
    changed = dataclasses.replace(HOPPER, **{field: OTHER[field]})
    assert _without_names(changed) != _without_names(HOPPER)


def test_derived_numbers_are_asserted_in_the_source():
    for v in _default_variants():
        text = render.render(v)
        assert f"kThreads == {v.threads}," in text
        assert f"kSharedBytes == {v.shared_bytes}," in text
        assert f"{v.symbol}(" in text


def test_undefined_names_in_the_template_are_errors(monkeypatch):
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    assert render._template().environment.undefined is environment.undefined
    broken = render._template().environment.from_string("{{ variant.colour }}")
    with pytest.raises(jinja2.UndefinedError, match="colour"):
        broken.render(variant=HOPPER)


def test_template_is_thin():
    lines = (render.TEMPLATES / "kernel.cu.jinja").read_text().splitlines()
    assert len(lines) <= 60
    assert not any("{%" in line for line in lines), "algorithms belong in C++"


def test_write_if_changed(tmp_path):
    path = tmp_path / "a" / "b.cu"
    assert render.write_if_changed(path, "one")
    before = path.stat().st_mtime_ns
    assert not render.write_if_changed(path, "one")
    assert path.stat().st_mtime_ns == before
    assert render.write_if_changed(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["b.cu"], "nothing temporary is left"


# ---- CUTLASS vocabulary --------------------------------------------------------------------------


def test_dtype_names_are_those_of_cutlass():
    assert cutlass_types.element(HOPPER) is cutlass.DataType.f16
    assert cutlass_types.cpp_type(cutlass_types.element(HOPPER)) == "cutlass::half_t"
    bf16 = HOPPER.with_format("bf16", True, 64)
    assert cutlass_types.element_tag(bf16) == "marlin_cutlass::BF16"
    assert cutlass_types.weight_type(bf16) is cutlass.DataType.u4
    assert cutlass_types.weight_type(HOPPER) is cutlass.DataType.s4
    with pytest.raises(ValueError, match="dtype='f8'"):
        cutlass_types.element(dataclasses.replace(HOPPER, dtype="f8"))


def test_tile_description_of_both_families():
    tile = cutlass_types.tile_description(HOPPER, 90)
    assert tile.threadblock_shape == [256, 16, 256] and tile.stages == 5
    assert tile.math_instruction.instruction_shape == [64, 16, 16]
    ampere = Variant.parse("w4a16_ampere_f16_g128_m16_n128k128_w2x2_p4_striped_c1")
    tile = cutlass_types.tile_description(ampere, 80)
    assert tile.warp_count == [2, 1, 2]
    assert tile.math_instruction.instruction_shape == [16, 8, 16]
    split = Variant.parse("w4a16_hopper_f16_g128_m16_n64k256_w1x4_p8_split2_c1")
    assert cutlass_types.tile_description(split, 90).cluster_shape == [2, 1, 1]


def test_procedural_name_is_in_the_source():
    assert cutlass_types.procedural_name(HOPPER) == "s4_f16_f32_256x16x256_1x1x1_5"
    assert cutlass_types.procedural_name(HOPPER) in render.render(HOPPER)
