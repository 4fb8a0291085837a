"""A process killed at any point of a save costs nothing that was published, in a directory or at a URL: the next run
continues from a checkpoint that verifies, never an older one than the last published, and leaves no rubbish behind. Nor
do exceptions and full disks.

The harness kills the other ranks as soon as one is dead, as a launcher does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from megacore.checkpoint import save as save_module
from megacore.checkpoint import storage
from megacore.checkpoint.check import check_load
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.directory import pointed_to, published, step_of, sweep
from megacore.checkpoint.manifest import find_checkpoint, read_manifest
from megacore.checkpoint.save import CheckpointSaver
from megacore.checkpoint.state import TrainingState
from megacore.checkpoint.storage import LocalRun
from megacore.errors import CheckpointError, StorageError
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.remote import RemotePath
from megacore.train.trainer import Trainer
from tests.distributed import RankFailed, run_distributed
from tests.parallel.test_stopping import Calling
from tests.parity.runs import BATCH, RaggedData, make_config, make_trainer

LAYOUT = (1, 2, 2)
OF_EVERY_RANK = ("staged", "shard opened", "shard half written", "shard written", "shard synced")


def options_of(directory: Path | str, at_url: bool) -> dict[str, Any]:
    return {"keep_last": 1, "train_iters": 1000, **({"save": f"file://{directory}/store"} if at_url else {})}


def trainer_of(directory: str, *, async_save: bool, at_url: bool = False) -> tuple[Trainer, Mesh]:
    config = make_config(LAYOUT, directory, zero_stage=1, async_save=async_save, **options_of(directory, at_url))
    mesh = build_mesh(config.parallel)
    return make_trainer(config, mesh), mesh


def step_and_save(trainer: Trainer) -> None:
    trainer.train_step(next(trainer.batches))
    trainer.save()


def die_in_a_save(
    rank: int, world_size: int, directory: str, victim: int, where: str, async_save: bool, at_url: bool
) -> None:
    """Publish step 1, and end at a point of the saving of step 2, which would delete step 1 after it."""
    trainer, mesh = trainer_of(directory, async_save=async_save, at_url=at_url)
    step_and_save(trainer)
    trainer.saving.finish()
    pids = all_gather_objects(os.getpid(), mesh.world)
    is_of_every_rank = where in OF_EVERY_RANK and not at_url

    def passing(point: str) -> None:
        if point == ("manifest written" if at_url else "renamed"):
            Path(directory, "published").touch()
        if point == where and rank in ((victim,) if is_of_every_rank else (0, victim)):
            Path(directory, "killed").touch()
            os.kill(pids[victim], signal.SIGKILL)

    storage.passing = passing
    step_and_save(trainer)
    signal.pause()  # a rank that is through before the signal arrives


def assert_goes_on(directory: Path, *, at_least: int, at_url: bool = False) -> None:
    """A run in one process continues from a whole checkpoint, and its own save leaves whole ones alone."""
    run, options = RemotePath(f"file://{directory}/store") if at_url else directory, options_of(directory, at_url)
    choice = choose_checkpoint(make_config((1, 1, 1), directory, load="auto", **options), ALONE)
    assert choice.directory is not None
    assert choice.refused == ()
    step = step_of(choice.directory)
    assert step is not None
    assert step >= at_least
    resumed = make_config((1, 1, 1), directory, load=str(choice.directory), **options)
    trainer = make_trainer(resumed, Mesh(device=torch.device("cpu")))
    assert trainer.step == step
    step_and_save(trainer)
    assert [whole(path, ALONE) for path in published(run)] == [None, None]  # the new one and the loaded one
    assert not [path.name for path in directory.rglob("*") if ".tmp" in path.name]


# Who is killed, and whether the save is in the background.
VICTIMS = [(0, True), (3, False)]
USUAL = {(3, "shard half written", False), (0, "half retired", False), (0, "manifest written", True)}


@pytest.mark.parametrize(
    ("victim", "async_save", "point", "at_url"),
    [
        pytest.param(*who, point, at_url, marks=() if (who[0], point, at_url) in USUAL else pytest.mark.slow)
        for who in VICTIMS
        for point in storage.POINTS
        for at_url in (False, True)
        if not (at_url and point == "replacement written")  # nothing is replaced at a URL
    ],
)
def test_a_save_that_is_cut_off_costs_nothing_published(
    tmp_path: Path, victim: int, async_save: bool, point: str, at_url: bool
) -> None:
    with pytest.raises(RankFailed):  # what is heard first may be a peer that misses the dead one
        run_distributed(die_in_a_save, 4, str(tmp_path), victim, point, async_save, at_url)
    assert (tmp_path / "killed").exists()
    assert_goes_on(tmp_path, at_least=2 if (tmp_path / "published").exists() else 1, at_url=at_url)


# ---- an exception in a part of a save, whatever its type, fails the save on all ranks alike and hangs none


# Part of a save: what it calls, and on which of the ranks 0 and 1 that raises.
PARTS: dict[str, tuple[Any, str, int]] = {
    "make the directory": (LocalRun, "begin", 0),
    "prepare optimizer state": (TrainingState, "_optimizer_shard", 1),
    "allocate a gathered bucket": (torch.Tensor, "new_empty", 0),
    "copy a tensor": (CheckpointSaver, "_kept", 1),
    "write a shard": (save_module, "write_tensors", 1),
    "publish": (save_module, "_merged", 0),
    "start a thread": (threading.Thread, "start", 1),
    "retire": (CheckpointSaver, "_retire", 0),
}


def fail(*_: object, **__: object) -> Any:
    raise TypeError("raised by the test")


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def save_with_each_part_failing(
    rank: int, world_size: int, directory: str, is_last: bool, options: dict[str, Any]
) -> dict[str, str | None]:
    """What saves raised on this rank, by the part that failed on one rank; then a save succeeds."""
    config = make_config((1, 1, 2), directory, train_iters=20, keep_last=2, zero_stage=1, **options)
    trainer = make_trainer(config, build_mesh(config.parallel))
    raised: dict[str, str | None] = {}
    for part, (owner, name, victim) in PARTS.items():
        trainer.train_step(next(trainer.batches))
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim:
                patch.setattr(owner, name, no_thread if owner is threading.Thread else fail)
            try:
                trainer.saving.save(trainer.state(), is_last=is_last)
                raised[part] = None
            except StorageError as error:
                raised[part] = str(error)
    trainer.train_step(next(trainer.batches))
    trainer.saving.save(trainer.state(), is_last=True)
    return raised


@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_exception_on_one_rank_fails_the_save_on_all(tmp_path: Path, async_save: bool) -> None:
    told = run_distributed(save_with_each_part_failing, 2, str(tmp_path), True, {"async_save": async_save})
    assert told[0] == told[1]
    for part, raised in told[0].items():
        if part == "retire":
            assert raised is None  # the checkpoint was published before
        else:
            assert raised is not None, part
            assert "the checkpoint cannot be written" in raised
            why = "can't start new thread" if part == "start a thread" else "TypeError: raised by the test"
            assert f"{why} (test_save_kills.py, line " in raised
    assert [step_of(path) for path in published(tmp_path)] == [len(PARTS) + 1, len(PARTS)]
    assert all(whole(path, ALONE) is None for path in published(tmp_path))
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.slow
def test_a_run_that_warns_trains_on_after_any_exception(tmp_path: Path) -> None:
    told = run_distributed(save_with_each_part_failing, 2, str(tmp_path), False, {"on_save_error": "warn"})
    assert told == [dict.fromkeys(PARTS)] * 2
    assert step_of(published(tmp_path)[0]) == len(PARTS) + 1


# ---- a file system that is filled to its last byte: the run trains on, and leaves no rest


STEPS, FULL, FREE = 34, 8, 28  # the disk is full in the steps from FULL on, and before FREE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB: room for a few checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(place)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield place
            subprocess.run(["umount", "--lazy", str(place)], check=True)  # a run that failed holds files open
            return
    pytest.skip("needs the right to mount a tmpfs: run as root")


def filling(disk: Path, **options: Any) -> Trainer:
    """A run on whose disk there is no room for some steps."""

    def fill() -> None:
        trainer.saving.finish()  # a save in the background would delete the checkpoint before it, which makes room
        with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    samples = Calling(RaggedData(BATCH * STEPS), (FULL - 1) * BATCH, fill)
    samples = Calling(samples, (FREE - 1) * BATCH, (disk / "fill").unlink)
    sizes = {"train_iters": STEPS, "save_interval": 2, "keep_last": 1, "log_interval": 1, **options}
    config = make_config((1, 1, 1), disk / "run", **sizes)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")), samples)
    return trainer


def logged(disk: Path) -> list[int]:
    """The steps in the metrics; every line must be whole."""
    return [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_warns_trains_on(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filling(disk, async_save=True, on_save_error="warn").run()
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl: No space left on device") == 1
    assert said.count("warning: the checkpoint cannot be written") >= 2
    lacking = int(said.split("metrics.jsonl lacks ")[1].split()[0])
    assert 0 < lacking <= FREE - FULL
    steps = logged(disk)
    assert len(steps) == STEPS - lacking
    assert steps[:3] == [1, 2, 3]
    assert steps[-5:] == list(range(STEPS - 4, STEPS + 1))
    assert step_of(published(disk / "run")[0]) == STEPS
    assert all(whole(path, ALONE) is None for path in published(disk / "run"))
    assert not list((disk / "run").glob("*.tmp-*"))


# ---- object stores ---------------------------------------------------------------------------------------------------

ONE = (1, 1, 1)
URL = "memory://run"


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """An empty store before and after."""
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def alone(output: Path, url: str = URL, **changes: object) -> Trainer:
    config = make_config(ONE, output, **{"save": url, "train_iters": 1000, **changes})
    return make_trainer(config, Mesh(device=torch.device("cpu")))


def stepped_and_saved(trainer: Trainer) -> float:
    result = trainer.train_step(next(trainer.batches))
    trainer.save()
    return float(result.loss)


def names(url: str) -> list[str]:
    """The names of all objects below a URL."""
    return [str(path).removeprefix(url + "/") for path in RemotePath(url).files()]


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_a_url_bit_for_bit(tmp_path: Path, async_save: bool) -> None:
    losses = []
    for url in (None, URL):
        trainer = alone(tmp_path, url, async_save=async_save, keep_last=2)  # type: ignore[arg-type]
        for _ in range(3):
            stepped_and_saved(trainer)
        trainer.saving.finish()
        where = str(tmp_path) if url is None else url
        resumed = alone(tmp_path / "b", url, load=where)  # type: ignore[arg-type]
        assert resumed.step == 3
        losses.append([stepped_and_saved(trainer), stepped_and_saved(resumed)])
        trainer.saving.finish()
    assert losses[0][0] == losses[0][1] == losses[1][0] == losses[1][1]
    # Every file is byte for byte that of the directory, but for the manifest, which has the configuration.
    there = RemotePath(URL) / "step_00000003"
    for name in read_manifest(there).files:
        assert (there / name).read_bytes() == (tmp_path / "step_00000003" / name).read_bytes()
    assert not [name for name in names(URL) if ".tmp-" in name]


def test_retention_pointer_and_the_same_step_again(tmp_path: Path) -> None:
    trainer = alone(tmp_path, keep_last=2, keep_every=3)
    for _ in range(6):
        stepped_and_saved(trainer)
    run = RemotePath(URL)
    assert [path.name for path in published(run)] == ["step_00000006", "step_00000005", "step_00000003"]
    assert pointed_to(run) == run / "step_00000006"
    again = alone(tmp_path, load=f"{URL}/step_00000005")
    stepped_and_saved(again)
    assert find_checkpoint(run) == run / "step_00000006.2"
    assert [whole(path, ALONE, archived=True) for path in published(run)] == [None] * 4


def test_a_run_whose_unfinished_save_was_swept_away_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another run with the same --save."""
    trainer, run = alone(tmp_path), RemotePath(URL)
    stepped_and_saved(trainer)
    monkeypatch.setattr(storage, "passing", lambda point: point == "before the rename" and sweep(run))
    with pytest.raises(StorageError, match=r"another run has removed this unfinished checkpoint: give each run"):
        stepped_and_saved(trainer)
    assert [path.name for path in published(run)] == ["step_00000001"]


