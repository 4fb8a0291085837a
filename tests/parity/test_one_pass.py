"""The optimizer's step in one pass against the step of before, operator by operator, in every layout and precision.

The decision is made when a model is built, and Triton is chosen for that alone: the operators then run in plain torch,
the flat update too (tests/kernels compares it with its kernel).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore import ops
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.matrix.runner import changes_of
from tests.parity import runs
from tests.parity.runs import Layout, outcome_of

Options = dict[str, Any]
STEPS = 4
# Of each layout, what is tried one after the other, in the words of tests/matrix.
CASES: list[tuple[Layout, list[str]]] = [
    ((1, 1, 1), ["precision=fp16 clip_grad=0.0", "weight_decay=0.0 mb8"]),
    ((1, 1, 2), ["z0 precision=bf16", "z2", "z3 precision=bf16"]),
]
UNCUT = "reproducible=True blocks1"
SLOW_CASES: list[tuple[Layout, list[str]]] = [
    ((1, 1, 1), ["", *(f"precision=bf16 {more}" for more in ("", "grad_reduce_dtype=bf16", UNCUT))]),
    ((2, 1, 1), ["sp"]),
    ((1, 2, 1), ["zb precision=bf16"]),
    (
        (1, 1, 2),
        ["z0", "z1", "z3", "z1 precision=bf16", "z2 precision=bf16", "z2 precision=bf16 grad_reduce_dtype=bf16"],
    ),
    ((1, 1, 2), ["z1 precision=fp16", f"z1 overlap_param_gather=False {UNCUT}"]),
]


def trainer_of(layout: Layout, output_dir: str, one_pass: bool, options: Options) -> Trainer:
    # A larger epsilon: the gradient of a key's bias is nothing but rounding, which it would turn into steps.
    changes = {"num_layers": layout[1] + 1, "train_iters": STEPS, "adam_eps": 1e-5, **options}
    with ops.kernels_chosen("triton" if one_pass else "torch"):
        trainer = runs.trainer_of(layout, output_dir, **changes)
    assert trainer.model.data_parallel.options.one_pass is one_pass
    return trainer


def outcomes(rank: int, world_size: int, layout: Layout, output_dir: str, variants: list[str]) -> None:
    for number, options in enumerate(map(changes_of, variants)):
        plain, found = (
            outcome_of(trainer_of(layout, f"{output_dir}/{number}-{one_pass}", one_pass, options), moments=True)
            for one_pass in (False, True)
        )
        assert found.initial.keys() == plain.initial.keys()
        assert found.losses[0] == plain.losses[0], options
        assert found.norms[0] == pytest.approx(plain.norms[0], rel=1e-6), options
        # A weight of 16 bits may be rounded the other way.
        exact = options.get("precision", "fp32") == "fp32"
        assert found.losses == pytest.approx(plain.losses, rel=1e-6 if exact else 1e-3), options
        for name, expected in plain.final.items():
            moved = (expected - plain.initial[name]).abs().max()
            assert moved > 0
            error = (found.final[name] - expected).abs().max()
            assert error <= (1e-4 if exact else 5e-2) * moved, (options, name)
        for kind in ("exp_avg", "exp_avg_sq") if exact else ():
            for name, expected in plain.moments[kind].items():
                error = (found.moments[kind][name] - expected).abs().max()
                assert error <= 1e-4 * expected.abs().max() + 1e-12, (options, kind, name)


@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        *(pytest.param(*case, id=str(case[0])) for case in CASES),
        *(pytest.param(*case, id=f"{case[0]} {case[1][0]}", marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
)
def test_one_pass_is_the_step_of_before(tmp_path: Path, layout: Layout, variants: list[str]) -> None:
    run_distributed(outcomes, math.prod(layout), layout, str(tmp_path), variants, timeout=120, stay=True)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of all that an update may change: master weights, moments, and the weights that layers compute with."""
    optimizer, data_parallel = trainer.update.optimizer, trainer.model.data_parallel
    data_parallel.ready()
    tensors: list[torch.Tensor] = [run.master for run in optimizer.runs]
    tensors += [optimizer.tensor(run, kind) for run in optimizer.runs for kind in optimizer.kinds]
    tensors += [b.full_params if b.options.stage < 3 else b.shard_params for b in data_parallel.buckets]
    return [tensor.detach().clone() for tensor in tensors]


