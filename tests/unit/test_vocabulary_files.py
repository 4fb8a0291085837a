"""Tokenizers from GPT-2's vocab.json and merges.txt, and from BERT's vocab.txt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertTokenizer

from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import DataError

TEXTS = ["Some words, 12 numbers  and\ttabs.\n\n", "naïve café — 東京 🙂", " leading", "<|endoftext|> inside", ""]


def test_gpt2s_vocabulary_files_give_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    trained = train_tokenizer(["some words to merge, and some words more; the words of the text " * 30], "bpe", 320)
    trained.save(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    beside = load_tokenizer(tmp_path / "gpt2-vocab.json")
    assert beside.fingerprint == load_tokenizer(tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt").fingerprint
    assert (beside.vocab_size, beside.eod) == (trained.vocab_size, trained.eod)
    for text in TEXTS:
        assert beside.encode(text) == trained.encode(text)
        assert beside.decode(beside.encode(text)) == trained.decode(trained.encode(text))
    (tmp_path / "gpt2-merges.txt").unlink()
    with pytest.raises(DataError, match=r"is a vocabulary without its merges: give them with --merge-file"):
        load_tokenizer(tmp_path / "gpt2-vocab.json")


@pytest.mark.parametrize("cased", [False, True])
def test_berts_vocabulary_file_gives_the_ids_of_its_tokenizer(tmp_path: Path, cased: bool) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz,.1234567890", *("Some" if cased else "")]
    vocabulary = [*special, *dict.fromkeys([*letters, "words", "##s", *(f"##{one}" for one in letters)])]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    ours = load_tokenizer(tmp_path / "vocab.txt")
    theirs = BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=not cased)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert {role: vocabulary[number][1:-1].lower() for role, number in ours.roles.items()} == {
        role: role for role in ("cls", "sep", "mask", "pad")
    }
