"""The alpha-beta model (Hockney 1994): a message of m bytes takes alpha + beta m seconds.

alpha is the latency of a message and 1 / beta the bandwidth. The time of a collective follows from its rounds and from
the bytes that a rank sends one after the other. What the model leaves out: the time of the additions, and other traffic
on the same wires or cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from megacore.parallel.collectives import barrier
from megacore.parallel.mesh import Group
from wire import Message, Wire

PING_PONG_BYTES = tuple(4**power for power in range(2, 12))  # 16 B to 4 MiB


@dataclass(frozen=True)
class Cost:
    """What a collective costs: rounds, and the bytes on its longest path."""

    rounds: int
    nbytes: float


def expected_cost(name: str, ranks: int, nbytes: float) -> Cost:
    """The cost by the textbook.

    Args:
        name: a function of algorithms.py.
        ranks: n.
        nbytes: of all parts together: what `broadcast` sends, `scatter` divides, `gather` collects.
    """
    steps, tree, parts = ranks - 1, math.ceil(math.log2(ranks)), (ranks - 1) / ranks * nbytes
    return {
        "broadcast": Cost(tree, tree * nbytes),
        "reduce": Cost(tree, tree * nbytes),
        "scatter": Cost(tree, parts),
        "gather": Cost(tree, parts),
        "all_gather": Cost(steps, parts),
        "reduce_scatter": Cost(steps, parts),
        "all_reduce_ring": Cost(2 * steps, 2 * parts),
        "all_reduce_tree": Cost(2 * tree, 2 * tree * nbytes),
        "all_reduce_halving": Cost(2 * tree, 2 * parts),
        "all_to_all": Cost(steps, parts),
    }[name]


def counted_cost(messages: list[Message], rounds: int) -> Cost:
    """The cost of what was really sent: the largest message of every round, summed.

    Args:
        messages: of all ranks.
        rounds: of each rank.
    """
    largest = [0] * rounds
    for message in messages:
        largest[message.round] = max(largest[message.round], message.nbytes)
    return Cost(rounds, sum(largest))


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds per message, and seconds per byte."""

    alpha: float
    beta: float

    def seconds(self, cost: Cost) -> float:
        return cost.rounds * self.alpha + cost.nbytes * self.beta


def fit(sizes: list[int], seconds: list[float]) -> AlphaBeta:
    """The alpha and beta with the least squared relative errors, neither below zero.

    Args:
        sizes: bytes of each message.
        seconds: that each took.
    """
    measured = np.asarray(seconds)
    terms = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1) / measured[:, None]
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
    return AlphaBeta(max(float(alpha), 0.0), max(float(beta), 0.0))


def ping_pong(wire: Wire, repeats: int) -> tuple[list[int], list[float]]:
    """Measure messages between ranks 0 and 1; the other ranks wait.

    Returns:
        Bytes, and median seconds of one message: half of there and back.
    """
    sizes, medians = list(PING_PONG_BYTES), []
    for size in sizes:
        ball = torch.zeros(size, dtype=torch.uint8)
        medians.append(median_seconds(partial(_there_and_back, wire, ball), repeats) / 2)
    return sizes, medians


def _there_and_back(wire: Wire, ball: torch.Tensor) -> None:
    if wire.rank == 0:
        wire.round(send=ball, to=1)
        wire.round(receive=ball, source=1)
    elif wire.rank == 1:
        wire.round(receive=ball, source=0)
        wire.round(send=ball, to=0)


def median_seconds(call: Callable[[], object], repeats: int, group: Group | None = None) -> float:
    """The median time of a call on this rank.

    Args:
        call: what is measured.
        repeats: how often.
        group: whose ranks begin together every time; None: they begin when they like.
    """
    times = []
    for _ in range(repeats + 1):
        if group is not None:
            barrier(group)
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]  # without the first, which makes connections
