"""Tokenizers: trained, saved and loaded through one protocol, against the libraries themselves; and what is refused."""

from __future__ import annotations

import json
import pickle
import sysconfig
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import Regex, models, normalizers, pre_tokenizers
from transformers import BertTokenizer

from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.tokenizers import fast_bpe
from megacore.data.tokenizers import words as word_table
from megacore.data.tokenizers.fast_bpe import FastEncoder, fast_encoder
from megacore.data.tokenizers.tokenizer import (
    END_OF_TEXT,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)
from megacore.data.tokenizers.training import WORDPIECE_TOKENS, TokenizerKind, train_tokenizer
from megacore.data.tokenizers.words import GPT2, LLAMA3, QWEN2, Division
from megacore.errors import DataError
from tests.unit import data_bytes

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text() for name in ("argparse.py", "textwrap.py", "json/decoder.py", "this.py")]
TRICKY = ["", " ", "  two  spaces ", "tab\tnewline\n\n  end\n", "def f(x):\n        return x"]
TRICKY += ["naïve Größe 東京 🙂 \x00 \u2028"]
KINDS: tuple[TokenizerKind, ...] = ("bpe", "unigram", "wordpiece", "sentencepiece-bpe")


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    return {kind: train_tokenizer(TEXTS, kind, 600) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [400, 50000])
def test_the_vocabulary_is_never_larger_than_asked(kind: TokenizerKind, vocab_size: int) -> None:
    if kind == "sentencepiece-bpe" and vocab_size == 50000:
        with pytest.raises(DataError, match="--vocab-size 50000: SentencePiece cannot train on this text"):
            train_tokenizer(TEXTS, kind, vocab_size)
        return
    tokenizer = train_tokenizer(TEXTS, kind, vocab_size)
    assert tokenizer.vocab_size <= vocab_size
    if vocab_size < 50000:
        assert tokenizer.vocab_size > 0.95 * vocab_size
    assert max(max(ids) for ids in tokenizer.encode_batch(TEXTS)) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("bpe", 256, "--vocab-size 256 must be at least 257"),
        ("wordpiece", 6, "--vocab-size 6 must be at least 7"),
        ("unigram", 100, "--vocab-size 100"),
        ("sentencepiece-bpe", 100, "--vocab-size 100"),
    ],
)
def test_a_vocabulary_too_small_for_its_kind_is_refused(kind: TokenizerKind, size: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        train_tokenizer(TEXTS, kind, size)
    assert "least" not in said or train_tokenizer(TEXTS, kind, size + 1).vocab_size == size + 1


def test_training_without_text_is_refused() -> None:
    for kind in KINDS:
        with pytest.raises(DataError, match="no text to train on"):
            train_tokenizer([], kind, 600)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "sentencepiece-bpe"])
def test_text_survives_a_round_trip(kind: str, trained: dict[str, Tokenizer]) -> None:
    tokenizer = trained[kind]
    for text in [*TEXTS, *TRICKY]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_loaded_as_it_was(
    kind: TokenizerKind, trained: dict[str, Tokenizer], tmp_path: Path
) -> None:
    tokenizer = trained[kind]
    assert train_tokenizer(TEXTS, kind, 600).fingerprint == tokenizer.fingerprint  # training is deterministic
    tokenizer.save(tmp_path / "sub" / kind)
    loaded = load_tokenizer(tmp_path / "sub" / kind)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    copy = pickle.loads(pickle.dumps(loaded))  # what a worker process receives where processes are not forked
    assert copy.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".bin", ".partial")]


def test_special_tokens_are_where_they_should_be(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    assert trained["bpe"].eod == 0
    assert trained["unigram"].eod == trained["sentencepiece-bpe"].eod == 1
    trained["wordpiece"].save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [backend.token_to_id(token) for token in WORDPIECE_TOKENS] == [0, 1, 2, 3, 4]
    assert trained["wordpiece"].eod == backend.token_to_id("[SEP]")
    # encode adds none of them: where a document ends is the dataset's business
    assert not {0, 2, 3, 4} & set(trained["wordpiece"].encode("return the value"))
    assert backend.encode("return").tokens[0] == "[CLS]"


def test_the_ids_are_those_of_sentencepiece(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    trained["unigram"].save(tmp_path / "unigram")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "unigram" / "tokenizer.model"))
    assert trained["unigram"].encode(TEXTS[1]) == model.encode(TEXTS[1])
    assert model.id_to_piece(1) == END_OF_TEXT


