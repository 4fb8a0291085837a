"""Random generators and strides on the pretend accelerator."""

from __future__ import annotations

import pytest
import torch

from megacore.parallel.collectives import copy_to_group, reduce_from_group
from megacore.parallel.sequence import gather_sequence, reduce_scatter_sequence
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parallel.test_generators import losses_of_two_steps
from tests.parallel.test_tensor import world_group

pytestmark = needs_pretend


def test_steps_with_dropout_leave_the_devices_generators_as_they_were() -> None:
    """The masks are the CPU's, whose generator this device draws from."""
    (expected,) = run_distributed(losses_of_two_steps, 1)
    (found,) = run_distributed(losses_of_two_steps, 1, "pretend", backend="pretend")
    for key, losses in expected.items():
        assert found[key] == pytest.approx(losses, rel=1e-6)


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
