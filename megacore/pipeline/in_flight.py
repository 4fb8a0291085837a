"""The microbatches that a rank has in flight, from the actions of its schedule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megacore.config import ParallelConfig
from megacore.pipeline.schedule import Action, Op, Schedule, build_schedule, rank_order
from megacore.pipeline.schedule_file import load_schedule


def in_flight(parallel: ParallelConfig, rank: int, microbatches: int, *, until: Op = Op.INPUT_GRAD) -> tuple[int, ...]:
    """Microbatches whose activations each of a rank's stages keeps, when together they keep most.

    Args:
        parallel: schedule and degrees.
        rank: number in the pipeline.
        microbatches: of a replica in a step.
        until: where a schedule splits backward, whether activations count until the gradient of the stage's input
            (`INPUT_GRAD`: the least that is kept) or of its weights (`WEIGHT_GRAD`: the most).
    """
    if parallel.schedule_csv is not None:
        order = load_schedule(Path(parallel.schedule_csv)).actions[rank]
        return _peak(order, parallel.pp, parallel.virtual_stages, until)
    if parallel.schedule == "gpipe":
        return (microbatches,)
    few = _few(parallel, microbatches)
    return _in_flight(parallel.schedule_name, rank, parallel.pp, few, parallel.virtual_stages, until)


def _few(parallel: ParallelConfig, microbatches: int) -> int:
    """As many microbatches as a step has, or fewer that fill the pipeline alike: no more are in flight later, and one
    backward follows another that is not the first. In an interleaved schedule that depends on the largest group of
    microbatches that go through the stages together."""
    p, groups = parallel.pp, microbatches // parallel.pp
    if parallel.virtual_stages == 1:
        return min(microbatches, max(2 * p, 3))
    if groups < 5:
        return microbatches
    larger = -(-(microbatches % p) // groups)  # than p, the largest group
    return 4 * p + max(4 * larger - 3, 0)


@functools.lru_cache(maxsize=4096)
def _in_flight(name: str, rank: int, ranks: int, microbatches: int, virtual_stages: int, until: Op) -> tuple[int, ...]:
    order = rank_order(name, rank, ranks, microbatches, virtual_stages=virtual_stages)
    return _peak(order, ranks, virtual_stages, until)


def _peak(order: Iterable[Action], ranks: int, virtual_stages: int, until: Op) -> tuple[int, ...]:
    held = [0] * virtual_stages
    peak = tuple(held)
    for action in order:
        if action.op is Op.FORWARD:
            held[action.stage // ranks] += 1
        elif action.op in (Op.BACKWARD, until):
            held[action.stage // ranks] -= 1
        if sum(held) > sum(peak):
            peak = tuple(held)
    return peak


class StageBackward(NamedTuple):
    """A backward of a rank.

    Attributes:
        stage: its number on the rank.
        previous: the number of the stage that made gradients last; -1: none in this step.
        is_first: whether it is the stage's first one in a step.
        follows_first: whether that of `previous` was its first one.
    """

    stage: int
    previous: int = -1
    is_first: bool = False
    follows_first: bool = False


class Moment(NamedTuple):
    """What a rank keeps at a moment of its schedule, by stage.

    Attributes:
        held: microbatches with activations.
        waiting: of these, those whose gradients of outputs wait for the gradients of weights.
        ahead: inputs and gradients of outputs that other stages have sent for later computations.
        begun: whether a backward has made gradients.
        computing: whether a backward, or half of one, begins, or a forward ends; else the first backward of a stage is
            done.
        split: whether activations count until the gradients of weights; else until that of the stage's input.
        backward: of which stage, and after which one's on this rank.
        after_forward: whether a forward of this stage ends.
        on_device: of how many forwards blocks are on the device where activations go to host memory (parallel/saved.py
            leaves those of the last two blocks there until a backward fetches others): 1 or 2; 0: not asked for.
        half: which half of a backward begins, where activations count until the gradients of weights; None: no half,
            or not asked for.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    ahead: int
    begun: tuple[bool, ...]
    computing: bool
    split: bool
    backward: StageBackward
    after_forward: bool = False
    on_device: int = 0
    half: Op | None = None


