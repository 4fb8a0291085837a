"""Sends and receives for any order of computations, placed so that no backend can deadlock.

Every transfer is one event in one global order, consistent with the order of computations; each rank's list is that
order as far as it concerns the rank. A global order has a first event that has not happened, and nothing keeps that one
from happening: so the lists run even if every transfer blocks both its sides, and messages between two ranks meet in
the order of their posting, which is the strictest rule any backend has. A receive stands where the other rank has made
what it sends, ahead of its use.
"""

from __future__ import annotations

from collections.abc import Sequence

from megacore.pipeline.actions import Action, Op, Schedule, ScheduleError, requirements, result, transfers_of

# Times that decide the order of events; any would do, those near the truth post receives in time.
_DURATION = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.INPUT_GRAD: 1, Op.WEIGHT_GRAD: 1}


def with_transfers(name: str, order: Sequence[Sequence[Action]], *, virtual_stages: int, microbatches: int) -> Schedule:
    """A schedule from the computations of each rank.

    Args:
        name: of the schedule.
        order: what each rank computes, in order.
        virtual_stages: stages of a rank.
        microbatches: number of microbatches.

    Raises:
        ScheduleError: the computations wait for each other.
    """
    ranks = len(order)
    stages = ranks * virtual_stages
    events: list[tuple[float, int, int, int, Action]] = []  # time, transfers first, tie break, rank, action
    for rank, (actions, starts) in enumerate(zip(order, start_times(order, stages), strict=True)):
        for action, start in zip(actions, starts, strict=True):
            events.append((start, 1, 0, rank, action))
            pair = transfers_of(action, stages) if ranks > 1 else None
            if pair is not None:
                end = start + _DURATION[action.op]
                unique = (action.stage * microbatches + action.microbatch) * 2 + (action.op is not Op.FORWARD)
                events += [(end, 0, unique, side.stage % ranks, side) for side in pair]
    events.sort(key=lambda event: event[:4])
    lists = tuple(tuple(action for *_, rank, action in events if rank == r) for r in range(ranks))
    return Schedule(name=name, ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches, actions=lists)


def start_times(order: Sequence[Sequence[Action]], stages: int) -> list[list[float]]:
    """When each computation starts at the earliest, with free transfers.

    Raises:
        ScheduleError: no rank can go on.
    """
    starts: list[list[float]] = [[] for _ in order]
    clock = [0.0] * len(order)
    made: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            for action in actions[len(starts[rank]) :]:
                needed = requirements(action, stages)
                if not all(key in made for key in needed):
                    break
                starts[rank].append(max([clock[rank], *(made[key] for key in needed)]))
                clock[rank] = made[result(action)] = starts[rank][-1] + _DURATION[action.op]
                moved = True
    stuck = [
        (rank, actions[len(starts[rank])]) for rank, actions in enumerate(order) if len(starts[rank]) < len(actions)
    ]
    if stuck:
        waiting = "; ".join(f"rank {rank} waits to do {action}" for rank, action in stuck)
        raise ScheduleError(f"the schedule cannot go on: {waiting}")
    return starts
