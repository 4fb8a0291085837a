"""Gradients that are sent in fewer bits: their sums lack nothing but what the errors hold, and training follows the run
that sends all bits, on every ZeRO stage and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import build_mesh
from megacore.train.replicas import ReplicaCheck
from megacore.zero.compressed import CODES, CompressedSum
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

STEPS, HALF = 6, 3
RUN: dict[str, Any] = {"num_layers": 2, "train_iters": STEPS, "lr_warmup_iters": 1, "micro_batch_size": 1}
Changes = dict[str, Any]


def terms_of(rank: int, step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(size, generator=generator) * torch.logspace(-3, 1, size)


def sums(rank: int, ranks: int, name: str, masked: bool) -> tuple[list[Tensor], Tensor]:
    """The sums of five steps on this rank, and the sum of all errors after them."""
    group, code = build_mesh(make_config((1, 1, ranks), "output", micro_batch_size=1).parallel).replicas, CODES[name]
    size = 3 * code.format.block  # which no number of ranks but 3 divides
    compressed = CompressedSum(size, group, code, device=torch.device("cpu"), passes_on=True)
    if masked:
        compressed.restrict(torch.arange(size) % 7 > 0)
    found = []
    for step in range(5):
        compressed.begin(terms_of(rank, step, size), scale=4.0)
        found.append(compressed.whole_sum())
    errors = compressed.gathered_server_error(torch.empty_like(compressed.worker_error).view(-1)).double()
    return found, errors + compressed.worker_error.view(-1)[:size].double() * ranks  # see the test


@pytest.mark.parametrize(("name", "masked"), [("sign", False), ("sign", True), ("int8", False), ("bf16", False)])
def test_what_sums_lack_is_in_the_errors(name: str, masked: bool) -> None:
    ranks = 2
    found = run_distributed(sums, ranks, name, masked)
    size = len(found[0][1])
    terms = [terms_of(rank, step, size).double() for rank in range(ranks) for step in range(5)]
    expected = torch.stack(terms).sum(0) / 4.0
    if masked:
        expected[torch.arange(size) % 7 == 0] = 0
    results = [[value.double() for value in values] for values, _ in found]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))  # equal on every rank
    errors = sum(error for _, error in found) / ranks  # each has the server's, and its own times the number of ranks
    assert (sum(results[0]) + errors - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert errors.any()


def losses(rank: int, ranks: int, directory: str, runs: list[tuple[Layout, Changes]]) -> list[list[float]]:
    """Of runs in which replicas are compared after each step."""
    found = []
    for layout, changes in runs:
        config = make_config(layout, directory, **RUN | changes)
        trainer = make_trainer(config, build_mesh(config.parallel))
        check = ReplicaCheck(trainer.model, trainer.update.optimizer, trainer.mesh, interval=1)
        of_run = []
        for step in range(1, STEPS + 1):
            of_run.append(float(trainer.train_step(next(trainer.batches)).loss))
            check.after_step(step)
        found.append(of_run)
    return found


def compare(cases: list[tuple[Layout, Changes]], ranks: int, directory: Path) -> None:
    """Each case beside the run that sends all bits."""
    runs = [(layout, changes | more) for layout, changes in cases for more in ({}, {"grad_reduce_compression": "none"})]
    found = run_distributed(losses, ranks, str(directory), runs, timeout=300)[0]
    for (layout, changes), of_case, expected in zip(cases, found[::2], found[1::2], strict=True):
        near = 1e-5 if changes["grad_reduce_compression"] == "bf16" else 1e-4
        assert of_case[0] == expected[0] and of_case[1:] != expected[1:], (layout, changes)
        assert of_case == pytest.approx(expected, rel=20 * near), (layout, changes)


def test_training_follows_the_run_that_sends_all_bits(tmp_path: Path) -> None:
    int8: Changes = {"grad_reduce_compression": "int8"}
    compare([((1, 1, 2), int8), ((1, 1, 2), int8 | {"zero_stage": 2, "optimizer": "lion", "lr": 1e-4})], 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("stage", range(4))
def test_every_stage_and_layout_follows_it(stage: int, compression: str, tmp_path: Path) -> None:
    base: Changes = {"grad_reduce_compression": compression, "zero_stage": stage}
    cases: list[tuple[Layout, Changes]] = [
        ((2, 1, 2), {"sequence_parallel": True}),
        ((1, 2, 2), {"optimizer": "lamb", "lr": 1e-2}),
        ((1, 1, 2), {"cp": 2, "optimizer": "sgd", "lr": 1e-2}),
        # to all experts: where a token chooses, a rounding may change its choice, and the loss by 3e-4
        ((1, 1, 4), {"ep": 2, "num_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 16}),
        ((1, 1, 4), {"optimizer": "muon", "lr": 1e-3, "offload_optimizer": True}),
        ((2, 1, 2), {"optimizer": "adamw", "moments_dtype": "int8", "overlap_grad_reduce": False}),
    ]
    compare([(layout, base | changes) for layout, changes in cases], 4, tmp_path)


def continued(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes, *, saves: bool) -> list[float]:
    config = make_config(layout, directory, **RUN | changes | ({} if saves else {"load": directory}))
    trainer = make_trainer(config, build_mesh(config.parallel))
    if saves:
        for _ in range(HALF):
            trainer.train_step(next(trainer.batches))
        trainer.save()
        trainer.saving.finish()
    return [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(STEPS - HALF)]


def begun(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> list[float]:
    return continued(rank, ranks, directory, layout, changes, saves=True)


def resumed(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> list[float]:
    return continued(rank, ranks, directory, layout, changes, saves=False)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_resumes_bit_for_bit_and_on_other_replicas(stage: int, tmp_path: Path) -> None:
    changes: Changes = {"grad_reduce_compression": "int8", "zero_stage": stage}
    expected = run_distributed(begun, 2, str(tmp_path), (1, 1, 2), changes)[0]
    assert run_distributed(resumed, 2, str(tmp_path), (1, 1, 2), changes)[0] == expected
    other = run_distributed(resumed, 2, str(tmp_path), (1, 1, 2), changes | {"zero_stage": 1})[0]
    assert other == pytest.approx(expected, rel=1e-4)
    alone = run_distributed(resumed, 1, str(tmp_path), (1, 1, 1), changes | {"zero_stage": 0})[0]
    assert alone == pytest.approx(expected, rel=1e-3)


def skipped(rank: int, ranks: int, directory: str) -> tuple[list[bool], bool, list[float]]:
    """Which steps an fp16 run skips whose loss scale is too large at first; whether its errors are finite; losses."""
    changes = {"precision": "fp16", "initial_loss_scale": 2.0**40, "hysteresis": 1, "max_bad_steps": 30}
    config = make_config((1, 1, 2), directory, grad_reduce_compression="int8", **RUN | changes | {"train_iters": 40})
    trainer = make_trainer(config, build_mesh(config.parallel))
    results = [trainer.train_step(next(trainer.batches)) for _ in range(40)]
    errors = [bucket.compressed for bucket in trainer.model.data_parallel.buckets]
    finite = all(error is not None and bool(error.worker_error.isfinite().all()) for error in errors)
    return [result.skipped is not None for result in results], finite, [float(result.loss) for result in results]


def test_a_step_that_overflows_is_skipped_and_leaves_no_trace_that_is_not_finite(tmp_path: Path) -> None:
    was_skipped, finite, found = run_distributed(skipped, 2, str(tmp_path))[0]
    assert was_skipped[0] and not was_skipped[-1] and finite
    assert min(found[-5:]) < found[0]
