"""How the host updates with --offload-optimizer: in one pass, on all threads of the rank.

That no stage changes a number are rows of tests/matrix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.distributed import run_distributed
from tests.parity.runs import trainer_of


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
            trainer = trainer_of((1, 1, world_size), directory, zero_stage=1, offload_optimizer=True, num_layers=2)
            trainer.train_step(next(trainer.batches))
        assert (threads, torch.get_num_threads()) == ({share}, 1)
        data_parallel = trainer.model.data_parallel
        assert sum(tensors) == len(data_parallel.runs) < len(data_parallel.segments)


def test_the_host_updates_in_one_pass_on_all_threads_of_the_rank(tmp_path: Path) -> None:
    run_distributed(how_the_host_updates, 2, str(tmp_path))