def moments(
    parallel: ParallelConfig, rank: int, microbatches: int, *, adds_gradients: bool, in_forward: bool = False
) -> Sequence[Moment]:
    """The moments of a rank's step of which none keeps more in every respect than these.

    Args:
        parallel: schedule and degrees.
        rank: number in the pipeline.
        microbatches: of a replica in a step.
        adds_gradients: whether a stage has gradients from its first backward on, and not from the beginning: then
            moments differ in which stages have had it, and in the backward before; else each is as if it had none
            before it.
        in_forward: whether also at the end of forwards, with `on_device` and `half`.
    """
    ways = adds_gradients, in_forward
    if parallel.schedule_csv is not None:
        order = load_schedule(Path(parallel.schedule_csv)).actions[rank]
        return _fullest(order, parallel.pp, parallel.virtual_stages, *ways)
    few = min(microbatches, 4) if parallel.schedule == "gpipe" else _few(parallel, microbatches)
    found = _moments_of(parallel.schedule_name, rank, parallel.pp, few, parallel.virtual_stages, *ways)
    if parallel.schedule != "gpipe":
        return found
    # Each of these moments is before the second backward, and further microbatches are all held then.
    more = microbatches - few
    return [moment._replace(held=tuple(held + more for held in moment.held)) for moment in found]


@functools.lru_cache(maxsize=4096)
def _moments_of(
    name: str, rank: int, ranks: int, microbatches: int, virtual_stages: int, adds_gradients: bool, in_forward: bool
) -> Sequence[Moment]:
    order = _schedule(name, ranks, microbatches, virtual_stages).actions[rank]
    return _fullest(order, ranks, virtual_stages, adds_gradients, in_forward)


@functools.lru_cache(maxsize=64)
def _schedule(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    return build_schedule(name, ranks, microbatches, virtual_stages)


@functools.cache
def _alone(stage: int) -> StageBackward:
    """One and the same for all schedules: figures are kept by it."""
    return StageBackward(stage)


def _fullest(
    order: Iterable[Action], ranks: int, virtual_stages: int, adds_gradients: bool, in_forward: bool
) -> Sequence[Moment]:
    order, kept = list(order), dict[tuple[object, ...], list[Moment]]()
    for split in (False, True):
        for moment in dict.fromkeys(_walk(order, ranks, virtual_stages, split=split)):
            if not in_forward:
                if moment.after_forward:
                    continue
                moment = moment._replace(on_device=0, half=None)
            if not adds_gradients:
                moment = moment._replace(begun=(True,) * virtual_stages, backward=_alone(moment.backward.stage))
            backward = moment.backward[:3]
            kind = moment.begun, moment.computing, split, moment.after_forward, moment.on_device, moment.half, backward
            alike = kept.setdefault(kind, [])
            if not any(_holds(other, moment) for other in alike):
                alike[:] = [*(other for other in alike if not _holds(moment, other)), moment]
    return [moment for alike in kept.values() for moment in alike]


def _holds(one: Moment, other: Moment) -> bool:
    """Whether `one`, of the same backward, keeps at least what `other` does."""
    if one.backward.follows_first and not other.backward.follows_first:
        return False
    counts = ((*moment.held, *moment.waiting, moment.ahead) for moment in (one, other))
    return all(map(operator.ge, *counts))


def _walk(order: Sequence[Action], ranks: int, virtual_stages: int, *, split: bool) -> Iterator[Moment]:
    held, waiting, begun = [0] * virtual_stages, [0] * virtual_stages, [False] * virtual_stages
    previous, was_first, ahead, last = -1, False, 0, ranks * virtual_stages - 1
    recent: list[tuple[int, int]] = []  # forwards whose blocks may be on the device
    for action in order:
        stage = action.stage // ranks
        if action.op.is_transfer:
            ahead += action.op.is_receive
            continue
        if action.op is Op.FORWARD:  # what it leaves is there when the next backward begins
            held[stage] += 1
            ahead -= ranks > 1 and action.stage > 0
            recent = [*recent[-1:], (action.stage, action.microbatch)]
            here = StageBackward(stage)
            yield Moment(tuple(held), tuple(waiting), ahead, tuple(begun), True, split, here, True, len(recent))
            continue
        if (action.stage, action.microbatch) not in recent:
            recent = []
        on_device = max(len(recent), 1)
        recent = [forward for forward in recent if forward != (action.stage, action.microbatch)]
        if action.op is not Op.WEIGHT_GRAD:
            ahead -= ranks > 1 and action.stage < last
        backward = StageBackward(stage, previous, not begun[stage], was_first)
        half = action.op if split and action.op is not Op.BACKWARD else None
        yield Moment(tuple(held), tuple(waiting), ahead, tuple(begun), True, split, backward, False, on_device, half)
        if action.op is Op.INPUT_GRAD and split:
            waiting[stage] += 1
        if action.op is Op.WEIGHT_GRAD and split:
            waiting[stage] -= 1
        if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD if split else Op.INPUT_GRAD):
            held[stage] -= 1
        if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD):
            previous, was_first = stage, not begun[stage]
            if was_first:
                begun[stage] = True
                yield Moment(tuple(held), tuple(waiting), ahead, tuple(begun), False, split, backward)
