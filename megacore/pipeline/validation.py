"""Proves that a schedule can be executed, and that it computes what it should, before any tensor moves. Every
microbatch goes forward and, in training, backward through every stage exactly once, nothing is used before it is there,
both sides of every transfer meet, and no rank waits for ever, neither with transfers that return at once nor with ones
that block until the other side is there."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

from megacore.pipeline.schedule import (
    Action,
    Key,
    Op,
    Schedule,
    ScheduleError,
    message,
    peer_stage,
    requirements,
    result,
    transfers_of,
)
from megacore.pipeline.simulator import Costs, run_all, simulate

_BACKWARDS = frozenset({Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD})


def prove(schedule: Schedule, *, trains: bool = True) -> None:
    """Refuse a schedule that cannot be run, or would not compute what it should. `trains`: with every forward's
    backward; otherwise without any. Raises ScheduleError with what is wrong, by rank and action."""
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.microbatch < schedule.microbatches or not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"rank {rank}: {action} does not exist: there are {schedule.microbatches} microbatches and "
                    f"{schedule.stages} stages, counted from 0"
                )
            if (right := schedule.placement.rank_of(action.stage)) != rank:
                raise ScheduleError(f"rank {rank}: {action} belongs on rank {right}")
    _require_each_once(schedule, trains)
    _require_local_order(schedule)
    simulate(schedule, Costs.uniform(schedule.stages))
    _run_blocking(schedule)


def in_flight(schedule: Schedule, rank: int) -> int:
    """Largest number of forwards of a rank whose output's gradient it still waits for."""
    return _peak(schedule, rank, {Op.BACKWARD, Op.INPUT_GRAD})


def held(schedule: Schedule, rank: int) -> int:
    """Largest number of forwards of a rank whose activations it still needs, until their weight gradients."""
    return _peak(schedule, rank, {Op.BACKWARD, Op.WEIGHT_GRAD})


def _peak(schedule: Schedule, rank: int, ends: set[Op]) -> int:
    now = peak = 0
    for action in schedule.computations(rank):
        now += (action.op is Op.FORWARD) - (action.op in ends)
        peak = max(peak, now)
    return peak


def _require_each_once(schedule: Schedule, trains: bool) -> None:
    counts: dict[Op, Counter[tuple[int, int]]] = {op: Counter() for op in Op}
    rank_of = schedule.placement.rank_of
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            counts[action.op][action.stage, action.microbatch] += 1
            if counts[action.op][action.stage, action.microbatch] > 1:
                raise ScheduleError(f"rank {rank} does {action} more than once")
    grads = counts[Op.BACKWARD] + counts[Op.INPUT_GRAD]
    required = [(Op.FORWARD, counts[Op.FORWARD])]
    if trains:
        required += [(Op.BACKWARD, grads), (Op.WEIGHT_GRAD, counts[Op.BACKWARD] + counts[Op.WEIGHT_GRAD])]
    elif backwards := [action for actions in schedule.actions for action in actions if action.op in _BACKWARDS]:
        raise ScheduleError(f"rank {rank_of(backwards[0].stage)} does {backwards[0]}, but nothing is trained")
    for op, have in required:
        # One after the other up to the first that is missing: a slip in a number makes it a list of millions.
        for stage, i in product(range(schedule.stages), range(schedule.microbatches)):
            if (stage, i) not in have:
                raise ScheduleError(f"rank {rank_of(stage)} never does {Action(op, i, stage)}")
        for (stage, i), count in have.items():
            if count > 1:
                raise ScheduleError(f"rank {rank_of(stage)} does {Action(op, i, stage)} twice, whole and in two")


def _require_local_order(schedule: Schedule) -> None:
    """Every transfer follows the computation of its tensor, and every tensor that crosses ranks has a transfer."""
    for rank in range(schedule.ranks):
        made: set[Key] = set()
        moved: set[Action] = set()
        for action in schedule.actions[rank]:
            if action.op.is_transfer:
                if not action.op.is_receive and message(action) not in made:
                    raise ScheduleError(f"rank {rank}: {action} comes before it is computed")
                moved.add(action)
                if action.op.is_receive:
                    made.add(message(action))
                continue
            for key in requirements(action, schedule.stages):
                if key not in made:
                    raise ScheduleError(f"rank {rank}: {action} comes before its {key[0]} of stage {key[1]} is there")
            made.add(result(action))
        for action in schedule.computations(rank):
            pair = transfers_of(action, schedule.placement)
            if pair is not None and pair[0] not in moved:
                raise ScheduleError(f"rank {rank}: {pair[0]} is missing")


def _run_blocking(schedule: Schedule) -> None:
    """Execute with transfers that block: a rank posts a batch of them together, and continues once each has met its
    other side; between two ranks, messages meet in the order of posting."""
    runs = [[run for is_transfer, run in schedule.action_groups(rank) if is_transfer] for rank in range(schedule.ranks)]
    posted: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)  # from, to, whether the receiving side
    waiting: list[list[tuple[tuple[int, int, bool], int]]] = [[] for _ in runs]

    def advance(rank: int, step: int) -> bool:
        if any(len(posted[source, to, not side]) <= number for (source, to, side), number in waiting[rank]):
            return False
        waiting[rank] = []
        for action in runs[rank][step] if step < len(runs[rank]) else ():
            other, side = schedule.placement.rank_of(peer_stage(action)), action.op.is_receive
            key = (other, rank, side) if side else (rank, other, side)
            waiting[rank].append((key, len(posted[key])))
            posted[key].append(action)
        return True

    stuck = run_all([len(run) + 1 for run in runs], advance)  # one step more, to wait for the last run
    if stuck:
        names = "; ".join(f"rank {rank} at {runs[rank][step - 1][0]}" for rank, step in stuck.items())
        raise ScheduleError(f"transfers that block would wait for ever: {names}")
    for (source, to, side), actions in list(posted.items()):
        for one, other in zip(actions, posted[source, to, not side], strict=True):
            if message(one) != message(other):
                raise ScheduleError(f"rank {source} and rank {to} do not mean the same message: {one}, {other}")