def test_a_checkpoint_at_a_url_is_marked_in_doubt(tmp_path: Path) -> None:
    trainer, run = alone(tmp_path), RemotePath(URL)
    for _ in range(2):
        stepped_and_saved(trainer)
    trainer.saving.doubt(updates=1)  # of other weights
    assert find_checkpoint(run) == run / "step_00000002"
    trainer.saving.doubt(updates=2)
    assert [whole(path, ALONE) for path in published(run)] == [None] * 2
    assert find_checkpoint(run) == pointed_to(run) == run / "step_00000001"


@pytest.mark.parametrize(
    "damage",
    ["changed", "no manifest", *(pytest.param(more, marks=pytest.mark.slow) for more in ("cut", "gone", "manifest"))],
)
def test_what_is_damaged_is_passed_over_by_name(tmp_path: Path, damage: str) -> None:
    trainer = alone(tmp_path)
    for _ in range(2):
        stepped_and_saved(trainer)
    newest = RemotePath(URL) / "step_00000002"
    victim = newest / ("manifest.json" if "manifest" in damage else sorted(read_manifest(newest).files)[0])
    content = victim.read_bytes()
    victim.unlink()
    if damage in ("changed", "manifest"):
        victim.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif damage == "cut":
        victim.write_bytes(content[:-1])
    config = make_config(ONE, tmp_path, save=URL, load="auto", train_iters=1000)
    check_load(config)
    choice = choose_checkpoint(config, ALONE)
    assert choice.directory == RemotePath(URL) / "step_00000001"
    assert str(newest) in choice.refused[0]
    assert sweep(RemotePath(URL)) == []  # what was a checkpoint is never swept away
    with pytest.raises(CheckpointError, match="step_00000002"):
        alone(tmp_path, load=str(newest))


def test_a_store_that_fails_leaves_nothing_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = alone(tmp_path)
    stepped_and_saved(trainer)
    files = fsspec.filesystem("memory")
    real = type(files).pipe_file

    def fail(self: object, path: str, value: bytes, **options: object) -> None:
        if path.endswith("manifest.json"):
            raise RuntimeError("the store is busy")
        real(self, path, value, **options)

    monkeypatch.setattr(type(files), "pipe_file", fail)
    with pytest.raises(StorageError, match=r"run/step_00000002/manifest.json: RuntimeError: the store is busy"):
        stepped_and_saved(trainer)
    assert {name.partition("/")[0] for name in names(URL)} == {"latest", "step_00000001"}
