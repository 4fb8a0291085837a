"""Files are replaced whole or not at all, and a lock keeps a second writer out for as long as its holder lives; files
of tensors, manifests, run directories and progress."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import faulthandler
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from safetensors import safe_open

from megacore import progress
from megacore.checkpoint import lock as lock_module
from megacore.checkpoint.check import changed_settings, check_settings, settings_to_continue
from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import expired, free_name, next_serial, pointed_to, step_of, sweep, temporary_name
from megacore.checkpoint.directory import published as checkpoints_in
from megacore.checkpoint.directory import published as published_steps
from megacore.checkpoint.files import FileEntry, describe, verify
from megacore.checkpoint.load import never_kept
from megacore.checkpoint.lock import WriterLock, sees_lock
from megacore.checkpoint.manifest import (
    Manifest,
    Piece,
    TensorEntry,
    checkpoints_of,
    is_tiled,
    marked_in_doubt,
    read_manifest,
    sealed,
    section_of,
)
from megacore.checkpoint.storage import LocalRun, write_tensors
from megacore.checkpoint.tensor_file import read_slice, read_tensor, write_file
from megacore.checkpoint.tensor_header import read_header
from megacore.config import AdamWConfig, CheckpointConfig, Config, ModelConfig, OptimizerConfig, TrainingConfig
from megacore.convert.publish import published
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.errors import CheckpointError, DataError, UserError
from megacore.files import GrowingFile, naming, read_bounded, replace_bytes, replacing
from megacore.observe.sinks import keep_until
from megacore.parallel.mesh import ALONE, Mesh
from megacore.progress import Bars, Progress
from megacore.safe_json import read_object
from tests.parity.runs import make_config, make_trainer
from tests.patience import patience


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def meet_a_full_disk() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*/a\.json"):
        meet_a_full_disk()
    with pytest.raises(OSError, match="'first'"), naming(Path("second")):  # a name that is known stays
        raise OSError(errno.EIO, "broken", "first")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


# Each reader with the file that it reads, and what it raises or returns where that is a pipe.
READERS: list[tuple[str, Callable[[Path], object], type[Exception] | object]] = [
    ("a", lambda directory: read_bounded(directory / "a", 9), OSError),
    ("a.json", lambda directory: read_object(directory / "a.json"), CheckpointError),
    ("latest", pointed_to, None),
    ("writer.lock", WriterLock, UserError),
    ("writer.lock", lambda directory: sees_lock(directory, "x", patience=0.0), False),
    ("metrics.jsonl", lambda directory: keep_until(directory / "metrics.jsonl", 3), UserError),
    ("tokenizer.json", load_tokenizer, DataError),
]


@pytest.mark.parametrize("special", ["pipe", "device", "link to a pipe"])
@pytest.mark.parametrize(("name", "read", "outcome"), READERS, ids=[name for name, *_ in READERS])
def test_a_pipe_or_device_is_not_read(
    special: str, name: str, read: Callable[[Path], object], outcome: type[Exception] | object, tmp_path: Path
) -> None:
    """Reading the pipe would wait for ever for its writer, and /dev/zero has no end."""
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(tmp_path / "pipe")
    if special == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to("/dev/zero" if special == "device" else tmp_path / "pipe")
    faulthandler.dump_traceback_later(patience(20), exit=True)
    try:
        if isinstance(outcome, type):
            with pytest.raises(outcome):
                read(run)
        else:
            assert read(run) == outcome
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_bounded(tmp_path / "a", 5) == read_bounded(tmp_path / "b", 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes, more than the 4 that are read"):
        read_bounded(tmp_path / "a", 4)
    with pytest.raises(IsADirectoryError):
        read_bounded(tmp_path, 4)


def test_appending_makes_a_file_and_refuses_what_would_block(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    GrowingFile(path).append(b"one\n")
    GrowingFile(path).append(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="is a symbolic link, which is not followed"):
        GrowingFile(tmp_path / "link").append(b"three\n")
    assert path.read_bytes() == b"one\ntwo\n"
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OSError, match="is not a regular file"):
            GrowingFile(other)


def test_a_growing_file_outlives_its_name(tmp_path: Path) -> None:
    path, there = tmp_path / "run" / "a", tmp_path / "gone" / "a"
    path.parent.mkdir()
    file = GrowingFile(path)
    assert file.append(b"1") is None
    path.parent.rename(there.parent)
    assert file.append(b"2") == f"{path} is {there} now: it is made again, with all that it had"
    shutil.rmtree(path.parent)
    assert file.append(b"3") == f"{path} was deleted: it is made again, with all that it had"
    replace_bytes(path, path.read_bytes())  # moved to another disk, with a link to it
    assert file.append(b"4") is None
    replace_bytes(path, b"edited ")
    assert file.append(b"5") == f"{path} was deleted: what follows is appended to the file that has its name"
    assert (path.read_bytes(), there.read_bytes()) == (b"edited 5", b"1")


# ---- directories that are published ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "problem"),
    [("new/..", "is no name of a new directory"), ("file/out", "cannot be made"), ("/proc/x/y", "cannot be made")],
)
def test_an_impossible_output_is_refused_before_anything_is_written(output: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"--output .* {problem}"), published(tmp_path / output):
        pytest.fail("the conversion began")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from megacore.convert.publish import published\n"
        "with published(Path(sys.argv[1])) as made: (made / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False, timeout=patience(60))
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".out.tmp-")
    living, other = tmp_path / f".out.tmp-{os.getppid()}", tmp_path / ".outer.tmp-999999999"
    living.mkdir()
    other.mkdir()
    with published(tmp_path / "out") as made:
        (made / "whole").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name, "out"])


# ---- safetensors files -----------------------------------------------------------------------------------------------

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
    types = {name: (one.dtype, tuple(one.shape)) for name, one in TENSORS.items()}
    write_file(path, types, iter(TENSORS.items()))
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


# ---- checkpoints' manifests and directories --------------------------------------------------------------------------

WHOLE = Piece(file="model.safetensors", start=[0, 0], stop=[4, 5])
WRITTEN = Manifest(
    step=3,
    consumed_samples=24,
    counters={"updates": 3, "scale": 65536.0},
    topology={"tp": 1, "pp": 2, "dp": 1},
    config={"model": {"num_layers": 2}},
    files={"model.safetensors": FileEntry(bytes=80, sha256="0" * 64, xxh3_128="0" * 32)},
    tensors={"model": {"weight": TensorEntry(shape=[4, 5], dtype="float32", pieces=[WHOLE])}},
)
Place = tuple[str | int, ...]
OLD_SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0, "adam_beta2": 0.95}}  # before each had a section
NEW_SGD = {"optimizer": {"optimizer": "sgd"}, "sgd": {"sgd_momentum": 0.0}, "adamw": {"adam_beta2": 0.95}}


@pytest.mark.parametrize("settings", [OLD_SGD, NEW_SGD], ids=["old", "new"])
def test_settings_of_optimizers_are_read_wherever_they_stand(settings: dict[str, dict[str, Any]]) -> None:
    manifest = dataclasses.replace(WRITTEN, config=settings)
    assert never_kept(manifest) == {"momentum_buffer", "ema"}
    kept: dict[str, dict[str, Any]] = {"optimizer": {"optimizer": "sgd"}, "sgd": {"sgd_momentum": 0.9}}
    assert never_kept(dataclasses.replace(WRITTEN, config=kept)) == {"ema"}
    assert never_kept(WRITTEN) == {"ema"}
    assert never_kept(dataclasses.replace(WRITTEN, config={"average": {"ema_decay": 0.9}})) == set()
    config = Config(
        model=ModelConfig(vocab_size=8), adamw=AdamWConfig(adam_beta2=0.999), training=TrainingConfig(train_iters=1)
    ).resolve(1)
    assert "--optimizer beta2=0.95 -> 0.999" in changed_settings(config, manifest)


@pytest.mark.parametrize(("min_lr", "given"), [(0.1, True), (0.2, False), (0.2, True)])
def test_another_schedule_is_refused_where_it_must_be_the_same(min_lr: float, given: bool) -> None:
    model, optimizer = ModelConfig(vocab_size=8), OptimizerConfig(lr=1.0, min_lr=min_lr)
    checkpoint = CheckpointConfig(load="run", same_schedule=given)
    training = TrainingConfig(train_iters=9)
    config = Config(model=model, optimizer=optimizer, training=training, checkpoint=checkpoint).resolve(1)
    settings = dataclasses.asdict(config)
    settings["optimizer"]["min_lr"] = 0.1
    differs = pytest.raises(CheckpointError, match=r"differ \(there -> here\): --min-lr 0.1 -> 0.2: use the values")
    with differs if given and min_lr != 0.1 else contextlib.nullcontext():
        check_settings(config, Path("step_3"), dataclasses.replace(WRITTEN, config=settings))


def test_a_field_of_a_manifest_has_the_name_of_this_version(tmp_path: Path) -> None:
    model = {"num_layers": 2, "attention_pattern": "w,f", "window_size": 4}
    manifest = read_with(tmp_path, ("config", "model"), model)
    assert section_of(manifest, tmp_path, "model", ModelConfig).layer_pattern == "w,f"
    assert settings_to_continue({"load": str(tmp_path)}) == {"num_layers": 2, "layer_pattern": "w,f", "window_size": 4}


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """The way to every value in a JSON document."""
    if here:
        yield here
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*here, key))


PLACES = list(places(json.loads(WRITTEN.to_json())))


def read_with(directory: Path, place: Place, change: Any) -> Manifest:
    """Read the manifest with one value replaced, or removed where the change is `del`."""
    raw = json.loads(WRITTEN.to_json())
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    if change == "del":
        del inner[place[-1]]
    else:
        inner[place[-1]] = copy.deepcopy(change)
    raw.pop("manifest_sha256", None)
    (directory / "manifest.json").write_text(sealed(raw))
    return read_manifest(directory)


def test_a_manifest_of_an_older_version_is_written_as_it_was_read(tmp_path: Path) -> None:
    """It has no XXH3. A mark changes nothing else, even what this version does not know."""
    path, raw = tmp_path / "manifest.json", json.loads(WRITTEN.to_json())
    del raw["files"]["model.safetensors"]["xxh3_128"]
    path.write_text(sealed(raw))
    old = read_manifest(tmp_path)
    path.write_text(old.to_json())
    assert read_manifest(tmp_path) == old
    raw |= {"of a later version": {"a": None}, "counters": {"updates": 3, "scale": 65536.0}}
    path.write_text(sealed(raw))
    path.write_text(marked_in_doubt(tmp_path))
    assert read_manifest(tmp_path) == dataclasses.replace(old, counters=old.counters | {"in_doubt": 1})
    assert path.read_text() == sealed(raw | {"counters": raw["counters"] | {"in_doubt": 1}})


@pytest.mark.parametrize(
    ("place", "change", "problem"),
    [
        (("step",), 0, "step is 0, but its directory's name says 3"),
        (("step",), 4, "step is 4, but its directory's name says 3"),
        (("consumed_samples",), 0, "consumed_samples is 0 after step 3"),
        (("topology",), {}, "topology is {}: it does not name"),
        (("topology", "pp"), 0, "topology is .*: it does not name"),
        (("schema",), 3, "schema is 3, but its tensors are those of schema 2"),
        (("schema",), 4, "schema 4, but this version reads schemas 2 and 3"),
        (("files", "model.safetensors", "sha256"), None, "sha256 is not a text"),
        (("files", "model.safetensors", "sha256"), "", "sha256 is not a digest of 64 hexadecimal digits"),
        (("files", "model.safetensors", "xxh3_128"), None, "xxh3_128 is not a text"),
        (("tokenizer",), "0" * 64, "but no file of it is listed"),
    ],
)
def test_a_value_that_contradicts_the_rest_is_refused_by_name(
    place: Place, change: Any, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=problem):
        read_with(tmp_path / "step_00000003", place, change)


@pytest.mark.parametrize(
    ("name", "number"),
    [("updates", -1), ("updates", 1.5), ("updates", 2**49), ("scale", 0), ("scale", 1e300), ("learning_rate", -1.0)],
)
def test_a_counter_out_of_range_is_refused_by_name(name: str, number: float, tmp_path: Path) -> None:
    counters = {"updates": 3, "scale": 65536.0, "learning_rate": 0.0, "allowance": -2}  # as an early version counted
    assert read_with(tmp_path, ("counters",), counters).counters == counters
    with pytest.raises(CheckpointError, match=rf"counters\.{name} is .* from "):
        read_with(tmp_path, ("counters",), counters | {name: number})


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    body = WRITTEN.to_json().split("\n", 2)[2].replace(' "step": 3', ' "step": 3,\n "step": 4')
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(f'{{\n "manifest_sha256": "{digest}",\n{body}')
    with pytest.raises(CheckpointError, match="'step' is there twice"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "wrong", [None, True, 1.5, -1, "x", [], ["x"], [None], {}, {"x": 1}, float("nan"), "del"], ids=str
)
def test_a_value_of_another_kind_is_named_and_never_an_accident(tmp_path: Path, wrong: Any) -> None:
    said = []
    for place in PLACES:
        with contextlib.suppress(CheckpointError):  # some values may be what is wrong here
            read_with(tmp_path, place, wrong)
            continue
        with pytest.raises(CheckpointError) as caught:
            read_with(tmp_path, place, wrong)
        said.append((str(place[0]), str(caught.value)))
    assert len(said) >= 10
    assert all(name in message for name, message in said)


# ---- pieces cover a tensor exactly, in any number of dimensions ------------------------------------------------------

Box = tuple[list[int], list[int]]  # start, stop


def entry(shape: list[int], boxes: list[Box]) -> TensorEntry:
    return TensorEntry(
        shape=shape, dtype="float32", pieces=[Piece(file="f", start=start, stop=stop) for start, stop in boxes]
    )


PINWHEEL: list[Box] = [([0, 0], [2, 1]), ([2, 0], [3, 2]), ([1, 2], [3, 3]), ([0, 1], [1, 3]), ([1, 1], [2, 2])]


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ([], [([], [])], True),
        ([], [([], []), ([], [])], False),
        ([0, 3], [([0, 0], [0, 3])], True),
        ([4], [([0], [4]), ([4], [4])], False),
        ([4], [([0], [5])], False),
        ([4], [([1], [4]), ([0], [1])], True),
        ([3, 3], PINWHEEL, True),
        ([3, 3], [*PINWHEEL[:-1], ([0, 1], [2, 2])], False),  # a piece is moved
        ([2, 2, 2], [([0, 0, 0], [2, 2, 1]), ([1, 0, 1], [2, 2, 2]), ([0, 0, 1], [1, 2, 2])], True),
        ([2, 2, 2], [([0, 0, 0], [2, 2, 1]), ([1, 0, 1], [2, 2, 2]), ([0, 0, 1], [1, 1, 2])], False),
        ([2, 2], [([0, 0], [2, 1]), ([0, 0], [2, 1])], False),  # as many elements as the tensor
        ([2] * 20, [([0] * 20, [1] * 20)] * 4, False),
        ([4, 4], [], False),
    ],
)
def test_pieces_by_hand(shape: list[int], boxes: list[Box], expected: bool) -> None:
    assert is_tiled(entry(shape, boxes)) == expected


# ---- a run's directory -----------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def checkpoint(run: Path, name: str, serial: int) -> Path:
    """A published checkpoint without tensors."""
    directory = run / name
    directory.mkdir(parents=True)
    manifest = Manifest(serial=serial, step=0, consumed_samples=0, topology={"tp": 1, "pp": 1, "dp": 1}, config={})
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory


def test_the_order_is_that_of_publication_and_not_of_steps(tmp_path: Path) -> None:
    names = {"step_00000004": 1, "step_00000008": 2, "step_00000002": 3, "step_00000004.2": 4, "step_100000000": 5}
    for name, serial in names.items():
        checkpoint(tmp_path, name, serial)
    (tmp_path / "step_00000010.tmp-0123abcd").mkdir()
    assert [path.name for path in published_steps(tmp_path)] == list(reversed(names))
    assert next_serial(tmp_path) == 6
    assert next_serial(tmp_path / "nowhere") == 1
    assert step_of(tmp_path / "step_00000004.2") == 4
    assert step_of(tmp_path / "step_4") is None
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be looked through for checkpoints \(Not a directory\)"):
        checkpoints_of(tmp_path / "file")


def test_what_has_lost_its_manifest_or_was_moved_away_is_still_seen(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_00000004", 1)
    checkpoint(tmp_path / "big", "step_00000006", 2)
    (tmp_path / "step_00000006").symlink_to(tmp_path / "big" / "step_00000006")
    (tmp_path / "step_00000008").mkdir()
    (tmp_path / "step_00000009").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_00000010").touch()
    (tmp_path / "step_00000011").symlink_to("step_00000011")
    names = [path.name for path in published_steps(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (11, 10, 9, 8, 6, 4)]
    assert next_serial(tmp_path) == 3
    assert free_name(tmp_path, 9) == "step_00000009.2"
    said = []
    for name in names[:4]:
        with pytest.raises(CheckpointError) as caught:
            read_manifest(tmp_path / name)
        said.append(str(caught.value).removeprefix(f"{tmp_path}/"))
    assert said == [
        "step_00000011/manifest.json cannot be read as a manifest: Too many levels of symbolic links",
        "step_00000010/manifest.json cannot be read as a manifest: Not a directory",
        f"step_00000009 is a link to {tmp_path}/nowhere, which is not there: the checkpoint is incomplete",
        "step_00000008/manifest.json is missing: the checkpoint is incomplete",
    ]
    assert read_manifest(tmp_path / "step_00000006").serial == 2


def test_retention_deletes_nothing_through_a_link(tmp_path: Path) -> None:
    """What is linked is neither counted nor deleted, nor is what a link leads to."""
    for step in (10, 20, 30):
        checkpoint(tmp_path, f"step_{step:08d}", step)
    outside = checkpoint(tmp_path / "big", "step_00000005", 5)
    newest = checkpoint(tmp_path / "big", "step_00000099", 99)
    for directory in (outside, newest):
        (tmp_path / directory.name).symlink_to(directory)
    (tmp_path / "step_00000010.2").symlink_to("step_00000010")
    found = expired(tmp_path, keep_last=1, keep_every=None, protected=[])
    assert [path.name for path in found] == ["step_00000020"]


def test_a_name_that_is_taken_is_never_given_again(tmp_path: Path) -> None:
    assert free_name(tmp_path, 4) == "step_00000004"
    final = checkpoint(tmp_path, "step_00000004", 1)
    assert free_name(tmp_path, 4) == "step_00000004.2"
    temporary = checkpoint(tmp_path, temporary_name(final.name), 2)
    before = (final / "manifest.json").read_bytes()
    manifest = (temporary / "manifest.json").read_text()
    with pytest.raises(FileExistsError):
        LocalRun(tmp_path).publish(temporary.name, final.name, manifest)
    assert (final / "manifest.json").read_bytes() == before
    LocalRun(tmp_path).publish(temporary.name, "step_00000004.2", manifest)
    assert free_name(tmp_path, 4) == "step_00000004.3"


def test_leftovers_are_swept_away_and_nothing_else(tmp_path: Path) -> None:
    kept = [checkpoint(tmp_path, "step_00000001", 1).name, "metrics.jsonl", "my.tmp-notes", "step_00000002.tmpx"]
    for name in kept[1:]:
        (tmp_path / name).touch()
    left = ["latest.tmp-01234567", "step_00000002.2.tmp-0123abcd", "step_00000002.tmp-0123abcd", "step_00000003.tmp"]
    (tmp_path / left[0]).touch()
    for name in left[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert sweep(tmp_path) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert sweep(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("last", "every", "protected", "gone"),
    [
        (None, None, [], []),
        (1, None, [], [10, 20, 30, 40]),
        (2, None, [], [10, 20, 30]),
        (2, 20, [], [10, 30]),
        (1, None, [10], [20, 30, 40]),
        (9, None, [], []),
    ],
)
def test_retention(tmp_path: Path, last: int | None, every: int | None, protected: list[int], gone: list[int]) -> None:
    paths = {step: checkpoint(tmp_path, f"step_{step:08d}", step) for step in (10, 20, 30, 40, 50)}
    kept = [paths[step] for step in protected]
    found = expired(tmp_path, keep_last=last, keep_every=every, protected=kept)
    assert [step_of(path) for path in found] == gone
    for path in found:
        LocalRun(tmp_path).retire(path.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {p.name for p in paths.values()} - {p.name for p in found}
    )


def test_a_pointer_names_the_last_and_is_believed_only_where_it_can_be(tmp_path: Path) -> None:
    assert pointed_to(tmp_path) is None
    LocalRun(tmp_path).point_to(checkpoint(tmp_path, "step_00000001", 1).name)
    assert pointed_to(tmp_path) == tmp_path / "step_00000001"
    for text in ("../elsewhere", "step_00000002", "/etc", ""):
        (tmp_path / "latest").write_text(text)
        assert pointed_to(tmp_path) is None


HOLD = "import sys, time; from pathlib import Path; from megacore.checkpoint.lock import WriterLock; "
HOLD += "lock = WriterLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_one_writer_and_no_lock_outlives_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"written by another run \(pid {holder.pid} on .*\): use another"):
            WriterLock(tmp_path / "run")
        holder.send_signal(signal.SIGKILL)
        monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", patience(5))
        lock = WriterLock(tmp_path / "run")  # as soon as the holder has ended
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()
    WriterLock(tmp_path / "run").release()
    lock.path.rename(tmp_path / "precious")
    lock.path.symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"its lock writer\.lock is a symbolic link, which is not followed: remove it"):
        WriterLock(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert "without locks: let no other run write there" in (WriterLock(tmp_path / "nfs").warning or "")


# ---- progress --------------------------------------------------------------------------------------------------------


def test_a_line_per_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("verifying", 10 * 10**9) as shown:
        for second in range(0, 130, 10):
            now[0] = float(second)
            shown.advance(10**8)
    assert capsys.readouterr().err.splitlines() == ["verifying: 7%, 0.7 of 10.0 GB", "verifying: 13%, 1.3 of 10.0 GB"]


def test_a_terminal_has_one_display_for_all_bars_and_only_the_first_rank_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("training", 10, unit="steps", done=2) as training:
        training.reach(5)
        display = Bars.display
        assert display is not None
        with Progress("saving", 2 * 10**9) as saving:
            saving.advance(10**9)
            assert Bars.display is display
            shown = [(task.description, task.completed, task.fields["figures"]) for task in display.tasks]
            assert shown == [("training", 5, "5 of 10 steps"), ("saving", 10**9, "1.0 of 2.0 GB")]
        assert [task.description for task in display.tasks] == ["training"]
    assert not Bars.__dict__["display"]
    monkeypatch.setenv("RANK", "1")
    with Progress("saving", 1) as saving:
        saving.advance(1)
        assert not Bars.__dict__["display"]


def test_saving_and_verifying_show_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    config = make_config((1, 1, 1), tmp_path, train_iters=1)
    make_trainer(config, Mesh(device=torch.device("cpu"))).run()
    (saved,) = checkpoints_in(tmp_path)
    assert whole(saved, ALONE) is None
    lines = capsys.readouterr().err.splitlines()
    for what in ("saving", f"verifying {saved.name}"):
        shares = [line for line in lines if line.startswith(f"{what}: ")]
        assert shares, lines
        assert shares[-1].startswith(f"{what}: 100%, "), shares[-1]
