"""The spike guard on real runs: a poisoned range of the data is skipped, or rolled back and skipped, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.checkpoint.manifest import read_manifest
from megacore.config import SpikeConfig
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.rollback import rollbacks_of
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import BATCH, SEQUENCE, VOCAB, Layout, gather, make_config, make_trainer

STEPS, SAVE = 14, 4
LAST_SAVED = 8
POISON = range(9 * BATCH, 11 * BATCH)  # the samples of steps 10 and 11
SKIPPED = range(8 * BATCH, 11 * BATCH)  # since the checkpoint at step 8, and a batch after the spike
OPTIONS: dict[str, Any] = {"train_iters": STEPS, "log_interval": 1, "num_layers": 2, "lr": 1e-2, "hidden_size": 16}


class Text:
    """Samples of random tokens of which every next token is 7, but for a range of them, which is noise.

    Args:
        poison: samples that are noise.
        removed: samples that are not there: what follows them has moved up.
    """

    def __init__(self, poison: range = range(0), removed: range = range(0), samples: int = 40 * BATCH) -> None:
        self._poison, self._removed, self._samples = poison, removed, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        index += len(self._removed) if index >= self._removed.start and self._removed else 0
        random = np.random.default_rng(index)
        tokens = random.integers(0, VOCAB, SEQUENCE)
        labels = random.integers(0, VOCAB, SEQUENCE) if index in self._poison else np.full(SEQUENCE, 7)
        return {
            "tokens": tokens.astype(np.int64),
            "labels": labels.astype(np.int64),
            "loss_mask": np.ones(SEQUENCE, np.float32),
        }


class Losses(Callback):
    """The loss of every step that is done, and whether it was skipped; of one that is done again the last."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}
        self.skipped: list[int] = []

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.by_step[result.step] = float(result.loss)
        if result.skipped is not None:
            self.skipped.append(result.step)


def trainer_on(
    mesh: Mesh | None, layout: Layout, directory: Path, data: Text, losses: Losses, spikes: SpikeConfig, **changes: Any
) -> Trainer:
    options: dict[str, Any] = OPTIONS | {"save_interval": SAVE} | changes
    config = make_config(layout, directory, **options, **vars(spikes))
    return make_trainer(config, mesh or build_mesh(config.parallel), data, callbacks=[losses])


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    optimizer, mesh = trainer.update.optimizer, trainer.mesh
    state = gather(trainer, mesh, lambda owned: owned.master)
    for kind in ("exp_avg", "exp_avg_sq"):
        values = gather(trainer, mesh, lambda owned, kind=kind: owned.state(optimizer, kind))  # type: ignore[misc]
        state |= {f"{kind} {name}": value for name, value in values.items()}
    return state


GUARD: dict[str, Any] = {"spike_window": 4, "spike_threshold": 8.0}


def rolls_back(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    found, expected = Losses(), Losses()
    guard = SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
    run = trainer_on(None, layout, Path(directory, "run"), Text(POISON), found, guard, **changes)
    run.run()
    run.saving.finish()
    checkpoint = Path(directory, "run", f"step_{LAST_SAVED:08d}")
    clean = Text(POISON, removed=SKIPPED)
    never = trainer_on(
        run.mesh, layout, Path(directory, "never"), clean, expected, SpikeConfig(on_spike="none"),
        load=str(checkpoint), **changes,
    )  # fmt: skip
    never.run()
    assert run.step == never.step == STEPS
    assert run.consumed_samples == STEPS * BATCH + len(SKIPPED)
    assert {step: found.by_step[step] for step in expected.by_step} == expected.by_step  # bit for bit
    assert list(expected.by_step) == list(range(LAST_SAVED + 1, STEPS + 1))
    curve = [found.by_step[step] for step in range(LAST_SAVED, STEPS + 1)]
    assert curve == sorted(curve, reverse=True)  # it falls on, past the rollback
    one, other = state_of(run), state_of(never)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert found.skipped == [10]
    if rank == 0:
        _look_at_files(Path(directory, "run"))


def _look_at_files(directory: Path) -> None:
    """Files tell of the rollback; metrics.jsonl has every step once."""
    again = read_manifest(directory / f"step_{LAST_SAVED:08d}.2")
    assert (again.step, again.consumed_samples) == (LAST_SAVED, SKIPPED.stop)
    for manifest in (again, read_manifest(directory / f"step_{STEPS:08d}")):
        (rollback,) = rollbacks_of(manifest.series)
        assert (rollback.from_step, rollback.to_step) == (10, LAST_SAVED)
        assert range(rollback.first_sample, rollback.stop_sample) == SKIPPED
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["train/rollbacks"] for record in records[LAST_SAVED - 1 :]] == [0] + [1] * (STEPS - LAST_SAVED)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "rollback")
    assert (event["step"], event["to_step"]) == (10, LAST_SAVED)
    assert event["skipped_samples"] == [SKIPPED.start, SKIPPED.stop]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((1, 1, 1), {"async_save": True}),
        ((1, 2, 2), {"zero_stage": 2, "clip_grad_adaptive": True, "clip_grad_warmup_iters": 5}),
        ((2, 1, 2), {"zero_stage": 3, "precision": "bf16", "keep_last": 9}),
        pytest.param(
            (1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}, marks=pytest.mark.slow
        ),
        pytest.param((2, 2, 2), {"zero_stage": 1, "schedule": "zero-bubble"}, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {"zero_stage": 1, "precision": "fp16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_poisoned_range_is_rolled_back_and_skipped(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    """The run is bit for bit the one that never saw the range, from the checkpoint on."""
    tp, pp, dp = layout
    run_distributed(rolls_back, tp * pp * dp, layout, str(tmp_path), changes)
