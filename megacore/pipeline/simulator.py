"""How long a schedule takes, and when which rank computes what: the time line for given costs, and with it the bubble.
The lists are run exactly as the ranks will run them, transfers included, but without tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from megacore.pipeline.schedule import (
    Action,
    Key,
    Op,
    Schedule,
    ScheduleError,
    message,
    peer_stage,
    possible_order,
    requirements,
    result,
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations in any unit; of each stage of the model."""

    forward: Sequence[float]  # of each stage
    input_grad: Sequence[float]  # of each stage
    weight_grad: Sequence[float]  # of each stage; a whole backward takes both
    transfer: float = 0.0  # from the end of a computation to the arrival of its result at another rank

    @classmethod
    def uniform(cls, stages: int, transfer: float = 0.0) -> Costs:
        """One unit for each of the three, on every stage."""
        return cls(forward=[1.0] * stages, input_grad=[1.0] * stages, weight_grad=[1.0] * stages, transfer=transfer)

    @classmethod
    def proportional(cls, amounts: Sequence[float]) -> Costs:
        """The same for each of the three, on each stage in proportion to an amount (operations, say)."""
        return cls(forward=amounts, input_grad=amounts, weight_grad=amounts)

    def times(self, factor: float) -> Costs:
        return Costs(
            forward=[factor * value for value in self.forward],
            input_grad=[factor * value for value in self.input_grad],
            weight_grad=[factor * value for value in self.weight_grad],
            transfer=factor * self.transfer,
        )

    def of(self, action: Action) -> float:
        s = action.stage
        return {
            Op.FORWARD: self.forward[s],
            Op.INPUT_GRAD: self.input_grad[s],
            Op.WEIGHT_GRAD: self.weight_grad[s],
            Op.BACKWARD: self.input_grad[s] + self.weight_grad[s],
        }[action.op]


