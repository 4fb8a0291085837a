"""The rules of the sentence splitter (sentences.toml), and what holds for every text."""

from __future__ import annotations

import random
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from megacore.data.gpt.dataset import GPTDataset
from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sentences import split_sentences
from megacore.data.tokenizers.training import train_tokenizer
from tests.patience import patience
from tests.unit import data_bytes

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


def test_sentences_of_a_file_change_nothing_for_a_left_to_right_model(tmp_path: Path) -> None:
    text = "One two. Three four! Five.\nSix seven? Eight nine ten.\n"
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train_tokenizer([text], "wordpiece", 60)
    job = {"inputs": (str(tmp_path / "a.txt"),), "output_prefix": str(tmp_path / "o")}
    for split in (False, True):
        preprocess(Job(**job, split_sentences=split), tokenizer)  # type: ignore[arg-type]
    whole, sentences = (IndexedDataset(tmp_path / f"o_text_{kind}") for kind in ("document", "sentence"))
    # Each sentence is a sequence, and documents are ranges of sequences: Megatron-LM's own form.
    lines = [["One two.", "Three four!", "Five."], ["Six seven?", "Eight nine ten."]]
    encoded = [[tokenizer.encode(sentence) for sentence in line] for line in lines]
    assert data_bytes.read(tmp_path / "o_text_sentence") == encoded
    assert sentences.document_indices.tolist() == [0, 3, 5]
    assert sentences.bin_path.read_bytes() == whole.bin_path.read_bytes()
    for k in range(20):
        one, other = (
            GPTDataset(indexed, range(2), num_samples=20, seq_length=4, seed=3)[k] for indexed in (whole, sentences)
        )
        assert all(np.array_equal(one[name], other[name]) for name in one)
