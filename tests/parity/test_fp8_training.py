"""--fp8 in training: which layers leave it, on every rank and after a resume; and what it learns beside bf16."""

from __future__ import annotations

import contextlib
import io
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.ops.fp8 import RECIPES, Quantised, Tile, quantise
from megacore.parallel.fp8 import fp8_products
from megacore.parallel.mesh import build_mesh
from megacore.train.fp8_errors import Fp8Errors
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.matrix.runner import fp8_tiles
from tests.parity.runs import make_config, make_trainer, trainer_of

LAYERS = [
    f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention.output", "attention.qkv", "mlp.down", "mlp.up")
]
STEPS = 3


def hook_of(trainer: Trainer) -> Fp8Errors:
    hook = trainer.train_steps.hook(Fp8Errors)
    assert hook is not None
    return hook


def in_sixteen_bits(trainer: Trainer) -> list[str]:
    """The layers of this rank that are."""
    layers = [one for chunk in trainer.model.chunks for one in fp8_products(chunk)]
    return sorted(one.name for one in layers if one.in_sixteen_bits)


def leave(rank: int, ranks: int, directory: str, budget: float, load: str | None) -> dict[str, Any]:
    """One step on two stages, and a checkpoint; or only what is loaded."""
    changes = {"num_layers": 2, "train_iters": STEPS, "precision": "bf16", "fp8": "rowwise", "fp8_budget": budget}
    trainer, said = trainer_of((1, ranks, 1), directory, **changes, load=load), io.StringIO()
    if load is None:
        with contextlib.redirect_stderr(said):
            trainer.train_step(next(trainer.batches))
        trainer.save()
        trainer.saving.finish()
    hook, names = hook_of(trainer), in_sixteen_bits(trainer)
    found = {"errors": hook.errors, "left": hook.left, "16 bits": names, "figures": hook.figures()}
    return found | {"said": said.getvalue()}


def test_a_layer_above_the_budget_leaves_fp8_everywhere(tmp_path: Path) -> None:
    every, _ = run_distributed(leave, 2, str(tmp_path / "1"), 0.5, None)
    errors: dict[str, float] = every["errors"]
    assert sorted(errors) == LAYERS and not every["left"] and every["16 bits"] == []
    assert all(0.02 < error < 0.06 for error in errors.values())
    assert every["figures"] == {"train/fp8_largest_error": max(errors.values()), "train/fp8_layers_left": 0}
    budget = statistics.median(errors.values())
    above = sorted(name for name, error in errors.items() if error > budget)
    first, second = run_distributed(leave, 2, str(tmp_path / "2"), budget, None)
    assert sorted(first["left"]) == above and first["left"] == second["left"]
    assert sorted(first["16 bits"] + second["16 bits"]) == above and first["16 bits"] and second["16 bits"]
    assert all(first["said"].count(f"step 1: {name}: the error of its ") == (name in above) for name in LAYERS)
    assert second["said"] == "", "the first rank says it"
    (again,) = run_distributed(leave, 1, str(tmp_path / "3"), budget, str(tmp_path / "2"))
    assert again["left"] == first["left"] and again["16 bits"] == above


def test_a_weight_is_quantised_once_a_step(tmp_path: Path) -> None:
    """For each of its two products, except on ZeRO stage 3, which has no memory for it; with the same bits."""
    changes = {"num_layers": 2, "train_iters": STEPS, "precision": "bf16", "fp8": "blockwise", "clip_grad": 0.0}
    weights: list[torch.Size] = []

    def counted(x: Tensor, form: torch.dtype, tile: Tile) -> Quantised:
        weights.extend([x.shape] if tile == RECIPES["blockwise"].weights else [])
        return quantise(x, form, tile)

    def numbers(stage: int, times: int) -> list[float]:
        trainer, found = trainer_of((1, 1, 1), tmp_path, **changes, zero_stage=stage), list[float]()
        for _ in range(STEPS):
            weights.clear()
            microbatches = next(trainer.batches)
            found.append(float(trainer.train_step(microbatches).loss))
            assert len(weights) == 2 * len(LAYERS) * times, "in training"
            weights.clear()
            found.append(float(trainer.train_steps.evaluate([microbatches]).means))
            assert len(weights) == len(LAYERS) * len(microbatches) == 4 * len(LAYERS), "in evaluation"
        return found

    with fp8_tiles(8), mock.patch("megacore.parallel.fp8.quantise", counted):
        assert numbers(2, 1) == numbers(3, 4)


class Sums:
    """Sequences that a small model learns: each number follows from the two before it."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = list(np.random.default_rng(index).integers(0, 17, 2))
        while len(window) < 17:
            window.append((window[-1] + window[-2]) % 17)
        tokens = np.array(window, np.int64)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(16, np.float32)}


def final_loss(directory: Path, **changes: Any) -> tuple[float, float]:
    """The loss of the first step, and the mean of the last twenty."""
    fixed = {"num_layers": 2, "hidden_size": 64, "train_iters": 150, "precision": "bf16", "lr": 3e-3, "clip_grad": 1.0}
    config = make_config((1, 1, 1), directory, **fixed, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel), Sums())
    losses = [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(config.training.train_iters)]
    return losses[0], statistics.mean(losses[-20:])


@pytest.mark.slow
def test_it_learns_as_bf16_does(tmp_path: Path) -> None:
    """The mean over seeds differs from that of bf16 by less than seeds differ."""
    with fp8_tiles(16):
        (starts, plain), *recipes = (
            zip(*(final_loss(tmp_path, seed=seed, **changes) for seed in range(4)), strict=True)
            for changes in ({}, *({"fp8": recipe} for recipe in RECIPES))
        )
    assert max(plain) < 0.6 * min(starts), "it is meant to learn"
    for _, losses in recipes:
        assert abs(statistics.mean(losses) - statistics.mean(plain)) < max(plain) - min(plain)
