"""What ranks decide from the sums of their votes: the weightiest reason of any of them, and whether one waits."""

from __future__ import annotations

import signal

import pytest

from megacore.config.sections import CheckpointConfig
from megacore.train.stopping import Decision, StopRequests


@pytest.mark.parametrize(
    ("signals", "step", "stop"),
    [
        ([0, 0, 0], 3, None),
        ([0, signal.SIGINT, 0], 3, "SIGINT"),
        ([signal.SIGTERM, signal.SIGINT, 0], 3, "SIGTERM"),
        ([signal.SIGINT, 0, signal.SIGTERM], 4, "--exit-interval 2"),
    ],
)
def test_the_weightiest_reason_of_any_rank_is_the_decision(signals: list[int], step: int, stop: str | None) -> None:
    requests = [StopRequests(CheckpointConfig(exit_interval=2)) for _ in signals]
    for one, number in zip(requests, signals, strict=True):
        one._signal = number
    votes = [one.votes(step, waiting=one is requests[1]) for one in requests]
    summed = [sum(column) for column in zip(*votes, strict=True)]
    assert requests[0].decision(summed) == Decision(stop=stop, some_rank_waits=True)
    assert requests[0].decision([*summed[:-1], 0]) == Decision(stop=stop)