def test_truncation_and_padding_in_the_file_are_ignored(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    trained["bpe"].save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "cut.json"))
    loaded = load_tokenizer(tmp_path / "cut.json")
    assert loaded.encode_batch(TEXTS) == trained["bpe"].encode_batch(TEXTS)
    assert loaded.fingerprint == trained["bpe"].fingerprint


def test_transformers_reads_ours_and_we_read_transformers(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    trained["bpe"].save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs(TEXTS)["input_ids"] == trained["bpe"].encode_batch(TEXTS)
    assert theirs.eos_token_id == trained["bpe"].eod
    # A GPT-2 directory of old: vocab.json and merges.txt, no tokenizer.json.
    model = json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["model"]
    old = tmp_path / "gpt2"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    loaded = load_tokenizer(old)
    assert loaded.encode_batch(TEXTS) == trained["bpe"].encode_batch(TEXTS)
    assert loaded.eod == trained["bpe"].eod


# ---- GPT-2's vocab.json and merges.txt, and BERT's vocab.txt ---------------------------------------------------------

LINES = ["Some words, 12 numbers  and\ttabs.\n\n", "naïve café — 東京 🙂", " leading", "<|endoftext|> inside", ""]


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
    for text in LINES:
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
    for text in LINES:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert {role: vocabulary[number][1:-1].lower() for role, number in ours.roles.items()} == {
        role: role for role in ("cls", "sep", "mask", "pad")
    }


# ---- what is refused -------------------------------------------------------------------------------------------------


def with_steps(**steps: Any) -> bytes:
    """A tokenizer.json of one word."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **steps}).encode()


def replacing(*pairs: tuple[str, str]) -> dict[str, Any]:
    """A normalizer that replaces one text after the other."""
    steps = [{"type": "Replace", "pattern": {"String": before}, "content": after} for before, after in pairs]
    return {"type": "Sequence", "normalizers": steps}


def part(number: int, data: bytes) -> bytes:
    """A text or message in a protobuf message, of less than 16 KiB."""
    return bytes([number << 3 | 2, len(data) & 0x7F | 0x80, len(data) >> 7]) + data


def sentencepiece_writing(text: bytes) -> bytes:
    """A SentencePiece model of two pieces, whose table of replacements has a text."""
    trie = b"\x00\xc0\x01".ljust(1024, b"\0")
    table = len(trie).to_bytes(4, "little") + trie + text + b"\0"
    pieces = part(1, part(1, b"<unk>") + b"\x18\x02") + part(1, part(1, b"a"))
    return pieces + part(3, part(2, table))


BROKEN = {
    "missing": (None, "no such tokenizer"),
    "empty.json": (b"", "the tokenizer file is empty"),
    "empty.model": (b"", "the tokenizer file is empty"),
    "text.json": (b"hello", "not a `tokenizers` JSON file"),
    "bytes.json": (b"\xff\xfe\x00", "not a `tokenizers` JSON file"),
    "other.json": (b'{"model": {"type": "Nonsense"}}', "not a `tokenizers` JSON file"),
    "deep.json": (b"[" * 100_000, "not a `tokenizers` JSON file"),
    "grows.json": (with_steps(normalizer=replacing(*[("a", "a" * 10)] * 8)), "text 100,000,000 times as long"),
    "cascades.json": (with_steps(normalizer=replacing(("a", "b" * 20), ("b", "c" * 20))), "text 400 times as long"),
    "inserts.json": (
        with_steps(decoder={"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 200}),
        "text 201 times as long",
    ),
    "grows.model": (sentencepiece_writing(b"b" * 5000), "text 278 times as long"),
    "text.model": (b"hello", "not a SentencePiece model"),
    "pickle.model": (pickle.dumps({"vocab": 1}), "not a SentencePiece model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unreadable_tokenizer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, message = BROKEN[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [pytest.param("normalizer", marks=pytest.mark.slow), "pre_tokenizer"])
def test_a_pattern_that_backtracks_without_end_is_refused(place: str, tmp_path: Path) -> None:
    pattern = {"pattern": {"Regex": "(x+x+)+y"}}
    split = {"type": "Split", **pattern, "behavior": "Isolated", "invert": False}
    step = split if place == "pre_tokenizer" else {"type": "Replace", **pattern, "content": ""}
    (tmp_path / "t.json").write_bytes(with_steps(**{place: step}))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match=r"t\.json: `tokenizers` gives up on a text .*retry-limit.*: simplify"):
            encode("x" * 60)


def test_code_in_a_transformers_directory_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="transformers cannot load this tokenizer"):
        load_tokenizer(tmp_path)
    assert not marker.exists()


def test_a_sentencepiece_model_with_a_configuration_beside_it(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    """As transformers saves a Llama 2: what the model lacks (added tokens, another end) is transformers' to read."""
    expected = trained["unigram"]
    expected.save(tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": {"__type": "AddedToken", "content": END_OF_TEXT}}
    known = {"added_tokens_decoder": {"0": {"content": expected.piece(0)}, "1": {"content": END_OF_TEXT}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | known))
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, SentencePieceTokenizer)
    assert (loaded.fingerprint, loaded.eod) == (expected.fingerprint, expected.eod)
    assert loaded.encode_batch(TEXTS) == expected.encode_batch(TEXTS)
    for change in ({"added_tokens_decoder": {"9999": {"content": "<|new|>"}}}, {"eos_token": expected.piece(5)}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | known | change))
        other = load_tokenizer(tmp_path)
        assert not isinstance(other, SentencePieceTokenizer)
        assert "eos_token" not in change or other.piece(other.eod or 0) == change["eos_token"]


