"""Random generators and strides on the pretend accelerator."""

from __future__ import annotations

from pathlib import Path

import torch

from megacore.parallel.collectives import copy_to_group, reduce_from_group
from megacore.parallel.mesh import build_mesh
from megacore.parallel.sequence import gather_sequence, reduce_scatter_sequence
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parallel.test_tensor import world_group
from tests.parity.runs import make_config, make_trainer

pytestmark = needs_pretend


def generators_around_a_step(rank: int, world_size: int, directory: str) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.2, "recompute": "full", "num_layers": 1}
    config = make_config((1, 1, 1), directory, device="pretend", **dropout)
    before = torch.manual_seed(1).get_state()
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_device_module("pretend").get_rng_state(), before)


def test_steps_with_dropout_leave_the_devices_generators_as_they_were(tmp_path: Path) -> None:
    """test_training.py compares the masks with the CPU's."""
    run_distributed(generators_around_a_step, 1, str(tmp_path), backend="pretend", init=False)


def regions_of_strided_tensors(rank: int, size: int) -> None:
    group, device = world_group(rank, size), torch.device("pretend", rank)
    for region in (copy_to_group, reduce_from_group, gather_sequence, reduce_scatter_sequence):
        x = torch.ones(6, 4, 8, device=device).transpose(0, 1).requires_grad_()
        found = region(x, group)
        found.backward(torch.ones(8, device=device).expand(found.shape))
        found = region(x, group)
        found.backward(torch.ones(found.shape[::-1], device=device).permute(2, 1, 0))


def test_collectives_are_given_contiguous_tensors() -> None:
    """The device's collectives refuse others, as NCCL does."""
    run_distributed(regions_of_strided_tensors, 2, backend="pretend")
