"""Calibration texts out of a vocabulary and out of files."""

from __future__ import annotations

import pytest

from marlin_cutlass.quantize.folder import quantize_folder
from marlin_cutlass.quantize.texts import read_texts, vocabulary_texts, vocabulary_words


class Tokenizer:
    """Only what a vocabulary needs."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in reversed(list(enumerate(self.tokens)))}


WORDS = tuple(f"w{'abcdefghij'[i // 10]}{'abcdefghij'[i % 10]}" for i in range(100))


@pytest.mark.parametrize(
    "tokens",
    [
        ("[PAD]", "[unused1]", "a", "!", "the", "##ing", "of", "42", "été"),  # WordPiece
        ("<s>", "!", "a", "ing", "Ġthe", "Ġof", "Ġ42", "Ġ", "Ġété", "Ġa"),  # byte-pair
        ("<unk>", "▁the", "ing", "▁of", "▁", "▁été"),  # SentencePiece
    ],
)
def test_words_are_whole_and_in_order(tokens):
    assert vocabulary_words(Tokenizer(*tokens)) == ["the", "of", "été"]


def test_texts_follow_the_order_of_the_vocabulary():
    texts = vocabulary_texts(Tokenizer(*WORDS), 400, words=(5, 9))
    assert texts == vocabulary_texts(Tokenizer(*WORDS), 400, words=(5, 9))
    assert texts != vocabulary_texts(Tokenizer(*WORDS), 400, words=(5, 9), seed=1)
    split = [text.rstrip(".").lower().split() for text in texts]
    assert {len(words) for words in split} == {5, 6, 7, 8, 9}
    counts = [sum(words.count(w) for words in split) for w in (WORDS[0], WORDS[50], WORDS[99])]
    assert counts[0] > counts[1] > counts[2] > 0
    assert len({word for words in split for word in words}) == len(WORDS)


def test_a_vocabulary_without_words_is_refused():
    with pytest.raises(ValueError, match="no whole words"):
        vocabulary_texts(Tokenizer("[PAD]", "1", "##ing", "a"), 3)
    for sizes in ({"count": 0}, {"count": 2, "words": (9, 2)}, {"count": 2, "words": (0, 0)}):
        with pytest.raises(ValueError, match="at least one text"):
            vocabulary_texts(Tokenizer("one", "two"), **sizes)


def test_texts_of_files(tmp_path):
    lines = tmp_path / "texts.txt"
    lines.write_text("one\n\n two words \n")
    assert read_texts(lines) == ["one", "two words"]
    objects = tmp_path / "texts.jsonl"
    objects.write_text('{"text": "one"}\n{"other": 2}\n')
    with pytest.raises(ValueError, match=r"texts.jsonl:2 is not a JSON object"):
        read_texts(objects)
    objects.write_text('{"text": ["one"]}\n')
    with pytest.raises(ValueError, match=r'texts.jsonl:1: "text" is list, not a string'):
        read_texts(objects)
    objects.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"texts.jsonl is not text in UTF-8"):
        read_texts(objects)
    lines.write_text("\n")
    with pytest.raises(ValueError, match="no calibration text"):
        read_texts(lines)


def test_folders_need_a_list_of_texts(tmp_path):
    with pytest.raises(TypeError, match="texts='hello': a list of texts"):
        quantize_folder(tmp_path, tmp_path / "out", "hello")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        quantize_folder(tmp_path / "none", tmp_path / "out", ["hello"])