@dataclass(frozen=True)
class Span:
    """A computation on the time line."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What each rank computes when."""

    spans: list[list[Span]] = field(default_factory=list)  # of each rank, in order

    @property
    def end(self) -> float:
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy(self) -> list[float]:
        return [sum(span.end - span.start for span in spans) for spans in self.spans]

    @property
    def idle_share(self) -> float:
        """The bubble: share of the ranks' time in which they do not compute, (p - 1) / (m + p - 1) for uniform 1F1B."""
        return 1.0 - sum(self.busy) / (len(self.spans) * self.end) if self.end else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The time line, if transfers run beside computations and messages between two ranks keep their order. Raises
    ScheduleError where a rank would wait for ever, or two sides of a transfer do not fit."""
    return Simulator.of_schedule(schedule).timeline(costs)


def run_all(lengths: Sequence[int], advance: Callable[[int, int], bool]) -> dict[int, int]:
    """Let every rank take its steps in order, as long as any can. `lengths`: number of steps of each rank. `advance`:
    (rank, step) -> whether it could be taken. Returns rank -> step at which it is stuck."""
    position = [0] * len(lengths)
    moved = True
    while moved:
        moved = False
        for rank, length in enumerate(lengths):
            while position[rank] < length and advance(rank, position[rank]):
                position[rank] += 1
                moved = True
    return {rank: at for rank, (at, length) in enumerate(zip(position, lengths, strict=True)) if at < length}


class _Step(NamedTuple):
    """A computation. What its rank computed itself exists when its turn comes."""

    rank: int
    action: Action
    # For each tensor from another rank the number, from 1, of the step after which that rank sends it; 0: at the
    # beginning.
    awaited: tuple[int, ...]


class Simulator:
    """Simulates one schedule with any costs: what waits for what does not depend on them, and is found once. `steps`:
    the computations, each after those that it waits for."""

    def __init__(self, ranks: int, steps: Sequence[_Step]) -> None:
        self._ranks, self._steps = ranks, steps

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> Self:
        """Of a schedule with its transfers, every one of which is checked. Raises ScheduleError where a rank would wait
        for ever, or two sides of a transfer do not fit."""
        return cls(schedule.ranks, _Machine(schedule).steps)

    @classmethod
    def of_computations(cls, order: Sequence[Sequence[Action]], stages: int) -> Self:
        """Of ranks that send every result at once, as `with_transfers` makes them do: the same times in less time.
        Raises ScheduleError where the computations wait for each other."""
        ranks, steps = len(order), list[_Step]()
        number: dict[Key, int] = {}  # of the step that makes it, from 1
        for rank, action, needed in possible_order(order, stages):
            made = (number[key] for key in needed)
            steps.append(_Step(rank, action, tuple(step for step in made if steps[step - 1].rank != rank)))
            number[result(action)] = len(steps)
        return cls(ranks, steps)

    def timeline(self, costs: Costs) -> Timeline:
        spans: list[list[Span]] = [[] for _ in range(self._ranks)]
        starts, ends = self._times(costs)
        for step, start, end in zip(self._steps, starts, ends[1:], strict=True):
            spans[step.rank].append(Span(step.action, start, end))
        return Timeline(spans=spans)

    def end(self, costs: Costs) -> float:
        return max(self._times(costs)[1])

    def _times(self, costs: Costs) -> tuple[list[float], list[float]]:
        """Starts of the steps; and the beginning, 0, with their ends."""
        durations = {
            Op.FORWARD: costs.forward,
            Op.INPUT_GRAD: costs.input_grad,
            Op.WEIGHT_GRAD: costs.weight_grad,
            Op.BACKWARD: [sum(parts) for parts in zip(costs.input_grad, costs.weight_grad, strict=True)],
        }
        starts, ends, clock = [], [0.0], [0.0] * self._ranks
        for step in self._steps:
            start = clock[step.rank]
            for sent in step.awaited:
                start = max(start, ends[sent] + costs.transfer)
            starts.append(start)
            clock[step.rank] = start + durations[step.action.op][step.action.stage]
            ends.append(clock[step.rank])
        return starts, ends


class _Machine:
    """The tensors that exist on each rank, the messages between them, and the steps taken in an order that is possible
    whatever they cost."""

    def __init__(self, schedule: Schedule) -> None:
        self.steps: list[_Step] = []
        self._schedule = schedule
        self._last = [0] * schedule.ranks  # each rank's last step
        self._made: list[set[Key]] = [set() for _ in range(schedule.ranks)]
        self._sent: dict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)  # (from, to) -> after step
        self._posted: dict[tuple[int, int], int] = defaultdict(int)  # receives
        self._expected: list[dict[Key, tuple[int, int]]] = [{} for _ in range(schedule.ranks)]  # from, number
        stuck = run_all([len(actions) for actions in schedule.actions], self._advance)
        if stuck:
            names = "; ".join(f"rank {rank} waits to do {schedule.actions[rank][at]}" for rank, at in stuck.items())
            raise ScheduleError(f"the schedule deadlocks: {names}")

    def _advance(self, rank: int, step: int) -> bool:
        action = self._schedule.actions[rank][step]
        if action.op.is_transfer:
            self._transfer(rank, action)
            return True
        awaited = []
        for key in requirements(action, self._schedule.stages):
            if key in self._expected[rank]:
                after = self._sent_after(rank, key)
                if after is None:
                    return False
                awaited.append(after)
            elif key not in self._made[rank]:
                return False
        self.steps.append(_Step(rank, action, tuple(awaited)))
        self._last[rank] = len(self.steps)
        self._made[rank].add(result(action))
        return True

    def _transfer(self, rank: int, action: Action) -> None:
        other = self._schedule.placement.rank_of(peer_stage(action))
        if action.op.is_receive:
            self._expected[rank][message(action)] = other, self._posted[other, rank]
            self._posted[other, rank] += 1
        else:
            self._sent[rank, other].append((action, self._last[rank]))

    def _sent_after(self, rank: int, key: Key) -> int | None:
        """The number of the step after which a tensor is sent to a rank; None as long as that is not known."""
        source, number = self._expected[rank][key]
        messages = self._sent[source, rank]
        if number >= len(messages):
            return None
        sent, after = messages[number]
        if message(sent) != key:
            raise ScheduleError(f"rank {rank} expects the {key[0]} of {key[1]}F{key[2]}, but rank {source} does {sent}")
        return after
