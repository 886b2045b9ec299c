"""Calibration texts: read from a file, or made of the words of a tokenizer's vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

COMMON_WORDS = 20  # the most frequent ones, about equally likely


def read_texts(path: str | Path) -> list[str]:
    """Calibration texts, one per line, or JSON lines with a "text" entry; no empty ones."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        line = line.strip()
        if not line or path.suffix != ".jsonl":
            texts.append(line)
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}:{number} is not a JSON object with a "text" entry') from None
        if not isinstance(text, str):
            raise ValueError(f'{path}:{number}: "text" is {type(text).__name__}, not a string')
        texts.append(text)
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"{path} holds no calibration text")
    return texts


def vocabulary_words(tokenizer) -> list[str]:
    """Whole words of a vocabulary in order of their ids, which is about that of their frequency
    (WordPiece and byte-pair vocabularies are built so)."""
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    names = [token for token, _ in by_id]
    marks = [mark for mark in ("Ġ", "▁") if any(token.startswith(mark) for token in names)]
    if marks:  # of tokens that begin a word; WordPiece marks the others instead
        names = [token.removeprefix(marks[0]) for token in names if token.startswith(marks[0])]
    return [name for name in dict.fromkeys(names) if len(name) > 1 and name.isalpha()]


def vocabulary_texts(
    tokenizer, count: int, *, words: tuple[int, int] = (6, 24), seed: int = 0
) -> list[str]:
    """`count` texts of words[0] to words[1] words drawn from the vocabulary by Zipf's law.

    They say nothing, but show a model every common word of its language among others: where real
    text of the later use is missing, they go beyond the words that the text at hand has. The same
    seed gives the same texts. ValueError for a vocabulary without words, or sizes below 1.
    """
    if count < 1 or not 1 <= words[0] <= words[1]:
        raise ValueError(f"count={count}, words={words}: at least one text of first <= last words")
    vocabulary = vocabulary_words(tokenizer)
    if not vocabulary:
        raise ValueError("the tokenizer's vocabulary has no whole words to make texts of")
    generator = random.Random(seed)
    weights = [1.0 / (rank + COMMON_WORDS) for rank in range(len(vocabulary))]
    texts = []
    for _ in range(count):
        length = generator.randint(*words)
        texts.append(" ".join(generator.choices(vocabulary, weights, k=length)).capitalize() + ".")
    return texts