# ---- tiktoken's encoder: the ids of tokenizers, or it is not used ----------------------------------------------------

UNKNOWN = LLAMA3.pattern.replace("{1,3}", "{1,2}")
HARD_TEXTS = [
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
def learned() -> Tokenizer:
    sources = [Path(fast_bpe.__file__).read_text(), Path(tokenizers.__file__).read_text(), *HARD_TEXTS]
    return train_tokenizer(sources * 3, "bpe", 700)


def changed(learned: Tokenizer, pattern: str | None = None, **parts: object) -> JsonTokenizer:
    """The tokenizer with other parts of `tokenizers`, perhaps with another division of texts."""
    assert isinstance(learned, JsonTokenizer)
    backend = tokenizers.Tokenizer.from_str(learned.to_json())
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
def test_ids_are_those_of_the_tokenizer(kind: str, learned: Tokenizer) -> None:
    parts = {"nfc": {"normalizer": normalizers.NFC()}}.get(kind, {})
    tokenizer = changed(learned, LLAMA3.pattern if kind == "llama3" else None, **parts)
    fast = encoder(tokenizer)
    texts = [*HARD_TEXTS, *(text * 50 for text in HARD_TEXTS), Path(__file__).read_text()]
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
    together: int, bits: int, pattern: str | None, learned: Tokenizer, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few words have a place, and texts that are looked up together stay apart."""
    monkeypatch.setattr(fast_bpe, "TOGETHER", together)
    monkeypatch.setattr(word_table, "BITS", bits)
    monkeypatch.setattr(word_table, "MOST_WORDS", 50)
    monkeypatch.setattr(word_table, "LONGEST_WORD", 20)
    fast = encoder(changed(learned, pattern))
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
    pattern: str | None, learned: Tokenizer, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = changed(learned, pattern)
    fast = encoder(tokenizer)
    assert (fast.words is None) == (pattern == UNKNOWN)
    assert fast.divides
    text = " ".join([*HARD_TEXTS, Path(__file__).read_text(), "no<|endoftext|> place "] * 2)
    monkeypatch.setattr(fast_bpe, "WHOLE", 40)
    assert len(list(fast.encode_parts([text]))) > 50
    assert fast.encode(text).tolist() == tokenizer.encode(text)
    added = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.add_special_tokens([added])  # it takes the spaces before it
    assert not encoder(JsonTokenizer(backend)).divides


def test_what_is_no_plain_byte_level_bpe_has_no_fast_encoder(learned: Tokenizer) -> None:
    assert fast_encoder(train_tokenizer(HARD_TEXTS * 5, "unigram", 330)) is None
    assert fast_encoder(changed(learned, normalizer=normalizers.Lowercase())) is None
    assert fast_encoder(changed(learned, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))) is None


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
def test_repeated_documents_are_left_out(workers: int, learned: Tokenizer, tmp_path: Path) -> None:
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
    report = preprocess(job, learned)
    assert (report.documents, report.repeated, report.empty) == (5, 7, 2)
    kept = [("one", "a"), ("two", "b"), ("three", "c"), ("two", "other"), ("four", "b")]
    for number, key in enumerate(job.json_keys):
        expected = [[[*learned.encode(pair[number]), learned.eod]] for pair in kept]
        assert data_bytes.read(tmp_path / f"o_{key}_document") == expected


def test_arrays_of_ids_give_the_same_files(learned: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path, [{"text": "One sentence. And one more."}, {"text": ""}, {"text": "Words"}])
    made = {}
    for name, fast in (("plain", None), ("fast", encoder(learned))):
        job = Job(inputs=(path,), output_prefix=str(tmp_path / name), append_eod=True, split_sentences=True)
        preprocess(job, learned, fast=fast)
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
