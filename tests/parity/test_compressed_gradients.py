"""Gradients that are sent in fewer bits: their sums lack nothing but what the errors hold, and a step that overflows
leaves no trace. How training follows the run that sends all bits are rows of tests/matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import build_mesh
from megacore.zero.compressed import CODES, CompressedSum
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

RUN: dict[str, Any] = {"num_layers": 2, "lr_warmup_iters": 1, "micro_batch_size": 1}


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
