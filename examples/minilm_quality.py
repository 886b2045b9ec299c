"""Embedding quality of all-MiniLM-L6-v2 by quantiser and group size, on held-out sentences.

    python examples/minilm_quality.py [--only NAME] [--group-size N] [--json FILE]

Mean cosine between the embeddings of the original fp32 model and of the quantised one. GPTQ is
calibrated on sentences out of the docstrings of Python's standard library and on words of the
tokenizer's vocabulary; the sentences judged are examples/sentences.txt, which have nothing in
common with them. Runs on a CPU: half an hour for everything, one or two minutes for a cell.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import random
import re
import sysconfig
from pathlib import Path

import torch
from minilm import compare, embed, load_model, read_sentences

from marlin_cutlass.quantize import quantize_model
from marlin_cutlass.quantize.texts import vocabulary_texts

GROUP_SIZES = (32, 64, 128, -1)
PAPER = {"compensate": False, "refine": 0, "signed_scales": False}
FELT = {"sensitivity": True, "refine": 10}
METHODS = {
    "rtn": {"method": "rtn"},
    "rtn, mse clip": {"method": "rtn", "clip": "mse"},
    "gptq, the paper's recipe": {"method": "gptq", **PAPER},
    "gptq": {"method": "gptq"},
    "gptq, sensitivity": {"method": "gptq", **FELT},
    "gptq, sensitivity, zero points": {"method": "gptq", "symmetric": False, **FELT},
}
BATCH = 32  # sentences of similar length per calibration sample
SEED = 0


def docstring_sentences(count: int) -> list[str]:
    """`count` sentences of 6 to 40 words from docstrings of the standard library's modules."""
    return list(_all_docstring_sentences()[:count])


@functools.cache
def _all_docstring_sentences() -> tuple[str, ...]:
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
    return tuple(sentences)


def calibration_sentences(tokenizer, count: int) -> list[str]:
    """`count` texts: a quarter are docstrings, which have the grammar of a language, the others
    words of the vocabulary, which have all of its words."""
    docstrings = docstring_sentences(count // 4)
    return docstrings + vocabulary_texts(tokenizer, count - len(docstrings), seed=SEED)


def calibration_samples(tokenizer, sentences: list[str]) -> list[dict]:
    """Batches of sentences of similar length; the attention mask keeps padding out."""
    ordered = sorted(sentences, key=len)
    parts = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    return [dict(tokenizer(part, return_tensors="pt", padding=True)) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--samples", type=int, default=1024, help="calibration sentences")
    parser.add_argument("--only", choices=METHODS, action="append", help="a method; repeatable")
    parser.add_argument("--group-size", type=int, action="append", help="repeatable")
    args = parser.parse_args()
    model, tokenizer = load_model()
    held_out = read_sentences()
    original = embed(model, tokenizer, held_out)
    samples = calibration_samples(tokenizer, calibration_sentences(tokenizer, args.samples))
    print(f"{args.samples} calibration sentences, {len(held_out)} held out; mean cosine (worst)")
    figures: dict[str, dict[str, list[float]]] = {}
    for label in args.only or METHODS:
        options, row = METHODS[label], figures.setdefault(label, {})
        print(f"{label:<32}", end="", flush=True)
        for group_size in args.group_size or GROUP_SIZES:
            work = copy.deepcopy(model)
            data = samples if options["method"] == "gptq" else None
            quantize_model(work, data, group_size=group_size, progress=False, **options)
            result = compare(original, embed(work, tokenizer, held_out))
            row[str(group_size)] = [result.cosine_mean, result.cosine_min]
            cell = f"  g{group_size}: {result.cosine_mean:.5f} ({result.cosine_min:.4f})"
            print(cell, end="", flush=True)
        print()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    torch.manual_seed(SEED)
    main()
