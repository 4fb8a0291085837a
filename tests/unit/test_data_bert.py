"""BERT samples against the text they are made of: nothing invented, nothing special masked, everywhere the same."""

from __future__ import annotations

import itertools
import json
import random
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from megacore.config import DataConfig, ModelConfig, TrainingConfig
from megacore.config.bert import BertConfig, BertSection, ResolvedBertConfig
from megacore.data.bert.build import build_bert_datasets, check_bert_inputs
from megacore.data.bert.dataset import BertDataset
from megacore.data.bert.masking import Masking, SpecialTokens, draw_spans
from megacore.data.bert.mock import MOCK_TOKENS
from megacore.data.bert.text import BertText, Shape, Split, paired_documents, sentence_chunks
from megacore.data.gpt.build import InputErrors, vocabulary_size
from megacore.data.indexed.preprocess import Job, preprocess
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sentences import split_sentences
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.data.tokenizers.training import TokenizerKind, train_tokenizer
from megacore.data.tokenizers.vocabulary import word_starts
from megacore.errors import DataError
from tests.patience import patience
from tests.unit import data_bytes

PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4  # ids of text begin at FIRST
TOKENS = SpecialTokens(pad=PAD, cls=CLS, sep=SEP, mask=MASK)
VOCAB = 60_000
TASKS = ("nsp", "sop", "none", "packed")


def corpus(path: Path, sizes: Sequence[Sequence[int]]) -> IndexedDataset:
    """Documents of sentences of so many tokens, all of them different: a token says where it comes from."""
    number = itertools.count(FIRST)
    documents = [[[next(number) for _ in range(size)] for size in document] for document in sizes]
    return IndexedDataset(data_bytes.write(path, documents))


def dataset(
    indexed: IndexedDataset,
    task: str,
    *,
    seq_length: int = 24,
    num_samples: int = 300,
    seed: int = 1,
    short: float = 0.1,
    stream: int = 0,
    documents: range | None = None,
    vocab_size: int = VOCAB,
    cache_dir: Path | None = None,
) -> BertDataset:
    """A dataset over all documents, of whose tokens 15% are predicted."""
    documents = range(indexed.num_documents) if documents is None else documents
    split = Split(indexed=indexed, documents=documents, num_samples=num_samples, seed=seed, cache_dir=cache_dir)
    drawn: dict[str, Any] = {"short_seq_prob": short, "mark_sentences": True}
    shape = Shape(seq_length=seq_length, special=TOKENS, vocab_size=vocab_size, **drawn)
    kind: Any = task
    text = BertText(split, shape, kind)
    special = np.arange(VOCAB) < FIRST
    masking = Masking(prob=0.15, mask=MASK, special=special, ordinary=np.flatnonzero(~special))
    return BertDataset(text, masking, num_samples=num_samples, seq_length=seq_length, pad=PAD, seed=seed, stream=stream)


def source(indexed: IndexedDataset) -> dict[int, tuple[int, int]]:
    """Document and sentence of each token."""
    return {
        int(token): (document, sequence)
        for document in range(indexed.num_documents)
        for sequence in range(*indexed.document_indices[document : document + 2])
        for token in indexed[sequence]
    }


def segments(sample: dict[str, Any]) -> list[list[int]]:
    """The runs of text in a sample, after a look at what holds for every one."""
    s = len(sample["tokens"])
    real = sample["documents"] > 0
    assert {name: (v.shape, v.dtype) for name, v in sample.items()} == {
        **{name: ((s,), np.dtype("int64")) for name in ("tokens", "token_types", "documents", "labels")},
        "loss_mask": ((s,), np.dtype("float32")),
        "sentence_labels": ((), np.dtype("int64")),
    }
    assert (np.diff(real.astype(int)) <= 0).all()  # padding comes last
    for name, filling in (("tokens", PAD), ("labels", PAD), ("token_types", 0), ("loss_mask", 0)):
        assert (sample[name][~real] == filling).all()
    labels, predicted = sample["labels"], sample["loss_mask"] == 1
    assert set(sample["loss_mask"].tolist()) <= {0.0, 1.0}
    assert (labels[predicted] >= FIRST).all()  # nothing special
    assert (sample["tokens"][~predicted] == labels[~predicted]).all()
    assert ((sample["tokens"][predicted] == MASK) | (sample["tokens"][predicted] >= FIRST)).all()
    text = labels[real].tolist()
    return [list(run) for special, run in itertools.groupby(text, lambda token: token < FIRST) if not special]


