"""A run ends early on all ranks together, saved: on a signal to any of them, at a step, after a time; and goes on as if
it had not. A save in the background ends no run without a word.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megacore.checkpoint import save as save_module
from megacore.checkpoint import storage
from megacore.checkpoint.check import settings_to_continue
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.directory import published, step_of
from megacore.checkpoint.files import FileEntry
from megacore.checkpoint.manifest import read_manifest
from megacore.config import Config, cli
from megacore.config.checkpoint import CheckpointConfig
from megacore.config.cli import parse_config
from megacore.errors import CheckpointError, DataError, StorageError, TrainingDiverged, TrainingStopped
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.remote import Location
from megacore.train.stopping import Decision, StopRequests
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parallel.test_checkpoint import stored
from tests.parity.runs import BATCH, Heard, RaggedData, make_config, make_trainer
from tests.patience import patience, scaled
from tests.unit.packaging_builds import ROOT

ALONE_MESH = Mesh(device=torch.device("cpu"))


@dataclass(frozen=True)
class Calling:
    """Samples, of which one does something when it is read."""

    samples: Any
    at: int
    call: Callable[[], object]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        if number == self.at:
            self.call()
        return self.samples[number]


def losses_of(directory: Path) -> list[list[float]]:
    """What a run has logged: step, loss, norm and learning rate."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [[r["step"], *(r[f"train/{of}"] for of in ("loss", "grad_norm", "lr"))] for r in map(json.loads, lines)]


def signalled(rank: int, world_size: int, directory: str, victim: int, options: dict[str, Any]) -> int:
    """Run on four ranks, of which one gets two signals in its third step; returns the steps done."""
    config = make_config((1, 2, 2), directory, train_iters=6, log_interval=1, num_layers=3, **options)
    mesh = build_mesh(config.parallel)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    samples = RaggedData(BATCH * 6)
    own = Calling(samples, 2 * BATCH + 2 * mesh.batch.rank, twice) if rank == victim else samples
    trainer = make_trainer(config, mesh, own)
    trainer.run()
    os.kill(os.getpid(), signal.SIGTERM) if rank == victim else None  # and a third when it is over
    return trainer.step


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run on four ranks that nothing ends early."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert run_distributed(signalled, 4, str(directory), -1, {}) == [6] * 4
    return directory


@pytest.mark.parametrize(
    ("victim", "options"), [pytest.param(0, {}, marks=pytest.mark.slow), (3, {"async_save": True, "save_interval": 1})]
)
def test_a_signal_to_one_rank_ends_all_at_the_same_step_saved(
    tmp_path: Path, uninterrupted: Path, victim: int, options: dict[str, Any]
) -> None:
    steps = run_distributed(signalled, 4, str(tmp_path / "a"), victim, options)
    assert steps == [3] * 4
    newest = published(tmp_path / "a")[0]
    assert step_of(newest) == 3
    assert whole(newest, ALONE) is None
    assert run_distributed(signalled, 4, str(tmp_path / "a"), -1, {"load": str(newest), **options}) == [6] * 4
    assert losses_of(tmp_path / "a") == losses_of(uninterrupted)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        resumed, straight = (stored(published(run)[0])[kind] for run in (tmp_path / "a", uninterrupted))
        assert resumed.keys() == straight.keys()
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())


def one_process(directory: Path, data: Any = None, **options: Any) -> Trainer:
    return make_trainer(make_config((1, 1, 1), directory, log_interval=1, num_layers=2, **options), ALONE_MESH, data)


def test_the_run_ends_at_a_multiple_of_a_step_and_after_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = one_process(tmp_path, train_iters=7, exit_interval=3)
    trainer.run()
    assert trainer.step == 3
    assert (
        f"step 3/7 | saved {tmp_path}/step_00000003\nstopped by --exit-interval 3: 3 of 7 steps"
        in capsys.readouterr().out
    )
    trainer = one_process(tmp_path, train_iters=7, load=str(tmp_path), exit_duration_minutes=1e-6)
    trainer.run()
    assert trainer.step == 4
    assert "stopped by --exit-duration-minutes 1e-06: 4 of 7 steps" in capsys.readouterr().out
    trainer = one_process(tmp_path, train_iters=7, load=str(tmp_path), exit_interval=7)
    trainer.run()
    assert "done: 7 steps" in capsys.readouterr().out
    one_process(tmp_path / "straight", train_iters=7).run()
    assert losses_of(tmp_path) == losses_of(tmp_path / "straight")


