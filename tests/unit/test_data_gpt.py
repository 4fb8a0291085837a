"""GPT samples against a brute-force stream, and the index cache against everything that can happen to it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data.gpt.blend import BlendedDataset
from megacore.data.gpt.dataset import GPTDataset, build_indices, extent
from megacore.data.indexed.reader import IndexedDataset
from megacore.errors import DataError
from tests.patience import patience
from tests.unit import data_bytes
from tests.unit.hostile import Payload

SHAPES = [(seed, *shape) for seed, shape in enumerate(itertools.product([1, 2, 3, 5, 8, 31], [1, 2, 7, 40, 90]))] * 3


def random_dataset(tmp_path: Path, seed: int) -> IndexedDataset:
    """Documents of a few sequences whose tokens are all different."""
    rng = random.Random(seed)
    counter = itertools.count()
    documents = [
        [[next(counter) for _ in range(rng.choice([0, 1, 2, 3, 7, 20]))] for _ in range(rng.randint(1, 2))]
        for _ in range(rng.randint(1, 9))
    ] + [[[next(counter) for _ in range(5)]]]
    return IndexedDataset(data_bytes.write(tmp_path / f"d{seed}", documents))


def test_samples_are_windows_of_the_brute_force_stream(tmp_path: Path) -> None:
    for number, (seed, seq_length, num_samples) in enumerate(SHAPES):
        indexed = random_dataset(tmp_path, number)
        options: dict[str, Any] = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
        dataset = GPTDataset(indexed, range(indexed.num_documents), **options)
        stream: list[int] = []
        for document in dataset.document_index:
            for sequence in range(*indexed.document_indices[document : document + 2]):
                stream.extend(indexed[sequence].tolist())
        windows = [stream[at : at + seq_length + 1] for at in range(0, len(stream) - seq_length, seq_length)]
        for k in range(num_samples):
            sample = dataset[k]
            expected = windows[dataset.shuffle_index[k]]
            assert sample["tokens"].tolist() == expected[:-1]
            assert sample["labels"].tolist() == expected[1:]
            assert sample["loss_mask"].tolist() == [1.0] * seq_length


def test_a_sample_names_the_documents_of_its_tokens(tmp_path: Path) -> None:
    indexed = random_dataset(tmp_path, 3)
    documents = range(indexed.num_documents)
    dataset = GPTDataset(indexed, documents, num_samples=20, seq_length=7, seed=0)
    starts = [indexed.document_start(number) for number in (*documents, documents.stop)]
    holder = {int(token): n for n in documents for token in indexed.tokens(starts[n], starts[n + 1])}
    blended = BlendedDataset([dataset, dataset], {"dataset": np.array([0, 1]), "sample": np.array([5, 6])})
    assert blended.documents_of(1) == dataset.documents_of(6)
    for k in range(20):
        sample = dataset[k]
        words, prefix = dataset.documents_of(k).split(" of ")
        named = [int(number) for number in words.removeprefix("documents ").split(", ")]
        held = {holder[token] for token in [*sample["tokens"].tolist(), *sample["labels"].tolist()]}
        assert prefix == indexed.prefix
        assert held == {number for number in named if starts[number] < starts[number + 1]}  # some are empty


def test_every_epoch_holds_every_document_and_every_window_once() -> None:
    for seed, seq_length, num_samples in SHAPES:
        rng = random.Random(seed)
        lengths = np.array([rng.choice([0, 1, 3, 9, 25]) for _ in range(rng.randint(1, 8))] + [4])
        documents = np.arange(10, 10 + len(lengths))
        tokens = int(lengths.sum())
        indices = build_indices(documents, lengths, num_samples=num_samples, seq_length=seq_length, seed=seed)
        for epoch in indices["document_index"].reshape(-1, len(documents)):
            assert sorted(epoch) == documents.tolist()
        shuffle = indices["shuffle_index"].tolist()
        assert len(shuffle) >= num_samples
        # Windows of an epoch are those that start in it; its samples come before those of the next epoch.
        epochs = [window * seq_length // tokens for window in shuffle]
        assert epochs == sorted(epochs)
        assert sorted(shuffle) == list(range(len(shuffle)))


def test_the_order_of_the_first_epochs_is_kept() -> None:
    # Checksums of the indices as they were when every epoch had a generator: what has been trained on stays in order.
    kept = {
        (13, 40, 1, 6, 0, 41): (900, 10, 3, 57712819, 795657506, 2806894942),  # 90 epochs
        (5, 0, 11, 2, 30, 1): (5000, 3, 7, 1666966030, 453179445, 302004852),  # 307
        (7,): (300, 20, 1, 2284052662, 2772738238, 539101878),  # 858
    }
    for lengths, (num_samples, seq_length, seed, *checksums) in kept.items():
        documents = np.arange(len(lengths))
        indices = build_indices(documents, np.array(lengths), num_samples=num_samples, seq_length=seq_length, seed=seed)
        assert [zlib.crc32(array.tobytes()) for array in indices.values()] == checksums


def test_many_epochs_are_whole_continue_and_are_in_every_order_equally_often() -> None:
    lengths, epochs = np.array([3, 4, 3]), 7024
    made = [build_indices(np.arange(3), lengths, num_samples=n, seq_length=3, seed=5) for n in (17000, 23400)]
    shorter, longer = made
    assert longer["shuffle_index"][:17000].tolist() == shorter["shuffle_index"][:17000].tolist()
    laid_out = longer["document_index"][: 3 * epochs].reshape(-1, 3)
    assert shorter["document_index"].tolist() == longer["document_index"][: len(shorter["document_index"])].tolist()
    assert (np.sort(laid_out, axis=1) == np.arange(3)).all()
    windows = longer["shuffle_index"].tolist()
    assert sorted(windows) == list(range(len(windows)))
    assert [window * 3 // 10 for window in windows] == sorted(window * 3 // 10 for window in windows)
    # 6,000 epochs drawn together: each of the 6 orders 1,000 times, to within 5 standard deviations of 29.
    counts = Counter(map(tuple, laid_out[1024:].tolist()))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 145 for count in counts.values())
    # Of an epoch's 3 or 4 windows the last stays last; the others are in either order, or one of 6, equally often.
    in_epoch: dict[int, list[int]] = {}
    for window in windows:
        in_epoch.setdefault(window * 3 // 10, []).append(window)
    for size, orders in ((3, 2), (4, 6)):
        ranks = [tuple(w - min(e) for w in e) for n, e in in_epoch.items() if n >= 1024 and len(e) == size]
        seen = Counter(ranks)
        assert all(order[-1] == size - 1 for order in seen)
        assert len(seen) == orders
        expected = len(ranks) / orders
        assert all(abs(count - expected) < 5 * expected**0.5 for count in seen.values())


def test_millions_of_epochs_take_seconds() -> None:
    # Two million epochs; with a generator for each of them this took half a minute.
    start = time.monotonic()
    indices = build_indices(np.arange(1), np.array([100]), num_samples=2 * 10**5, seq_length=1024, seed=1)
    assert time.monotonic() - start < patience(8)
    assert len(indices["document_index"]) == 2_048_001
    assert indices["sample_index"][-1].tolist() == [2_048_000, 0]


def test_sizes_beyond_32_bits_are_exact() -> None:
    lengths = np.array([2**40 + 1, 2**33, 2**40 - 1])
    seq_length = 2**36
    indices = build_indices(np.arange(3), lengths, num_samples=40, seq_length=seq_length, seed=0)
    ends = np.cumsum([int(lengths[d]) for d in indices["document_index"]], dtype=object)
    for window, (place, offset) in enumerate(indices["sample_index"].tolist()):
        start = 0 if place == 0 else int(ends[place - 1])
        assert start + offset == window * seq_length
        assert offset < lengths[indices["document_index"][place]]
    size = extent(2**50 + 1, 2**60, 2**11)
    assert size.epochs == -(-((2**60 - 1) * 2**11 + 1) // (2**50 + 1))


def test_a_token_outside_the_vocabulary_is_located_when_read(tmp_path: Path) -> None:
    indexed = IndexedDataset(data_bytes.write(tmp_path / "d", [[[1, 2], [3]], [[4, 99, 5]], [[6]]]))
    dataset = GPTDataset(indexed, range(3), num_samples=20, seq_length=3, seed=0, vocab_size=50)
    with pytest.raises(DataError, match=r"d\.bin: sequence 2 holds the token id 99, outside the vocabulary of 50"):
        [dataset[k] for k in range(20)]


def test_a_split_without_tokens_is_refused(tmp_path: Path) -> None:
    indexed = IndexedDataset(data_bytes.write(tmp_path / "d", [[[]], [[1, 2]]]))
    with pytest.raises(DataError, match="hold no tokens"):
        GPTDataset(indexed, range(1), num_samples=1, seq_length=1, seed=0)


# ---- the cache -------------------------------------------------------------------------------------------------------


def open_cached(prefix: Path, cache: Path, seed: int = 1, num_samples: int = 30) -> GPTDataset:
    """The dataset at a prefix with its indices in a cache."""
    indexed = IndexedDataset(prefix)
    documents = range(indexed.num_documents)
    return GPTDataset(indexed, documents, num_samples=num_samples, seq_length=8, seed=seed, cache_dir=cache)


def contents(dataset: GPTDataset) -> list[list[int]]:
    """All samples."""
    return [dataset[k]["tokens"].tolist() for k in range(len(dataset))]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A dataset of 20 documents."""
    return data_bytes.write(tmp_path / "data", [[list(range(n, 2 * n + 1))] for n in range(20)])


