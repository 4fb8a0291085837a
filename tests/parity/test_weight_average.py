"""--ema-decay against torch's AveragedModel on every layout; --eval-ema; the export.

Resumes are rows of tests/matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.parity import runs
from tests.parity.runs import Layout, gather
from tools.convert_checkpoint import main as convert

Changes = dict[str, Any]
STEPS, DECAY = 4, 0.7
LAYOUTS: dict[str, tuple[Layout, Changes]] = {
    "tp2": ((2, 1, 1), {"optimizer": "muon"}),
    "pp2": ((1, 2, 1), {}),
    "z0": ((1, 1, 2), {"optimizer": "lamb"}),
    "z1": ((1, 1, 2), {"zero_stage": 1, "precision": "bf16"}),
    "z2": ((1, 1, 2), {"zero_stage": 2, "optimizer": "muon"}),
    "z3": ((1, 1, 2), {"zero_stage": 3}),
    "offload": ((1, 1, 2), {"zero_stage": 1, "offload_optimizer": True}),
    "ep2": ((1, 1, 2), {"ep": 2, "zero_stage": 1, "num_experts": 4, "moe_ffn_hidden_size": 16}),
}


def trainer_of(layout: Layout, directory: Path | str, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": STEPS, "micro_batch_size": 1, "lr_warmup_iters": 1, "ema_decay": DECAY}
    return runs.trainer_of(layout, directory, **{**fixed, **changes})


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return gather(trainer, trainer.mesh, lambda owned: owned.master, everywhere=True)


def average(trainer: Trainer) -> dict[str, Tensor]:
    optimizer = trainer.update.optimizer
    return gather(trainer, trainer.mesh, lambda owned: owned.state(optimizer, "ema"), everywhere=True)


def require_average(trainer: Trainer) -> None:
    """Train, and compare the average with that of torch over the weights of all steps."""
    expected = weights(trainer)
    apply = get_ema_multi_avg_fn(DECAY)
    for number in range(STEPS):
        trainer.train_step(next(trainer.batches))
        apply(list(expected.values()), list(weights(trainer).values()), number)
    for name, value in average(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)
        assert not torch.equal(value, weights(trainer)[name])


def averages(rank: int, ranks: int, directory: str, names: list[str]) -> None:
    for name in names:
        layout, changes = LAYOUTS[name]
        require_average(trainer_of(layout, directory, **changes))


def test_the_average_is_that_of_torch(tmp_path: Path) -> None:
    require_average(trainer_of((1, 1, 1), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tp2", "z1"], ["pp2", "z0"], ["z2", "z3"], ["offload", "ep2"]], ids=str)
def test_the_average_is_that_of_torch_on_every_layout(names: list[str], tmp_path: Path) -> None:
    run_distributed(averages, 2, str(tmp_path), names, timeout=120)


def test_it_begins_with_the_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    before = trainer_of((1, 1, 1), tmp_path, ema_decay=None)
    before.train_step(next(before.batches))
    before.save()
    trainer = trainer_of((1, 1, 1), tmp_path, load=str(tmp_path))
    first = weights(trainer)
    trainer.train_step(next(trainer.batches))
    for name, value in average(trainer).items():
        torch.testing.assert_close(value, DECAY * first[name] + (1 - DECAY) * weights(trainer)[name])


def evaluated(trainer: Trainer) -> float:
    loss = trainer.evaluate()
    assert loss is not None
    return loss


def evaluate_and_train_on(rank: int, ranks: int, directory: str, changes: Changes) -> None:
    changes = {"eval_iters": 2, "train_iters": STEPS + 1, **changes}
    averaged, plain = (trainer_of((1, 1, ranks), directory, eval_ema=eval_ema, **changes) for eval_ema in (True, False))
    for trainer in (averaged, plain):
        for _ in range(STEPS):
            trainer.train_step(next(trainer.batches))
    before, other = weights(averaged), average(averaged)
    assert evaluated(averaged) != evaluated(plain)
    assert all(torch.equal(weights(averaged)[name], value) for name, value in before.items())
    assert all(torch.equal(average(averaged)[name], value) for name, value in other.items())
    assert averaged.train_step(next(averaged.batches)).loss == plain.train_step(next(plain.batches)).loss
    for local, same in zip(averaged.model.data_parallel.segments, plain.model.data_parallel.segments, strict=True):
        kept = local.state(averaged.update.optimizer, "ema")
        assert kept is not None
        same.master.copy_(kept)
    plain.model.data_parallel.publish()
    assert evaluated(averaged) == evaluated(plain)


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {"zero_stage": 1, "precision": "bf16"})], ids=str)
def test_an_evaluation_computes_with_the_average_and_leaves_the_weights(
    ranks: int, changes: Changes, tmp_path: Path
) -> None:
    run_distributed(evaluate_and_train_on, ranks, str(tmp_path), changes)


def test_the_converter_exports_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of((1, 1, 1), tmp_path / "run")
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    flags = [*words(input=tmp_path / "run", output=tmp_path / "hf"), "--from", "megacore", "--to", "hf"]
    assert convert([*flags, "--ema"]) == 0, capsys.readouterr().err
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    (embedding,) = (value for name, value in exported.items() if name.endswith("wte.weight"))
    assert torch.equal(embedding, average(trainer)["embedding.tokens.weight"])
    without = trainer_of((1, 1, 1), tmp_path / "without", ema_decay=None)
    without.save()
    flags = [*words(input=tmp_path / "without", output=tmp_path / "none"), "--from", "megacore", "--to", "hf", "--ema"]
    assert convert(flags) == 2
    assert "has no average of the weights" in capsys.readouterr().err
