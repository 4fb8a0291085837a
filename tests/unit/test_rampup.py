"""The batch-size ramp: the size of every step, what is counted in samples, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megacore.config.rampup import BatchSizes, Ramp
from megacore.optim.lr_schedules import learning_rate
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone, refuse = refusals.alone, refusals.refuse  # fixtures
RAMPS = [(1536, 16, 16, 5_859_375), (2048, 192, 16, 9_765_625), (64, 8, 8, 1000), (16, 4, 12, 7), (32, 32, 8, 100)]


def reference(full: int, start: int, increment: int, samples: int, steps: int) -> list[int]:
    """The sizes as Megatron-LM's calculator gives them from the samples consumed so far."""
    increments, consumed, sizes = (full - start) // increment, 0, list[int]()
    for _ in range(steps):
        level = increments if consumed >= samples else consumed * increments // samples
        sizes.append(start + level * increment)
        consumed += sizes[-1]
    return sizes


@pytest.mark.parametrize(("full", "start", "increment", "samples"), RAMPS)
def test_sizes_follow_the_samples(full: int, start: int, increment: int, samples: int) -> None:
    ramp = BatchSizes(full, Ramp(start, increment, samples))
    steps = ramp.steps(samples) + 50
    expected = reference(full, start, increment, samples, steps)
    assert [ramp.of_step(step) for step in range(1, steps + 1)] == expected
    assert expected[-1] == full
    total = 0
    for step, size in enumerate(expected, 1):
        assert ramp.steps(total) == ramp.steps(total + size - 1) == step - 1
        total += size
        assert ramp.samples(step) == total
    assert ramp.samples(0) == 0


def test_without_a_ramp_nothing_changes() -> None:
    sizes = BatchSizes(24)
    assert (sizes.of_step(1), sizes.of_step(999), sizes.samples(7), sizes.steps(167)) == (24, 24, 168, 6)
    assert type(sizes.full_steps(7)) is int


def parts(values: Sequence[float]) -> list[float]:
    return [round(value, 12) for value in values]


def test_the_learning_rate_follows_the_samples() -> None:
    flags = ("--global-batch-size", "8", "--rampup-batch-size", "2", "2", "12", "--lr-warmup-iters", "2")
    config = parse(*GOOD, *flags, "--lr", "0.4", "--min-lr", "0", "--lr-decay-style", "linear")
    sizes, train_iters = config.batch_sizes, config.training.train_iters
    assert [sizes.of_step(step) for step in range(1, 11)] == [2, 2, 4, 6, 8, 8, 8, 8, 8, 8]
    assert config.lr_decay_iters == 62 // 8
    rates = [learning_rate(sizes.full_steps(step), config.optimizer, train_iters=train_iters) for step in range(1, 11)]
    position = [total / 8 for total in (2, 4, 8, 14, 22, 30, 38, 46, 54, 62)]
    assert parts(rates) == parts([0.2 * p if p < 2 else max(0.0, 0.4 * (7 - p) / 5) for p in position])
