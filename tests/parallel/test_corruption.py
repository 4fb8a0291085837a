"""Whatever is changed in a checkpoint is refused by file name, in no time, and `--load auto` takes the one before.

A hostile checkpoint, whose digests are right, is refused as well: it reads and writes nothing outside, executes
nothing, and takes no memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megacore.checkpoint.check import check_load
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.manifest import sealed
from megacore.errors import CheckpointError
from megacore.parallel.mesh import ALONE, Mesh
from tests.parity.runs import VOCAB, make_config, make_trainer
from tests.patience import patience

FLIPS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two checkpoints, each with a tokenizer."""
    directory = tmp_path_factory.mktemp("run")
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    config = make_config((1, 1, 1), directory / "out", tokenizer=str(directory / "tokenizer.json"))
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        trainer.save()
    return directory / "out"


@pytest.fixture
def newest(run: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy" / "step_00000002"


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def refused(directory: Path, file: Path) -> None:
    """The damaged file is named, in seconds of computing, and the checkpoint before is taken."""
    start = time.process_time()
    problem = whole(directory, ALONE)
    assert problem is not None
    assert str(file) in problem
    choice = choose_checkpoint(make_config((1, 1, 1), directory.parent, load="auto"), ALONE)
    assert choice.directory == directory.with_name("step_00000001")
    assert choice.refused == (problem,)
    assert time.process_time() - start < patience(2)


def test_a_whole_checkpoint_is_taken(newest: Path) -> None:
    assert {path.name for path in files_of(newest)} >= {"manifest.json", "model-pp0-tp0.safetensors", "tokenizer.json"}
    assert whole(newest, ALONE) is None
    choice = choose_checkpoint(make_config((1, 1, 1), newest.parent, load="auto"), ALONE)
    assert (choice.directory, choice.refused) == (newest, ())


def test_every_flipped_bit_is_refused_by_file_name(newest: Path) -> None:
    generator = random.Random(7)
    files = files_of(newest)
    for number in range(FLIPS):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        bit = generator.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        good = file.read_bytes()
        file.write_bytes(content)
        refused(newest, file)
        file.write_bytes(good)
    assert whole(newest, ALONE) is None


def test_a_file_beside_the_tokenizer_is_refused_by_name(newest: Path) -> None:
    (newest / "tokenizer" / "tokenizer.model").touch()
    refused(newest, newest / "tokenizer" / "tokenizer.model")
    for check in (check_load, lambda config: choose_checkpoint(config, ALONE)):
        with pytest.raises(CheckpointError, match=r"tokenizer.model is not among the files of the manifest"):
            check(make_config((1, 1, 1), newest.parent, load=str(newest)))


def test_every_truncated_or_missing_file_and_every_shard_of_another_step_is_refused_by_name(newest: Path) -> None:
    for file in files_of(newest):
        good, size = file.read_bytes(), file.stat().st_size
        other = newest.with_name("step_00000001") / file.relative_to(newest)
        shards = [other.read_bytes()] if file.suffix == ".safetensors" else []
        for content in (b"", good[:1], good[: size // 2], good[:-1], *shards):
            file.write_bytes(content)
            refused(newest, file)
        file.unlink()
        refused(newest, file)
        file.write_bytes(good)


@pytest.mark.parametrize("lost", ["model-pp0-tp0.safetensors", "manifest.json"])
def test_a_run_with_nothing_whole_is_refused_and_never_started_afresh(newest: Path, lost: str) -> None:
    for directory in newest.parent.glob("step_*"):
        (directory / lost).unlink()
    for load in ("auto", str(newest.parent)):
        with pytest.raises(CheckpointError, match=rf"none of the 2 .* can be continued: .*step_00000002/{lost}.*"):
            choose_checkpoint(make_config((1, 1, 1), newest.parent, load=load), ALONE)


def test_checkpoints_that_were_moved_away_and_linked_are_taken(newest: Path) -> None:
    """With one of them gone, it is named, and the other one taken."""
    big, older = newest.parent.parent / "big", newest.with_name("step_00000001")
    big.mkdir()
    for directory in (newest, older):
        directory.rename(big / directory.name)
        directory.symlink_to(big / directory.name)
    config = make_config((1, 1, 1), newest.parent, load="auto")
    assert choose_checkpoint(config, ALONE).directory == newest
    loaded = make_config((1, 1, 1), newest.parent, load=str(newest), keep_last=1)
    trainer = make_trainer(loaded, Mesh(device=torch.device("cpu")))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    assert [whole(big / name, ALONE) for name in (newest.name, older.name)] == [None, None]
    shutil.rmtree(newest.with_name("step_00000003"))
    shutil.rmtree(big / newest.name)
    choice = choose_checkpoint(config, ALONE)
    problem = f"{newest} is a link to {big / newest.name}, which is not there: the checkpoint is incomplete"
    gone = f"{newest.parent / 'latest'} names step_00000003, which is not there any more"
    assert (choice.directory, choice.refused) == (older, (gone, problem))


# ---- hostile checkpoints: whoever made them has made their digests too


def rewritten(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and seal it as its writer would."""
    raw = json.loads((directory / "manifest.json").read_text())
    del raw["manifest_sha256"]
    change(raw)
    (directory / "manifest.json").write_text(sealed(raw))


def replaced(directory: Path, file: str, content: bytes) -> None:
    """Replace a file, with its size and digest in the manifest."""
    (directory / file).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewritten(directory, lambda raw: raw["files"].update({file: entry}))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The test fails where the process grows by more than 50 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


NAMES = ["../outside", "/etc/passwd", "a/../../outside", "tokenizer/../../outside", "tokenizer/", "..", ".", "", "a\\b"]
NAMES += ["tokenizer/a/b", "a\0b", "manifest.json"]


@pytest.mark.usefixtures("little_memory")
def test_a_name_outside_the_directory_is_refused(newest: Path) -> None:
    (newest.parent / "outside").write_text("secret")
    entry, good = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}, (newest / "manifest.json").read_text()
    for name in NAMES:
        rewritten(newest, lambda raw, name=name: raw["files"].update({name: entry}))  # type: ignore[misc]
        assert "names a file outside its directory" in str(whole(newest, ALONE)), name
        (newest / "manifest.json").write_text(good)


@pytest.mark.parametrize("what", ["file", "directory", "pipe"])
def test_links_and_pipes_are_refused_and_not_opened(newest: Path, what: str) -> None:
    file = newest / ("tokenizer" if what == "directory" else "model-pp0-tp0.safetensors")
    aside = newest.parent / "aside"
    file.rename(aside)
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(aside)
    assert str(file) in str(whole(newest, ALONE))


BOMBS = {
    "deep": lambda: b"[" * 1_000_000,
    "wide": lambda: b"[" + b"0," * 10_000_000 + b"0]",
    "long": lambda: b" " * (1 << 26) + b"{}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_json_bomb_is_refused(newest: Path, bomb: str) -> None:
    body = b' "serial": 9,\n "x": ' + BOMBS[bomb]() + b"}\n"
    seal = b'{\n "manifest_sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode()
    (newest / "manifest.json").write_bytes(seal + body)
    del body
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    refused(newest, newest / "manifest.json")
    assert time.monotonic() - start < patience(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def tables() -> dict[str, bytes]:
    """Files with wrong tables."""

    def shard(header: dict[str, Any] | bytes, data: bytes = b"\0" * 64) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return {
        "giant": struct.pack("<Q", 10**18) + b"{}",
        "beyond the file": struct.pack("<Q", 1000) + b"{}",
        "large": shard(b" " * 10_000_000),
        "deep": shard(b"[" * 20_000),
        "no object": shard(b"[]"),
        "text": shard(b"\xff\xfe"),
        "overlapping": shard({"a": entry, "b": entry}),
        "empty": b"",
        "pickle": pickle.dumps(Payload()),
        "zip": b"PK\3\4" + b"\0" * 100,
    }


class Payload:
    """What a pickle would execute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/megacore-executed",)


@pytest.mark.usefixtures("little_memory")
def test_a_shard_whose_table_lies_is_refused(newest: Path) -> None:
    for content in tables().values():
        replaced(newest, "model-pp0-tp0.safetensors", content)
        refused(newest, newest / "model-pp0-tp0.safetensors")
    assert not Path("/tmp/megacore-executed").exists()


@pytest.mark.usefixtures("little_memory")
def test_a_table_with_overlapping_tensors_is_refused_when_it_is_read(newest: Path) -> None:
    """The names and shapes are those of the manifest; where the bytes lie is not."""
    file = newest / "model-pp0-tp0.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["blocks.1.mlp.up.weight"] = header["blocks.0.mlp.up.weight"]
    text = json.dumps(header).encode().ljust(length)
    replaced(newest, file.name, struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=file.name):
        make_trainer(make_config((1, 1, 1), newest.parent, load=str(newest)), Mesh(device=torch.device("cpu")))