ODD: dict[str, list[list[int]]] = {
    "ordinary": [[5, 9, 3, 12, 7], [4, 4, 8, 2, 30, 1], [6, 11], [3, 3, 3, 3, 3, 3, 3, 3]],
    "two short documents": [[1, 1], [1, 1]],
    "one-sentence documents among others": [[5], [3, 4], [9], [2, 2, 2], [1]],
    "empty sentences and documents": [[], [0, 3, 0, 4, 0], [0], [2, 0, 0, 2], [], [0, 1, 1]],
    "a document longer than all": [[400, 300, 2], [2, 3]],
    "many tiny sentences": [[1] * 100, [1] * 57],
}


@pytest.mark.parametrize("seq_length", [5, pytest.param(24, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ODD)
def test_samples_are_the_text_of_their_documents(name: str, task: str, seq_length: int, tmp_path: Path) -> None:
    indexed = corpus(tmp_path / "d", ODD[name])
    where = source(indexed)
    made = dataset(indexed, task, seq_length=seq_length, num_samples=40)
    for k in range(40):
        sample = made[k]
        parts = segments(sample)
        documents = [{where[token][0] for token in part} for part in parts]
        assert all(part == list(range(part[0], part[0] + len(part))) for part in parts)
        assert all(len(found) == 1 for found in documents)
        labels, types = sample["labels"][sample["documents"] > 0].tolist(), sample["token_types"].tolist()
        if task in ("none", "packed"):
            assert sample["sentence_labels"] == -1
            assert not any(types)
            assert len(labels) == seq_length if task == "packed" else labels == [CLS, *parts[0], SEP]
            continue
        a, b = parts
        assert labels == [CLS, *a, SEP, *b, SEP]
        assert types[: len(labels)] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        label = int(sample["sentence_labels"])
        if task == "nsp" and label:
            assert documents[0] != documents[1]
        else:
            first, second = (b, a) if label else (a, b)
            assert documents[0] == documents[1]
            assert first[-1] < second[0]
            assert where[first[-1]][1] < where[second[0]][1]  # cut between sentences


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_seed_and_number_alone(task: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    indexed = corpus(tmp_path / "d", [[rng.randint(1, 9) for _ in range(rng.randint(2, 12))] for _ in range(40)])

    def contents(numbers: Sequence[int], **changes: Any) -> list[bytes]:
        made = dataset(indexed, task, **changes)
        return [b"".join(value.tobytes() for value in made[k].values()) for k in numbers]

    numbers = list(range(120))
    expected = contents(numbers)
    assert contents(numbers[::-1])[::-1] == expected
    assert contents(numbers, num_samples=1200) == expected  # a longer run begins as a shorter one
    assert contents(numbers, cache_dir=tmp_path / "cache") == expected
    assert contents(numbers, cache_dir=tmp_path / "cache") == expected  # and from the cache
    others = [contents(numbers, seed=2), contents(numbers, stream=1)]
    for other in others:
        assert sum(a == b for a, b in zip(expected, other, strict=True)) < 12
    assert len(set(expected)) > 100


def test_every_epoch_has_every_chunk_and_piece_once(tmp_path: Path) -> None:
    rng = random.Random(1)
    sizes = [[rng.randint(1, 9) for _ in range(rng.randint(1, 12))] for _ in range(30)]
    indexed = corpus(tmp_path / "d", sizes)
    pieces = sum(-(-sum(document) // 22) for document in sizes)
    made = dataset(indexed, "none", short=0.0, num_samples=3 * pieces)
    for epoch in range(3):
        tokens: Counter[int] = Counter()
        for k in range(epoch * pieces, (epoch + 1) * pieces):
            tokens.update(segments(made[k])[0])
        assert tokens == Counter(source(indexed).keys())
    made = dataset(indexed, "sop", short=0.0, num_samples=500)
    chunks = sentence_chunks(indexed, range(30), target=21)
    count, where = len(chunks["first"]), source(indexed)
    for epoch in range(2):
        seen = []
        for k in range(epoch * count, (epoch + 1) * count):
            sequences = [where[token][1] for part in segments(made[k]) for token in part]
            (chunk,) = set(np.searchsorted(chunks["first"], sequences, side="right").tolist())
            seen.append(chunk)
        assert sorted(seen) == list(range(1, count + 1))


def test_packed_samples_are_the_stream_of_the_documents_without_waste(tmp_path: Path) -> None:
    sizes = [[5, 3], [0], [1], [40], [2, 2, 2], [17]]
    indexed = corpus(tmp_path / "d", sizes)
    units = {
        d: [CLS, *itertools.chain(*(indexed[i].tolist() for i in range(*indexed.document_indices[d : d + 2]))), SEP]
        for d in range(6)
        if d != 1
    }
    made = dataset(indexed, "packed", seq_length=10, num_samples=40)
    text = made.text
    assert isinstance(text, BertText)
    order = text.arrays["document_index"].tolist()
    stream = list(itertools.chain(*(units[d] for d in order)))
    numbers = list(itertools.chain(*([place] * len(units[d]) for place, d in enumerate(order))))
    for k in range(40):
        window = int(text.arrays["shuffle_index"][k])
        sample = made[k]
        assert sample["labels"].tolist() == stream[10 * window : 10 * window + 10]
        places = numbers[10 * window : 10 * window + 10]
        assert sample["documents"].tolist() == [place - places[0] + 1 for place in places]


def test_chunks_against_a_loop_over_sentences(tmp_path: Path) -> None:
    rng = random.Random(2)
    for trial in range(60):
        sizes = [[rng.choice([0, 1, 2, 5, 30]) for _ in range(rng.randint(0, 9))] for _ in range(rng.randint(1, 6))]
        sizes.append([1, 1])
        indexed = corpus(tmp_path / str(trial), sizes)
        target = rng.randint(1, 20)
        expected = []
        for document in range(len(sizes)):
            begin, end = indexed.document_indices[document : document + 2].tolist()
            real = [i for i in range(begin, end) if len(indexed[i])]
            while len(real) >= 2:
                count = next(
                    (n for n in range(1, len(real)) if sum(len(indexed[i]) for i in real[:n]) >= target), len(real)
                )
                count = max(count, 2)
                count += len(real) - count == 1
                expected.append((real[0], real[count - 1] + 1, document))
                real = real[count:]
        made = sentence_chunks(indexed, range(len(sizes)), target=target)
        assert list(zip(*(made[name].tolist() for name in ("first", "stop", "document")), strict=True)) == expected
        with mock.patch("megacore.data.bert.text._BLOCK", rng.choice([1, 7])):  # read in parts
            parts = sentence_chunks(indexed, range(len(sizes)), target=target)
        assert all(np.array_equal(made[name], parts[name]) for name in made)
        assert paired_documents(indexed, range(len(sizes))) == min(2, len({document for *_, document in expected}))


def test_a_pair_needs_sentences_and_another_document(tmp_path: Path) -> None:
    single = corpus(tmp_path / "a", [[5], [6, 0], []])
    with pytest.raises(DataError, match=r"a\.idx: no document of this split has two sentences"):
        dataset(single, "sop")
    alone = corpus(tmp_path / "b", [[5, 5, 5], [9]])
    assert segments(dataset(alone, "sop")[0])
    with pytest.raises(DataError, match=r"b\.idx: only one document of this split has two sentences"):
        dataset(alone, "nsp")
    empty = corpus(tmp_path / "c", [[0], [], [1]])
    for task in ("none", "packed"):
        with pytest.raises(DataError, match="the 2 documents of this split hold no tokens"):
            dataset(empty, task, documents=range(2))


@pytest.mark.parametrize("task", TASKS)
def test_a_token_outside_the_vocabulary_is_located(task: str, tmp_path: Path) -> None:
    indexed = IndexedDataset(data_bytes.write(tmp_path / "d", [[[5, 6], [7, 99]], [[8], [9, 9]]]))
    made = dataset(indexed, task, vocab_size=50, short=0.0)
    with pytest.raises(DataError, match=r"d\.bin: sequence 1 holds the token id 99, outside the vocabulary of 50"):
        [made[k] for k in range(100)]


@pytest.mark.parametrize("task", TASKS)
def test_only_the_documents_of_the_split_are_read(task: str, tmp_path: Path) -> None:
    indexed = corpus(tmp_path / "d", [[5, 6, 2]] * 12)
    where = source(indexed)
    made = dataset(indexed, task, documents=range(3, 7))
    seen = {where[t][0] for k in range(200) for part in segments(made[k]) for t in part}
    assert seen == {3, 4, 5, 6}


# ---- pretrain_bert.py's inputs ---------------------------------------------------------------------------------------

LINES = [
    f"The {thing} came first. It was {thing} number {number}! Was it? It {verb}."
    for number, (thing, verb) in enumerate([("dog", "ran"), ("cat", "sat"), ("bird", "sang"), ("fish", "swam")] * 10)
]


def write(folder: Path, kind: TokenizerKind, name: str, lines: list[str], **options: bool) -> str:
    """Tokenize lines, with a tokenizer of the kind; returns the prefix."""
    if not (folder / kind).exists():
        train_tokenizer(LINES, kind, 300).save(folder / kind)
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    options = {"split_sentences": True, **options}
    job = Job(inputs=(str(folder / f"{name}.txt"),), output_prefix=str(folder / name), **options)  # type: ignore[arg-type]
    preprocess(job, load_tokenizer(folder / kind))
    return job.outputs[0]


def config(
    folder: Path, *prefixes: str, kind: TokenizerKind = "wordpiece", data: dict[str, Any] | None = None, **bert: Any
) -> ResolvedBertConfig:
    """A configuration of 10 steps of 4 samples of 32 tokens."""
    given = {"data_path": prefixes, "tokenizer": str(folder / kind), "seq_length": 32, "split": "8,2"} | (data or {})
    made = BertConfig(
        data=DataConfig(**given),  # type: ignore[arg-type]
        training=TrainingConfig(train_iters=10, global_batch_size=4, eval_interval=5, eval_iters=2),
        bert=BertSection(**bert),
    )
    return made.resolve(1, vocab_size=vocabulary_size(made))


def refused(made: ResolvedBertConfig) -> tuple[str, ...]:
    """What is wrong with the inputs."""
    with pytest.raises(InputErrors) as caught:
        check_bert_inputs(made)
    return caught.value.problems


def test_the_style_and_the_task_decide_the_layout(tmp_path: Path) -> None:
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    ways: list[tuple[dict[str, Any], str]] = [
        ({}, "nsp"),
        ({"sentence_task": "sop"}, "sop"),
        ({"sentence_task": "none"}, "none"),
        ({"bert_style": "modern", "whole_word_masking": True, "max_ngram": 3}, "packed"),
    ]
    for bert, kind in ways:
        made = config(tmp_path, prefix, **bert)
        check_bert_inputs(made)
        train, valid = build_bert_datasets(made)
        assert isinstance(train, BertDataset)
        assert isinstance(train.text, BertText)
        assert train.text.kind == kind
        assert valid is not None
        assert (len(train), len(valid)) == (40, 8)
        assert train.masking.prob == (0.3 if bert.get("bert_style") else 0.15)
        assert train[3]["tokens"].max() < load_tokenizer(tmp_path / "wordpiece").vocab_size


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    whole = write(tmp_path, "bpe", "whole", LINES, split_sentences=False)
    problems = refused(config(tmp_path, whole, kind="bpe"))
    assert len(problems) == 2
    assert problems[0].startswith(f"--tokenizer {tmp_path}/bpe has no [CLS] and no [SEP] and no [MASK] and no [PAD]")
    assert "--model wordpiece" in problems[0]
    assert problems[1].startswith("--sentence-task nsp needs documents of several sentences, but no document of")
    assert "whole_text_document.idx" in problems[1]
    assert "--split-sentences, or use --sentence-task none" in problems[1]


@pytest.mark.parametrize("moved", [False, True], ids=["the ids of the data", "other ids"])
def test_a_tokenizer_without_mask_is_named_so(moved: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    path = tmp_path / "wordpiece" / "tokenizer.json"
    state = json.loads(path.read_text().replace('"[MASK]"', '"[OTHER]"'))
    if moved:
        *_, (one, first), (other, second) = sorted(state["model"]["vocab"].items(), key=lambda entry: entry[1])
        state["model"]["vocab"] |= {one: second, other: first}
    path.write_text(json.dumps(state))
    problems = refused(config(tmp_path, prefix))
    assert len(problems) == 1 + moved
    assert any("has no [MASK] token, which BERT needs" in problem for problem in problems)
    assert any("made with another tokenizer" in problem for problem in problems) == moved


def test_a_tokenizer_without_marks_has_no_whole_words(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    check_bert_inputs(config(marked, write(marked, "wordpiece", "d", LINES), whole_word_masking=True))
    prefix = write(tmp_path, "wordpiece", "d", LINES)
    path = tmp_path / "wordpiece" / "tokenizer.json"
    path.write_text(path.read_text().replace('"continuing_subword_prefix": "##"', '"continuing_subword_prefix": ""'))
    made = config(tmp_path, prefix, whole_word_masking=True)
    assert any("does not mark where words begin" in problem for problem in refused(made))


@pytest.mark.parametrize("bert", [{}, {"sentence_task": "none"}, {"bert_style": "modern"}])
def test_generated_samples_have_what_real_ones_have(bert: dict[str, Any]) -> None:
    made = BertConfig(
        model=ModelConfig(vocab_size=200),
        data=DataConfig(mock_data=True, seq_length=48),
        training=TrainingConfig(train_iters=50, global_batch_size=8, eval_interval=1, eval_iters=1),
        bert=BertSection(**bert),
    ).resolve(1)
    check_bert_inputs(made)
    train, valid = build_bert_datasets(made)
    assert valid is not None
    samples = [train[k] for k in range(400)]
    tokens = np.stack([sample["labels"] for sample in samples])
    assert (tokens.min(), tokens.max()) == (0 if bert.get("bert_style") is None else 1, 199)
    real = np.stack([sample["documents"] for sample in samples]) > 0
    assert (tokens[~real] == MOCK_TOKENS.pad).all()
    assert real.all() == (bert.get("bert_style") == "modern")
    labels = [int(sample["sentence_labels"]) for sample in samples]
    if made.bert.sentence_task == "none":
        assert set(labels) == {-1}
    else:
        assert abs(sum(labels) - 200) < 3 * 10
    predicted = np.stack([sample["loss_mask"] for sample in samples]) == 1
    text = real & (tokens >= 4)
    assert not (predicted & ~text).any()
    prob = made.bert.mask_prob
    assert abs(predicted.sum() - prob * text.sum()) < 3 * (prob * (1 - prob) * text.sum()) ** 0.5
    again = build_bert_datasets(made).train
    assert all(np.array_equal(samples[k][name], again[k][name]) for k in range(20) for name in samples[k])
    # Evaluation is another stream of the same language.
    assert not np.array_equal(valid[0]["labels"], samples[0]["labels"])


# ---- the rules of the sentence splitter (sentences.toml) -------------------------------------------------------------

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


# ---- masking against counts ------------------------------------------------------------------------------------------

SMALL_VOCAB, MASK_ID = 1000, 4
SPECIAL = np.arange(SMALL_VOCAB) < 5
# A third of the vocabulary goes on with a word.
STARTS = np.arange(SMALL_VOCAB) % 3 != 0


def masking(prob: float = 0.15, *, words: bool = False, max_ngram: int = 1) -> Masking:
    """Rules over a vocabulary of 1,000 ids, of which the first five are special."""
    starts, ordinary = STARTS if words else None, np.flatnonzero(~SPECIAL)
    return Masking(prob=prob, mask=MASK_ID, special=SPECIAL, ordinary=ordinary, starts=starts, max_ngram=max_ngram)


def text(length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Random tokens, one in 25 of them special."""
    tokens = rng.integers(5, SMALL_VOCAB, size=length)
    special = rng.random(length) < 0.04
    tokens[special] = rng.integers(5, size=int(special.sum()))
    return tokens


def words_of(tokens: NDArray[np.int64]) -> list[list[int]]:
    """Positions of each word, by brute force."""
    words: list[list[int]] = []
    for at, token in enumerate(tokens.tolist()):
        if SPECIAL[token]:
            continue
        if words and words[-1][-1] == at - 1 and not STARTS[token]:
            words[-1].append(at)
        else:
            words.append([at])
    return words


def within(count: float, trials: int, prob: float, sigmas: float = 3) -> bool:
    """Whether a binomial count is as near to its mean as can be asked."""
    return abs(count - trials * prob) <= sigmas * (trials * prob * (1 - prob)) ** 0.5


WAYS: list[dict[str, Any]] = [{}, {"words": True}, {"max_ngram": 3}, {"words": True, "max_ngram": 4}]


@pytest.mark.parametrize(
    ("way", "prob", "length"),
    # By default every way once, with either rate and either length; all of them together are slow.
    [
        pytest.param(way, prob, length, marks=[pytest.mark.slow] * ((i % 2, i // 2) != (j, k)))
        for i, way in enumerate(WAYS)
        for j, prob in enumerate((0.15, 0.3))
        for k, length in enumerate((30, 500))
    ],
)
def test_rates_are_those_asked_for(way: dict[str, Any], prob: float, length: int) -> None:
    rng, rules = np.random.default_rng(length), masking(prob, **way)
    count: Counter[str] = Counter()
    for _ in range(100_000 // length):
        tokens = text(length, rng)
        changed, chosen = rules.apply(tokens, None, rng)
        assert not chosen[SPECIAL[tokens]].any()
        assert (changed[~chosen] == tokens[~chosen]).all()
        assert not SPECIAL[changed[chosen & (changed != MASK_ID)]].any()
        count["text"] += int((~SPECIAL[tokens]).sum())
        count["chosen"] += int(chosen.sum())
        count["masked"] += int((changed[chosen] == MASK_ID).sum())
        count["kept"] += int((changed[chosen] == tokens[chosen]).sum())
    assert within(count["chosen"], count["text"], prob)
    assert within(count["masked"], count["chosen"], 0.8)
    assert masking(0.99, **way).choose(np.full(300, 7), None, rng).sum() >= 290  # nearly everything can be masked
    # A random token is now and then the same one.
    assert within(count["kept"], count["chosen"], 0.1 + 0.1 / (SMALL_VOCAB - 5))


def test_every_ordinary_token_may_replace_another() -> None:
    rng = np.random.default_rng(1)
    rules = Masking(prob=0.5, mask=MASK_ID, special=SPECIAL, ordinary=np.array([5, 6, 7]))
    seen = {token for _ in range(50) for token in rules.apply(np.full(40, 9), None, rng)[0].tolist()}
    assert seen == {MASK_ID, 9, 5, 6, 7}


def test_every_position_is_chosen_equally_often() -> None:
    rng, tokens = np.random.default_rng(1), np.arange(5, 55)
    times = np.sum([masking(0.2).choose(tokens, None, rng) for _ in range(4000)], axis=0)
    # 50 binomials of 4,000 trials each: none is 5 standard deviations off.
    assert abs(times - 800).max() < 5 * (4000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_words_are_masked_whole(max_ngram: int) -> None:
    rng, rules = np.random.default_rng(2), masking(0.3, words=True, max_ngram=max_ngram)
    long_words = 0
    for _ in range(200):
        tokens = text(120, rng)
        chosen = rules.choose(tokens, None, rng)
        for word in words_of(tokens):
            assert len(set(chosen[word].tolist())) == 1
            long_words += len(word) > 1 and bool(chosen[word[0]])
    assert long_words > 500


def test_the_sentences_first_token_begins_a_word_whatever_it_is() -> None:
    rng, rules = np.random.default_rng(3), masking(0.5, words=True)
    tokens, begins = np.array([7, 9, 9, 9]), np.array([False, False, True, False])
    seen = {tuple(rules.choose(tokens, begins, rng).tolist()) for _ in range(300)}
    assert (True, True, False, False) in seen
    assert (False, False, True, True) in seen
    assert all(a == b and c == d for a, b, c, d in seen)


def test_ngrams_are_as_long_as_their_weights_say() -> None:
    rng = np.random.default_rng(4)
    sizes = np.ones(20_000, np.int64)
    runs = np.arange(20_000) // 50
    lengths: Counter[int] = Counter()
    for _ in range(10):
        spans = draw_spans(sizes, runs, 2000, 4, rng)
        lengths.update(stop - start for start, stop in spans)
        taken = np.concatenate([np.arange(*span) for span in spans])
        assert len(set(taken.tolist())) == len(taken)  # none overlap
        assert all(runs[start] == runs[stop - 1] for start, stop in spans)
    total = lengths.total()
    assert total > 8000
    weights = {n: (1 / n) / (1 + 1 / 2 + 1 / 3 + 1 / 4) for n in (1, 2, 3, 4)}
    assert lengths.keys() == weights.keys()
    assert all(within(lengths[n], total, weight) for n, weight in weights.items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [[], [1, 2, 3], [7], [1, 9, 9, 2, 7], [9] * 40])
def test_short_texts_are_masked_on_average_too(tokens: list[int], way: dict[str, Any]) -> None:
    rng, rules = np.random.default_rng(6), masking(0.3, **way)
    values = np.array(tokens, np.int64)
    free = int((~SPECIAL[values]).sum())
    counts = [int(rules.choose(values, None, rng).sum()) for _ in range(1500)]
    assert max(counts) <= free
    # A word is chosen as a whole: the variance of the mean is that of all tokens at once, at most.
    assert abs(np.mean(counts) - 0.3 * free) <= 4 * free * (0.3 * 0.7 / 1500) ** 0.5


# ---- tokenizers ------------------------------------------------------------------------------------------------------

TEXT = ["the people of the town were running and jumping over the walls of the towns"] * 3


@pytest.mark.parametrize("kind", ["bpe", "unigram", "sentencepiece-bpe", "wordpiece"])
def test_words_begin_where_the_tokenizer_marks_them(kind: Any) -> None:
    tokenizer = train_tokenizer(TEXT, kind, 300 if kind != "wordpiece" else 60)
    starts = tokenizer.word_starts()
    assert starts is not None
    line = TEXT[0]
    ids = tokenizer.encode(line)
    marked = [0, *(at for at, token in enumerate(ids) if at and starts[token])]
    assert len(marked) == len(line.split())
    pieces = [tokenizer.decode(ids[a:b]).strip() for a, b in zip(marked, [*marked[1:], len(ids)], strict=True)]
    assert [piece.replace(" ", "") for piece in pieces] == line.split()


def test_a_vocabulary_without_marks_has_no_words() -> None:
    assert word_starts(["a", "b"], {"model": {"type": "BPE"}}) is None
    assert word_starts(["a", "##b"], {"model": {"continuing_subword_prefix": "##"}}) == [True, False]
    steps = {"pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}
    assert word_starts(["Ġa", "b", "Ċ"], {"model": {}, "pre_tokenizer": steps}) == [True, False, True]
    assert word_starts(["▁a", "b"], {"model": {"type": "BPE"}}) == [True, False]
