"""Checkpoints at URLs: what a directory promises, an object store keeps.

`memory://` is a store in one process; `file://` is one that several processes see, without the renaming that a
directory has. That a save which is killed at any point costs nothing is in test_save_kills.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from megacore.checkpoint.check import check_load
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.directory import pointed_to, published, sweep
from megacore.checkpoint.manifest import find_checkpoint, read_manifest
from megacore.errors import CheckpointError, StorageError
from megacore.parallel.mesh import ALONE, Mesh
from megacore.remote import RemotePath
from megacore.train.trainer import Trainer
from tests.parity.runs import make_config, make_trainer

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


def step_and_save(trainer: Trainer) -> float:
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
            step_and_save(trainer)
        trainer.saving.finish()
        where = str(tmp_path) if url is None else url
        resumed = alone(tmp_path / "b", url, load=where)  # type: ignore[arg-type]
        assert resumed.step == 3
        losses.append([step_and_save(trainer), step_and_save(resumed)])
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
        step_and_save(trainer)
    run = RemotePath(URL)
    assert [path.name for path in published(run)] == ["step_00000006", "step_00000005", "step_00000003"]
    assert pointed_to(run) == run / "step_00000006"
    again = alone(tmp_path, load=f"{URL}/step_00000005")
    step_and_save(again)
    assert find_checkpoint(run) == run / "step_00000006.2"
    assert [whole(path, ALONE, archived=True) for path in published(run)] == [None] * 4


def test_a_checkpoint_at_a_url_is_marked_in_doubt(tmp_path: Path) -> None:
    trainer, run = alone(tmp_path), RemotePath(URL)
    for _ in range(2):
        step_and_save(trainer)
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
        step_and_save(trainer)
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
    step_and_save(trainer)
    files = fsspec.filesystem("memory")
    real = type(files).pipe_file

    def fail(self: object, path: str, value: bytes, **options: object) -> None:
        if path.endswith("manifest.json"):
            raise RuntimeError("the store is busy")
        real(self, path, value, **options)

    monkeypatch.setattr(type(files), "pipe_file", fail)
    with pytest.raises(StorageError, match=r"run/step_00000002/manifest.json: RuntimeError: the store is busy"):
        step_and_save(trainer)
    assert {name.partition("/")[0] for name in names(URL)} == {"latest", "step_00000001"}
