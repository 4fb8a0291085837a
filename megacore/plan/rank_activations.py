"""Activations and gradients of one rank of a pipeline: of its layers, and the most of them that it has in its schedule.

Nothing of it depends on how replicas share state: a search computes it once for layouts that differ only in that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.pipeline.in_flight import Moment, StageBackward
from megacore.pipeline.schedule import Op
from megacore.plan.activations import (
    halves_gradient_bytes,
    head_bytes,
    head_kept_bytes,
    inner_bytes,
    input_half_bytes,
    mlp_gradient_bytes,
    residual_bytes,
    shared_bytes,
)
from megacore.plan.backward_memory import (
    Passing,
    computed_again,
    computed_again_by_layer,
    kept_by_layer,
    kept_gradients,
    passing_bytes,
    product_inputs_left,
)
from megacore.plan.cut import OnRank
from megacore.plan.once import once_per_layers
from megacore.plan.state import PlannedLayer


class RankLayers(NamedTuple):
    """What the layers of a rank keep of one microbatch, and what exists beside it.

    Attributes:
        in_blocks: what each layer keeps, by stage, as `kept_by_layer` has it.
        kept: the same summed by stage, without that of blocks where it goes to host memory; with the input from another
            stage.
        head_kept: by stage, what the head keeps of a microbatch until its backward.
        kept_grads: by stage, gradients of outputs that wait for the gradients of weights.
        head: what exists in the head while its gradients are computed.
        again: what a block that is computed again keeps besides its input.
        shared: what all blocks share.
        on_device: by stage, what is on the device of activations that lie in host memory: those of two of its blocks;
            and with another forward's beside its own, of two blocks in any case.
        on_host: by stage, what of a microbatch's activations goes to host memory.
        in_input_half: by stage, what is on the device where backward is split, when most exists in the half for inputs,
            with its gradients.
        in_weight_half: by stage, in the half for weights what products of two of its blocks read.
        ending: by stage, what exists beside what is kept at the end of its forward.
        working: by stage, what exists beside what is kept at the end of its forward, or in backward instead of what
            this has freed.
    """

    in_blocks: Sequence[Sequence[float]]
    kept: Sequence[float]
    head_kept: Sequence[float]
    kept_grads: Sequence[float]
    head: float
    again: float
    shared: float
    on_device: Sequence[tuple[float, float]]
    on_host: Sequence[float]
    in_input_half: Sequence[tuple[float, float]]
    in_weight_half: Sequence[float]
    ending: Sequence[float]
    working: Sequence[float]


class _StageLayers(NamedTuple):
    """What the layers of a stage keep; attributes are those of `RankLayers`, of a stage that is not on the host."""

    in_blocks: Sequence[float]
    kept: float
    kept_grads: float


@once_per_layers
def _layers_of_stage(config: ResolvedConfig, stage: OnRank, *, on_cpu: bool) -> _StageLayers:
    (chunk,) = stage.chunks
    in_blocks = kept_by_layer(chunk, config, on_cpu=on_cpu)
    kept_grads = sum(kept_gradients(config, chunk)) if config.parallel.may_split_backward else 0.0
    return _StageLayers(in_blocks, sum(in_blocks), kept_grads)


def _of_blocks(chunk: Sequence[PlannedLayer], in_blocks: Sequence[float]) -> Sequence[float]:
    """Of what each layer keeps that which may go to host memory: an embedding's mask of dropout stays."""
    return [0.0 if layer.block is None else size for layer, size in zip(chunk, in_blocks, strict=True)]


