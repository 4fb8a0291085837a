"""Safetensors files, read and written beside the library of that name, and digested beside the standard library."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from megacore.checkpoint.files import describe, verify
from megacore.checkpoint.storage import write_tensors
from megacore.checkpoint.tensor_file import TensorWriter, read_slice, read_tensor
from megacore.checkpoint.tensor_header import read_header
from megacore.errors import CheckpointError

TENSORS = {
    "scalar": torch.tensor(3.5),
    "vector": torch.randn(17),
    "matrix": torch.randn(5, 7, dtype=torch.float64),
    "half": torch.randn(6, 4, 5).to(torch.bfloat16),
    "deep": torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture(params=["shard", "stream"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file with all of TENSORS, by each of the two that write."""
    path = tmp_path / "file.safetensors"
    if request.param == "shard":
        assert write_tensors(path, TENSORS) == describe(path)
        return path
    with TensorWriter(path, {name: (one.dtype, tuple(one.shape)) for name, one in TENSORS.items()}) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    return path


def test_the_library_reads_what_was_written(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_any_slice_is_that_of_the_tensor(path: Path) -> None:
    generator = random.Random(3)
    stored = read_header(path)
    for name, tensor in TENSORS.items():
        assert torch.equal(read_tensor(stored[name]), tensor)
        for _ in range(60):
            where = [sorted(generator.choices(range(size + 1), k=2)) for size in tensor.shape]
            expected = tensor[tuple(slice(start, stop) for start, stop in where)]
            found = read_slice(stored[name], [(start, stop) for start, stop in where])
            assert torch.equal(found, expected), (name, where)
            out = torch.full_like(expected, 9).contiguous()
            assert read_slice(stored[name], [(start, stop) for start, stop in where], out) is out
            assert torch.equal(out, expected), (name, where)


def test_a_file_that_became_shorter_is_named(path: Path) -> None:
    stored = read_header(path)
    with path.open("r+b") as file:
        file.truncate(stored["deep"].start + 8)
    with pytest.raises(CheckpointError, match=r"file\.safetensors ends within deep"):
        read_slice(stored["deep"], [(0, 2), (0, 3), (0, 4), (1, 5)])


def test_digests_are_those_of_the_whole_content(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(1_000_003)
    path = tmp_path / "file"
    path.write_bytes(content)
    entry = describe(path)
    assert entry.bytes == len(content)
    assert entry.sha256 == hashlib.sha256(content).hexdigest()
    assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(content)


def test_either_digest_refuses_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    entry = describe(path)
    verify(path, entry, archived=True)
    verify(path, dataclasses.replace(entry, sha256="0"))  # is not looked at
    with pytest.raises(CheckpointError, match="file does not have the SHA-256 of its manifest"):
        verify(path, dataclasses.replace(entry, sha256="0"), archived=True)
    with pytest.raises(CheckpointError, match="file does not have the XXH3 of its manifest"):
        verify(path, dataclasses.replace(entry, xxh3_128="0"))
    verify(path, dataclasses.replace(entry, xxh3_128=None))
    with pytest.raises(CheckpointError, match="file does not have the SHA-256 of its manifest"):
        verify(path, dataclasses.replace(entry, sha256="0", xxh3_128=None))