# ---- saves in the background


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins to write only after the weights and moments have been overwritten."""
    trainer = one_process(tmp_path, async_save=True, train_iters=100)
    write = save_module.write_tensors
    for number in range(1, 3):
        trainer.train_step(next(trainer.batches))
        ready = threading.Event()
        monkeypatch.setattr(save_module, "write_tensors", lambda *given: (ready.wait(patience(10)), write(*given))[1])  # noqa: B023
        entries = list(trainer.state().entries())
        expected = {(kind, spec.name): tensor.clone() for kind, spec, tensor, _ in entries}
        trainer.saving.save(trainer.state())
        with torch.no_grad():
            for _, _, tensor, _ in entries:
                tensor.fill_(7.0)
        ready.set()
        trainer.save()
        with torch.no_grad():
            for kind, spec, tensor, _ in entries:
                tensor.copy_(expected[kind, spec.name])
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            found = stored(tmp_path / f"step_{number:08d}")[kind]
            assert found.keys() == {name for k, name in expected if k == kind}
            assert all(torch.equal(value, expected[kind, name]) for name, value in found.items())


def full_disk(rank: int, world_size: int, directory: str, options: dict[str, Any]) -> tuple[int, str | None, float]:
    """A run on whose third save rank 1 has no room for shards; steps, how it ended, and seconds."""
    config = make_config((1, 1, 2), directory, train_iters=6, save_interval=1, keep_last=2, num_layers=2, **options)
    mesh = build_mesh(config.parallel)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    samples: Any = RaggedData(BATCH * 6)
    for at, limit in ((2, (100, limits[1])), (4, limits)) if rank == 1 else ():
        samples = Calling(samples, at * BATCH + 2, partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit))
    trainer = make_trainer(config, mesh, samples)
    start, ended = time.monotonic(), None
    try:
        trainer.run()
    except StorageError as error:
        ended = str(error)
    return trainer.step, ended, time.monotonic() - start


@pytest.mark.parametrize("async_save", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_stops_all_ranks_or_none_as_the_run_is_set(tmp_path: Path, async_save: bool) -> None:
    told = run_distributed(full_disk, 2, str(tmp_path / "stop"), {"async_save": async_save})
    assert told[0][:2] == told[1][:2]
    steps, ended, _ = told[0]
    assert 3 <= steps <= 5
    assert ended is not None
    assert "File too large" in ended
    newest = published(tmp_path / "stop")[0]
    assert step_of(newest) in ((1, 2) if async_save else (2,))  # the second may still have been under way
    assert whole(newest, ALONE) is None
    assert not list((tmp_path / "stop").glob("*.tmp-*"))
    told = run_distributed(full_disk, 2, str(tmp_path / "warn"), {"async_save": async_save, "on_save_error": "warn"})
    assert [t[:2] for t in told] == [(6, None)] * 2
    assert step_of(published(tmp_path / "warn")[0]) == 6
    assert all(whole(path, ALONE) is None for path in published(tmp_path / "warn"))
    assert max(t[2] for t in told) < patience(30)


def test_the_last_save_is_never_only_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(28, "No space left on device", "there")
    monkeypatch.setattr(save_module, "write_tensors", Mock(side_effect=error))
    for async_save in (False, True):
        trainer = one_process(tmp_path, train_iters=2, save_interval=1, on_save_error="warn", async_save=async_save)
        with pytest.raises(StorageError, match="there: No space left on device"):
            trainer.run()
        assert trainer.step == 2


def test_a_pointer_that_cannot_be_written_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage.os, "replace", Mock(side_effect=OSError(122, "Disk quota exceeded", "latest")))
    trainer = one_process(tmp_path, train_iters=2, save_interval=1, keep_last=1)
    trainer.run()
    assert "warning: latest: Disk quota exceeded; the checkpoint itself is whole" in capsys.readouterr().out
    assert [step_of(path) for path in published(tmp_path)] == [2, 1]  # nothing is deleted on a disk like that


def in_a_streak(
    rank: int, world_size: int, layout: tuple[int, int, int], directory: str, bad: range, options: dict[str, Any]
) -> tuple[str, str | None, list[str]]:
    """A run that saves every step and whose losses are NaN in some: how it ends, what goes on, and what it says."""
    options = {"train_iters": 7, "save_interval": 1, "keep_last": 1, "num_layers": layout[1], **options}
    config, heard = make_config(layout, directory, **options), Heard()
    trainer = make_trainer(config, build_mesh(config.parallel), callbacks=[heard])
    poisoned(trainer, lambda step: math.nan if step + 1 in bad else 1.0)
    try:
        trainer.run()
        ended = "done"
    except TrainingDiverged as error:
        ended = str(error)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, load="auto"))
    try:
        choice = choose_checkpoint(config, trainer.mesh.world).directory
    except CheckpointError as error:
        return ended, str(error), heard.said
    return ended, None if choice is None else choice.name, heard.said


FP16 = {"precision": "fp16", "initial_loss_scale": 2.0**30, "hysteresis": 1}
STREAKS: list[Any] = [
    # layout, steps that are bad, options, how the run ends, what goes on, what it says
    ((1, 1, 2), range(4, 9), {"max_bad_steps": 3, "async_save": True}, "for 3 .*before step 3",
     "none of the 1 checkpoints .*step_00000003, whose weights may be of no use",
     "now passes over {}/step_00000003, whose weights may be of no use: the steps with these weights were skipped"),
    ((1, 1, 1), range(6, 9), {"keep_last": 2}, "2 steps since the last update were not finite", "step_00000004",
     "passes over {}/step_00000007"),
    ((1, 1, 1), range(5, 9), {"exit_interval": 6}, "done", "step_00000004", "passes over {}/step_00000006"),
    ((1, 1, 1), range(7, 9), {}, "done", "step_00000006", "passes over {}/step_00000007"),
    ((1, 1, 1), range(1, 8), {},
     r"each of 7 .* the loss .*is not finite \(.*: use --init-method-std 0.02 or .*, or look", None, "skipped"),
    ((1, 1, 1), range(1, 8), {"max_bad_steps": 2},
     r"for 2 .*-steps 2\), and no step has updated the weights: use --init-method-std 0.02 or .*(?<!lr), or look at",
     None, "skipped"),
    ((1, 1, 1), range(0), FP16 | {"train_iters": 3}, "each of 3 .*loss-scale initial=1.34218e.08", None, "overflowed"),
    ((1, 1, 2), range(0), FP16 | {"exit_interval": 3}, "done", "step_00000003", "overflowed"),
    ((1, 1, 1), range(1, 8), {"exit_interval": 3}, "done", "none of the 1 checkpoints .* nevertheless", "stopped"),
    ((1, 1, 1), range(0), {"train_iters": 3, "init_method_std": 1e30},
     "each of 3 .*the model is wrong from the start; use --init-method-std 0.02(?!.*--train-iters)", None, "skipped"),
    ((1, 1, 1), range(0), {"lr": 1e20, "clip_grad": 0.0, "max_bad_steps": 2},
     r"for 2 .*or --clip-grad \(likely .*largest weight is 2.6e\+19",
     None, "not saved: the largest weight is 2.6e+19"),
]  # fmt: skip


SLOW_STREAKS: list[Any] = [
    ((1, 2, 2), range(4, 9), {"max_bad_steps": 3, "zero_stage": 1, "keep_last": 2},
     "for 3 .*before step 3, .* largest weight is 1,", "step_00000002",
     "step 4/7 | the save waits for a step that updates the weights"),
    ((2, 1, 2), range(4, 6), {"zero_stage": 3, "async_save": True}, "done", "step_00000007", "saved {}/step_00000006"),
]  # fmt: skip


@pytest.mark.parametrize("streak", [*STREAKS, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_STREAKS)])
def test_what_goes_on_after_skipped_steps_is_sound(streak: Any, tmp_path: Path) -> None:
    layout, bad, options, ending, continued, said = streak
    ranks, arguments = math.prod(layout), (layout, str(tmp_path), bad, options)
    results = run_distributed(in_a_streak, ranks, *arguments) if ranks > 1 else [in_a_streak(0, 1, *arguments)]
    for ended, taken, _ in results:
        assert re.search(ending, ended)
        assert taken is continued is None or (taken and continued and re.search(continued, taken))
    assert said.format(tmp_path) in "\n".join(results[0][2])


def poisoned(trainer: Trainer, bad: Callable[[int], float]) -> Trainer:
    """The trainer, whose losses are multiplied by what `bad` says of the steps before, also where one is computed again
    for its diagnosis."""
    sound, compute, before = trainer.task.loss, trainer.train_steps.compute_gradients, [0]

    def compute_gradients(microbatches: Any) -> None:
        before[0] = trainer.step
        compute(microbatches)

    def loss(output: Tensor, microbatch: Any) -> Tensor:
        return sound(output, microbatch) * bad(before[0])

    trainer.train_steps.compute_gradients = compute_gradients  # type: ignore[method-assign]
    trainer.task.loss = loss  # type: ignore[method-assign]
    return trainer


def names_in_doubt(directory: Path) -> set[str]:
    return {path.name for path in published(directory) if read_manifest(path).is_in_doubt}


def test_every_copy_of_weights_without_a_finite_step_is_in_doubt_after_a_resume_too(tmp_path: Path) -> None:
    trainer = one_process(tmp_path, train_iters=3, save_interval=1)
    trainer.run()
    trainer.saving.save_again(trainer.state())  # as a rollback does
    resumed = {"load": str(tmp_path / "step_00000003.2"), "train_iters": 9, "max_bad_steps": 2}
    with pytest.raises(TrainingDiverged, match="for 2 steps in a row"):
        poisoned(one_process(tmp_path, **resumed), lambda step: math.nan).run()
    assert names_in_doubt(tmp_path) == {"step_00000003", "step_00000003.2"}
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    elsewhere = one_process(tmp_path / "other", **resumed | {"load": str(tmp_path / "step_00000002")})
    with pytest.raises(TrainingDiverged):
        poisoned(elsewhere, lambda step: math.nan).run()
    assert names_in_doubt(tmp_path) == {"step_00000003", "step_00000003.2"}, "another run's"


SKIPS: dict[str, Any] = {"on_spike": "skip", "spike_window": 4}


@pytest.mark.parametrize(
    ("others", "options"),
    [({9: 1e4}, SKIPS), ({6: 1e12}, {"precision": "fp16"})],
    ids=["a spike between", "an overflow before"],
)
def test_another_skipped_step_does_not_hide_those_that_were_not_finite(
    others: dict[int, float], options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = one_process(tmp_path, train_iters=12, save_interval=1, **options)
    with pytest.raises(TrainingDiverged, match="5 steps since the last update were not finite") as ended:
        poisoned(trainer, lambda step: others.get(step, math.nan if step > 5 else 1.0)).run()
    assert names_in_doubt(tmp_path) == {"step_00000006", "step_00000012"}
    assert "had diverged already" not in str(ended.value), "a spike is no loss of these weights"


def test_a_rollback_forgets_the_steps_that_it_undoes(tmp_path: Path) -> None:
    options = {"on_spike": "rollback", "spike_window": 4, "train_iters": 20, "save_interval": 1, "max_bad_steps": 2}
    trainer = one_process(tmp_path, RaggedData(60 * BATCH), **options)

    def bad(step: int) -> float:
        return math.nan if trainer.rollbacks.done else {7: math.nan, 8: 1e4}.get(step, 1.0)

    with pytest.raises(TrainingDiverged, match="from a checkpoint before step 7, the last that"):
        poisoned(trainer, bad).run()
    assert trainer.update.skipped_in_a_row == len(trainer.train_steps.not_finite) == 2
    assert names_in_doubt(tmp_path) == {"step_00000007", "step_00000007.2"}


def nan_after(steps: int) -> Callable[[int], float]:
    return lambda step: math.nan if step >= steps else 1.0


def test_a_loaded_checkpoint_is_of_the_run_however_it_is_spelled_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins to count updates at 0, and its checkpoint has had 3."""
    one_process(tmp_path, train_iters=3, save_interval=1).run()
    monkeypatch.chdir(tmp_path)
    resumed = {"load": f"../{tmp_path.name}/step_00000003", "load_optim": False, "train_iters": 9, "max_bad_steps": 2}
    with pytest.raises(TrainingDiverged):
        poisoned(one_process(tmp_path, **resumed), nan_after(3)).run()
    assert names_in_doubt(tmp_path) == {"step_00000003"}