@once_per_layers
def layers_of(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool) -> RankLayers:
    """Of one pipeline rank; `on_cpu`: whether the ranks compute in host memory."""
    chunks, blocks = on_rank.chunks, on_rank.distinct_blocks
    stages = [_layers_of_stage(config, stage, on_cpu=on_cpu) for stage in on_rank.stages]
    offloads = config.training.offload_activations and not on_cpu
    has_head = on_rank.is_last and chunks[-1][-1].block is None and bool(blocks)
    # A microbatch's logits are kept until its backward; those of the one that is computed are part of `working`.
    head_kept = [0.0] * len(chunks)
    if has_head:
        head_kept[-1] = head_kept_bytes(config)
    again = computed_again(config, blocks, on_cpu=on_cpu)
    head = head_bytes(config) if has_head else 0.0
    shared = shared_bytes(config) if blocks else 0.0
    on_device, on_host = [(0.0, 0.0)] * len(chunks), [0.0] * len(chunks)
    if offloads:
        of_blocks = [_of_blocks(*of) for of in zip(chunks, (stage.in_blocks for stage in stages), strict=True)]
        on_host, most = [sum(sizes) for sizes in of_blocks], max(map(max, of_blocks))
        two_blocks = [sum(sorted(sizes)[-2:]) for sizes in of_blocks]
        on_device = [(two, max(two, max(sizes) + most)) for two, sizes in zip(two_blocks, of_blocks, strict=True)]
    in_input_half, in_weight_half = on_device, [0.0] * len(chunks)
    if offloads and config.parallel.may_split_backward:
        in_input_half = [_in_input_half(config, stage, again=again, head=head) for stage in on_rank.stages]
        in_weight_half = [sum(sorted(product_inputs_left(config, chunk))[-2:]) for chunk in chunks]
    sent = residual_bytes(config) if config.parallel.pp > 1 else 0.0  # freed on arrival
    ending = [max(head if kept else 0.0, sent) for kept in head_kept]

    def received(number: int) -> float:
        """The input from another stage, whose gradient goes back there, where blocks keep a shard or a copy of it."""
        is_apart = offloads or config.training.distribute_saved_activations
        return residual_bytes(config) if is_apart and chunks[number][0].block is not None else 0.0

    def working(number: int) -> float:
        freed, most = 0.0, ending[number]
        if config.parallel.may_split_backward and config.training.recompute == "selective":
            # Attention is computed again in the half for inputs, which frees nothing.
            freed = -head if head_kept[number] else 0.0
        sizes = computed_again_by_layer(config, chunks[number], again)
        for size, kept in zip(reversed(sizes), reversed(stages[number].in_blocks), strict=True):
            most = max(most, size - freed)
            freed += 0.0 if offloads or freed < 0 else kept
        return most

    return RankLayers(
        in_blocks=[stage.in_blocks for stage in stages],
        kept=[stage.kept - on_host[number] + received(number) for number, stage in enumerate(stages)],
        head_kept=head_kept,
        kept_grads=[stage.kept_grads for stage in stages],
        head=head,
        again=again,
        shared=shared,
        on_device=on_device,
        on_host=on_host,
        in_input_half=in_input_half,
        in_weight_half=in_weight_half,
        ending=ending,
        working=[working(number) for number in range(len(chunks))],
    )


def _in_input_half(config: ResolvedConfig, stage: OnRank, *, again: float, head: float) -> tuple[float, float]:
    """`RankLayers.in_input_half` of a stage. While a block computes with what it keeps, the block before it is on the
    device too; while the first block does, what products of the second one read. Beside the only block of a stage it is
    what those of another microbatch read, or all that its forward keeps."""
    (chunk,) = stage.chunks
    in_blocks = kept_by_layer(chunk, config, on_cpu=False)
    waits, agains = kept_gradients(config, chunk), computed_again_by_layer(config, chunk, again)
    reads = product_inputs_left(config, chunk)
    numbers = [number for number, layer in enumerate(chunk) if layer.block is not None]
    kept_head = head if chunk[-1].name == "head" else 0.0
    alone, beside_another = [kept_head], [kept_head]
    for at, number in enumerate(numbers):
        block = chunk[number].block
        assert block is not None
        second = numbers[1] if len(numbers) > 1 else number
        beside = in_blocks[numbers[at - 1]] if at else reads[second]
        # The input of `down` stays beside the gradients, which in SwiGLU are those of both halves too.
        inner = (reads[number] > 0) + (halves_gradient_bytes(config, block, on_cpu=False) > 0)
        gradients = mlp_gradient_bytes(config, block, on_cpu=False) + inner_bytes(config, block) * inner
        if half := input_half_bytes(config, block, on_cpu=False):
            gradients = max(gradients, waits[number] + half)
        here = in_blocks[number] + agains[number] + sum(waits[number + 1 :]) + kept_head + gradients
        alone.append(here + beside)
        beside_another.append(here + (beside if len(numbers) > 1 else in_blocks[number]))
    return max(alone), max(beside_another)


