"""The microbatches that a rank has in flight, from the actions of its schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megacore.config import ParallelConfig
from megacore.pipeline.schedule import Action, Op, rank_order
from megacore.pipeline.schedule_file import load_schedule


class Load(NamedTuple):
    """The microbatches of a rank at one moment of a step, by stage."""

    held: tuple[int, ...]  # between a forward and its input gradient
    waiting: tuple[int, ...]  # those whose weight gradients are still to be computed

    @property
    def kept(self) -> tuple[int, ...]:
        """Microbatches whose activations are kept."""
        return tuple(map(sum, zip(*self, strict=True)))


def in_flight(parallel: ParallelConfig, rank: int, microbatches: int, *, until: Op = Op.INPUT_GRAD) -> tuple[int, ...]:
    """Microbatches whose activations each of a rank's stages keeps, when together they keep most. `microbatches`: of a
    replica in a step. `until`: where a schedule splits backward, whether activations count until the gradient of the
    stage's input (`INPUT_GRAD`: the least that is kept) or of its weights (`WEIGHT_GRAD`: the most)."""
    loads = fullest_loads(parallel, rank, microbatches)
    return max((load.held if until is Op.INPUT_GRAD else load.kept for load in loads), key=sum)


def fullest_loads(parallel: ParallelConfig, rank: int, microbatches: int) -> Sequence[Load]:
    """The loads of a step beside which no other has as much of everything. Which of them takes the most memory depends
    on what each stage keeps. Arguments as for `in_flight`."""
    if parallel.schedule_csv is not None:
        order = load_schedule(Path(parallel.schedule_csv)).actions[rank]
        return _fullest(order, parallel.pp, parallel.virtual_stages)
    if parallel.schedule == "gpipe":
        return [Load((microbatches,), (0,))]
    few = enough_microbatches(parallel, microbatches)
    return _built_in(parallel.schedule_name, rank, parallel.pp, few, parallel.virtual_stages)


def enough_microbatches(parallel: ParallelConfig, microbatches: int) -> int:
    """As many microbatches as a step has, or fewer that fill the pipeline alike: no more are in flight later, and one
    backward follows another that is not the first. In an interleaved schedule that depends on the largest group of
    microbatches that go through the stages together."""
    if parallel.schedule_csv is not None or parallel.schedule == "gpipe":
        return microbatches
    p, groups = parallel.pp, microbatches // parallel.pp
    if parallel.virtual_stages == 1:
        return min(microbatches, max(2 * p, 3))
    if groups < 5:
        return microbatches
    larger = -(-(microbatches % p) // groups)  # than p, the largest group
    return 4 * p + max(4 * larger - 3, 0)


@functools.lru_cache(maxsize=4096)
def _built_in(name: str, rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Sequence[Load]:
    order = rank_order(name, rank, ranks, microbatches, virtual_stages=virtual_stages)
    return _fullest(order, ranks, virtual_stages)


def _fullest(order: Iterable[Action], ranks: int, virtual_stages: int) -> Sequence[Load]:
    held, waiting = [0] * virtual_stages, [0] * virtual_stages
    loads: dict[Load, int] = {}  # with how many there are
    for action in order:
        stage = action.stage // ranks
        held[stage] += (action.op is Op.FORWARD) - (action.op in (Op.BACKWARD, Op.INPUT_GRAD))
        waiting[stage] += (action.op is Op.INPUT_GRAD) - (action.op is Op.WEIGHT_GRAD)
        loads[Load(tuple(held), tuple(waiting))] = sum(held) + sum(waiting)
    found: list[Load] = []
    for load in sorted(loads, key=loads.__getitem__, reverse=True):
        if not any(all(map(int.__ge__, other.held + other.waiting, load.held + load.waiting)) for other in found):
            found.append(load)
    return found
