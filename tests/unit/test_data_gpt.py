"""GPT samples against a brute-force stream, and the index cache against everything that can happen to it;
the .bin/.idx format, packing, blends and batches."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import pickle
import random
import shutil
import struct
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megacore.data.gpt.blend import BlendedDataset, blend_index, blend_order
from megacore.data.gpt.dataset import GPTDataset, build_indices, extent
from megacore.data.gpt.mock import MockDataset
from megacore.data.gpt.packing import PackedDataset, best_fit_decreasing
from megacore.data.indexed.reader import DTYPES, IndexedDataset, check_token_ids, token_dtype
from megacore.data.indexed.sidecar import loss_mask_prefix
from megacore.data.indexed.writer import IndexedWriter, merge
from megacore.data.loading.loader import BatchLoader, Microbatch
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


def test_the_order_of_the_first_epochs_is_kept() -> None:
    # Checksums of the indices as they have always been: what has been trained on stays in order.
    kept = {
        (13, 40, 1, 6, 0, 41): (900, 10, 3, 57712819, 795657506, 2806894942),  # 90 epochs
        (5, 0, 11, 2, 30, 1): (5000, 3, 7, 1666966030, 453179445, 302004852),  # 307
        (7,): (300, 20, 1, 2284052662, 2772738238, 539101878),  # 858
        (3,): (300, 20, 1, 2647132570, 3359124360, 539101878),  # 2,001, the later ones together
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


# ---- samples that know their documents -------------------------------------------------------------------------------

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
    # A blend weighs what its datasets say.
    parts = [packed(dataset_of(tmp_path, seed, lengths)[0], "none", 40) for seed, lengths in ((8, [2]), (9, [9]))]
    blend = BlendedDataset(parts, blend_index([1.0, 3.0], 40))
    assert blend.packing is not None and blend.packing.padding == pytest.approx(0.75 / 4)


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


# ---- the .bin/.idx format --------------------------------------------------------------------------------------------

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[], [7]], [[8, 9, 10, 11]]]


def random_documents(rng: random.Random, largest: int = 60000) -> list[list[list[int]]]:
    """A few documents of a few sequences, empty ones included."""
    return [
        [[rng.randint(0, largest) for _ in range(rng.choice([0, 1, 2, 30]))] for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(1, 8))
    ] + [[[1]]]


def append(writer: IndexedWriter, document: Sequence[Sequence[int]]) -> None:
    tokens = np.array([token for sequence in document for token in sequence], writer.dtype)
    writer.extend(tokens, np.array(list(map(len, document)), np.int64), np.array([len(document)]))


def written(prefix: Path, documents: data_bytes.Documents, code: int = 8) -> Path:
    """Write documents with our writer, one call a document."""
    with IndexedWriter(prefix, DTYPES[code]) as writer:
        for document in documents:
            append(writer, document)
        writer.commit()
    return prefix


def test_files_are_those_of_the_independent_writer_and_reader(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number, code in enumerate([1, 2, 3, 4, 5, 8] * 5):
        documents = random_documents(rng, largest=100)
        ours, theirs = tmp_path / f"ours{number}", tmp_path / f"theirs{number}"
        written(ours, documents, code)
        data_bytes.write(theirs, documents, code)
        for ending in ("bin", "idx"):
            assert Path(f"{ours}.{ending}").read_bytes() == Path(f"{theirs}.{ending}").read_bytes()
        assert data_bytes.read(ours) == documents
        dataset = IndexedDataset(theirs)
        sequences = list(itertools.chain.from_iterable(documents))
        assert [dataset[number].tolist() for number in range(len(dataset))] == sequences
        assert dataset.num_documents == len(documents)
        ends = list(itertools.accumulate((sum(map(len, document)) for document in documents), initial=0))
        assert dataset.document_offsets(0, len(documents)).tolist() == ends
        assert [dataset.document_start(d) for d in range(len(documents) + 1)] == ends
        middle = len(documents) // 2
        assert dataset.document_offsets(middle, len(documents)).tolist() == ends[middle:]


def test_a_dataset_is_opened_by_either_file_and_read_in_part(tmp_path: Path) -> None:
    prefix = data_bytes.write(tmp_path / "d", DOCUMENTS)
    dataset = IndexedDataset(prefix)
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(5, 1, 2).tolist() == [9, 10]
    assert dataset[-1].tolist() == [8, 9, 10, 11]
    with pytest.raises(IndexError):
        dataset[6]
    assert IndexedDataset(f"{prefix}.idx").prefix == IndexedDataset(f"{prefix}.bin").prefix == str(prefix)
    changed("idx", lambda data: data + bytes([0, 1, 0, 0, 1, 0]))(prefix)  # a multimodal file has modes
    modes = IndexedDataset(prefix).sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(256, "uint16"), (65499, "uint16"), (65500, "int32"), (250880, "int32")]
)
def test_the_dtype_follows_megatron_s_rule(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


# ---- what is refused -------------------------------------------------------------------------------------------------


Damage = Callable[[Path], None]


def changed(ending: str, make: Callable[[bytes], bytes]) -> Damage:
    """One of the two files has another content."""

    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.{ending}")
        path.write_bytes(make(path.read_bytes()))

    return damage


def patched(offset: int, fmt: str, value: object) -> Damage:
    """A field of the .idx has another value."""
    return changed("idx", lambda data: data[:offset] + struct.pack(fmt, value) + data[offset + struct.calcsize(fmt) :])


def cut(ending: str, length: int) -> Damage:
    """A file is cut to a length, or by one if it is negative."""
    return changed(ending, lambda data: data[:length])


def longer(ending: str) -> Damage:
    """A file has two bytes more."""
    return changed(ending, lambda data: data + b"\1\2")


def removed(ending: str) -> Damage:
    """A file is not there."""
    return lambda prefix: Path(f"{prefix}.{ending}").unlink()


def zeroed(prefix: Path) -> None:
    """Announce 10^8 sequences and leave what describes them to holes: nothing of it may be read."""
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:18] + struct.pack("<QQ", 10**8, 10**8 + 1))
    os.truncate(path, 34 + 12 * 10**8 + 8 * (10**8 + 1))


def pipe(prefix: Path) -> None:
    """A pipe that nothing writes to."""
    path = Path(f"{prefix}.idx")
    path.unlink()
    os.mkfifo(path)


LENGTHS_AT, POINTERS, BOUNDARIES = 34, 34 + 6 * 4, 34 + 6 * 12
BROKEN: dict[str, tuple[Damage, str]] = {
    "no idx": (removed("idx"), r"d\.idx: No such file"),
    "no bin": (removed("bin"), r"d\.bin: No such file"),
    "empty idx": (cut("idx", 0), r"d\.idx: 0 bytes are too few for the 34-byte header"),
    "wrong magic": (patched(0, "<B", 0x4E), r"d\.idx: wrong magic"),
    "version": (patched(9, "<Q", 2), r"d\.idx: version 2; only version 1"),
    "big-endian": (patched(9, ">Q", 1), r"d\.idx: written big-endian"),
    "dtype": (patched(17, "<B", 9), r"d\.idx: unknown dtype code 9"),
    "another dtype": (patched(17, "<B", 4), r"d\.bin: 22 bytes long, shorter than the 30"),
    "idx cut": (cut("idx", -1), r"d\.idx: 145 bytes long, but its header announces 6 sequences"),
    "idx longer": (longer("idx"), r"d\.idx: 148 bytes long"),
    "2^62 sequences": (patched(18, "<Q", 1 << 62), r"d\.idx: .* announces 4611686018427387904 sequences"),
    "bin empty": (cut("bin", 0), r"d\.bin: 0 bytes long, shorter than the"),
    "bin shorter": (cut("bin", -2), r"d\.bin: 20 bytes long, shorter than the 22 that d\.idx describes"),
    "bin longer": (longer("bin"), r"d\.bin: 24 bytes long, longer than the 22"),
    "pointer": (patched(POINTERS + 8, "<q", 8), r"d\.idx: sequence 1 starts at byte 8, expected 6"),
    "negative length": (patched(LENGTHS_AT + 8, "<i", -2), r"d\.idx: sequence 2 has the negative length -2"),
    "zeros": (zeroed, r"d\.bin: 22 bytes long, longer than the 0 that d\.idx describes"),
    "a pipe": (pipe, r"d\.idx: is not a regular file"),
    "first boundary": (patched(BOUNDARIES, "<q", 1), r"d\.idx: document boundaries run from 1 to 6, expected 0 to 6"),
    "boundaries backwards": (patched(BOUNDARIES + 8, "<q", 4), "document 1 ends at sequence 3, before it starts at 4"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_dataset_is_refused_at_opening(name: str, tmp_path: Path) -> None:
    damage, message = BROKEN[name]
    prefix = data_bytes.write(tmp_path / "d", DOCUMENTS)
    damage(prefix)
    tracemalloc.start()
    begun = time.process_time()
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)
    assert time.process_time() - begun < patience(1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_dataset_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.idx: holds no documents"):
        IndexedDataset(data_bytes.write(tmp_path / "d", []))
    with IndexedWriter(tmp_path / "e", np.uint16) as writer, pytest.raises(DataError, match="no documents"):
        writer.commit()


def test_damage_behind_the_first_million_sequences_is_found(tmp_path: Path) -> None:
    count = (1 << 20) + 5
    prefix = tmp_path / "d"
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    idx += np.full(count, 1, "<i4").tobytes() + np.arange(0, 2 * count, 2).tobytes() + np.arange(count + 1).tobytes()
    (tmp_path / "d.idx").write_bytes(idx)
    (tmp_path / "d.bin").write_bytes(bytes(2 * count))
    assert len(IndexedDataset(prefix)) == count
    patched(34 + 4 * count + 8 * (count - 2), "<q", 4)(prefix)
    with pytest.raises(DataError, match=f"sequence {count - 2} starts at byte 4"):
        IndexedDataset(prefix)


def test_token_ids_outside_the_vocabulary_are_located(tmp_path: Path) -> None:
    dataset = IndexedDataset(data_bytes.write(tmp_path / "d", DOCUMENTS))
    check_token_ids(dataset, 12)
    with pytest.raises(DataError, match=r"d\.bin: sequence 4 holds the token id 7, outside the vocabulary of 7"):
        check_token_ids(dataset, 7)
    check_token_ids(dataset, 7, stop=6)
    negative = IndexedDataset(data_bytes.write(tmp_path / "n", [[[3], [-1]]], code=4))
    with pytest.raises(DataError, match=r"n\.bin: sequence 1 holds the token id -1"):
        check_token_ids(negative, 7)
    floats = IndexedDataset(data_bytes.write(tmp_path / "f", [[[3]]], code=7))
    with pytest.raises(DataError, match="holds float32 values, not token ids"):
        check_token_ids(floats, 7)


# ---- the writer ------------------------------------------------------------------------------------------------------


def test_nothing_is_there_before_commit_and_nothing_is_left_without(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        append(writer, [[1, 2]])
        assert not (tmp_path / "d.bin").exists()
        assert not (tmp_path / "d.idx").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_new_dataset_replaces_the_old_one_and_its_sidecar(tmp_path: Path) -> None:
    written(tmp_path / "d", DOCUMENTS)
    (tmp_path / "d.json").write_text("{}")
    (tmp_path / "d.bin.partial").write_bytes(b"left by a killed run, longer than what follows" * 10)
    written(tmp_path / "d", [[[1]]])
    assert data_bytes.read(tmp_path / "d") == [[[1]]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_a_second_writer_of_the_same_dataset_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(tmp_path / "d", np.uint16)
        append(writer, [[5]])
        writer.commit()
    assert data_bytes.read(tmp_path / "d") == [[[5]]]


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_a_merge_is_what_writing_everything_at_once_gives(tmp_path: Path) -> None:
    rng = random.Random(2)
    parts = [random_documents(rng) for _ in range(4)]
    prefixes = [str(data_bytes.write(tmp_path / f"p{number}", part)) for number, part in enumerate(parts)]
    merge(prefixes, str(tmp_path / "all"))
    data_bytes.write(tmp_path / "once", list(itertools.chain.from_iterable(parts)))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"all.{ending}").read_bytes() == (tmp_path / f"once.{ending}").read_bytes()


def test_a_merge_is_exact_beyond_the_range_of_32_bits(tmp_path: Path) -> None:
    # Sparse files: 4.3e9 tokens take 8.6 GB of names and a few kB of disk.
    huge = 2**31 - 1
    for name, last in (("a", 17), ("b", 23)):
        lengths = [huge, 3]
        idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
        idx += struct.pack("<2i2q3q", *lengths, 0, 2 * huge, 0, 1, 2)
        (tmp_path / f"{name}.idx").write_bytes(idx)
        with open(tmp_path / f"{name}.bin", "wb") as file:
            file.seek(2 * huge)
            file.write(struct.pack("<3H", last, last, last))
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m"))
    merged = IndexedDataset(tmp_path / "m")
    assert merged.sequence_pointers.tolist() == [0, 2 * huge, 2 * (huge + 3), 2 * (2 * huge + 3)]
    assert merged.document_offsets(0, 4).tolist() == [0, huge, huge + 3, 2 * huge + 3, 2 * huge + 6]
    assert merged[1].tolist() == [17] * 3
    assert merged[3].tolist() == [23] * 3
    assert (tmp_path / "m.bin").stat().st_blocks * 512 < 1 << 20


def test_a_merge_is_whole_where_the_system_writes_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is nearly full a call writes what still fits, and does not fail."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, memoryview(data)[:7], offset))
    for name in ("a", "b"):
        data_bytes.write(tmp_path / name, DOCUMENTS)
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m"))
    assert data_bytes.read(tmp_path / "m") == DOCUMENTS * 2


def test_an_input_is_not_overwritten_by_the_merge(tmp_path: Path) -> None:
    data_bytes.write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(DataError, match="would be overwritten, but is one of the inputs"):
        merge([str(tmp_path / "a")], str(tmp_path / "sub" / ".." / "a"))
    assert data_bytes.read(tmp_path / "a") == DOCUMENTS


# ---- blends and batches: which sample comes when, on every layout ----------------------------------------------------


class Numbered:
    """Sample k is full of the number k; one of them may be unusable."""

    def __init__(self, length: int, bad: int | None = None, offset: int = 0) -> None:
        self.length, self.bad, self.offset = length, bad, offset

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        assert 0 <= index < self.length
        if index == self.bad:
            raise DataError(f"sample {index} is unusable")
        tokens = np.full(3, index + self.offset)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": np.ones(3, np.float32)}


# ---- blends ----------------------------------------------------------------------------------------------------------


def worst_deviation(order: NDArray[np.int16], weights: list[float]) -> float:
    """The largest |count - weight * n| of any dataset over all prefixes."""
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
    return float(np.abs(counts - shares * np.arange(1, len(order) + 1)[:, None]).max())


def test_every_prefix_holds_each_share_to_within_one() -> None:
    """So equal weights take turns. Largest error first would be off by more with the second weights."""
    rng = random.Random(0)
    drawn = [[rng.random() ** rng.choice([1, 2, 8]) + 1e-3 for _ in range(rng.randint(1, 12))] for _ in range(150)]
    for weights in ([2.0, 2.0, 2.0], [0.0026, 0.1411, 0.0101, 0.0026, 0.8384, 0.0026, 0.0026], *drawn):
        assert worst_deviation(blend_order(weights, 400), weights) < 1
    assert zlib.crc32(blend_order([0.5, 0.3, 0.2], 400).tobytes()) == 2504754347, "the order of today"


def test_a_blend_takes_each_dataset_in_its_own_order() -> None:
    index = blend_index([0.5, 0.3, 0.2], 200)
    blend = BlendedDataset([Numbered(200, offset=1000 * d) for d in range(3)], index)
    values = [int(blend[k]["tokens"][0]) for k in range(200)]
    for d in range(3):
        mine = [value - 1000 * d for value in values if value // 1000 == d]
        assert mine == list(range(len(mine)))
    assert Counter(value // 1000 for value in values) == {0: 100, 1: 60, 2: 40}
    with pytest.raises(IndexError):
        blend[200]


# ---- batches ---------------------------------------------------------------------------------------------------------


def numbers(loader: BatchLoader, steps: int | None = None) -> list[list[list[int]]]:
    """Sample numbers by step and microbatch."""
    return [[m.tokens[:, 0].tolist() for m in step] for step in itertools.islice(loader, steps)]


def loader(
    length: int = 40, rank: int = 0, ranks: int = 1, *, micro: int = 2, bad: int | None = None, **more: Any
) -> BatchLoader:
    """Of numbered samples, for one of the data-parallel ranks."""
    sizes: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": 8, "rank": rank, "ranks": ranks}
    return BatchLoader(Numbered(length, bad), Microbatch, **sizes | more)


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (8, 1), (3, 4)])
def test_samples_of_a_step_do_not_depend_on_the_layout(micro: int, dp: int) -> None:
    batch = 24
    ranks = [numbers(loader(100, d, dp, micro=micro, global_batch_size=batch)) for d in range(dp)]
    for step in range(100 // batch):
        for j, d in itertools.product(range(batch // (micro * dp)), range(dp)):
            first = step * batch + (j * dp + d) * micro
            assert ranks[d][step][j] == list(range(first, first + micro))
    assert all(len(rank) == 100 // batch for rank in ranks)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_from_the_consumed_samples_alone(num_workers: int) -> None:
    whole = loader(80, 1, 2, num_workers=num_workers)
    assert numbers(whole, 4)[3] == [[26, 27], [30, 31]]
    assert whole.consumed_samples == 32
    resumed = loader(80, 1, 2, num_workers=num_workers, consumed_samples=32)
    assert numbers(resumed) == numbers(whole)
    assert resumed.consumed_samples == 80


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_unusable_sample_is_one_clear_error(num_workers: int) -> None:
    steps = loader(bad=11, num_workers=num_workers)
    next(steps)
    with pytest.raises(DataError, match=r"^sample 11 is unusable$"):
        next(steps)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_begins_again_with_the_same_processes(num_workers: int) -> None:
    steps = loader(40, 1, 2, consumed_samples=8, num_workers=num_workers)
    processes = {process.pid for process in multiprocessing.active_children()}
    whole = numbers(steps)
    assert len(whole) == 4
    for count in (4, 2, 0, 1):  # where it is rewound: at the end, on the way, at once
        steps.rewind()
        assert steps.consumed_samples == 8
        assert numbers(steps, count) == whole[:count]
    assert {process.pid for process in multiprocessing.active_children()} == processes


def test_the_processes_of_a_forgotten_loader_end() -> None:
    others = multiprocessing.active_children()
    steps = loader(num_workers=2)
    next(steps)
    workers = [process for process in multiprocessing.active_children() if process not in others]
    assert len(workers) == 2
    cycle: list[object] = [steps]
    cycle.append(cycle)  # a trainer is part of such cycles
    del steps, cycle
    gc.collect()
    assert not any(process.is_alive() for process in workers)


# ---- generated data --------------------------------------------------------------------------------------------------


def test_generated_samples_are_a_function_of_seed_stream_and_number() -> None:
    def sample(seed: int, stream: int, k: int) -> list[int]:
        return MockDataset(1000, 64, 50, seed, stream=stream)[k]["tokens"].tolist()

    assert sample(1, 0, 7) == sample(1, 0, 7)
    assert len({tuple(sample(*key)) for key in itertools.product((1, 2), (0, 1, 2), (0, 1, 2))}) == 18
    one = MockDataset(1000, 64, 50, 1)[3]
    assert one["tokens"][1:].tolist() == one["labels"][:-1].tolist()
    assert one["loss_mask"].tolist() == [1.0] * 64


def test_generated_tokens_can_be_learned_by_looking_one_token_back() -> None:
    train = MockDataset(5000, 256, 200, seed=1)
    valid = MockDataset(5000, 256, 50, seed=1, stream=1)
    counts: dict[int, Counter[int]] = {}
    for k in range(200):
        for token, label in zip(train[k]["tokens"].tolist(), train[k]["labels"].tolist(), strict=True):
            counts.setdefault(token, Counter())[label] += 1

    def loss(token: int, label: int) -> float:
        return -math.log((counts[token][label] + 0.1) / (counts[token].total() + 6.4))

    pairs = [p for k in range(50) for p in zip(valid[k]["tokens"].tolist(), valid[k]["labels"].tolist(), strict=True)]
    assert sum(loss(*pair) for pair in pairs) / len(pairs) == pytest.approx(0.74, abs=0.05)
    unigram = Counter(token for token, _ in pairs)
    entropy = -sum(n / len(pairs) * math.log(n / len(pairs)) for n in unigram.values())
    assert entropy > 4.1