def skipping(rank: int, world_size: int, output_dir: str, zero_stage: int) -> None:
    """Steps 1 and 3 overflow; the second goes on as if the first had not been."""
    options = {"precision": "fp16", "initial_loss_scale": 1024.0, "hysteresis": 8, "zero_stage": zero_stage}
    losses: list[list[float]] = []
    for one_pass in (False, True):
        trainer = trainer_of((1, 1, world_size), f"{output_dir}/{one_pass}", one_pass, options)
        losses.append([])
        for step in range(STEPS):
            trainer.update.scaler.scale = 2.0**120 if step in (0, 2) else 1024.0
            before = state_of(trainer)
            result = trainer.train_step(next(trainer.batches))
            losses[-1].append(float(result.loss))
            same = all(torch.equal(old, new) for old, new in zip(before, state_of(trainer), strict=True))
            assert same == (step in (0, 2))
        assert (trainer.update.skipped_steps, trainer.update.updates) == (2, 2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_step_that_the_device_skips_changes_nothing(tmp_path: Path, zero_stage: int) -> None:
    run_distributed(skipping, 2, str(tmp_path), zero_stage, stay=True)


def resuming(rank: int, world_size: int, output_dir: str) -> None:
    """A run that is saved after two steps and resumed, each with and without one pass, ends as one that is not."""

    def run(name: str, one_pass: bool, steps: int, load: str | None = None) -> list[torch.Tensor]:
        options = {"zero_stage": 1, "load": load}
        trainer = trainer_of((1, 1, world_size), f"{output_dir}/{name}", one_pass, options)
        for _ in range(steps):
            trainer.train_step(next(trainer.batches))
        if load is None:
            trainer.save()
        return state_of(trainer)

    straight = run("straight", True, STEPS)
    run("two", True, 2)
    resumed = run("resumed", True, 2, load=f"{output_dir}/two")
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))
    run("two plain", False, 2)
    for changed in (run("to plain", False, 2, f"{output_dir}/two"), run("to one", True, 2, f"{output_dir}/two plain")):
        weights = [(one, other) for one, other in zip(straight, changed, strict=False) if one.shape == other.shape]
        assert weights
        for one, other in weights:
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-5, atol=2e-6)


def test_a_run_may_be_resumed_with_another_step(tmp_path: Path) -> None:
    run_distributed(resuming, 2, str(tmp_path), stay=True)


# ---- the host, with --offload-optimizer


def how_the_host_updates(rank: int, world_size: int, directory: str) -> None:
    """Each rank has eight cores of its own, or both may use the same eight."""
    for cores, share in ((range(8), 4), (range(8 * rank, 8 * rank + 8), 8)):
        tensors, threads, adamw = list[int](), set[int](), torch._fused_adamw_

        def watched(parameters: list[torch.Tensor], *arguments: Any, **options: Any) -> None:
            tensors.append(len(parameters))  # noqa: B023
            threads.add(torch.get_num_threads())  # noqa: B023
            adamw(parameters, *arguments, **options)  # noqa: B023

        with (
            mock.patch.object(os, "sched_getaffinity", return_value=set(cores)),
            mock.patch.object(torch, "_fused_adamw_", watched),
        ):
            trainer = runs.trainer_of((1, 1, world_size), directory, zero_stage=1, offload_optimizer=True, num_layers=2)
            trainer.train_step(next(trainer.batches))
        assert (threads, torch.get_num_threads()) == ({share}, 1)
        data_parallel = trainer.model.data_parallel
        assert sum(tensors) == len(data_parallel.runs) < len(data_parallel.segments)


def test_the_host_updates_in_one_pass_on_all_threads_of_the_rank(tmp_path: Path) -> None:
    run_distributed(how_the_host_updates, 2, str(tmp_path))
