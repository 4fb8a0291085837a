"""Words hold whole pieces of a tokenizer's pattern: `tokenizers` divides each alike by itself and in its text."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from megacore.data.tokenizers.word_division import DIVISIONS, GPT2, LLAMA3, QWEN2, Division, WordFinder

# As the tokenizer.json files of Llama 3 and of Qwen 2 have them.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHITE = [" ", "  ", "   ", "\n", "\n\n", "\r", "\r\n", "\t", "\v", "\f", "\x85", "\xa0", "\u3000", "\u2028", "\u1680"]
_ASCII = [*"aBz1'e_.!?-(\"#", "'s", "'S", "'ll", "'Ll", "'VE", "'re", "'d", "''s", "!?", "\0", "\x7f", "\x1c"]
_ASCII += ["123", "12345", "123456789", "letters", "Word", *_WHITE[:10]]
_WIDE = [*"é東½Ⅷ²。ßŉǅ\u212aﬅ", "'ſ", "\u0301", "e\u0301", "\U0001f600", "\U0001f469\u200d\U0001f680", "٣٤٥٦", "\u180e"]
_WIDE += ["\u200b", "\ufeff", "한국어", "नि", "\U0001d7d8", *_WHITE[10:]]
_CODES = (range(1, 0x3000), range(1, 0xD800), range(0xE000, 0x110000))


def random_text(random: Random) -> str:
    """White space, numbers, signs and contractions of ASCII, often with other characters among them."""
    kind, length = random.random(), random.randrange(14)
    if kind < 0.4:
        return "".join(random.choices(_ASCII, k=length))
    if kind < 0.8:
        return "".join(random.choices([*_ASCII, *_WIDE], k=length))
    if kind < 0.9:
        return "".join(random.choices(" \n\r\t!a1'\xa0sS.", k=length))
    letters = (chr(random.choice(random.choice(_CODES))) for _ in range(length))
    return "".join(letter + random.choice(["", "", "\n", " ", "'s", "!", "1"]) for letter in letters)


def pieces(text: str, splitter: pre_tokenizers.Split) -> list[str]:
    return [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]


def words(texts: list[str], division: Division) -> list[list[str]]:
    """Those of texts that are looked through together."""
    encoded = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, encoded)])
    data = b"".join(encoded)
    begins = WordFinder(division).begins(data, bounds).tolist()
    ends = [[*(place for place in begins if first <= place < end), end] for first, end in pairwise(bounds.tolist())]
    return [[data[begin:end].decode() for begin, end in pairwise(cuts)] for cuts in ends]


@pytest.mark.parametrize("division", [GPT2, LLAMA3, QWEN2], ids=["gpt2", "llama3", "qwen2"])
@pytest.mark.parametrize("count", [1500, pytest.param(60_000, marks=pytest.mark.slow)])
def test_words_are_divided_as_in_their_text(count: int, division: Division) -> None:
    random, splitter = Random(count), pre_tokenizers.Split(Regex(division.pattern), "isolated")
    for _ in range(count // 20):
        texts = [random_text(random) for _ in range(20)]
        for text, found in zip(texts, words(texts, division), strict=True):
            divided = [piece for word in found for piece in pieces(word, splitter)]
            assert divided == pieces(text, splitter), (text, found)


def test_words_of_ascii_are_small() -> None:
    text = "I'LL pay 12345 (or) x=f(a)!\n\n    # don't\tgo"
    gpt2 = ["I", "'", "LL", " pay", " 12345", " (", "or", ")", " x", "=", "f", "(", "a", ")!"]
    assert words([text], GPT2) == [[*gpt2, "\n\n   ", " #", " don", "'t", "\t", "go"]]
    llama3 = ["I", "'LL", " pay", " ", "123", "45", " (", "or", ")", " x", "=f", "(a", ")!\n\n"]
    assert words([text], LLAMA3) == [[*llama3, "   ", " #", " don", "'t", "\tgo"]]


def test_patterns_are_known_as_files_have_them() -> None:
    assert DIVISIONS[LLAMA3_PATTERN] is LLAMA3
    assert DIVISIONS[QWEN2_PATTERN] is QWEN2
    assert LLAMA3_PATTERN.replace("{1,3}", "{1,2}") not in DIVISIONS
