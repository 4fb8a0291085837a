"""A process killed at any point of a save costs nothing that was published, in a directory or at a URL: the next run
continues from a checkpoint that verifies, never an older one than the last published, and leaves no rubbish behind.

The harness kills the other ranks as soon as one is dead, as a launcher does.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import storage
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.directory import published, step_of
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.remote import RemotePath
from megacore.train.trainer import Trainer
from tests.distributed import RankFailed, run_distributed
from tests.parity.runs import make_config, make_trainer

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
