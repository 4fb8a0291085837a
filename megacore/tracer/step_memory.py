"""A rank's memory in a step, put together from what few layers did in few microbatches; nothing here loads torch.

profile.py runs them. Of layers that are alike there are three: the first, the last, and one that stands for all
between; five where a layer acts ahead of another one. Microbatches are as few (`microbatches_that_run`). From what each
layer adds to the rank's memory in each action follows the memory of a stage of any depth, in a step of any number of
microbatches, in any order of actions: nothing here knows what an operator keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.dimensions import shard_ranks
from megacore.models.outline import ModelLayer, outline
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule import Action, Op, rank_order
from megacore.plan.in_flight import enough_microbatches
from megacore.plan.state import zero_stage
from megacore.plan.traffic import recomputed_whole
from megacore.zero.packing import grown

_LONGEST_PATTERN = 8  # layers after which a stage may repeat itself


class Passage(NamedTuple):
    """What one layer does to a rank's memory within an action."""

    layer: int  # its number among the layers of the stage that are built; -1: what comes before the first
    high: int  # most bytes above those at its beginning
    net: int  # bytes at its end above those at its beginning
    net_on_host: int = 0  # the same in host memory, of ranks that compute elsewhere


class Pass(NamedTuple):
    """What an action does to a rank's memory."""

    after: str  # what `left_by` says of it
    passages: Sequence[Passage]  # of its layers, in order


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A rank's memory in a step."""

    beside_state: int  # bytes on the device when a step begins that are not state
    # Share of the gradients among the state that exist when a step begins; it makes the others.
    lasting_gradients: float
    updating: int  # most bytes on the device that are not state while weights are updated
    # By operation and number of the stage on the rank: those of the microbatches that run, in order.
    passes: Mapping[tuple[Op, int], Sequence[Pass]]
    messages: Mapping[tuple[Op, int], int]  # bytes of what each stage receives: inputs, and gradients of its outputs


MOST_UNLIKE = 4
"""Microbatches of a step that may be unlike each other by their place in it alone."""


def microbatches_that_run(config: ResolvedConfig, rank: int) -> int:
    """Microbatches of a rank's profile. By their place in a step there are three kinds, the first, the last, and those
    between. On ZeRO's stages 2 and 3 the second one is unlike later ones. Where an action leaves memory to the next, as
    many run as show each action after all those that come before it in a step."""
    if config.parallel.schedule_csv is not None:  # it is made for a number of microbatches
        return config.microbatches
    least = min(_unlike(config), config.microbatches)
    most = max(least, enough_microbatches(config.parallel, config.microbatches))
    needed = successions(config, rank, most)
    return next(count for count in range(least, most + 1) if successions(config, rank, count) >= needed)


def _unlike(config: ResolvedConfig) -> int:
    return MOST_UNLIKE if config.parallel.zero_stage >= 2 else 3


def successions(config: ResolvedConfig, rank: int, microbatches: int) -> frozenset[tuple[Op, int, int | str]]:
    """The operations of a rank's step, each with the number of its stage on the rank, and what `left_by` says or how
    many of them came before: a schedule may split only some backwards."""
    parallel, done = config.parallel, Counter[tuple[Op, int]]()
    order = rank_order(parallel.schedule_name, rank, parallel.pp, microbatches, virtual_stages=parallel.virtual_stages)
    found = set[tuple[Op, int, int | str]]()
    for action, left in zip(order, left_by(config, order), strict=True):
        key = action.op, action.stage // parallel.pp
        found |= {(*key, left), (*key, min(done[key], _unlike(config) - 1))}
        done[key] += 1
    return frozenset(found)


def left_by(config: ResolvedConfig, order: Sequence[Action]) -> list[str]:
    """For each computation of a rank, those before it that may have left memory which this one frees: the last two
    offloaded blocks stay on the device until the next comes (megacore/parallel/saved.py)."""
    if not config.training.offload_activations:
        return [""] * len(order)

    def words(action: Action, last: Action) -> str:
        whose = "its" if (action.microbatch, action.stage) == (last.microbatch, last.stage) else "another's"
        return f"{whose} {last.op.value}{last.stage // config.parallel.pp}"

    layers = outline(config)
    blocks = (sum(layer.block is not None for layer in layers[r.start : r.stop]) for r in stage_ranges(layers, config))
    reach = 1 if min(blocks) > 1 else 2
    return [
        ", ".join(words(action, last) for last in order[max(number - reach, 0) : number])
        for number, action in enumerate(order)
    ]


def unlike_ends(config: ResolvedConfig) -> int:
    """How many layers at each end of a row of equal ones differ from those between: a layer gathers the parameters of
    the next one, or fetches its activations, while it computes."""
    parallel = config.parallel
    return 2 if parallel.zero_stage == 3 or parallel.offload_params or config.training.offload_activations else 1


