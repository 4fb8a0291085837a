"""Samples that know their documents: packed by best fit, one document each, or windows of the stream."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.gpt.dataset import GPTDataset
from megacore.data.gpt.packing import PackedDataset, best_fit_decreasing
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import loss_mask_prefix
from megacore.errors import DataError
from tests.unit import data_bytes

LENGTHS = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33]  # with samples of 8: shorter, as long, one more, several times


def dataset_of(path: Path, seed: int, lengths: list[int] = LENGTHS) -> tuple[IndexedDataset, list[list[int]]]:
    """Documents of these lengths in some order, whose tokens are all different."""
    counter = itertools.count(1)
    documents = [[next(counter) for _ in range(n)] for n in random.Random(seed).sample(lengths * 2, 2 * len(lengths))]
    return IndexedDataset(data_bytes.write(path / f"d{seed}", [[document] for document in documents])), documents


def best_fit_by_loop(lengths: list[int], capacity: int) -> list[int]:
    """The room that is left in each sample."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda i: rooms[i])] -= length
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(12))
def test_best_fit_decreasing_is_that_of_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 7, 16, 100])
    lengths = [rng.randint(1, rng.choice([capacity, -(-capacity // 3)])) for _ in range(rng.randint(1, 300))]
    assigned = best_fit_decreasing(np.array(lengths), capacity)
    filled = np.bincount(assigned, weights=lengths)
    assert sorted(capacity - filled) == best_fit_by_loop(lengths, capacity)


def packed(indexed: IndexedDataset, packing: Any, num_samples: int = 1, **options: Any) -> PackedDataset:
    """Samples of 8 tokens."""
    documents = range(indexed.num_documents)
    return PackedDataset(indexed, documents, packing, num_samples=num_samples, seq_length=8, seed=3, **options)


def predicted(samples: Any) -> Counter[tuple[int, int]]:
    """Pairs of a token and its label that count."""
    pairs: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        counted = sample["loss_mask"] > 0
        pairs.update(zip(sample["tokens"][counted].tolist(), sample["labels"][counted].tolist(), strict=True))
    return pairs


@pytest.mark.parametrize("seed", range(4))
def test_an_epoch_of_packs_predicts_every_next_token_once(tmp_path: Path, seed: int) -> None:
    indexed, documents = dataset_of(tmp_path, seed)
    size = packed(indexed, "best-fit").packing.samples
    data = packed(indexed, "best-fit", size, boundaries=True)
    samples = [data[k] for k in range(size)]
    assert predicted(samples) == Counter(pair for each in documents for pair in itertools.pairwise(each))
    number_of = {token: number for number, document in enumerate(documents) for token in document}
    place_of = {token: place for document in documents for place, token in enumerate(document)}
    padding = 0
    for k, sample in enumerate(samples):
        real = sample["tokens"] > 0
        padding += int((~real).sum())
        assert np.all(np.diff(real.astype(int)) <= 0)  # padding is at the end
        named = data.documents_of(k)
        for before, (token, document, position) in itertools.pairwise(
            zip(*(sample[name][real].tolist() for name in ("tokens", "documents", "positions")), strict=True)
        ):
            same = number_of[token] == number_of[before[0]]
            assert (document, position) == ((before[1], before[2] + 1) if same else (before[1] + 1, 0))
            assert position == place_of[token] % 8 and str(number_of[token]) in named
        assert sample["documents"][0] == 1 and sample["positions"][0] == 0
        assert np.all(sample["documents"][~real] == sample["documents"][real].max() + 1)
        # Documents that fit are whole: of each number there is one piece.
        for number in {number_of[token] for token in sample["tokens"][real].tolist()}:
            held = [token for token in sample["tokens"][real].tolist() if number_of[token] == number]
            assert held[: len(documents[number])] == documents[number][place_of[held[0]] :][: len(held)]
    assert data.packing.padding == pytest.approx(padding / (8 * size))
    assert data.packing.longer == sum(len(document) > 9 for document in documents)


def test_a_sample_of_one_document_is_cut_and_says_so(tmp_path: Path) -> None:
    indexed, documents = dataset_of(tmp_path, 1)
    useful = [document for document in documents if len(document) > 1]
    data = packed(indexed, "none", len(useful))
    samples = [data[k] for k in range(len(useful))]
    assert predicted(samples) == Counter(pair for each in useful for pair in itertools.pairwise(each[:9]))
    assert sorted(int(sample["tokens"][0]) for sample in samples) == sorted(document[0] for document in useful)
    report, longer = data.packing, sum(len(document) > 9 for document in useful)
    assert (report.documents, report.samples, report.longer) == (len(useful), len(useful), longer)
    assert report.cut == pytest.approx(sum(max(len(d) - 9, 0) for d in useful) / sum(map(len, useful)))
    assert report.padding == pytest.approx(sum(int((s["tokens"] == 0).sum()) for s in samples) / (8 * len(useful)))


@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_the_order_is_that_of_a_longer_run_and_of_the_cache(tmp_path: Path, packing: str) -> None:
    indexed, _ = dataset_of(tmp_path, 2)
    few, many = packed(indexed, packing, 5), packed(indexed, packing, 90, cache_dir=tmp_path / "cache")
    again = pickle.loads(pickle.dumps(packed(indexed, packing, 90, cache_dir=tmp_path / "cache")))
    for k in range(90):
        for name, value in many[k].items():
            assert np.array_equal(again[k][name], value)
            assert k >= 5 or np.array_equal(few[k][name], value)
    size = many.packing.samples
    epochs = [[int(many[k]["tokens"][0]) for k in range(first, first + size)] for first in (0, size)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


@pytest.mark.parametrize("seq_length", [1, 5, 8])
def test_windows_of_the_stream_tell_their_documents(tmp_path: Path, seq_length: int) -> None:
    indexed, documents = dataset_of(tmp_path, seq_length)
    number_of = {token: number for number, document in enumerate(documents) for token in document}
    last = {document[-1] for document in documents if document}
    options: dict[str, Any] = {"num_samples": 40, "seq_length": seq_length, "seed": 1}
    plain = GPTDataset(indexed, range(len(documents)), **options)
    data = GPTDataset(indexed, range(len(documents)), **options, boundaries=True, eod=0)
    for k in range(40):
        sample, tokens = data[k], plain[k]["tokens"].tolist()
        assert sample["tokens"].tolist() == tokens and sample["labels"].tolist() == plain[k]["labels"].tolist()
        expected = [(1, 0)]
        for before, token in itertools.pairwise(tokens):
            number, position = expected[-1]
            same = number_of[before] == number_of[token] and before not in last
            expected.append((number, position + 1) if same else (number + 1, 0))
        assert list(zip(sample["documents"], sample["positions"], strict=True)) == expected
        assert sample["loss_mask"].tolist() == [float(token not in last) for token in tokens]


@pytest.mark.parametrize("packing", ["concat", "none", "best-fit"])
def test_only_the_tokens_of_the_loss_mask_are_predicted(tmp_path: Path, packing: str) -> None:
    indexed, documents = dataset_of(tmp_path, 5)
    chosen = {token for document in documents for token in document if random.Random(token).random() < 0.4}
    prefix = Path(loss_mask_prefix(indexed.prefix))
    data_bytes.write(prefix, [[[int(token in chosen) for token in document]] for document in documents], code=1)
    if packing == "concat":
        data: Any = GPTDataset(indexed, range(len(documents)), num_samples=30, seq_length=8, seed=1)
    else:
        data = packed(indexed, packing, 30)
    for k in range(30):
        sample = data[k]
        found = sample["labels"][sample["loss_mask"] > 0].tolist()
        assert set(found) <= chosen
        if packing == "concat":
            assert found == [token for token in sample["labels"].tolist() if token in chosen]
    if packing == "best-fit":
        size = data.packing.samples
        everything = predicted(packed(indexed, packing, size)[k] for k in range(size))
        pairs = (pair for document in documents for pair in itertools.pairwise(document))
        assert everything == Counter(pair for pair in pairs if pair[1] in chosen)

    data_bytes.write(prefix, [[[1] * (len(document) + 1)] for document in documents], code=1)
    with pytest.raises(DataError, match=r"_loss_mask\.idx is not the loss mask of .*remove .*_loss_mask\.bin"):
        packed(indexed, packing if packing != "concat" else "none")
