"""An exception in one rank's part of a save, whatever its type, fails the save on all ranks alike and hangs none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint import save as save_module
from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import published, step_of
from megacore.checkpoint.save import CheckpointSaver
from megacore.checkpoint.state import TrainingState
from megacore.checkpoint.storage import LocalRun
from megacore.errors import StorageError
from megacore.parallel.mesh import ALONE, build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

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
            assert f"{why} (test_save_errors.py, line " in raised
    assert [step_of(path) for path in published(tmp_path)] == [len(PARTS) + 1, len(PARTS)]
    assert all(whole(path, ALONE) is None for path in published(tmp_path))
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.slow
def test_a_run_that_warns_trains_on_after_any_exception(tmp_path: Path) -> None:
    told = run_distributed(save_with_each_part_failing, 2, str(tmp_path), False, {"on_save_error": "warn"})
    assert told == [dict.fromkeys(PARTS)] * 2
    assert step_of(published(tmp_path)[0]) == len(PARTS) + 1
