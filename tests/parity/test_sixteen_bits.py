"""Sixteen bits over a whole run: they learn as fp32 does, and the loss scale survives overflow, save and load."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megacore.data.gpt.mock import MockDataset
from megacore.parallel.mesh import build_mesh
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import BATCH, SEQUENCE, VOCAB, Layout, gather, make_config, make_trainer

STEPS = 200
SPREAD = math.log(64)  # the loss of a model that knows only how often each token occurs


def step(trainer: Trainer) -> float:
    """One step; the loss of the whole batch."""
    return float(trainer.train_step(next(trainer.batches)).loss)


def learn(rank: int, world_size: int, layout: Layout, directory: str, precision: str, stage: int) -> list[float]:
    """Losses of a run on data that can be learned: a small model and one microbatch, since there are many steps."""
    changes = {"precision": precision, "zero_stage": stage, "train_iters": STEPS, "lr": 1e-2, "init_method_std": 0.02}
    config = make_config(layout, directory, num_layers=2, micro_batch_size=BATCH // layout[2], **changes)
    mesh = build_mesh(config.parallel)
    samples = STEPS * config.training.global_batch_size
    trainer = make_trainer(config, mesh, MockDataset(VOCAB, SEQUENCE, samples, seed=3))
    return [step(trainer) for _ in range(STEPS)]


@cache
def losses(directory: Path, layout: Layout, precision: str, stage: int) -> list[float]:
    tp, pp, dp = layout
    found: list[float] = run_distributed(learn, tp * pp * dp, layout, str(directory), precision, stage, timeout=180)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout, stage", [((1, 1, 1), 0), ((1, 1, 2), 2)], ids=str)
def test_two_hundred_steps_end_where_fp32_ends(
    layout: Layout, stage: int, precision: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Within 2% of fp32's loss, at the last step and over the last ten."""
    directory = tmp_path_factory.getbasetemp()
    expected = losses(directory, (1, 1, 1), "fp32", 0)
    found = losses(directory, layout, precision, stage)
    assert sum(expected[-10:]) < 10 * 0.3 * SPREAD, "the run is meant to learn"
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)
    assert sum(found[-10:]) == pytest.approx(sum(expected[-10:]), rel=0.02)


# Loss scales after each of eight steps, of which the second, fifth and eighth overflow, with --loss-scale-window 3 and
# --hysteresis 2: the second overflow halves, and so does each later one until three good steps in a row.
OVERFLOWS = (2, 5, 8)
SCALES = [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0]

Continued = tuple[list[float], list[float], dict[str, Tensor], dict[str, float]]


def scaled_steps(
    rank: int, world_size: int, layout: Layout, directory: str, load: str | None, last: int
) -> Continued | None:
    """Steps up to `last` from the start or from a checkpoint, then a save: losses, scales, weights, counters."""
    scale = {"initial_loss_scale": 1024.0, "loss_scale_window": 3, "hysteresis": 2}
    config = make_config(layout, directory, precision="fp16", zero_stage=2, load=load, num_layers=3, **scale)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    name = "blocks.2.mlp.down.weight"
    if rank == world_size - 1 and name in trainer.parameters:
        # Only the last rank sees it; the step is counted up before this backward's update.
        trainer.parameters[name].register_hook(lambda g: g * math.inf if trainer.step + 1 in OVERFLOWS else g)
    seen, scales = [], []
    while trainer.step < last:
        seen.append(step(trainer))
        scales.append(trainer.update.scaler.scale)
    trainer.save()
    weights = gather(trainer, mesh, lambda owned: owned.master)
    return (seen, scales, weights, trainer.update.counters()) if rank == 0 else None


@pytest.mark.parametrize("layout", [(1, 2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_resumed_fp16_run_is_bitwise_the_uninterrupted_one(layout: Layout, tmp_path: Path) -> None:
    """Saved after the first overflow and one good step: half of the allowance is used, and the window is open."""

    def steps(directory: str, load: Path | None, last: int) -> Continued:
        arguments = (layout, str(tmp_path / directory), None if load is None else str(load), last)
        found: Continued = run_distributed(scaled_steps, layout[0] * layout[1] * layout[2], *arguments, timeout=180)[0]
        return found

    losses, scales, weights, counters = steps("whole", None, 8)
    assert scales == SCALES
    first_losses, first_scales, _, at_save = steps("parts", None, 3)
    assert at_save["allowance"] == 1
    assert at_save["good_steps"] == 1
    more_losses, more_scales, resumed, at_end = steps("parts", tmp_path / "parts" / "step_00000003", 8)
    assert first_losses + more_losses == losses
    assert first_scales + more_scales == scales
    assert at_end == counters
    assert counters["skipped_steps"] == len(OVERFLOWS)
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())
