"""What a rank keeps is what the formulas say, for every stage, precision and number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.parallel.mesh import build_mesh
from megacore.plan.state import state_bytes
from megacore.zero.memory import measured_bytes
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

Case = tuple[int, str]  # ZeRO stage, precision
CASES: list[Case] = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
Held = tuple[dict[str, int], dict[str, float]]  # measured, predicted


def bytes_held(rank: int, dp: int, directory: str) -> dict[Case, Held]:
    """What a rank holds after a step, for each stage and precision."""
    found: dict[Case, Held] = {}
    for stage, precision in CASES:
        changes = {"zero_stage": stage, "precision": precision, "hidden_size": 64, "micro_batch_size": 1}
        config = make_config((1, 1, dp), directory, **changes)
        trainer = make_trainer(config, build_mesh(config.parallel))
        trainer.train_step(next(trainer.batches))
        data_parallel = trainer.model.data_parallel
        parameters = sum(p.numel() for p in data_parallel.parameters)
        measured = measured_bytes(data_parallel, trainer.update.optimizer)
        found[stage, precision] = measured, state_bytes(parameters, config)
    return found


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_measured_is_predicted(dp: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    for found in run_distributed(bytes_held, dp, str(tmp_path_factory.mktemp("run")), timeout=180):
        for case, (measured, predicted) in found.items():
            for kind, expected in predicted.items():
                assert measured[kind] == pytest.approx(expected, rel=0.03), (case, kind)


MIXTURE = {"num_experts": 8, "activation": "swiglu", "disable_bias_linear": True, "hidden_size": 64, "num_layers": 2}


def held_of_mixture(rank: int, world_size: int, directory: str) -> list[Held]:
    """Logged beside the prediction: what the fullest rank holds of a mixture after a step, for each stage."""
    found = []
    for stage in range(4):
        config = make_config((1, 1, 4), directory, ep=2, zero_stage=stage, micro_batch_size=1, **MIXTURE)
        trainer = make_trainer(config, build_mesh(config.parallel))
        trainer.train_step(next(trainer.batches))
        measured = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
        found.append((measured, trainer.metrics.predicted_memory))
    return found


def test_measured_is_predicted_with_experts(tmp_path: Path) -> None:
    for of_rank in run_distributed(held_of_mixture, 4, str(tmp_path), timeout=180):
        for stage, (measured, predicted) in enumerate(of_rank):
            for kind, expected in predicted.items():
                assert measured[kind] == pytest.approx(expected, rel=0.03), (stage, kind)


@pytest.mark.parametrize("stage, expected", [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_sixteen_bits_by_hand(stage: int, expected: float) -> None:
    """The published bytes a parameter, with fp32 gradients, at eight ranks."""
    config = make_config((1, 1, 8), "output", zero_stage=stage, precision="bf16")
    assert sum(state_bytes(1, config).values()) == pytest.approx(expected)
