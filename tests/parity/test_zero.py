"""What a step of ZeRO reads for its norms, and how the host updates: each number once, on all threads.

That no stage changes a number are rows of tests/matrix."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megacore.optim import update
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer


def entries_read_for_norms(rank: int, world_size: int, directory: str, stage: int) -> float:
    """How often a step in 16 bits reads a gradient entry for its norm, over all that this rank computes."""
    config = make_config((1, 1, world_size), directory, zero_stage=stage, precision="bf16", micro_batch_size=1)
    trainer = make_trainer(config, build_mesh(config.parallel))
    counted: list[int] = []
    foreach_norm, square_sum = torch._foreach_norm, update.square_sum

    def counting_norms(tensors: list[torch.Tensor], *options: Any) -> Any:
        if not options:  # with a dtype it is the check of weights
            counted.extend(tensor.numel() for tensor in tensors)
        return foreach_norm(tensors, *options)

    def counting_squares(tensor: torch.Tensor) -> torch.Tensor:
        counted.append(tensor.numel())
        return square_sum(tensor)

    torch._foreach_norm = counting_norms  # type: ignore[assignment]
    update.square_sum = counting_squares
    trainer.train_step(next(trainer.batches))
    return sum(counted) / sum(parameter.numel() for parameter in trainer.parameters.values())


def test_norms_read_no_gradient_that_no_sum_changes_twice(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One replica: each once, for the global norm. Stage 1: a rank's shard before the sum, which overwrites it, and the
    shard of the sum."""
    directory = str(tmp_path_factory.mktemp("run"))
    for world_size, stage, expected in ((1, 0, 1.0), (2, 1, 1 / 2 + 1 / 2)):
        found = run_distributed(entries_read_for_norms, world_size, directory, stage)
        assert found == pytest.approx([expected] * world_size, rel=0.05)


def how_the_host_updates(
    rank: int, world_size: int, directory: str, bound: bool
) -> tuple[list[int], set[int], int, int, int]:
    """Of one step with offload: tensors in each call of AdamW, threads meanwhile and afterwards, and what a rank owns:
    runs and segments.

    Args:
        bound: whether each rank has eight cores of its own; otherwise both may use the same eight.
    """
    os.sched_getaffinity = lambda process: set(range(8 * rank, 8 * rank + 8) if bound else range(8))
    config = make_config((1, 1, world_size), directory, zero_stage=1, offload_optimizer=True, num_layers=2)
    trainer = make_trainer(config, build_mesh(config.parallel))
    tensors, threads, adamw = list[int](), set[int](), torch._fused_adamw_

    def watched(parameters: list[torch.Tensor], *arguments: Any, **options: Any) -> None:
        tensors.append(len(parameters))
        threads.add(torch.get_num_threads())
        adamw(parameters, *arguments, **options)

    torch._fused_adamw_ = watched  # type: ignore[assignment]
    trainer.train_step(next(trainer.batches))
    data_parallel = trainer.model.data_parallel
    return tensors, threads, torch.get_num_threads(), len(data_parallel.runs), len(data_parallel.segments)


@pytest.mark.parametrize(("bound", "share"), [(False, 4), (True, 8)])
def test_the_host_updates_in_one_pass_on_all_threads_of_the_rank(
    bound: bool, share: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for tensors, threads, after, runs, segments in run_distributed(
        how_the_host_updates, 2, str(tmp_path_factory.mktemp("run")), bound
    ):
        assert (threads, after) == ({share}, 1)
        assert sum(tensors) == runs < segments