def entries(cache: Path) -> list[Path]:
    """The entries of a cache, unfinished ones included."""
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_the_second_opening_reads_the_cache(prefix: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = open_cached(prefix, cache)
    (entry,) = entries(cache)
    inodes = {path.name: path.stat().st_ino for path in entry.iterdir()}
    second = open_cached(prefix, cache)
    assert {path.name: path.stat().st_ino for path in entry.iterdir()} == inodes
    assert contents(first) == contents(second)
    assert not second.shuffle_index.flags.writeable


def test_what_the_indices_follow_from_decides_the_entry(prefix: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    open_cached(prefix, cache)
    open_cached(prefix, cache, seed=2)
    open_cached(prefix, cache, num_samples=60)
    assert len(entries(cache)) == 3
    before = contents(open_cached(prefix, cache))
    data_bytes.write(prefix, [[list(range(n, 2 * n + 1))] for n in range(19, -1, -1)])
    after = open_cached(prefix, cache)
    assert len(entries(cache)) == 4
    assert contents(after) != before
    assert contents(after) == contents(open_cached(prefix, tmp_path / "fresh"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def _pickled(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, np.array([Payload(path.parents[2] / "marker")], dtype=object), allow_pickle=True)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": _flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 8),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "pickle": _pickled,
    "raw pickle": lambda path: path.write_bytes(pickle.dumps(Payload(path.parents[2] / "marker"))),
}


@pytest.mark.parametrize("file", ["sample_index.npy", "manifest.json"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_built_again(name: str, file: str, prefix: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = contents(open_cached(prefix, cache))
    (entry,) = entries(cache)
    sound = {path.name: path.read_bytes() for path in entry.iterdir()}
    DAMAGE[name](entry / file)
    assert contents(open_cached(prefix, cache)) == expected
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == sound
    assert entries(cache) == [entry]
    assert not (tmp_path / "marker").exists()


def test_without_a_place_for_the_cache_indices_stay_in_memory(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    in_the_way = open_cached(prefix, tmp_path / "file" / "cache")
    assert contents(in_the_way) == contents(open_cached(prefix, tmp_path / "cache"))


def _open_at_once(prefix: Path, cache: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put(contents(open_cached(prefix, cache)))  # type: ignore[attr-defined]


def test_racing_processes_agree_and_leave_one_entry(prefix: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    expected = contents(open_cached(prefix, tmp_path / "alone"))
    for attempt in range(4):
        cache = tmp_path / f"cache{attempt}"
        if attempt % 2:  # half of the time they find a damaged entry
            shutil.copytree(tmp_path / "alone", cache)
            _flip(entries(cache)[0] / "sample_index.npy")
        barrier, results = context.Barrier(4), context.SimpleQueue()
        arguments = (prefix, cache, barrier, results)
        processes = [context.Process(target=_open_at_once, args=arguments) for _ in range(4)]
        for process in processes:
            process.start()
        assert all(results.get() == expected for _ in processes)
        for process in processes:
            process.join()
        assert len(entries(cache)) == 1
