"""tiktoken's encoder for byte-level BPE: the ids are those of `tokenizers`, or it is not used. Exact duplicates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.tokenizers import fast_bpe
from megacore.data.tokenizers import words as word_table
from megacore.data.tokenizers.fast_bpe import FastEncoder, fast_encoder
from megacore.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.data.tokenizers.words import GPT2, LLAMA3, QWEN2, Division
from tests.unit import data_bytes

UNKNOWN = LLAMA3.pattern.replace("{1,3}", "{1,2}")
TEXTS = [
    "def f(x):\n    return x  + 1\n\n\n  # it's 12345 words, naïve — 東京 🙂\t\t",
    "",
    " ",
    "\n\n \n",
    "<|endoftext|> in the text",
    "e\u0301 is not é",
    "\u00a0\u2003x\u200b",
    "SOME Words' ll 'LL ١٢٣ Ⅷ ²",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    sources = [Path(fast_bpe.__file__).read_text(), Path(tokenizers.__file__).read_text(), *TEXTS]
    return train_tokenizer(sources * 3, "bpe", 700)


def changed(trained: Tokenizer, pattern: str | None = None, **parts: object) -> JsonTokenizer:
    """The tokenizer with other parts of `tokenizers`, perhaps with another division of texts."""
    assert isinstance(trained, JsonTokenizer)
    backend = tokenizers.Tokenizer.from_str(trained.to_json())
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        parts["pre_tokenizer"] = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    for name, part in parts.items():
        setattr(backend, name, part)
    return JsonTokenizer(backend)


def encoder(tokenizer: Tokenizer, workers: int = 1) -> FastEncoder:
    """The fast encoder of a tokenizer that has one."""
    fast = fast_encoder(tokenizer, workers)
    assert fast is not None
    return fast


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is encoded to prove that the encoders agree, which other tests show."""
    monkeypatch.setattr(fast_bpe, "PROBED", ())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "nfc"])
