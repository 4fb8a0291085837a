"""--gradient-noise-interval against the formula in fp64, on every layout, and beside training without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megacore.observe.gradient_noise import GradientNoise
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity import runs
from tests.parity.runs import VOCAB, Layout, bitwise, outcome_of

Changes = dict[str, Any]
STEPS = 3


def trainer_of(layout: Layout, directory: Path | str, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": STEPS, "log_interval": 1, "micro_batch_size": 2 // layout[2]}
    return runs.trainer_of(layout, directory, **{**fixed, "gradient_noise_interval": 1, **changes})


def square_norm(trainer: Trainer, microbatches: list[Any]) -> float:
    """The squared norm of the mean gradient of microbatches, by torch's own cross-entropy; summed in fp64."""
    model, loss, count = trainer.model.chunks[0], torch.zeros(()), 0.0
    for microbatch in microbatches:
        logits: Tensor = model(microbatch.tokens)[..., :VOCAB]
        losses = F.cross_entropy(logits.flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        loss = loss + (losses * microbatch.loss_mask.flatten()).sum()
        count += float(microbatch.loss_mask.sum())
    gradients = torch.autograd.grad(loss / count, [p for p in model.parameters() if p.requires_grad])
    return sum(float(gradient.double().square().sum()) for gradient in gradients)


def averages(trainer: Trainer) -> list[float]:
    hook = trainer.train_steps.hook(GradientNoise)
    assert hook is not None
    return hook.series()["gradient_noise"]


def test_it_is_that_of_the_formula(tmp_path: Path) -> None:
    trainer, signal, noise = trainer_of((1, 1, 1), tmp_path), 0.0, 0.0
    for number in range(STEPS):
        microbatches = next(trainer.batches)
        small, large = square_norm(trainer, microbatches[:1]), square_norm(trainer, microbatches)
        signal = 0.95 * signal + 0.05 * (8 * large - 2 * small) / 6
        noise = 0.95 * noise + 0.05 * (small - large) / (1 / 2 - 1 / 8)
        trainer.train_step(microbatches)
        assert averages(trainer) == pytest.approx([signal, noise], rel=1e-4)
        if number == 1:
            trainer.save()
    again = trainer_of((1, 1, 1), tmp_path, load=str(tmp_path))
    again.run()
    assert averages(again) == averages(trainer)
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record["train/gradient_noise_scale"] == (noise / signal if min(noise, signal) > 0 else None) or (
        record["train/gradient_noise_scale"] == pytest.approx(noise / signal, rel=1e-3)
    )


def test_training_computes_the_same_bits(tmp_path: Path) -> None:
    changes: Changes = {"hidden_dropout": 0.1, "precision": "bf16"}
    first, second = (
        outcome_of(trainer_of((1, 1, 1), tmp_path, gradient_noise_interval=interval, **changes), moments=True)
        for interval in (0, 2)
    )
    bitwise(first, second)


def measured(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> list[float]:
    trainer = trainer_of(layout, directory, **changes)
    trainer.run()
    return averages(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {"sequence_parallel": True}),
        ((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 4}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
        ((1, 1, 2), {"zero_stage": 1, "offload_optimizer": True}),
        ((1, 1, 2), {"zero_stage": 3}),
        ((1, 1, 2), {"ep": 2, "zero_stage": 2, "num_experts": 4, "moe_ffn_hidden_size": 16}),
    ],
    ids=str,
)
def test_every_layout_measures_the_same(layout: Layout, changes: Changes, tmp_path: Path) -> None:
    found = run_distributed(measured, 2, str(tmp_path / "two"), layout, changes, timeout=120)
    parallel = ("sequence_parallel", "schedule", "virtual_stages", "zero_stage", "offload_optimizer", "ep")
    alone = {name: value for name, value in changes.items() if name not in parallel}
    expected = measured(0, 1, str(tmp_path / "one"), (1, 1, 1), alone)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-4)
