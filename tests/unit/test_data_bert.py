"""BERT samples against the text they are made of: nothing invented, nothing special masked, everywhere the same."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.bert.dataset import BertDataset
from megacore.data.bert.masking import Masking, SpecialTokens
from megacore.data.bert.text import BertText, Shape, Split, paired_documents, sentence_chunks
from megacore.data.indexed.reader import IndexedDataset
from megacore.errors import DataError
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