@pytest.mark.parametrize("failing", ["step_00000003/manifest.json", "latest"])
def test_what_cannot_be_marked_is_told_beside_what_is(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, replace = one_process(tmp_path, train_iters=9, max_bad_steps=2), os.replace
    for _ in range(3):
        trainer.train_step(next(trainer.batches))
        trainer.save()
    trainer.saving.save_again(trainer.state())

    def fail(source: Path, target: Path) -> None:
        if target == tmp_path / failing:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(storage.os, "replace", fail)
    with pytest.raises(TrainingDiverged):
        poisoned(trainer, nan_after(3)).run()
    assert names_in_doubt(tmp_path) == {"step_00000003", "step_00000003.2"} - {Path(failing).parent.name}
    said = capsys.readouterr().out
    assert f"now passes over {tmp_path}/step_00000003.2" in said
    assert f"{tmp_path / failing}: No space left on device" in said
    is_named = f"still takes {tmp_path}/step_00000003, whose weights may be of no use" in said
    assert is_named == (failing != "latest")
    assert (tmp_path / "latest").read_text() == ("step_00000003.2\n" if failing == "latest" else "step_00000002\n")


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        pytest.param(SKIPS, lambda step: 1e4 if step > 6 else 1.0, id="spikes"),
        *(
            pytest.param({"precision": "fp16", **scale}, lambda step: 1e12 if step > 6 else 1.0, marks=pytest.mark.slow)
            for scale in ({}, {"loss_scale": 1024.0})
        ),
    ],
)
def test_steps_that_are_skipped_for_another_reason_leave_the_last_checkpoint_alone(
    options: dict[str, Any], bad: Callable[[int], float], tmp_path: Path
) -> None:
    trainer = poisoned(one_process(tmp_path, train_iters=9, save_interval=1, **options), bad)
    trainer.run()
    assert trainer.update.skipped_in_a_row >= 2
    assert names_in_doubt(tmp_path) <= {"step_00000009"}


