"""The code in docs/formats.md and docs/quantize.md runs, and its tables say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marlin_cutlass import formats

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = [
    (name, i, code)
    for name in ("formats.md", "quantize.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S))
]


@pytest.mark.parametrize(("name", "index", "code"), BLOCKS, ids=[f"{n}-{i}" for n, i, _ in BLOCKS])
def test_code_blocks_run(name, index, code):
    exec(compile(code, f"{name}, block {index}", "exec"), {"__name__": "docs"})


def test_no_placeholder_is_left():
    for name in ("formats.md", "quantize.md"):
        assert not re.search(r"^(FIGURES|TABLE|TODO)", (DOCS / name).read_text(), re.M)


def test_every_reader_and_packer_is_named():
    text = (DOCS / "formats.md").read_text()
    for name in ("from_gptq", "from_awq", "from_compressed_tensors", "from_marlin", "from_hqq"):
        assert name in text and hasattr(formats, name)
    for fixture in (Path(__file__).parent / "fixtures").glob("*.safetensors"):
        packer = fixture.name.split("_")[0]
        assert {"gptq": "gptqmodel", "ct": "compressed-tensors", "marlin": "autoawq"}.get(
            packer, packer
        ) in text
