"""The .bin/.idx format against an independent reader and writer, byte for byte, and all that can be wrong with it."""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megacore.data.indexed.reader import DTYPES, IndexedDataset, check_token_ids, token_dtype
from megacore.data.indexed.writer import IndexedWriter, merge
from megacore.errors import DataError
from tests.patience import patience
from tests.unit import data_bytes

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[], [7]], [[8, 9, 10, 11]]]


def random_documents(rng: random.Random, largest: int = 60000) -> list[list[list[int]]]:
    """A few documents of a few sequences, empty ones included."""
    return [
        [[rng.randint(0, largest) for _ in range(rng.choice([0, 1, 2, 30]))] for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(1, 8))
    ] + [[[1]]]


def written(prefix: Path, documents: data_bytes.Documents, code: int = 8) -> Path:
    """Write documents with our writer, one call a sequence."""
    with IndexedWriter(prefix, DTYPES[code]) as writer:
        for document in documents:
            for tokens in document:
                writer.add(tokens)
            writer.end_document()
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


LENGTHS, POINTERS, BOUNDARIES = 34, 34 + 6 * 4, 34 + 6 * 12
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
    "negative length": (patched(LENGTHS + 8, "<i", -2), r"d\.idx: sequence 2 has the negative length -2"),
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
        writer.add([1, 2])
        writer.end_document()
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
        writer.add([5])
        writer.end_document()
        writer.commit()
    assert data_bytes.read(tmp_path / "d") == [[[5]]]


@pytest.mark.parametrize("tokens", [[65536], [-1], np.array([1 << 40])])
def test_a_token_that_does_not_fit_is_refused_not_wrapped(tokens: list[int], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", np.uint16) as writer, pytest.raises(DataError, match="do not fit uint16"):
        writer.add(tokens)


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
