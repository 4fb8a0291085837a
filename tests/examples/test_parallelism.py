"""examples/parallelism: every layout trains as one process does, and keeps the bytes that the rule says."""

from __future__ import annotations

import pytest
import torch

import data_parallel
import ddp
import pipeline
import problem
import tensor_parallel
import zero1
import zero2
import zero3
from megacore.config import ParallelConfig
from megacore.parallel.mesh import join_job
from tests.distributed import run_distributed
from tests.examples.conftest import printed

STEPS = 8
LAYOUTS = {module.__name__: module for module in (data_parallel, ddp, tensor_parallel, pipeline, zero1, zero2, zero3)}


def trained(rank: int, ranks: int, names: list[str]) -> dict[str, problem.Result]:
    _, group = join_job(ParallelConfig(device="cpu"))
    return {name: LAYOUTS[name].train(group, STEPS) for name in names}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_trains_as_one_process_does(ranks: int) -> None:
    alone = problem.train_alone(STEPS)
    assert alone.losses[-1] < alone.losses[0]
    names = [name for name in LAYOUTS if ranks == 2 or name != "pipeline"]
    for results in run_distributed(trained, ranks, names):
        for name, found in results.items():
            assert found.losses == pytest.approx(alone.losses, rel=1e-5), name
            for weight, expected in zip(found.weights, alone.weights, strict=True):
                torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5, msg=name)
            assert found.held == found.rule, name


def test_one_process_keeps_sixteen_bytes_per_parameter() -> None:
    alone = problem.train_alone(2)
    assert alone.held == alone.rule
    assert alone.held.total == 16 * problem.number_of_parameters()


def test_a_script_prints_losses_and_bytes() -> None:
    (status, text), *others = run_distributed(printed, 2, zero1.main, ["--steps", "2"], init=False)
    assert status == 0
    assert others == [(0, "")]
    assert "measured:  4.00 +  4.00 +  4.00 = 12.00" in text
    assert "one process:  4.00 +  4.00 +  8.00 = 16.00" in text
