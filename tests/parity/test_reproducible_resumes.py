"""--reproducible: a run that is resumed on another layout again and again ends in the bits of the one that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly
from tests.distributed import run_distributed
from tests.matrix.programs import LLAMA
from tests.parity.runs import Layout, Outcome, bitwise, gather, make_config, make_trainer, moments_of

Leg = tuple[Layout, dict[str, Any]]  # one part of the run
MODEL: dict[str, Any] = LLAMA | {
    "num_query_groups": 2,
    "num_layers": 2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "lr_warmup_iters": 2,
    "hidden_dropout": 0.1,
    "reproducible": True,
}
TWO_RANKS: list[Leg] = [
    ((2, 1, 1), {"sequence_parallel": True}),
    ((1, 2, 1), {"schedule": "zero-bubble"}),
    ((1, 1, 2), {"zero_stage": 3}),
    ((1, 1, 1), {"cp": 2, "zero_stage": 1}),
    ((1, 2, 1), {"schedule": "gpipe", "recompute": "full"}),
]
FOUR_RANKS: list[Leg] = [
    ((2, 2, 1), {"sequence_parallel": True, "schedule": "zero-bubble"}),
    ((1, 1, 4), {"zero_stage": 3}),
    ((2, 1, 1), {"cp": 2, "zero_stage": 2}),
    ((1, 4, 1), {"schedule": "1f1b", "recompute": "selective"}),
    ((4, 1, 1), {}),
    ((1, 1, 2), {"cp": 2, "zero_stage": 1, "recompute": "full"}),
]


def run_legs(
    rank: int, ranks: int, directory: str, legs: list[Leg], changes: dict[str, Any], steps: int
) -> tuple[list[float], Outcome]:
    """Some steps on each layout, which begins with the checkpoint that the one before left; and what comes out."""
    compute_reproducibly()
    losses: list[float] = []
    for number, (layout, of_leg) in enumerate(legs):
        loaded = {"load": directory} if number else {}
        config = make_config(layout, directory, **changes, **of_leg, **loaded)
        trainer = make_trainer(config, build_mesh(config.parallel) if ranks > 1 else Mesh(device=torch.device("cpu")))
        losses += [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(steps)]
        trainer.save()
        trainer.saving.finish()
    final = gather(trainer, trainer.mesh, lambda owned: owned.master)
    return losses, Outcome([], [], {}, {}, final, moments_of(trainer))


@pytest.mark.parametrize(
    "ranks, legs, changes, steps",
    [
        (2, TWO_RANKS, {}, 1),
        pytest.param(4, FOUR_RANKS, {"num_layers": 4}, 3, marks=pytest.mark.slow),
        pytest.param(4, FOUR_RANKS, {"num_layers": 4, "precision": "bf16"}, 2, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "four ranks", "four ranks, bf16"],
)
def test_a_run_that_changes_its_layout_at_each_resume_ends_in_the_same_bits(
    ranks: int, legs: list[Leg], changes: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    both = MODEL | changes | {"train_iters": steps * len(legs)}
    straight, expected = run_legs(0, 1, str(tmp_path / "one"), [((1, 1, 1), {})], both, steps * len(legs))
    losses, found = run_distributed(run_legs, ranks, str(tmp_path / "many"), legs, both, steps, timeout=300)[0]
    assert losses == straight
    assert found.moments.keys() == {"exp_avg", "exp_avg_sq"}
    bitwise(found, expected)
