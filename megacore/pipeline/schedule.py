"""Pipeline schedules as data: pure functions that return in which order a rank computes.

| schedule | source | bubble, of the ideal time | in flight |
|---|---|---|---|
| gpipe | Huang et al. 2019, arXiv 1811.06965 | (p - 1) / m | m |
| 1f1b | Narayanan et al. 2021, arXiv 2104.04473, section 2.2 | (p - 1) / m | p - r |
| interleaved | the same, section 2.2.2 | (p - 1) / (v m) | more, of smaller stages |
| zero-bubble | ZB-H1: Qi et al. 2023, arXiv 2401.10241, section 2 | (p - 1) (f + b - w) / (m (f + b + w)) | p - r |

p ranks, m microbatches, v stages a rank, rank r from 0; f, b, w: time of forward, input gradient, weight gradient. In
flight are the microbatches between a forward and its input gradient. What weight gradients need is kept until they are
done: with zero-bubble that of up to p microbatches on every rank, with the others that of those in flight. The last two
bubbles hold from m = p on; with fewer microbatches they are larger, and `simulate.py` tells by how much. A
schedule orders computations only; `transfers.py` adds the sends and receives, the same way for all.
"""

from __future__ import annotations

from itertools import pairwise

from megacore.pipeline.actions import Action, Op, Schedule
from megacore.pipeline.transfers import with_transfers

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B: rank r runs p - r - 1 forwards ahead, then a forward and a backward in turn, then the backwards left.

    So at most p - r microbatches are in flight, however many there are.
    """
    ahead = min(ranks - rank - 1, microbatches)
    actions = [Action(Op.FORWARD, i, rank) for i in range(ahead)]
    for i in range(ahead, microbatches):
        actions += [Action(Op.FORWARD, i, rank), Action(Op.BACKWARD, i - ahead, rank)]
    return actions + [Action(Op.BACKWARD, i, rank) for i in range(microbatches - ahead, microbatches)]


def gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards."""
    return [Action(op, i, rank) for op in (Op.FORWARD, Op.BACKWARD) for i in range(microbatches)]


def interleaved(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> list[Action]:
    """Interleaved 1F1B: a rank holds v thin stages, and the bubble shrinks by v.

    Microbatches go in groups through all of a rank's stages, first to last forward and last to first backward. A group
    has p microbatches or, where p does not divide m, a few more: fewer would leave ranks waiting within it.
    """
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
    """ZB-H1: 1F1B with backward in two, of which the second, the weight gradients, fills what would be bubble.

    Rank r puts each weight gradient off by r microbatches, so that every rank keeps at most p microbatches' activations
    in all: as many as the first rank of 1F1B.
    """
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


def forward_only(rank: int, ranks: int, microbatches: int, virtual_stages: int = 1) -> list[Action]:
    """Evaluation: every microbatch forward through the rank's stages, nothing kept."""
    training = interleaved(rank, ranks, microbatches, virtual_stages)
    return [action for action in training if action.op is Op.FORWARD]


def rank_order(name: str, rank: int, ranks: int, microbatches: int, *, virtual_stages: int = 1) -> list[Action]:
    """What one rank computes, in order; arguments as for `build_schedule`."""
    assert virtual_stages == 1 or name in ("interleaved", "forward-only")
    if name in ("interleaved", "forward-only"):
        staged = interleaved if name == "interleaved" else forward_only
        return staged(rank, ranks, microbatches, virtual_stages)
    plain = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zero-bubble": zero_bubble}
    return plain[name](rank, ranks, microbatches)


def build_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """A schedule by name, transfers included.

    Args:
        name: one of `SCHEDULES`, or `forward-only`.
        ranks: number of pipeline ranks p.
        microbatches: number of microbatches m, at least 1.
        virtual_stages: stages v of a rank; more than 1 with `interleaved` and `forward-only` alone.
    """
    order = [rank_order(name, rank, ranks, microbatches, virtual_stages=virtual_stages) for rank in range(ranks)]
    return with_transfers(name, order, virtual_stages=virtual_stages, microbatches=microbatches)
