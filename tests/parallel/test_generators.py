"""Torch's default generators belong to the caller: training leaves their state as it was, and does not depend on it."""

from __future__ import annotations

import itertools
import tempfile
from typing import get_args

import pytest
import torch

from megacore.data.gpt.mock import MockDataset
from megacore.data.loading.loader import BatchLoader, Microbatch
from megacore.ops import Attention
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

Losses = dict[tuple[str, str], list[float]]


def losses_of_two_steps(rank: int, world_size: int, device: str = "cpu") -> Losses:
    """By attention and recomputation; building the trainer, reading and training change no state of the generator."""
    found: Losses = {}
    for attention, recompute in itertools.product(get_args(Attention), ("none", "selective", "full")):
        changes = {"device": device, "hidden_dropout": 0.1, "attention_dropout": 0.2, "attention": attention}
        with tempfile.TemporaryDirectory() as directory:
            config = make_config((1, 1, 1), directory, recompute=recompute, **changes)
            before = torch.manual_seed(len(found)).get_state()
            trainer = make_trainer(config, build_mesh(config.parallel))
            found[attention, recompute] = [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(2)]
            assert torch.equal(torch.get_rng_state(), before), (attention, recompute)
            if device != "cpu":
                assert torch.equal(torch.get_device_module(device).get_rng_state(), before), (attention, recompute)
    return found


def test_steps_with_dropout_leave_the_generator_as_it_was() -> None:
    (found,) = run_distributed(losses_of_two_steps, 1)
    for attention in get_args(Attention):
        assert found[attention, "none"] == found[attention, "selective"] == found[attention, "full"]
    assert found["auto", "none"] == found["sdpa", "none"]
    assert found["auto", "none"] == pytest.approx(found["fused-softmax", "none"], rel=1e-5)  # the same masks


def test_reading_ahead_leaves_the_generator_as_it_was() -> None:
    data = MockDataset(vocab_size=7, seq_length=4, num_samples=2, seed=3)
    before = torch.get_rng_state()
    loader = BatchLoader(data, Microbatch, micro_batch_size=1, global_batch_size=1, rank=0, ranks=1, num_workers=1)
    read, after = len(list(loader)), torch.get_rng_state()
    del loader  # ends its process, whatever the test finds
    assert read == 2
    assert torch.equal(after, before)