def alike(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> tuple[list[int], list[int]]:
    """Which layers of a stage are built for a profile; and for each layer which of those, from 0, it is like."""
    if config.optimizer_settings.takes_some_whole or _share_buckets(config, layers):  # these repeat with no layer
        return list(range(len(layers))), list(range(len(layers)))
    kinds: list[Hashable] = [
        (layer.name if layer.block is None else id(layer.block), layer.parameters, again)
        for layer, again in zip(layers, recomputed_whole(config, layers), strict=True)
    ]
    edge = unlike_ends(config)
    built, like, most = list[int](), list[int](), 2 * edge + 1
    for first, length, times in _patterns(kinds):
        copies, offset = min(times, most), len(built)
        built += range(first, first + copies * length)
        for time in range(times):
            copy = time if time < edge or times <= most else max(edge, time - times + most)
            like += range(offset + copy * length, offset + (copy + 1) * length)
    return built, like


def _share_buckets(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> bool:
    """Whether buckets of gradients, which ZeRO's stage 2 makes anew, may hold more than a block."""
    if zero_stage(config) != 2:
        return False
    bucket = grown(int(config.parallel.bucket_size_mb * 2**20), shard_ranks(config.parallel))
    return any(layer.block is not None and 4 * layer.parameters < bucket for layer in layers)


def _patterns(kinds: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """The kinds in parts that repeat a pattern: where each begins, how long its pattern is, and how often it comes."""
    first = 0
    while first < len(kinds):
        best = 1, 1
        for length in range(1, min(_LONGEST_PATTERN, len(kinds) - first) + 1):
            pattern, times = kinds[first : first + length], 1
            while kinds[first + times * length : first + (times + 1) * length] == pattern:
                times += 1
            if times > 1 and length * times > best[0] * best[1]:
                best = length, times
        yield first, *best
        first += best[0] * best[1]


class Change(NamedTuple):
    """What an action does to a rank's memory; attributes are those of `Passage` and `Pass`."""

    high: int
    net: int
    net_on_host: int
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """The most that a rank holds while the microbatches of a step are computed, above what it holds between steps."""

    bytes: int  # on its device
    kept: int  # of them activations, of all forwards so far
    made: int  # of them gradients that the step has made anew
    on_host: int  # activations in host memory, at most


def change_of(like: Sequence[int], passages: Sequence[Passage], op: Op) -> Change:
    """What an action does in a stage whose layers are like the built ones with these numbers."""
    merged: dict[int, Passage] = {}
    for passage in passages:
        before = merged.get(passage.layer, Passage(passage.layer, 0, 0))
        merged[passage.layer] = Passage(
            passage.layer,
            max(before.high, before.net + passage.high),
            before.net + passage.net,
            before.net_on_host + passage.net_on_host,
        )
    high = net = on_host = 0
    for number in (-1, *(like if op is Op.FORWARD else reversed(like))):
        if number in merged:
            _, above, more, more_on_host = merged[number]
            high = max(high, net + above)
            net += more
            on_host += more_on_host
    return Change(high, net, on_host)


def peak_of(
    profile: StepProfile,
    stages: Sequence[Sequence[int]],
    order: Sequence[tuple[bool, Sequence[Action]]],
    config: ResolvedConfig,
) -> StepPeak:
    """The peak of a rank that takes these actions. `profile`: of the rank, or of one with the same kinds of layers.
    `stages`: for each layer of each of its stages, which of the built layers it is like. `order`: its actions, in
    groups as `Schedule.action_groups` has them."""
    ranks = config.parallel.pp
    changes = {
        key: [change_of(stages[key[1]], one.passages, key[0])._replace(after=one.after) for one in passes]
        for key, passes in profile.passes.items()
    }
    computations = [action for is_transfer, batch in order if not is_transfer for action in batch]
    before = iter(left_by(config, computations))
    counts = Counter((action.op, action.stage // ranks) for action in computations)
    done = dict.fromkeys(counts, 0)
    held = on_host = most_on_host = gradients = 0
    peak = kept = made = 0
    for is_transfer, batch in order:
        if is_transfer:
            sizes = [profile.messages[action.op, action.stage // ranks] for action in batch]
            peak = max(peak, held + sum(size for size in sizes if size > 0))
            held += sum(sizes)
            continue
        for action in batch:
            key, after = (action.op, action.stage // ranks), next(before)
            change = _at(changes[key], done[key], counts[key], after)
            if held + change.high > peak:
                peak = held + change.high
                kept, made = held - gradients + (change.net if action.op is Op.FORWARD else 0), gradients
            if not done[key] and action.op in (Op.BACKWARD, Op.WEIGHT_GRAD) and counts[key] > 1:
                gradients += change.net - _at(changes[key][1:], 0, counts[key] - 1, after).net
            done[key] += 1
            held += change.net
            on_host += _sent_to_host(changes, key)
            most_on_host = max(most_on_host, on_host)
    return StepPeak(bytes=peak, kept=kept, made=made, on_host=most_on_host)


def _sent_to_host(changes: Mapping[tuple[Op, int], Sequence[Change]], key: tuple[Op, int]) -> int:
    """Bytes that a forward sends to the host, or that the last backward of a microbatch frees there."""
    op, stage = key
    if op is Op.INPUT_GRAD:
        return 0
    return changes[Op.FORWARD, stage][0].net_on_host * (1 if op is Op.FORWARD else -1)


def _at(changes: Sequence[Change], number: int, count: int, after: str) -> Change:
    """That of the microbatch with this number, of so many: one stands for all between the first and the last. Of those
    that run, it is like the nearest one that comes after the same action."""
    assert len(changes) <= count
    like = number
    if len(changes) < count:
        like = len(changes) - 1 if number == count - 1 else min(number, len(changes) - 2)
    alike = [n for n, change in enumerate(changes) if change.after == after] or range(len(changes))
    return changes[min(alike, key=lambda n: abs(n - like))]
