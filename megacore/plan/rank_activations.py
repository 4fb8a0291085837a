"""Activations and gradients of one rank of a pipeline: of its layers, and the most of them that it has in its schedule.

Nothing of it depends on how replicas share state: a search computes it once for layouts that differ only in that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.plan.activations import head_bytes, head_kept_bytes, residual_bytes, shared_bytes
from megacore.plan.backward_memory import Passing, computed_again, kept_by_layer, kept_gradients, passing_bytes
from megacore.plan.cut import OnRank
from megacore.plan.in_flight import Moment, StageBackward
from megacore.plan.once import once_per_layers


class RankLayers(NamedTuple):
    """What the layers of a rank keep of one microbatch, and what exists beside it.

    Attributes:
        in_blocks: what each layer keeps, by stage, as `kept_by_layer` has it.
        kept: the same summed by stage; 0 where it goes to host memory.
        head_kept: by stage, what the head keeps of a microbatch until its backward.
        kept_grads: by stage, gradients of outputs that wait for the gradients of weights.
        head: what exists in the head while its gradients are computed.
        again: what a block that is computed again keeps besides its input.
        shared: what all blocks share.
        working: by stage, what exists beside what is kept at the end of its forward.
    """

    in_blocks: Sequence[Sequence[float]]
    kept: Sequence[float]
    head_kept: Sequence[float]
    kept_grads: Sequence[float]
    head: float
    again: float
    shared: float
    working: Sequence[float]


@once_per_layers
def layers_of(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool) -> RankLayers:
    """Of one pipeline rank; `on_cpu`: whether the ranks compute in host memory."""
    chunks, blocks = on_rank.chunks, on_rank.distinct_blocks
    in_blocks = [kept_by_layer(chunk, config, on_cpu=on_cpu) for chunk in chunks]
    offloads = config.training.offload_activations and not on_cpu
    has_head = on_rank.is_last and chunks[-1][-1].block is None and bool(blocks)
    # A microbatch's logits are kept until its backward; those of the one that is computed are part of `working`.
    head_kept = [0.0] * len(chunks)
    if has_head:
        head_kept[-1] = head_kept_bytes(config)
    again = computed_again(config, blocks, on_cpu=on_cpu)
    head = head_bytes(config) if has_head else 0.0
    shared = shared_bytes(config) if blocks else 0.0
    if offloads:  # two blocks are on the device at a time
        shared += 2 * max((size for sizes in in_blocks for size in sizes), default=0.0)
    sent = residual_bytes(config) if config.parallel.pp > 1 else 0.0  # freed on arrival
    splits = config.parallel.may_split_backward
    return RankLayers(
        in_blocks=in_blocks,
        kept=[0.0 if offloads else sum(sizes) for sizes in in_blocks],
        head_kept=head_kept,
        kept_grads=[sum(kept_gradients(config, chunk)) if splits else 0.0 for chunk in chunks],
        head=head,
        again=again,
        shared=shared,
        working=[max(head if kept else 0.0, again, sent) for kept in head_kept],
    )


class Peaks(NamedTuple):
    """The most gradients and activations of a rank in its schedule.

    Attributes:
        activations: without gradients.
        certain: while a microbatch is computed, with `working` of its stage; and when a first backward is done.
        expected: the same, where backward is split until the gradients of weights.
        by_backward: of `expected` when each backward begins, without `working`.
    """

    activations: float
    certain: tuple[float, float]
    expected: tuple[float, float]
    by_backward: Mapping[StageBackward, float]


@once_per_layers
def peaks_of(
    config: ResolvedConfig,
    on_rank: OnRank,
    schedule: Sequence[Moment],
    flying: tuple[int, ...],
    *,
    grads: tuple[float, ...],
    lasting: float,
    on_cpu: bool,
) -> Peaks:
    """The most that a rank has at the moments of its schedule.

    Args:
        config: a resolved configuration.
        on_rank: the layers of the rank.
        schedule: its moments.
        flying: microbatches that each of its stages has in flight.
        grads: gradients that the first backward of each stage makes.
        lasting: gradients that are there from the beginning.
        on_cpu: whether the ranks compute in host memory.
    """
    layers, splits = layers_of(config, on_rank, on_cpu=on_cpu), config.parallel.may_split_backward
    keeps_logits = any(layers.head_kept)

    def held_bytes(microbatches: Sequence[int], computed: int = -1) -> float:
        """Of activations, by the rank's stages, without the logits of one that stage number `computed` computes."""
        if not keeps_logits:
            return products(microbatches, layers.kept)
        others = [max(n - 1, 0) if stage == computed else n for stage, n in enumerate(microbatches)]
        return products(microbatches, layers.kept) + products(others, layers.head_kept)

    def by_backward(*, computing: bool, split: bool) -> dict[StageBackward, float]:
        found = dict[StageBackward, float]()
        for moment in schedule:
            if moment.computing is computing and moment.split is split:
                waiting = products(moment.waiting, layers.kept_grads) if splits else 0.0
                begun = products(moment.begun, grads)
                held = held_bytes(moment.held, moment.backward.stage if computing else -1)
                size = lasting + begun + held + waiting + (layers.shared if computing else 0.0)
                found[moment.backward] = max(found.get(moment.backward, lasting), size)
        return found

    def most(*, split: bool) -> tuple[float, float]:
        computed = by_backward(computing=True, split=split).items()
        most = max((size + layers.working[backward.stage] for backward, size in computed), default=lasting)
        return most, max(by_backward(computing=False, split=split).values(), default=lasting)

    certain = most(split=False)
    last = len(flying) - 1
    held = [held_bytes(flying, last), *(held_bytes(moment.held, last) for moment in schedule if not moment.split)]
    return Peaks(
        activations=max(held) + layers.shared,
        certain=certain,
        expected=most(split=True) if splits else certain,
        by_backward=by_backward(computing=True, split=splits),
    )


def passing_of(config: ResolvedConfig, on_rank: OnRank, backward: StageBackward, *, on_cpu: bool) -> Passing:
    """What exists for a moment of a backward."""
    layers = layers_of(config, on_rank, on_cpu=on_cpu)
    return passing_bytes(
        config,
        on_rank,
        backward,
        head=layers.head,
        again=layers.again,
        working=layers.working[backward.stage],
        kept=layers.in_blocks,
        on_cpu=on_cpu,
    )


passing_of_whole = once_per_layers(passing_of)
"""The same where each rank holds its parameters and gradients whole, as on ZeRO's stages 0 and 1."""


def products(counts: Iterable[int], sizes: Iterable[float]) -> float:
    """The sum of so many of each size."""
    return sum(map(operator.mul, counts, sizes))
