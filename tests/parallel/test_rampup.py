"""Training with a batch-size ramp: its rates, and a resume within the ramp."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

RAMP: dict[str, Any] = {
    "rampup_batch_size": ("4", "4", "24"),
    "global_batch_size": 16,
    "train_iters": 7,
    "lr_warmup_iters": 2,
    "num_layers": 3,
}
SIZES = [4, 4, 8, 12, 16, 16, 16]


def saved(rank: int, world: int, output: str, stop: int, load: str | None) -> list[tuple[float, float, int]]:
    """Loss, learning rate and samples so far of the steps up to `stop`, with a checkpoint of the last."""
    config = make_config((1, 1, 1), output, **RAMP, load=load)
    trainer = make_trainer(config, build_mesh(config.parallel))
    steps = []
    while trainer.step < stop:
        result = trainer.train_step(next(trainer.batches))
        steps.append((float(result.loss), result.lr, trainer.consumed_samples))
    with trainer.saving:
        trainer.save()
    return steps


def test_a_resumed_ramp_is_the_uninterrupted_one(tmp_path: Path) -> None:
    (whole,) = run_distributed(saved, 1, str(tmp_path / "whole"), 7, None)
    (first,) = run_distributed(saved, 1, str(tmp_path / "parts"), 3, None)
    (second,) = run_distributed(saved, 1, str(tmp_path / "parts"), 7, str(tmp_path / "parts"))
    assert first + second == whole
    assert [samples for *_, samples in whole] == [sum(SIZES[: step + 1]) for step in range(7)]


def test_the_momentum_of_1cycle_mirrors_its_rate(tmp_path: Path) -> None:
    """Both follow the samples: along lines, the momentum falls as much of its way as the rate rises of its."""
    changes = RAMP | {"lr_decay_style": "1cycle", "lr_cycle_style": "linear", "lr": 1.0, "min_lr": 0.0}
    config = make_config((1, 1, 1), tmp_path, **changes, lr_warmup_init=0.0)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu"), world=ALONE))
    rates, momenta = [], []
    for _ in range(config.training.train_iters):
        rates.append(trainer.train_step(next(trainer.batches)).lr)
        momenta.append(trainer.update.optimizer.momentum)
    after = [step for step, samples in enumerate(accumulate(SIZES)) if samples >= 2 * 16]  # the warm-up
    assert [momenta[step] for step in after] == pytest.approx([0.9 - 0.05 * rates[step] for step in after])


def test_a_range_test_has_a_rate_for_each_step(tmp_path: Path) -> None:
    changes = RAMP | {"lr_range_test": True, "lr_range_test_start": 1e-6, "lr": 1.0, "lr_warmup_iters": 0}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=torch.device("cpu"), world=ALONE))
    rates = [trainer.train_step(next(trainer.batches)).lr for _ in SIZES]
    assert rates == pytest.approx([10.0**power for power in range(-6, 1)])
