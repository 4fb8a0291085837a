"""The replay of the ranks' calls: what a device would finish passes, and what would hang is an error at once."""

from __future__ import annotations

import pytest

from tests.accelerator.order import Call, Message, OrderError, Replay

SUM, MAX = Call(collective="all_reduce(sum, float32[4])"), Call(collective="all_reduce(max, float32[4])")


def sends(peer: int, what: str = "float32[4]") -> Message:
    return Message(True, peer, what)


def receives(peer: int, what: str = "float32[4]") -> Message:
    return Message(False, peer, what)


def replay(*calls: tuple[int, Call | list[Message]], ranks: int = 2) -> None:
    """Make the ranks' calls in this order in time."""
    found = Replay([f"rank {rank}" for rank in range(ranks)])
    for rank, call in calls:
        found.add(rank, Call.from_json((Call(messages=call) if isinstance(call, list) else call).to_json()))
        found.run()


@pytest.mark.parametrize(
    "calls",
    [
        [(0, SUM), (0, MAX), (1, SUM), (1, MAX)],
        [(0, [sends(1)]), (0, [receives(1)]), (1, [receives(0)]), (1, [sends(0)])],
        [(0, [sends(1), receives(1)]), (1, [sends(0), receives(0)])],
        [(0, [sends(1), receives(1)]), (1, [receives(0)]), (1, [sends(0)])],
        [
            (0, [sends(1, "float32[4]"), sends(1, "int64[1]")]),
            (1, [receives(0, "float32[4]"), receives(0, "int64[1]")]),
        ],
        [(0, [sends(1)]), (1, [receives(0)]), (0, SUM), (1, SUM)],
    ],
    ids=["collectives", "one at a time", "exchange", "a batch against two calls", "two messages", "both kinds"],
)
def test_calls_that_fit_pass(calls: list[tuple[int, Call | list[Message]]]) -> None:
    replay(*calls)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(0, SUM), (1, MAX)], "rank 0 and rank 1 are in different collectives"),
        ([(0, [sends(1)]), (1, [sends(0)])], "rank 0 and rank 1 wait for each other"),
        ([(0, [receives(1)]), (1, [receives(0)])], "rank 0 and rank 1 wait for each other"),
        ([(0, SUM), (1, [sends(0)])], "rank 0 and rank 1 wait for each other"),
        ([(0, [sends(1)]), (1, [receives(0, "float32[8]")])], "exchange messages of different sizes"),
        (  # gloo would pair these by their tags
            [
                (0, [sends(1, "float32[4]"), sends(1, "int64[1]")]),
                (1, [receives(0, "int64[1]"), receives(0, "float32[4]")]),
            ],
            "exchange messages of different sizes",
        ),
    ],
)
def test_calls_that_do_not_fit_are_named(calls: list[tuple[int, Call | list[Message]]], said: str) -> None:
    with pytest.raises(OrderError, match=said) as raised:
        replay(*calls)
    for _, call in calls:
        assert str(call if isinstance(call, Call) else Call(messages=call)) in str(raised.value)


def test_a_ring_of_blocking_sends_is_a_circle() -> None:
    ring = [(rank, [sends((rank + 1) % 3)]) for rank in range(3)]
    replay(*ring[:2], ranks=3)  # the last rank may still receive first
    with pytest.raises(OrderError, match="rank 0 and rank 1 and rank 2 wait for each other"):
        replay(*ring, ranks=3)
    replay(*ring[:2], (2, [receives(1)]), (1, [receives(0)]), (2, [sends(0)]), (0, [receives(2)]), ranks=3)


def test_a_collective_waits_for_messages_before_it() -> None:
    with pytest.raises(OrderError, match="wait for each other"):
        replay((0, [sends(1)]), (1, SUM), (0, SUM), (1, [receives(0)]))
