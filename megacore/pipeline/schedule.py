"""Pipeline schedules as data: the order in which each rank computes, sends and receives, as lists of actions.

Nothing here touches a tensor. These functions write the lists, `validation.py` proves them, the simulator
(megacore/pipeline/simulator.py) times them, and `runtime.py` executes them.

| schedule | source | waiting, by computing time | in flight |
|---|---|---|---|
| gpipe | Huang et al. 2019, arXiv 1811.06965 | (p - 1) / m | m |
| 1f1b | Narayanan et al. 2021, arXiv 2104.04473, section 2.2 | (p - 1) / m | p - r |
| interleaved | the same, section 2.2.2 | (p - 1) / (v m) | more, of smaller stages |
| zero-bubble | ZB-H1: Qi et al. 2023, arXiv 2401.10241, section 2 | (p - 1) (f + b - w) / (m (f + b + w)) | p - r |
| zb-v | ZB-V: the same, section 6, and Qi et al. 2024, arXiv 2405.15362 | (p - 1) / (6 m) for f = b = w | p |
| dualpipev | DeepSeek-V3: arXiv 2412.19437, section 3.2.1, cut in half | (p - 1) / (6 m) for f = b = w | p + 1/2 |

p ranks, m microbatches, v stages per rank, rank r from 0; f, b, w: time of forward, input gradient, weight gradient. In
flight are the microbatches between a forward and its input gradient. What weight gradients need is kept until they are
computed: with zero-bubble for up to p microbatches on every rank, with the others for those in flight. The shares of
interleaved and zero-bubble hold from m = p on, the last two from m = 2 p on; with fewer microbatches they are larger,
by as much as the simulator tells.

A schedule orders computations; `with_transfers` adds the sends and receives, the same way for all. Every transfer is
one event in a global order that is consistent with the order of computations, and each rank's list is the part of that
order that concerns the rank. The first event of the order that has not happened can always happen. So no backend can
deadlock, even if every transfer blocks both its sides, and two ranks post their messages in the same order, which is
the strictest rule any backend has. A receive is posted once the other rank has computed the tensor, ahead of its use.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from megacore.config.parallel import V_SCHEDULES
from megacore.errors import UserError

# ---- actions, and what each depends on


class ScheduleError(UserError):
    """A schedule that cannot be run; the message names the rank and the action."""


class Op(Enum):
    """What an action does with one microbatch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # both of the following at once
    INPUT_GRAD = "I"  # the gradient of the stage's input, for which the stage before waits
    WEIGHT_GRAD = "W"  # the gradients of the stage's weights, for which no stage waits
    RECV_INPUT = "recv input"  # activations from the stage before
    SEND_OUTPUT = "send output"  # activations to the stage after
    RECV_GRAD = "recv grad"  # gradient of the output from the stage after
    SEND_GRAD = "send grad"  # gradient of the input to the stage before

    __hash__ = object.__hash__  # members are singletons; Enum's hash is written in Python

    @property
    def is_transfer(self) -> bool:
        return self in _TRANSFERS

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECV_INPUT, Op.RECV_GRAD)


_TRANSFERS = frozenset({Op.RECV_INPUT, Op.SEND_OUTPUT, Op.RECV_GRAD, Op.SEND_GRAD})


@dataclass(frozen=True)
class Action:
    """One step of a rank: `op` on microbatch `microbatch` of stage `stage`."""

    op: Op
    microbatch: int
    stage: int

    def __str__(self) -> str:
        """`2F7` is the forward of microbatch 7 at stage 2; `send output of 2F7`, `recv grad for 2F7` are transfers."""
        if not self.op.is_transfer:
            return f"{self.stage}{self.op.value}{self.microbatch}"
        preposition = "for" if self.op.is_receive else "of"
        return f"{self.op.value} {preposition} {self.stage}F{self.microbatch}"


class Placement(NamedTuple):
    """Which rank holds which stage. A microbatch passes all ranks v times: from the first to the last or, in a V, every
    second time back. Where a V turns, a rank hands on to itself."""

    ranks: int  # number of pipeline ranks p
    virtual_stages: int = 1  # stages per rank, v
    is_v: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        passage, place = divmod(stage, self.ranks)
        return self._mirrored(passage, place)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of the forward."""
        return [passage * self.ranks + self._mirrored(passage, rank) for passage in range(self.virtual_stages)]

    def _mirrored(self, passage: int, place: int) -> int:
        return self.ranks - 1 - place if self.is_v and passage % 2 else place


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank does, in order."""

    name: str
    ranks: int  # number of pipeline ranks p
    virtual_stages: int  # stages per rank, v
    microbatches: int  # number of microbatches m
    actions: tuple[tuple[Action, ...], ...]  # of each rank
    is_v: bool = False  # whether its stages are placed as a V

    @property
    def placement(self) -> Placement:
        return Placement(self.ranks, self.virtual_stages, self.is_v)

    @property
    def stages(self) -> int:
        return self.placement.stages

    def computations(self, rank: int) -> list[Action]:
        return [action for action in self.actions[rank] if not action.op.is_transfer]

    def action_groups(self, rank: int) -> Iterator[tuple[bool, list[Action]]]:
        """A rank's actions in groups; yields whether a group is of transfers, which are posted together, and the
        group."""
        for is_transfer, group in groupby(self.actions[rank], key=lambda action: action.op.is_transfer):
            yield is_transfer, list(group)