class Peaks(NamedTuple):
    """The most gradients and activations of a rank in its schedule.

    Attributes:
        activations: without gradients; with inputs, and gradients of outputs, that other stages have sent ahead.
        certain: while a microbatch is computed, with `working` or `ending` of its stage; and when a first backward is
            done.
        expected: the same, where backward is split until the gradients of weights.
        by_backward: of `expected` when each backward begins, without `working`.
    """

    activations: float
    certain: tuple[float, float]
    expected: tuple[float, float]
    by_backward: Mapping[StageBackward, float]


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

    last = len(flying) - 1
    most_held = held_bytes(flying, last)
    found: dict[tuple[bool, bool], dict[StageBackward, float]] = {}  # by `computing` and `split` of the moments
    in_other = {False: lasting, True: lasting}  # by `split`: in forward, and in the half of a backward for inputs
    for moment in schedule:
        if moment.split and not splits:
            continue
        ahead = moment.ahead * residual_bytes(config)
        if not moment.split:
            most_held = max(most_held, held_bytes(moment.held, last) + ahead)
        held = held_bytes(moment.held, moment.backward.stage if moment.computing else -1) + ahead
        waiting = products(moment.waiting, layers.kept_grads) if splits else 0.0
        size = lasting + products(moment.begun, grads) + held + waiting + (layers.shared if moment.computing else 0.0)
        stage = moment.backward.stage
        if moment.half is Op.WEIGHT_GRAD:
            size += layers.in_weight_half[stage]
        elif moment.computing:
            of_stage = layers.on_device if moment.half is None else layers.in_input_half
            size += of_stage[stage][max(moment.on_device - 1, 0)]
        if moment.after_forward or moment.half is Op.INPUT_GRAD:
            size += layers.ending[stage] if moment.after_forward else 0.0
            in_other[moment.split] = max(in_other[moment.split], size)
            continue
        of_kind = found.setdefault((moment.computing, moment.split), {})
        of_kind[moment.backward] = max(of_kind.get(moment.backward, lasting), size)

    def most(*, split: bool) -> tuple[float, float]:
        computed, done = (found.get((computing, split), {}) for computing in (True, False))
        most = max((size + layers.working[backward.stage] for backward, size in computed.items()), default=lasting)
        most = max(most, in_other[split])
        return most, max(done.values(), default=lasting)

    return Peaks(
        activations=most_held + layers.shared + max(sizes[min(sum(flying), 2) - 1] for sizes in layers.on_device),
        certain=most(split=False),
        expected=most(split=splits),
        by_backward=found.get((True, splits), {}),
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
        kept=[_freed_by_layer(config, *of, on_cpu=on_cpu) for of in zip(on_rank.chunks, layers.in_blocks, strict=True)],
        on_cpu=on_cpu,
    )


def passing_of_whole(config: ResolvedConfig, on_rank: OnRank, backward: StageBackward, *, on_cpu: bool) -> Passing:
    """The same where each rank holds its parameters and gradients whole, as on ZeRO's stages 0 and 1, and has them from
    the beginning of a step. The other stages of the rank then make no difference."""
    layers, stage = layers_of(config, on_rank, on_cpu=on_cpu), on_rank
    extent = {"head": layers.head, "again": layers.again, "working": layers.working[backward.stage]}
    if not on_rank.table:
        stage, backward = on_rank.stages[backward.stage], _ONLY
    return _passing_of_stage(config, stage, backward, **extent, on_cpu=on_cpu)


_ONLY = StageBackward(0)


@once_per_layers
def _passing_of_stage(
    config: ResolvedConfig,
    on_rank: OnRank,
    backward: StageBackward,
    *,
    head: float,
    again: float,
    working: float,
    on_cpu: bool,
) -> Passing:
    in_blocks = (_layers_of_stage(config, stage, on_cpu=on_cpu).in_blocks for stage in on_rank.stages)
    kept = [_freed_by_layer(config, *of, on_cpu=on_cpu) for of in zip(on_rank.chunks, in_blocks, strict=True)]
    return passing_bytes(config, on_rank, backward, head=head, again=again, working=working, kept=kept, on_cpu=on_cpu)


def _freed_by_layer(
    config: ResolvedConfig, chunk: Sequence[PlannedLayer], in_blocks: Sequence[float], *, on_cpu: bool
) -> Sequence[float]:
    """What backward has freed of each layer's activations when it is done with it. Of those in host memory two blocks
    are on the device: until nothing is left to fetch, each block that is freed makes room for another. Where backward
    is split it is what their products read."""
    if on_cpu or not config.training.offload_activations:
        return in_blocks
    if config.parallel.may_split_backward:
        in_blocks = product_inputs_left(config, chunk)
    last_two = [number for number, size in enumerate(_of_blocks(chunk, in_blocks)) if size][:2]
    return [size if number in last_two else 0.0 for number, size in enumerate(in_blocks)]


def products(counts: Iterable[int], sizes: Iterable[float]) -> float:
    """The sum of so many of each size."""
    return sum(map(operator.mul, counts, sizes))
