"""The most blocks with which a model trains on a device of little memory, on the pretend accelerator."""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch

from megacore.parallel.mesh import build_mesh
from tests.accelerator.device import limit_memory
from tests.parity.runs import make_config, make_trainer

UNLIMITED = 80 << 30  # of the pretend device
PLAIN: dict[str, Any] = {"zero_stage": 0}
HOST: dict[str, Any] = {"zero_stage": 3, "offload_optimizer": True, "offload_params": True}


@dataclass(frozen=True)
class Largest:
    """The deepest model that completes a step.

    Attributes:
        blocks: how many it has.
        parameters: how many it has.
        peak: most bytes on the device at a time.
        on_host: bytes of its state in host memory.
        is_limit: whether one block more exceeds the device; else no more were tried.
    """

    blocks: int
    parameters: int
    peak: int
    on_host: int
    is_limit: bool


def largest(
    rank: int, world_size: int, directory: str, *, limit: int, most: int, shape: dict[str, Any], flags: dict[str, Any]
) -> Largest:
    """Of the models of a width, the deepest that completes a step of AdamW in bf16 within a device's memory.

    Args:
        rank: of this process.
        world_size: number of replicas.
        directory: of what runs write.
        limit: bytes of the device.
        most: blocks that are tried.
        shape: of a block and of the batch, by field name.
        flags: of memory, by field name.

    Raises:
        torch.OutOfMemoryError: the device is too small for two blocks.
    """

    def step(blocks: int) -> Largest:
        usual = {"device": "pretend", "precision": "bf16", "train_iters": 1, "memory_check": False}
        batch = {"micro_batch_size": 1, "global_batch_size": world_size, "num_layers": blocks}
        config = make_config((1, 1, world_size), directory, **{**usual, **batch, **shape, **flags})
        gc.collect()
        mesh = build_mesh(config.parallel)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        limit_memory(before + limit)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the launch summary
                trainer = make_trainer(config, mesh)
            assert trainer.train_step(next(trainer.batches)).loss.isfinite()
            torch.accelerator.synchronize()
        finally:
            limit_memory(UNLIMITED)
        state = [held for bucket in trainer.model.data_parallel.buckets for held in bucket.storages().values()]
        state += [[tensor for kept in trainer.update.optimizer.state.values() for tensor in kept.values()]]
        on_host = {t.data_ptr(): t.untyped_storage().nbytes() for one in state for t in one if t.device.type == "cpu"}
        return Largest(
            blocks=blocks,
            parameters=sum(parameter.numel() for parameter in trainer.model.data_parallel.parameters),
            peak=torch.accelerator.max_memory_allocated() - before,
            on_host=sum(on_host.values()),
            is_limit=False,
        )

    found, too_many = step(2), most + 1
    per_block = (step(4).peak - found.peak) / 2 if found.peak + limit // 8 < limit else limit
    while found.blocks + 1 < too_many:
        guess = found.blocks + int((limit - found.peak) // max(per_block, 1))
        try:
            found = step(min(max(guess, found.blocks + 1), too_many - 1))
        except torch.OutOfMemoryError:
            too_many = max(guess, found.blocks + 1)
    return Largest(**{**vars(found), "is_limit": too_many <= most})
