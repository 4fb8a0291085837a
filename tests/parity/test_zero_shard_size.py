"""--zero-shard-size: ranks that shard in groups train as torch.optim.AdamW does in one process, keep what the formulas
say, and their checkpoints fit every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import validate
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.plan.state import state_bytes
from megacore.train.replicas import ReplicaCheck
from megacore.train.trainer import Trainer
from megacore.zero.memory import measured_bytes
from tests.distributed import run_distributed
from tests.parity.reference import plain_torch
from tests.parity.runs import Layout, Outcome, agree, make_config, make_trainer, outcome_of

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "train_iters": 3,
    "lr_warmup_iters": 2,
    "adam_eps": 1e-4,
    "micro_batch_size": 1,
    "global_batch_size": 16,
}
Case = tuple[Layout, dict[str, Any]]
CASES: list[Case] = [((1, 1, 4), {"zero_stage": stage}) for stage in (1, 2, 3)]
MORE: list[Case] = [
    ((1, 1, 4), {"zero_stage": 2, "overlap_grad_reduce": False, "overlap_param_gather": False}),
    ((1, 1, 4), {"zero_stage": 3, "offload_optimizer": True, "clip_grad": 100.0}),
    ((1, 1, 2), {"cp": 2, "zero_stage": 2}),
]


def trainer_of(layout: Layout, directory: str, **changes: Any) -> Trainer:
    config = make_config(layout, directory, **{**SMALL, **changes})
    return make_trainer(config, build_mesh(config.parallel))


def outcomes(rank: int, ranks: int, directory: str, cases: list[Case]) -> list[Outcome]:
    found = []
    for layout, changes in cases:
        trainer = trainer_of(layout, directory, zero_shard_size=2, **changes)
        found.append(outcome_of(trainer, moments=True))
        require_memory(trainer)
        ReplicaCheck(trainer.model, trainer.update.optimizer, trainer.mesh, interval=3).after_step(3)
    return found


def require_memory(trainer: Trainer) -> None:
    parameters = sum(p.numel() for p in trainer.model.data_parallel.parameters)
    measured = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
    for kind, expected in state_bytes(parameters, trainer.config).items():
        assert measured[kind] == pytest.approx(expected, rel=0.05), kind


def require_as_one_process(cases: list[Case], directory: Path) -> None:
    plain = {clip: plain_torch(directory, **SMALL, clip_grad=clip) for clip in (0.5, 100.0)}  # 100: never
    found = run_distributed(outcomes, 4, str(directory), cases, timeout=120)[0]
    for (layout, changes), outcome in zip(cases, found, strict=True):
        expected = plain[changes.get("clip_grad", 0.5)]
        agree(outcome, expected)
        for name, value in expected.final.items():
            torch.testing.assert_close(outcome.final[name], value, rtol=0, atol=1e-6, msg=f"{layout} {changes} {name}")


def test_stage_2_is_torchs_adamw(tmp_path: Path) -> None:
    require_as_one_process([CASES[1]], tmp_path)


@pytest.mark.slow
def test_the_other_stages_are_torchs_adamw(tmp_path: Path) -> None:
    require_as_one_process([CASES[0], CASES[2]], tmp_path)


@pytest.mark.slow
def test_overlap_offload_and_context_parallelism(tmp_path: Path) -> None:
    require_as_one_process(MORE, tmp_path)


def losses_of(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(steps)]


def saved(rank: int, ranks: int, directory: str) -> list[float]:
    trainer = trainer_of((1, 1, 4), directory, zero_stage=3, zero_shard_size=2)
    losses_of(trainer, 1)
    trainer.save()
    return losses_of(trainer, 2)


def resumed(rank: int, ranks: int, directory: str, changes: dict[str, Any]) -> list[float]:
    return losses_of(trainer_of((1, 1, 4), directory, load=directory, **changes), 2)


@pytest.mark.slow
def test_a_checkpoint_continues_with_and_without(tmp_path: Path) -> None:
    expected = run_distributed(saved, 4, str(tmp_path), timeout=60)[0]
    for changes in (
        {"zero_stage": 3, "zero_shard_size": 2},
        {"zero_stage": 2},
        {"zero_stage": 1, "zero_shard_size": 4},
    ):
        found = run_distributed(resumed, 4, str(tmp_path), changes, timeout=60)[0]
        assert found == pytest.approx(expected, rel=1e-6)
    alone = make_config((1, 1, 1), tmp_path, load=str(tmp_path), **SMALL)
    trainer = make_trainer(alone, Mesh(device=torch.device("cpu"), world=ALONE))
    assert losses_of(trainer, 2) == pytest.approx(expected, rel=1e-6)


def test_refusals(tmp_path: Path) -> None:
    def problems(**changes: Any) -> list[str]:
        return validate(make_config((1, 1, 4), tmp_path, micro_batch_size=1, **changes), 4)

    assert problems(zero_stage=1, zero_shard_size=3) == [
        "--zero-shard-size 3 must divide the number of --dp x --cp ranks, 4: use 2 or 4"
    ]
    assert problems(zero_shard_size=2) == [
        "--zero-shard-size 2 has no effect with --zero-stage 0: leave it out, or use --zero-stage 1, 2 or 3"
    ]
    found = problems(zero_stage=1, zero_shard_size=2, num_experts=4, moe_ffn_hidden_size=16)
    assert any(problem.startswith("--zero-shard-size 2 is not possible with --num-experts 4") for problem in found)
