"""The rules of the sentence splitter (sentences.toml), and what holds for every text."""

from __future__ import annotations

import random
import time
import tomllib
from pathlib import Path

import pytest

from megacore.data.indexed.sentences import split_sentences
from tests.patience import patience

CASES: list[str] = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES)
def test_the_rules(case: str) -> None:
    assert split_sentences(case.replace("|", "")) == [part.strip() for part in case.split("|")]


def test_nothing_is_lost_and_nothing_is_empty_whatever_the_text() -> None:
    rng = random.Random(0)
    odd = ["", " ", "\n\n\n", ". . .", "...", "!", "\u3002", "a.", ".a", "\x00. B", "\ud83d\ude00. C"]
    pieces = [*'aB .!?。"”()1№»\n', "  ", "\n\n", "...", "Dr", "e.g"]
    for text in [*odd, *("".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(3000))]:
        parts = split_sentences(text)
        assert all(part and part == part.strip() for part in parts)
        assert "".join("".join(parts).split()) == "".join(text.split())


@pytest.mark.parametrize("unit", [".", "!", '."', ".)", "\n ", "a.", "A. ", "Dr. ", "1. ", "。", ". ", "x" * 40 + ". "])
def test_long_texts_take_linear_time(unit: str) -> None:
    start = time.monotonic()
    split_sentences(unit * (200_000 // len(unit)))
    assert time.monotonic() - start < patience(3)
