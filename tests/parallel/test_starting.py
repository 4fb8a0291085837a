"""What a run takes from a checkpoint: its weights alone, all but the optimizer's state, or the shape of its model;
and a resume within a batch-size ramp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.check import settings_to_continue
from megacore.config import Config, cli
from megacore.config.cli import parse_config
from megacore.parallel.mesh import build_mesh
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

SHAPE: dict[str, Any] = {"num_layers": 2, "train_iters": 4}


def begin(output: Path | str, **changes: Any) -> Trainer:
    config = make_config((1, 1, 1), output, **{**SHAPE, **changes})
    return make_trainer(config, build_mesh(config.parallel))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.parameters.items()}


def moments(trainer: Trainer) -> float:
    states = trainer.update.optimizer.state.values()
    return sum(float(state["exp_avg"].abs().sum()) for state in states if "exp_avg" in state)


def starts(rank: int, world: int, folder: str) -> None:
    source = begin(f"{folder}/source")
    source.run()
    there, final = f"{folder}/source", weights(source)

    fine_tuned = begin(f"{folder}/tuned", pretrained_checkpoint=there, load=None, seed=7)
    assert (fine_tuned.step, fine_tuned.consumed_samples, fine_tuned.loaded, moments(fine_tuned)) == (0, 0, None, 0)
    assert all(torch.equal(value, final[name]) for name, value in weights(fine_tuned).items())
    fine_tuned.train_step(next(fine_tuned.batches))
    with fine_tuned.saving:
        fine_tuned.save()

    continued = begin(f"{folder}/tuned", pretrained_checkpoint=there, load=f"{folder}/tuned", seed=7)
    assert continued.step == 1  # its own checkpoint comes first
    assert moments(continued) == moments(fine_tuned) > 0

    anew = begin(f"{folder}/anew", load=there, load_optim=False, train_iters=6)
    assert (anew.step, anew.consumed_samples, moments(anew)) == (4, 32, 0)
    assert anew.update.updates == 0
    assert all(torch.equal(value, final[name]) for name, value in weights(anew).items())


def test_a_run_starts_from_weights_or_without_the_state_of_the_optimizer(tmp_path: Path) -> None:
    run_distributed(starts, 1, str(tmp_path))


def saved(rank: int, world: int, folder: str) -> None:
    begin(folder, ffn_hidden_size=96, position_embedding_type="rope", rotary_base=500.0, train_iters=1).run()


def test_a_checkpoint_has_the_shape_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_distributed(saved, 1, str(tmp_path))
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
RAMP |= {"lr_warmup_iters": 2, "num_layers": 3}
SIZES = [4, 4, 8, 12, 16, 16, 16]


def ramped(rank: int, world: int, output: str, stop: int, load: str | None) -> list[tuple[float, float, int]]:
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
    (whole,) = run_distributed(ramped, 1, str(tmp_path / "whole"), 7, None)
    (first,) = run_distributed(ramped, 1, str(tmp_path / "parts"), 3, None)
    (second,) = run_distributed(ramped, 1, str(tmp_path / "parts"), 7, str(tmp_path / "parts"))
    assert first + second == whole
    assert [samples for *_, samples in whole] == [sum(SIZES[: step + 1]) for step in range(7)]