# The second step is not finite; the weights of the first are large, but may be what somebody wants.
DIVERGING = {"lr": 1e11, "clip_grad": 0.0, "max_bad_steps": 1, "save_interval": 1, "async_save": True}


# Set where a run of these tests fails for a reason of its own.
FAILS = threading.Event()


def slowly(
    path: Location, tensors: Mapping[str, Tensor], on_written: Callable[[int], None] = lambda count: None
) -> FileEntry:
    """Writes the first shard while the next step fails."""
    FAILS.wait(scaled(1.0))
    FAILS.set()
    return storage.write_tensors(path, tensors, on_written)


def diverge(rank: int, world_size: int, directory: str) -> str:
    """A run whose second step diverges while rank 1 still writes the checkpoint of the first; how it ends."""
    config = make_config((1, 1, world_size), directory, train_iters=6, num_layers=2, **DIVERGING)
    if rank == world_size - 1:
        save_module.write_tensors = slowly
    trainer = make_trainer(config, build_mesh(config.parallel))
    with pytest.raises(TrainingStopped) as caught:
        trainer.run()
    return str(caught.value)


def test_a_save_under_way_is_finished_where_the_run_stops_on_all_ranks(tmp_path: Path) -> None:
    told = run_distributed(diverge, 2, str(tmp_path))
    assert told[0] == told[1]
    newest = published(tmp_path)[0]
    assert step_of(newest) == 1
    assert whole(newest, ALONE) is None
    assert not list(tmp_path.glob("*.tmp-*"))