Key = tuple[str, int, int]  # ("output" | "gradient" | "done", stage, microbatch)


def requirements(action: Action, stages: int) -> list[Key]:
    """The keys of what a computation needs, from any rank."""
    stage, i = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return [("output", stage - 1, i)] if stage > 0 else []
    if action.op is Op.WEIGHT_GRAD:
        return [("gradient", stage, i)]
    return [("output", stage, i)] + ([("gradient", stage + 1, i)] if stage < stages - 1 else [])


def result(action: Action) -> Key:
    """The key of what a computation produces: the output, the gradient of the input, or only weight gradients."""
    return _RESULTS[action.op], action.stage, action.microbatch


_RESULTS = {Op.FORWARD: "output", Op.BACKWARD: "gradient", Op.INPUT_GRAD: "gradient", Op.WEIGHT_GRAD: "done"}


def backwards_beside(schedule: Schedule, rank: int) -> dict[Action, Action]:
    """DualPipeV's backwards, by the forward before each of them, whose gradient is expected before this forward, and
    which is of the rank's other stage. Such a backward may begin beside the forward: this changes no order of messages,
    and what it waits for depends on nothing that is later in the order of all ranks."""
    pairs, late = dict[Action, Action](), set[Action]()
    forward: Action | None = None  # the last computation, if it is one
    for action in schedule.actions[rank] if schedule.name == "dualpipev" else ():
        if action.op.is_transfer:
            late.add(action)
            continue
        is_early = Action(Op.RECV_GRAD, action.microbatch, action.stage) not in late
        if action.op is Op.BACKWARD and is_early and forward is not None and forward.stage != action.stage:
            pairs[forward] = action
        forward, late = action if action.op is Op.FORWARD else None, set()
    return pairs


def transfers_of(action: Action, placement: Placement) -> tuple[Action, Action] | None:
    """The send and the receive that follow a computation; None if no stage of another rank needs its result."""
    stage, i = action.stage, action.microbatch
    if action.op is Op.WEIGHT_GRAD:
        return None
    is_forward = action.op is Op.FORWARD
    other = stage + 1 if is_forward else stage - 1
    if not 0 <= other < placement.stages or placement.rank_of(other) == placement.rank_of(stage):
        return None
    if is_forward:
        return Action(Op.SEND_OUTPUT, i, stage), Action(Op.RECV_INPUT, i, other)
    return Action(Op.SEND_GRAD, i, stage), Action(Op.RECV_GRAD, i, other)


def message(transfer: Action) -> Key:
    """The key of the tensors that a transfer carries, the same for the sending and the receiving side."""
    kind, from_sender = _MESSAGES[transfer.op]
    return kind, transfer.stage + from_sender, transfer.microbatch


# What a transfer carries, and how far from the transfer's stage the stage is that computed it.
_MESSAGES = {
    Op.SEND_OUTPUT: ("output", 0),
    Op.RECV_INPUT: ("output", -1),
    Op.SEND_GRAD: ("gradient", 0),
    Op.RECV_GRAD: ("gradient", 1),
}


def peer_stage(transfer: Action) -> int:
    """The stage at the other end of a transfer."""
    return transfer.stage + (1 if transfer.op in (Op.SEND_OUTPUT, Op.RECV_GRAD) else -1)


# ---- the schedules

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", *V_SCHEDULES)


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B: rank r runs p - r - 1 forwards ahead, then forward and backward in turn. At most p - r microbatches are in
    flight."""
    ahead = min(ranks - rank - 1, microbatches)
    actions = [Action(Op.FORWARD, i, rank) for i in range(ahead)]
    for i in range(ahead, microbatches):
        actions += [Action(Op.FORWARD, i, rank), Action(Op.BACKWARD, i - ahead, rank)]
    return actions + [Action(Op.BACKWARD, i, rank) for i in range(microbatches - ahead, microbatches)]


def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards."""
    return [Action(op, i, rank) for op in (Op.FORWARD, Op.BACKWARD) for i in range(microbatches)]


