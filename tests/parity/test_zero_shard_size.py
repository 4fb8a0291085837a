"""--zero-shard-size: ranks that shard in groups keep what the formulas say. How they train are rows of tests/matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacore.config import validate
from megacore.parallel.mesh import build_mesh
from megacore.plan.state import state_bytes
from megacore.zero.memory import measured_bytes
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer


def state(rank: int, ranks: int, directory: str, stage: int) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a rank holds after a step, and what is planned, by kind."""
    config = make_config((1, 1, 4), directory, num_layers=2, zero_stage=stage, zero_shard_size=2)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    parameters = sum(p.numel() for p in trainer.model.data_parallel.parameters)
    measured = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
    planned = state_bytes(parameters, config)
    trainer.model.data_parallel.ready()
    return {kind: measured[kind] for kind in planned}, dict(planned)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 3))])
def test_ranks_hold_what_is_planned(stage: int, tmp_path: Path) -> None:
    for measured, planned in run_distributed(state, 4, str(tmp_path), stage):
        assert measured == pytest.approx(planned, rel=0.05)


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