def fail_elsewhere(rank: int, world_size: int, directory: str) -> None:
    """A failure of this rank's own while a save is under way: no other rank is asked any more."""
    options = {"train_iters": 6, "save_interval": 1, "async_save": True, "num_layers": 2}
    config = make_config((1, 1, world_size), directory, **options)
    mesh = build_mesh(config.parallel)

    def fail() -> None:
        save_module.all_gather_objects = lambda *_: pytest.fail("another rank is asked")
        FAILS.set()
        raise DataError("sample 16 cannot be read")

    samples = Calling(RaggedData(BATCH * 6), BATCH + 2 * rank, fail)
    trainer = make_trainer(config, mesh, samples)
    save_module.write_tensors = slowly
    with pytest.raises(DataError, match="sample 16"):
        trainer.run()


def test_a_save_under_way_is_given_up_where_one_rank_fails(tmp_path: Path) -> None:
    run_distributed(fail_elsewhere, 2, str(tmp_path))
    assert published(tmp_path) == []
    assert not list(tmp_path.glob("*.tmp-*"))


TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of before are there again after a test."""
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("signals", "step", "stop"),
    [([0, 0, 0], 3, None), ([0, INT, 0], 3, "SIGINT"), ([INT, 0, USR2], 3, "SIGUSR2"), ([TERM, INT, 0], 3, "SIGTERM"),
     ([INT, 0, TERM], 4, "--exit-interval 2")],
)  # fmt: skip
def test_the_weightiest_reason_of_any_rank_is_the_decision(
    signals: list[int], step: int, stop: str | None, handlers: None
) -> None:
    requests = [StopRequests(CheckpointConfig(exit_interval=2)) for _ in signals]
    for one, number in zip(requests, signals, strict=True):
        before = signal.getsignal(USR2)
        with one:
            if number:
                signal.raise_signal(number)
        assert number or signal.getsignal(USR2) is before  # signals do again what they did
    votes = [one.votes(step, waiting=one is requests[1]) for one in requests]
    summed = [sum(column) for column in zip(*votes, strict=True)]
    assert requests[0].decision(summed) == Decision(stop=stop, some_rank_waits=True)
    assert requests[0].decision([*summed[:-2], 0, 0]) == Decision(stop=stop)


WHILE_TORCH_LOADS = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)
            raise SystemExit(7)

sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("program", ["pretrain_gpt.py", "pretrain_bert.py"])
def test_a_request_to_save_while_torch_loads_does_not_kill_the_rank(tmp_path: Path, program: str) -> None:
    flags = ["--mock-data", "--vocab-size", "64", "--train-iters", "2", "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", WHILE_TORCH_LOADS, str(ROOT / program), *flags, "--hang-timeout-minutes", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


# ---- at the start ----------------------------------------------------------------------------------------------------


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.parameters.items()}


def moments(trainer: Trainer) -> float:
    states = trainer.update.optimizer.state.values()
    return sum(float(state["exp_avg"].abs().sum()) for state in states if "exp_avg" in state)


def test_a_run_starts_from_weights_or_without_the_state_of_the_optimizer(tmp_path: Path) -> None:
    there, changes = str(tmp_path / "source"), {"train_iters": 4, "pretrained_checkpoint": str(tmp_path / "source")}
    source = one_process(tmp_path / "source", train_iters=4)
    source.run()
    final = weights(source)

    fine_tuned = one_process(tmp_path / "tuned", **changes, seed=7)
    assert (fine_tuned.step, fine_tuned.consumed_samples, fine_tuned.loaded, moments(fine_tuned)) == (0, 0, None, 0)
    assert all(torch.equal(value, final[name]) for name, value in weights(fine_tuned).items())
    fine_tuned.train_step(next(fine_tuned.batches))
    fine_tuned.save()

    continued = one_process(tmp_path / "tuned", **changes, load=str(tmp_path / "tuned"), seed=7)
    assert continued.step == 1  # its own checkpoint comes first
    assert moments(continued) == moments(fine_tuned) > 0

    anew = one_process(tmp_path / "anew", load=there, load_optim=False, train_iters=6)
    assert (anew.step, anew.consumed_samples, moments(anew)) == (4, 32, 0)
    assert anew.update.updates == 0
    assert all(torch.equal(value, final[name]) for name, value in weights(anew).items())


def test_a_checkpoint_has_the_shape_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shape: dict[str, Any] = {"ffn_hidden_size": 96, "position_embedding_type": "rope", "rotary_base": 500.0}
    one_process(tmp_path, **shape).save()
    monkeypatch.setattr(cli, "GRACE_SECONDS", 0.0)

    def parse(*flags: str) -> Config:
        given = ["--mock-data", "--train-iters", "9", *flags]
        return parse_config(given, prog="x", description="", kind=Config, continued=settings_to_continue)

    for flags in (["--load", str(tmp_path)], ["--pretrained-checkpoint", str(tmp_path)], ["--use-checkpoint-args"]):
        start = flags if flags[-1] == str(tmp_path) else ["--load", str(tmp_path), *flags]
        model = parse(*start).model
        assert (model.num_layers, model.hidden_size, model.inner_size, model.vocab_size) == (2, 32, 96, 131)
        assert (model.position_embedding_type, model.rotary_base) == ("rope", 500.0)
    assert "--num-layers 2 instead of 12" in capfd.readouterr().err
    assert parse("--load", str(tmp_path), "--num-layers", "3").model.num_layers == 3  # which check_load refuses
    tuned = parse("--load", str(tmp_path), "--finetune")
    assert (tuned.checkpoint.load, tuned.start.pretrained_checkpoint) == (None, str(tmp_path))


# ---- a batch-size ramp

RAMP: dict[str, Any] = {"rampup_batch_size": ("4", "4", "24"), "global_batch_size": 16, "train_iters": 7}
RAMP["lr_warmup_iters"] = 2
SIZES = [4, 4, 8, 12, 16, 16, 16]


def test_a_resumed_ramp_is_the_uninterrupted_one(tmp_path: Path) -> None:
    for name, stop, load in (("whole", 7, None), ("parts", 3, None), ("parts", 7, str(tmp_path / "parts"))):
        trainer = one_process(tmp_path / name, **RAMP, exit_interval=stop, load=load)
        trainer.run()
        assert trainer.consumed_samples == sum(SIZES[:stop])
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
