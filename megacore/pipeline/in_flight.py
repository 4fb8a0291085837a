"""The microbatches that a rank has in flight, from the actions of its schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from megacore.config import ParallelConfig
from megacore.pipeline.schedule import Action, Op, rank_order
from megacore.pipeline.schedule_file import load_schedule


def in_flight(parallel: ParallelConfig, rank: int, microbatches: int, *, until: Op = Op.INPUT_GRAD) -> tuple[int, ...]:
    """Microbatches whose activations each of a rank's stages keeps, when together they keep most. `microbatches`: of a
    replica in a step. `until`: where a schedule splits backward, whether activations count until the gradient of the
    stage's input (`INPUT_GRAD`: the least that is kept) or of its weights (`WEIGHT_GRAD`: the most)."""
    if parallel.schedule_csv is not None:
        order = load_schedule(Path(parallel.schedule_csv)).actions[rank]
        return _peak(order, parallel.pp, parallel.virtual_stages, until)
    if parallel.schedule == "gpipe":
        return (microbatches,)
    few = enough_microbatches(parallel, microbatches)
    return _in_flight(parallel.schedule_name, rank, parallel.pp, few, parallel.virtual_stages, until)


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
