"""The rules of the sentence splitter, one by one: `|` in a case marks where a text must be split."""

from __future__ import annotations

import random
import time
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

CASES = [
    # plain ends
    "One sentence.",
    "No stop at all",
    "He came. |He saw. |He left.",
    "Really? |Yes! |Good.",
    "What?! |No!! |Well... |Fine.",
    "It rained in 1999. |In 2000 it did not.",
    "We sold 3. |They sold 4.",
    "A line\nbreak is white space. |Two\tare as well.",
    "A heading\n\n|A paragraph without a stop\n \t\n|Another.",
    # what goes on
    "He said: yes. and left.",
    "Yahoo! was a company.",
    "Wait... for it. |Wait... |For what?",
    "Is it (yes?), or not?",
    "He asked why?, and left.",
    "The iPhone sold. iPhones do.",  # a lower-case letter goes on
    # numbers, names, addresses
    "Pi is 3.14 or so. |Euler's number is 2.72.",
    "Version 2.0.1 is out. |See example.com/a.b for more.",
    "See No. 5 and Fig. 3 on p. 7. |No. |It has no. 8.",
    "Henry the VIII. |See vol. IV of it, pp. 3-4.",
    "It cost $3.50. |$4 was asked.",
    # abbreviations and initials
    "Dr. A. Smith met Mrs. Jones, e.g. in the U.S. Army, at 3 p.m. on Monday.",
    "J. R. R. Tolkien wrote it. |C. S. Lewis did not.",
    "He lives in the U.S. |The house is big.",
    "Apples, pears, etc. |They were ripe.",
    "Apples, pears, etc. Fruit Company.",
    "Acme Inc. |It was sold to Smith Bros. Circus.",
    "She holds a Ph.D. |She teaches.",
    "Smith et al. |In this they differ from Jones et al. (1999).",
    "World War I. |The next war came soon.",
    "He moved to St. Paul on Main St. |There he stayed.",
    "Lt. Col. Gen. Brown vs. Green, cf. Black.",
    "On Jan. 5 and Sept. 6.",
    "Martin Luther King Jr. Boulevard.",
    "An unknown abbrev. |Is not known.",
    # words that only a capital makes an abbreviation, and the other way round
    "The sun. |E.g. this.",
    "He sat. |John stood. |They wed. |Mary left.",
    "Do not mar. |Anna said al. |Bob said co. |Max agreed.",
    "One more rep. |Jim did it. |The gen. |Smith had it. |No sen. |Yuko paid. |A col. |Dan crossed it.",
    "On Sun. Morning Service, with Gov. Brown, Rep. Smith and GEN. Lee, on Wed. |The rest slept.",
    "He took the SAT. |John did not.",
    "Ca. 1900 Acme Co. Limited, ca. Easter, in the 2nd ed. New York.",
    "Sacramento, CA. |She moved on with Al. |John and Ed. |Nobody knew.",
    "The hon. |Members of the co. |Directors of it.",
    # list items
    "1. First of all.\n\n|2. Second.",
    "It is so. |B. The second. |3. The third.",
    "iv. A Roman item.",
    # quotes and brackets after and before the stop
    'He said "No." |Then he left.',
    'He said "No!" |"Why?" |\'Because.\'',
    '"Stop!" he said. |“Why?” she asked.',
    "(He left.) |[She stayed.] |{They slept.}",
    "He left (see below). |(There is more.)",
    "He left. (see below) More. |(See below.) |More.",
    "»Komm her.« |»Warum?« fragte er.",
    "Il dit : « Viens. » |Puis il partit. |« Oui ! »",
    "¿Qué? |¡Nada! |Él se fue. |Última línea.",
    # other scripts
    "京都に行く。|東京にも行く！|本当？|はい。",
    "「行こう。」|と言った。",
    "価格は３．１４です。|次。",
    "यह एक वाक्य है। |यह दूसरा है॥ |अंत",
    "هل تأتي؟ |نعم. |لا",
    "یہ جملہ ہے۔ |دوسرا جملہ۔",
    "Սա նախադասություն է։ |Երկրորդը։",
    "ይህ ነው። |ሁለተኛ።",
    "Это предложение. |Вот ещё одно! |И т.д. и т.п. Конец.",  # an acronym, before no English word
    "Αυτό είναι. |Και αυτό.",
    "זה משפט. |זה עוד אחד.",
    "ประโยคหนึ่ง ประโยคสอง",  # Thai has no full stop
    "中文没有空格。|Mixed text. |再来。",
]


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
