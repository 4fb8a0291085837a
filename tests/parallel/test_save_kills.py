"""A process killed at any point of a save costs nothing that was published: the next run continues from a checkpoint
that verifies, never an older one than the last published, and leaves no rubbish behind.

The harness kills the other ranks as soon as one is dead, as a launcher does.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from megacore.checkpoint import storage
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.directory import published, step_of
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.train.trainer import Trainer
from tests.distributed import RankFailed, run_distributed
from tests.parity.runs import make_config, make_trainer

LAYOUT = (1, 2, 2)
OF_EVERY_RANK = ("staged", "shard opened", "shard half written", "shard written", "shard synced")
CHOSEN = [
    (0, "begun", False),
    (1, "shard half written", False),
    (0, "manifest written", True),
    (3, "before the rename", False),
    (0, "renamed", False),
    (2, "renamed", True),
    (0, "half retired", True),
]


def trainer_of(directory: str, *, async_save: bool) -> tuple[Trainer, Mesh]:
    options = {"zero_stage": 1, "async_save": async_save, "keep_last": 1, "train_iters": 1000}
    config = make_config(LAYOUT, directory, **options)
    mesh = build_mesh(config.parallel)
    return make_trainer(config, mesh), mesh


def step_and_save(trainer: Trainer) -> None:
    trainer.train_step(next(trainer.batches))
    trainer.save()


def die_in_a_save(rank: int, world_size: int, directory: str, victim: int, where: str, async_save: bool) -> None:
    """Publish step 1, and end at a point of the saving of step 2, which would delete step 1 after it."""
    trainer, mesh = trainer_of(directory, async_save=async_save)
    step_and_save(trainer)
    pids = all_gather_objects(os.getpid(), mesh.world)

    def passing(point: str) -> None:
        if point == "renamed":
            Path(directory, "renamed").touch()
        if point == where and rank == (victim if where in OF_EVERY_RANK else 0):
            Path(directory, "killed").touch()
            os.kill(pids[victim], signal.SIGKILL)

    storage.passing = passing
    step_and_save(trainer)
    signal.pause()  # a rank that is through before the signal arrives


def assert_goes_on(directory: Path, *, at_least: int) -> None:
    """A run in one process continues from a whole checkpoint, and its own save leaves whole ones alone."""
    config = make_config((1, 1, 1), directory, load="auto", keep_last=1, train_iters=1000)
    choice = choose_checkpoint(config, ALONE)
    assert choice.directory is not None
    assert choice.refused == ()
    step = step_of(choice.directory)
    assert step is not None
    assert step >= at_least
    resumed = make_config((1, 1, 1), directory, load=str(choice.directory), keep_last=1, train_iters=1000)
    trainer = make_trainer(resumed, Mesh(device=torch.device("cpu")))
    assert trainer.step == step
    step_and_save(trainer)
    assert [whole(path, ALONE) for path in published(directory)] == [None, None]  # the new one and the loaded one
    assert not [path.name for path in directory.iterdir() if ".tmp" in path.name]


def check(directory: Path, victim: int, point: str, async_save: bool) -> None:
    with pytest.raises(RankFailed):  # what is heard first may be a peer that misses the dead one
        run_distributed(die_in_a_save, 4, str(directory), victim, point, async_save)
    assert (directory / "killed").exists()
    assert_goes_on(directory, at_least=2 if (directory / "renamed").exists() else 1)


@pytest.mark.parametrize(("victim", "point", "async_save"), CHOSEN)
def test_a_save_that_is_cut_off_costs_nothing_published(
    tmp_path: Path, victim: int, point: str, async_save: bool
) -> None:
    check(tmp_path, victim, point, async_save)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("point", storage.POINTS)
@pytest.mark.parametrize("victim", range(4))
def test_every_rank_at_every_point(tmp_path: Path, victim: int, point: str, async_save: bool) -> None:
    check(tmp_path, victim, point, async_save)


def die_some_time(rank: int, world_size: int, directory: str, seed: int) -> None:
    """Save after every step until one rank, or all, are killed."""
    generator = random.Random(seed)
    trainer, _ = trainer_of(directory, async_save=generator.random() < 0.5)
    victims = {generator.randrange(4)} if generator.random() < 0.7 else {0, 1, 2, 3}
    step_and_save(trainer)
    after = generator.uniform(0.0, 0.6)
    if rank in victims:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        if rank == 0:
            steps = [step_of(path) or 0 for path in published(Path(directory))]
            Path(directory, "published").write_text(str(max(steps)))
        step_and_save(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_death_at_any_time(tmp_path: Path, seed: int) -> None:
    with pytest.raises(RankFailed, match=r"SIGKILL|Connection|closed"):
        run_distributed(die_some_time, 4, str(tmp_path), seed)
    text = (tmp_path / "published").read_text() if (tmp_path / "published").exists() else ""
    assert_goes_on(tmp_path, at_least=int(text or 1))