def test_ids_are_those_of_the_tokenizer(kind: str, trained: Tokenizer) -> None:
    parts = {"nfc": {"normalizer": normalizers.NFC()}}.get(kind, {})
    tokenizer = changed(trained, LLAMA3.pattern if kind == "llama3" else None, **parts)
    fast = encoder(tokenizer)
    texts = [*TEXTS, *(text * 50 for text in TEXTS), Path(__file__).read_text()]
    for text, ids in zip(texts, fast.encode_batch(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text), text


PARTS = [*"aBé東1½'e_. \n\t\x1c\x85\xa0\u3000\u2028\u180e", "'s", "'ll", "'v", "  ", "\r\n"]
PARTS += ["\u200b", "!?", "\u0301", "\U0001f600", "<|", "\0", "letters", "123456789", "x" * 40]


@pytest.mark.parametrize(
    ("together", "bits", "pattern"),
    [
        (1, 2, None),
        pytest.param(1 << 16, 17, None, marks=pytest.mark.slow),
        (1 << 16, 2, LLAMA3.pattern),
        pytest.param(1, 17, QWEN2.pattern, marks=pytest.mark.slow),
    ],
)
def test_words_have_the_ids_that_they_have_in_a_text(
    together: int, bits: int, pattern: str | None, trained: Tokenizer, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few words have a place, and texts that are looked up together stay apart."""
    monkeypatch.setattr(fast_bpe, "TOGETHER", together)
    monkeypatch.setattr(word_table, "BITS", bits)
    monkeypatch.setattr(word_table, "MOST_WORDS", 50)
    monkeypatch.setattr(word_table, "LONGEST_WORD", 20)
    fast = encoder(changed(trained, pattern))
    assert fast.words is not None
    random = Random(0)
    texts = ["".join(random.choices(PARTS, k=random.randrange(14))) for _ in range(1000)]
    ascii_texts = ["".join(random.choices([part for part in PARTS if part.isascii()], k=9)) for _ in range(1000)]
    assert fast.agrees([*texts, *ascii_texts])
    fast.encode("some words, of which there is a last one")  # the table may have been emptied
    assert max(map(len, fast.words.words)) <= 20
    if together == 1:
        assert 0 < len(fast.words.words) <= 80  # the words of a text come after the limit is looked at


@pytest.mark.parametrize("pattern", [None, LLAMA3.pattern, UNKNOWN])
def test_a_long_text_is_encoded_in_parts(
    pattern: str | None, trained: Tokenizer, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = changed(trained, pattern)
    fast = encoder(tokenizer)
    assert (fast.words is None) == (pattern == UNKNOWN)
    assert fast.divides
    text = " ".join([*TEXTS, Path(__file__).read_text(), "no<|endoftext|> place "] * 2)
    monkeypatch.setattr(fast_bpe, "WHOLE", 40)
    assert len(list(fast.encode_parts([text]))) > 50
    assert fast.encode(text).tolist() == tokenizer.encode(text)
    added = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.add_special_tokens([added])  # it takes the spaces before it
    assert not encoder(JsonTokenizer(backend)).divides


def test_what_is_no_plain_byte_level_bpe_has_no_fast_encoder(trained: Tokenizer) -> None:
    assert fast_encoder(train_tokenizer(TEXTS * 5, "unigram", 330)) is None
    assert fast_encoder(changed(trained, normalizer=normalizers.Lowercase())) is None
    assert fast_encoder(changed(trained, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))) is None


def test_a_vocabulary_whose_ids_are_not_in_the_order_of_its_merges_has_none() -> None:
    """tiktoken would merge b and c of abc first."""
    letters = {letter: number for number, letter in enumerate(fast_bpe.bytes_of_letters())}
    backend = tokenizers.Tokenizer(models.BPE({**letters, "bc": 256, "ab": 257}, [("a", "b"), ("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = JsonTokenizer(backend)
    assert tokenizer.encode("abc") == [257, letters["c"]]
    assert fast_encoder(tokenizer) is None


def write(tmp_path: Path, lines: list[dict[str, str]]) -> str:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_repeated_documents_are_left_out(workers: int, trained: Tokenizer, tmp_path: Path) -> None:
    texts = ["one", "two", "one", "three", "", "two", "four"]
    titles = ["a", "b", "a", "c", "d", "other", "b"]
    lines = [{"text": text, "title": title} for text, title in zip(texts, titles, strict=True)]
    job = Job(
        inputs=(write(tmp_path, lines),) * 2,
        output_prefix=str(tmp_path / "o"),
        json_keys=("text", "title"),
        append_eod=True,
        deduplicate=True,
        workers=workers,
    )
    report = preprocess(job, trained)
    assert (report.documents, report.repeated, report.empty) == (5, 7, 2)
    kept = [("one", "a"), ("two", "b"), ("three", "c"), ("two", "other"), ("four", "b")]
    for number, key in enumerate(job.json_keys):
        expected = [[[*trained.encode(pair[number]), trained.eod]] for pair in kept]
        assert data_bytes.read(tmp_path / f"o_{key}_document") == expected


def test_arrays_of_ids_give_the_same_files(trained: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path, [{"text": "One sentence. And one more."}, {"text": ""}, {"text": "Words"}])
    made = {}
    for name, fast in (("plain", None), ("fast", encoder(trained))):
        job = Job(inputs=(path,), output_prefix=str(tmp_path / name), append_eod=True, split_sentences=True)
        preprocess(job, trained, fast=fast)
        made[name] = [Path(f"{job.outputs[0]}.{end}").read_bytes() for end in ("bin", "idx")]
    assert made["fast"] == made["plain"]


# ---- division of words -----------------------------------------------------------------------------------------------

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
    begins = division.begins(data, bounds).tolist()
    ends = [[*(place for place in begins if first <= place < end), end] for first, end in pairwise(bounds.tolist())]
    return [[data[begin:end].decode() for begin, end in pairwise(cuts)] for cuts in ends]


@pytest.mark.parametrize("division", [GPT2, LLAMA3, QWEN2], ids=["gpt2", "llama3", "qwen2"])
@pytest.mark.parametrize("count", [800, pytest.param(60_000, marks=pytest.mark.slow)])
def test_words_are_divided_as_in_their_text(count: int, division: Division) -> None:
    random, splitter = Random(count), pre_tokenizers.Split(Regex(division.pattern), "isolated")
    for _ in range(count // 20):
        texts = [random_text(random) for _ in range(20)]
        for text, found in zip(texts, words(texts, division), strict=True):
            divided = [piece for word in found for piece in pieces(word, splitter)]
            assert divided == pieces(text, splitter), (text, found)