def interleaved(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """Interleaved 1F1B: a rank holds v thin stages, which divides the bubble by v. Microbatches go in groups through
    all of a rank's stages, first to last forward and last to first backward. A group has p microbatches or, where p
    does not divide m, a few more: with fewer, ranks would wait within a group."""
    count = max(1, microbatches // ranks)
    edges = [microbatches * g // count for g in range(count + 1)]
    groups = [range(first, stop) for first, stop in pairwise(edges)]
    chunks = range(virtual_stages)
    forwards = [Action(Op.FORWARD, i, c * ranks + rank) for g in groups for c in chunks for i in g]
    backwards = [Action(Op.BACKWARD, i, c * ranks + rank) for g in groups for c in reversed(chunks) for i in g]
    largest = max(map(len, groups))
    ahead = min(2 * (ranks - rank - 1) + (virtual_stages - 1) * largest, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]


def zero_bubble(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """ZB-H1: 1F1B with a split backward, whose second half, the weight gradients, fills the bubble. Rank r delays each
    weight gradient by r microbatches, so that every rank keeps the activations of at most p microbatches, like the
    first rank of 1F1B."""
    ahead = min(ranks - rank - 1, microbatches)
    actions = [Action(Op.FORWARD, i, rank) for i in range(ahead)]
    weights = iter([Action(Op.WEIGHT_GRAD, i, rank) for i in range(microbatches)])
    for i in range(microbatches):
        if ahead + i < microbatches:
            actions.append(Action(Op.FORWARD, ahead + i, rank))
        actions.append(Action(Op.INPUT_GRAD, i, rank))
        if i >= rank:
            actions.append(next(weights))
    return [*actions, *weights]


def zb_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """ZB-V: every microbatch goes down the ranks and up again, so that the first rank is the first to go backward. A
    rank keeps the activations of at most p microbatches, as the first rank of 1F1B."""
    below, count = ranks - rank, max(microbatches, 2 * ranks - 1)
    return _in_phases(
        rank,
        ranks,
        microbatches,
        ("F0", 2 * below - 1),
        ("F1 F0", rank),
        ("F1 I1 W", below),
        ("F0 I0 W F1 I1 W", count - ranks - below + 1),
        ("I0 W F1 I1 W", below - 1),
        ("I0 I1", rank),
        ("I0 W", below),
        ("W", 2 * rank),
    )


def dualpipev(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """DualPipe, cut in half: a V in which each forward of one stage of a rank goes with a backward of its other one."""
    below, count, whole = ranks - rank - 1, max(microbatches, 2 * ranks), (rank + 1) // 2
    return _in_phases(
        rank,
        ranks,
        microbatches,
        ("F0", 2 * below),
        ("F0 F1", rank + 1),
        ("I1 W F1", below),
        ("F0 B1 F1 B0", count - ranks - below),
        ("B1 F1 B0", below),
        ("B1 B0", whole),
        ("I1 I0" if rank % 2 else "B1 I0", 1),
        ("I1 I0", rank - whole),
        ("W I0", below),
        ("W", rank + 1),
    )


def forward_only_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """`forward_only` through a V."""
    ahead = min(2 * (ranks - rank) - 1, microbatches)
    return _in_phases(rank, ranks, microbatches, ("F0", ahead), ("F1 F0", microbatches - ahead), ("F1", ahead))


def _in_phases(rank: int, ranks: int, microbatches: int, *phases: tuple[str, int]) -> list[Action]:
    """The computations of a rank with two stages of a V. `phases`: words, and how often they come: `F0` is the next
    forward of the rank's first stage, `B1` the next backward of its second, `I1` only its first half, `W` the half that
    has waited longest. Those of further microbatches, with which a pipeline would be full, are left out."""
    stages, done = Placement(ranks, 2, is_v=True).stages_of(rank), Counter[tuple[bool, int]]()
    actions, waiting = list[Action](), deque[Action]()
    for words, times in phases:
        for word in words.split() * times:
            if word == "W":
                actions.append(waiting.popleft())
                continue
            op, stage = Op(word[0]), stages[int(word[1])]
            key = op is Op.FORWARD, stage
            actions.append(Action(op, done[key], stage))
            done[key] += 1
            if op is Op.INPUT_GRAD:
                waiting.append(Action(Op.WEIGHT_GRAD, actions[-1].microbatch, stage))
    return [action for action in actions if action.microbatch < microbatches]


def forward_only(rank: int, ranks: int, microbatches: int, virtual_stages: int = 1) -> list[Action]:
    """Evaluation: every microbatch forward through the rank's stages, nothing kept."""
    training = interleaved(rank, ranks, microbatches, virtual_stages)
    return [action for action in training if action.op is Op.FORWARD]


def rank_order(name: str, rank: int, ranks: int, microbatches: int, *, virtual_stages: int = 1) -> list[Action]:
    """The computations of one rank, in order; arguments as for `build_schedule`."""
    if name in ("interleaved", "forward-only"):
        staged = interleaved if name == "interleaved" else forward_only
        return staged(rank, ranks, microbatches, virtual_stages)
    assert virtual_stages == 1 + (name in _IN_V)
    plain = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zero-bubble": zero_bubble} | _IN_V
    return plain[name](rank, ranks, microbatches)


_IN_V = {"zb-v": zb_v, "dualpipev": dualpipev, "forward-only-v": forward_only_v}


def build_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """A schedule by name, transfers included. `name`: one of `SCHEDULES`, `forward-only`, or `forward-only-v`.
    `microbatches`: at least 1. `virtual_stages`: per rank; 2 in a V, and else more than 1 only with `interleaved` and
    `forward-only`."""
    order = computations(name, ranks, microbatches, virtual_stages)
    return with_transfers(
        name, order, virtual_stages=virtual_stages, microbatches=microbatches, is_v=placement_of(name, ranks).is_v
    )


def placement_of(name: str, ranks: int, virtual_stages: int = 1) -> Placement:
    """Where the stages of a schedule of `build_schedule` are; arguments as there."""
    return Placement(ranks, virtual_stages, is_v=name in _IN_V)


def computations(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """What each rank computes, in order; arguments as for `build_schedule`."""
    return [rank_order(name, rank, ranks, microbatches, virtual_stages=virtual_stages) for rank in range(ranks)]


# ---- sends and receives

# Durations that decide the order of events. Any would be correct; realistic ones post receives in time.
_DURATION = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.INPUT_GRAD: 1, Op.WEIGHT_GRAD: 1}


def with_transfers(
    name: str, order: Sequence[Sequence[Action]], *, virtual_stages: int, microbatches: int, is_v: bool = False
) -> Schedule:
    """A schedule from the computations of each rank. `order`: the computations of each rank, in order.
    `virtual_stages`: stages per rank. `is_v`: whether they are placed as a V. Raises ScheduleError where the
    computations wait for each other."""
    ranks = len(order)
    placement = Placement(ranks, virtual_stages, is_v)
    stages = placement.stages
    events: list[tuple[float, int, int, int, Action]] = []  # time, transfers first, tie break, rank, action
    for rank, (actions, starts) in enumerate(zip(order, start_times(order, stages), strict=True)):
        for action, start in zip(actions, starts, strict=True):
            events.append((start, 1, 0, rank, action))
            pair = transfers_of(action, placement)
            if pair is not None:
                end = start + _DURATION[action.op]
                unique = (action.stage * microbatches + action.microbatch) * 2 + (action.op is not Op.FORWARD)
                events += [(end, 0, unique, placement.rank_of(side.stage), side) for side in pair]
    events.sort(key=lambda event: event[:4])
    lists: list[list[Action]] = [[] for _ in order]
    for *_, rank, action in events:
        lists[rank].append(action)
    actions_of_ranks = tuple(map(tuple, lists))
    return Schedule(
        name=name,
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        actions=actions_of_ranks,
        is_v=is_v,
    )


def start_times(order: Sequence[Sequence[Action]], stages: int) -> list[list[float]]:
    """The earliest start of each computation, with free transfers. Raises ScheduleError where they wait for each
    other."""
    starts: list[list[float]] = [[] for _ in order]
    clock = [0.0] * len(order)
    made: dict[Key, float] = {}
    for rank, action, needed in possible_order(order, stages):
        starts[rank].append(max([clock[rank], *(made[key] for key in needed)]))
        clock[rank] = made[result(action)] = starts[rank][-1] + _DURATION[action.op]
    return starts


def possible_order(order: Sequence[Sequence[Action]], stages: int) -> Iterator[tuple[int, Action, list[Key]]]:
    """The computations of all ranks, each after those that it requires: the rank, the computation, what it requires.
    Raises ScheduleError where the computations wait for each other."""
    position, made, moved = [0] * len(order), set[Key](), True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = requirements(action, stages)
                if not made.issuperset(needed):
                    break
                yield rank, action, needed
                made.add(result(action))
                position[rank] += 1
                moved = True
    stuck = [
        (rank, actions[at]) for rank, (at, actions) in enumerate(zip(position, order, strict=True)) if at < len(actions)
    ]
    if stuck:
        waiting = "; ".join(f"rank {rank} waits to do {action}" for rank, action in stuck)
        raise ScheduleError(f"the schedule deadlocks: {waiting}")


# ---- what was executed

Kind = Literal["compute", "wait", "post"]


class Timed(NamedTuple):
    """Something a rank did, with its time on the wall clock, in seconds."""

    kind: Kind  # a computation; waiting for a transfer; posting transfers
    # The one that was computed, or that was waited for (none: for what was sent to leave), or all posted.
    actions: tuple[Action, ...]
    start: float
    end: float
