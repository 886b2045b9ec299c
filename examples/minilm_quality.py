"""Embedding quality of all-MiniLM-L6-v2 by quantiser and group size, on held-out sentences.

    python examples/minilm_quality.py [--json FILE]

Mean cosine between the embeddings of the original fp32 model and of the quantised one. GPTQ is
calibrated on sentences out of the docstrings of Python's standard library; the sentences judged are
examples/sentences.txt, which have nothing in common with them. Runs on a CPU in a few minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import sysconfig
from pathlib import Path

import torch
from minilm import compare, embed, load_model, read_sentences

from marlin_cutlass.quantize import quantize_model

GROUP_SIZES = (32, 64, 128, -1)
METHODS = {
    "rtn": {"method": "rtn"},
    "rtn, mse clip": {"method": "rtn", "clip": "mse"},
    "gptq, plain recipe": {"method": "gptq", "compensate": False},
    "gptq": {"method": "gptq"},
    "gptq, static order": {"method": "gptq", "act_order": "static"},
    "gptq, asymmetric": {"method": "gptq", "symmetric": False},
}
BATCH = 32  # sentences of similar length per calibration sample
SEED = 0


def docstring_sentences(count: int) -> list[str]:
    """`count` sentences of 6 to 40 words from docstrings of the standard library's modules."""
    found: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            for text in re.split(r"(?<=[.!?])\s+|\n\s*\n", ast.get_docstring(node) or ""):
                words = re.sub(r"\s+", " ", text).strip()
                if 6 <= len(words.split()) <= 40 and re.fullmatch(r"[A-Z][\w ,;:'()-]+\.", words):
                    found.add(words)
    sentences = sorted(found)
    random.Random(SEED).shuffle(sentences)
    return sentences[:count]


def calibration_samples(tokenizer, sentences: list[str]) -> list[dict]:
    """Batches of sentences of similar length; the attention mask keeps padding out."""
    ordered = sorted(sentences, key=len)
    parts = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    return [dict(tokenizer(part, return_tensors="pt", padding=True)) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--samples", type=int, default=512, help="calibration sentences")
    args = parser.parse_args()
    model, tokenizer = load_model()
    held_out = read_sentences()
    original = embed(model, tokenizer, held_out)
    samples = calibration_samples(tokenizer, docstring_sentences(args.samples))
    print(f"{args.samples} calibration sentences, {len(held_out)} held out; mean cosine (worst)")
    figures: dict[str, dict[str, list[float]]] = {}
    for label, options in METHODS.items():
        row = figures.setdefault(label, {})
        for group_size in GROUP_SIZES:
            work = copy.deepcopy(model)
            data = samples if options["method"] == "gptq" else None
            quantize_model(work, data, group_size=group_size, progress=False, **options)
            result = compare(original, embed(work, tokenizer, held_out))
            row[str(group_size)] = [result.cosine_mean, result.cosine_min]
        cells = "  ".join(f"g{g}: {mean:.5f} ({worst:.4f})" for g, (mean, worst) in row.items())
        print(f"{label:<20} {cells}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    main()
