"""What training takes of a rank's memory, by formula: state, activations, and the moment of building.

The state is ZeRO's (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1), the activations those of activations.py,
times the microbatches that the schedule keeps in flight. Two sums are made of them: what a rank certainly takes, by
which a run may be refused, and what it is expected to take, by which a way out is recommended.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from megacore.config import ParallelConfig, ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.pipeline.partition import LayerCost, layer_kind, stage_ranges
from megacore.pipeline.schedule import Action, Op, rank_order
from megacore.pipeline.schedule_file import load_schedule
from megacore.plan.activations import (
    ELEMENT_BYTES,
    activation_gradient_bytes,
    attention_core_bytes,
    block_bytes,
    head_bytes,
    head_kept_bytes,
    kept_gradient_bytes,
    residual_bytes,
    shared_bytes,
)
from megacore.plan.buckets import grown
from megacore.plan.model_size import largest_product, vocabulary_rows

GIB = 2.0**30
# torch, its threads and its allocator in a process that computes on a CPU; on an accelerator workspaces of its
# libraries and buffers of its communication, beside the context that is there before anything is counted.
CPU_OVERHEAD, ACCELERATOR_OVERHEAD = 0.4 * GIB, 1.0 * GIB
# A process that only loads torch takes this on a CPU: less than what any run takes.
_CERTAIN_CPU_OVERHEAD = 0.15 * GIB
_FRAGMENTATION = 0.03


class PlannedLayer(LayerCost, Protocol):
    """What is asked of a layer: a `LayerOutline`, or a `LayerSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def held(self) -> int | None: ...
    @property
    def tied(self) -> Mapping[str, str]: ...
    @property
    def shared(self) -> int: ...
    @property
    def block(self) -> ResolvedModel | None: ...


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank takes.

    Attributes:
        pp_rank: its number in the pipeline.
        parameters: how many it holds, padding included.
        state: by kind, as `state_bytes` has them; where the optimizer is offloaded also what lies in host memory.
        on_host: how much of the state lies in host memory while the rank computes on an accelerator.
        activations: kept for backward by the microbatches in flight.
        in_flight: microbatches whose activations the rank keeps, summed over its stages.
        working: what exists beside them at the end of a forward: logits, or a block that is computed again.
        building: what exists when the last layer has been made.
        late: bytes of the state that do not exist while there are activations: the moments of a run of one step, which
            the optimizer makes after backward. 0 in other runs.
        computing: most bytes of gradients and activations at a time while a microbatch is computed. Gradients that a
            step makes anew exist from the first backward on.
        completing: the same at the end of a first backward, when its gradients exist and its activations are freed.
        passing: bytes that exist for a moment of backward, as an estimate: gradients of weights before they are added
            up, gradients of activations, buckets that are being reduced.
        reducing: on ZeRO's stages 2 and 3 the rank's shard of the bucket that is being reduced.
        overhead: of the process, certain and expected.
    """

    pp_rank: int
    parameters: int
    state: Mapping[str, float]
    on_host: float
    activations: float
    in_flight: int
    working: float
    building: float
    late: float
    computing: float
    completing: float
    passing: float
    reducing: float
    overhead: tuple[float, float]

    @property
    def certain(self) -> float:
        """Bytes without which the run cannot proceed, of the memory in which the rank computes: a run that does not
        have them is refused."""
        return max(self.building, self._computing_state, self._backward) + self.overhead[0]

    @property
    def expected_tensors(self) -> float:
        """Bytes of tensors that the rank is expected to hold at its peak, in the memory in which it computes: those
        that are certain, and in backward `passing` and `reducing` as well."""
        return max(self.building, self._computing_state, self._backward + self.passing + self.reducing)

    @property
    def gradients_apart(self) -> bool:
        """Whether all gradients and all activations never exist at the same time."""
        return max(self.computing, self.completing) < self.state["grads"] + self.activations

    @property
    def _computing_state(self) -> float:
        """State in the memory in which the rank computes."""
        return sum(self.state.values()) - self.on_host

    @property
    def _backward(self) -> float:
        """State and activations at the peak of forward and backward."""
        without_gradients = self._computing_state - self.late - self.state["grads"]
        return without_gradients + max(self.computing + self.working, self.completing)

    @property
    def expected(self) -> float:
        """Bytes that the rank is expected to take at its peak, with what the allocator and the process add."""
        return self.expected_tensors * (1 + _FRAGMENTATION) + self.overhead[1]


def state_bytes(parameters: int, config: ResolvedConfig) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer, and of gradients on their way to host memory (`buffers`).

    Args:
        parameters: of a rank's slice of its pipeline stages.
        config: a resolved configuration.
    """
    compute, ranks = ELEMENT_BYTES[config.precision.precision], ranks_of_role("replicas", config.parallel)
    summed = 4 if config.training.reproducible else ELEMENT_BYTES[config.precision.grad_reduce_dtype]
    reduce = _term_bytes(config)
    offload = config.parallel.offload_optimizer
    master = 4 if offload or compute != 4 else 0
    stage = config.parallel.zero_stage if ranks > 1 else 0
    shard = updated_parameters(parameters, config)
    return {
        "params": parameters * compute / (ranks if stage >= 3 else 1),
        "grads": parameters * reduce / (ranks if stage >= 2 else 1),
        "optimizer": shard * (config.optimizer_settings.bytes_per_parameter + master),
        "buffers": shard * summed if offload else 0.0,
    }


def _term_bytes(config: ResolvedConfig) -> int:
    """Bytes of a gradient while it is added up."""
    return 8 if config.training.reproducible else ELEMENT_BYTES[config.precision.grad_reduce_dtype]


def updated_parameters(parameters: int, config: ResolvedConfig) -> float:
    """How many of a rank's parameters it updates: with ZeRO its share of them, else all.

    Args:
        parameters: of a rank's slice of its pipeline stages.
        config: a resolved configuration.
    """
    return parameters / (ranks_of_role("replicas", config.parallel) if config.parallel.zero_stage >= 1 else 1)


def plan_memory(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], *, on_cpu: bool, torch_is_loaded: bool = False
) -> list[RankMemory]:
    """The memory of the ranks of a pipeline; it is the same on all ranks of a stage.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        on_cpu: whether the ranks compute in host memory.
        torch_is_loaded: whether what torch takes of host memory is taken already, and does not count again.
    """
    config = config.for_device(on_cpu=on_cpu)
    stages = stage_ranges(layers, config)
    count = ranks_of_role("pipeline", config.parallel)
    ranks = [_rank_memory(config, layers, stages, rank, on_cpu=on_cpu) for rank in range(count)]
    if on_cpu and torch_is_loaded:
        overhead = (0.0, CPU_OVERHEAD - _CERTAIN_CPU_OVERHEAD)
        return [dataclasses.replace(rank, overhead=overhead) for rank in ranks]
    return ranks


def fullest_rank(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], *, on_cpu: bool, limit: float = math.inf
) -> RankMemory:
    """The rank that is expected to take most: `plan_memory` of the ranks that may be it.

    Of ranks whose layers are alike the first takes most: in every built-in schedule it has as many microbatches in
    flight as the later ones, or more.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        on_cpu: whether the ranks compute in host memory.
        limit: bytes; the first rank that takes more is returned in place of the fullest.
    """
    config = config.for_device(on_cpu=on_cpu)
    stages, count = stage_ranges(layers, config), ranks_of_role("pipeline", config.parallel)
    kinds = [layer_kind(layer) for layer in layers]
    first: dict[Hashable, int] = {}  # of the ranks that are alike
    for rank in range(count):
        alike = tuple(tuple(kinds[numbers.start : numbers.stop]) for numbers in stages[rank::count])
        first.setdefault((rank, alike) if config.parallel.schedule_csv is not None else alike, rank)
    ranks = []
    for rank in first.values():
        ranks.append(_rank_memory(config, layers, stages, rank, on_cpu=on_cpu))
        if ranks[-1].expected > limit:
            return ranks[-1]
    return max(ranks, key=lambda rank: rank.expected)


def fullest_state(ranks: Iterable[RankMemory]) -> dict[str, float]:
    """Bytes of state by kind, each on the rank that keeps most of it."""
    states = [rank.state for rank in ranks]
    return {kind: max(state[kind] for state in states) for kind in states[0]}


def _rank_memory(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], stages: Sequence[range], rank: int, *, on_cpu: bool
) -> RankMemory:
    on_rank = stages[rank :: ranks_of_role("pipeline", config.parallel)]
    parameters = held_parameters(layers, on_rank)
    state = state_bytes(parameters, config)
    chunks = [[layers[i] for i in numbers] for numbers in on_rank]
    # Besides what its blocks keep, a stage keeps the output that it sends until the gradient of it comes back.
    outputs = [0.0 if chunk[-1] is layers[-1] else residual_bytes(config) for chunk in chunks]
    in_blocks = [_kept_by_layer(chunk, config, on_cpu=on_cpu) for chunk in chunks]
    offloads = config.training.offload_activations and not on_cpu
    kept = [sent + (0.0 if offloads else sum(sizes)) for sizes, sent in zip(in_blocks, outputs, strict=True)]
    blocks = [block for chunk in chunks for layer in chunk if (block := layer.block) is not None]
    flying = in_flight(config.parallel, rank, config.microbatches)
    has_head = stages[-1] in on_rank and layers[-1].block is None and bool(blocks)
    # A microbatch's logits are kept until its backward; those of one are part of `working`.
    head_kept = [head_kept_bytes(config) if has_head and chunk[-1] is layers[-1] else 0.0 for chunk in chunks]
    again = _computed_again(config, blocks, on_cpu=on_cpu)
    head = head_bytes(config) if has_head else 0.0
    shared = shared_bytes(config) if blocks else 0.0
    if offloads:  # two blocks are on the device at a time
        shared += 2 * max((size for sizes in in_blocks for size in sizes), default=0.0)
    working = max(head, again)
    schedule = _moments(config.parallel, rank, config.microbatches)
    forgets = _forgets_gradients(config)
    totals = [sum(sizes) for sizes in _held_by_layer(chunks)]
    grads = [state["grads"] * total / max(sum(totals), 1) if forgets else 0.0 for total in totals]
    kept_grads = [sum(_kept_gradients(config, chunk)) for chunk in chunks]

    def most(*, computing: bool, split: bool) -> float:
        """Of gradients and activations, at the moments in which a microbatch is computed, or else is done."""
        found = 0.0 if forgets else state["grads"]
        for moment in schedule:
            if moment.computing is computing and moment.split is split:
                waiting = _products(moment.waiting, kept_grads)
                held = _products(moment.held, kept) + _products([max(n - 1, 0) for n in moment.held], head_kept)
                begun = _products(moment.begun, grads) if forgets else state["grads"]
                found = max(found, begun + held + waiting + (shared if computing else 0.0))
        return found

    certain = [most(computing=computing, split=False) for computing in (True, False)]
    expected = [most(computing=computing, split=True) for computing in (True, False)]
    waits = max(expected[0] + working, expected[1]) - max(certain[0] + working, certain[1])
    backward = _passing(config, chunks, head=head, again=again, working=working, on_cpu=on_cpu)
    return RankMemory(
        pp_rank=rank,
        parameters=parameters,
        state=state,
        on_host=(0.0 if on_cpu or not config.parallel.offload_optimizer else state["optimizer"] + state["buffers"])
        + (_products(flying, map(sum, in_blocks)) if offloads else 0.0),
        activations=_products(flying, kept) + _products([max(n - 1, 0) for n in flying], head_kept) + shared,
        in_flight=sum(flying),
        working=working,
        building=_building_bytes(config, state, [layer for chunk in chunks for layer in chunk]),
        late=_late_bytes(config, state, on_cpu=on_cpu),
        computing=certain[0],
        completing=certain[1],
        passing=backward.passing + max(waits, 0.0),
        reducing=backward.reducing,
        overhead=(_CERTAIN_CPU_OVERHEAD, CPU_OVERHEAD) if on_cpu else (0.0, ACCELERATOR_OVERHEAD),
    )


def _products(counts: Iterable[int], sizes: Iterable[float]) -> float:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def held_parameters(layers: Sequence[PlannedLayer], stages: Sequence[range]) -> int:
    """Parameters of one rank, padding included; a table that two of its layers share counts once.

    Args:
        layers: the whole model.
        stages: the numbers of the layers of each of the rank's stages.
    """
    return sum(map(sum, _held_by_layer([[layers[i] for i in numbers] for numbers in stages])))


def whole_parameters(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> int:
    """Of the whole model, a tied one counted once."""
    tables = config.model.vocab_size * config.model.hidden_size if config.model.vocab_size else 0
    tied = (tables if layer.held is not None else layer.shared for layer in layers if layer.tied)
    return sum(layer.parameters for layer in layers) - sum(tied)


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
    if parallel.schedule != "gpipe":  # in all others the most are in flight after the first few
        microbatches = min(microbatches, 4 * parallel.pp)
    return _in_flight(parallel.schedule_name, rank, parallel.pp, microbatches, parallel.virtual_stages, until)


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


class _Moment(NamedTuple):
    """What a rank keeps at a moment of its schedule, by stage.

    Attributes:
        held: microbatches with activations.
        waiting: of these, those whose gradients of outputs wait for the gradients of weights.
        begun: whether a backward has made gradients.
        computing: whether a microbatch is computed; else the first backward of a stage is done.
        split: whether activations count until the gradients of weights; else until that of the stage's input.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    begun: tuple[bool, ...]
    computing: bool
    split: bool


def _moments(parallel: ParallelConfig, rank: int, microbatches: int) -> Sequence[_Moment]:
    """The moments of a rank's step of which none keeps more in every respect than these."""
    if parallel.schedule_csv is not None:
        order = load_schedule(Path(parallel.schedule_csv)).actions[rank]
        return _fullest(order, parallel.pp, parallel.virtual_stages)
    if parallel.schedule != "gpipe":
        microbatches = min(microbatches, 4 * parallel.pp)
    return _moments_of(parallel.schedule_name, rank, parallel.pp, microbatches, parallel.virtual_stages)


@functools.lru_cache(maxsize=4096)
def _moments_of(name: str, rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Sequence[_Moment]:
    order = rank_order(name, rank, ranks, microbatches, virtual_stages=virtual_stages)
    return _fullest(order, ranks, virtual_stages)


def _fullest(order: Iterable[Action], ranks: int, virtual_stages: int) -> Sequence[_Moment]:
    order, kept = list(order), dict[tuple[object, ...], list[_Moment]]()
    for split in (False, True):
        for moment in _walk(order, ranks, virtual_stages, split=split):
            alike = kept.setdefault((moment.begun, moment.computing, split), [])
            if not any(_holds(other, moment) for other in alike):
                alike[:] = [*(other for other in alike if not _holds(moment, other)), moment]
    return [moment for alike in kept.values() for moment in alike]


def _holds(one: _Moment, other: _Moment) -> bool:
    """Whether `one` keeps at least what `other` does."""
    pairs = zip(one.held + one.waiting, other.held + other.waiting, strict=True)
    return all(a >= b for a, b in pairs)


def _walk(order: Iterable[Action], ranks: int, virtual_stages: int, *, split: bool) -> Iterator[_Moment]:
    held, waiting, begun = [0] * virtual_stages, [0] * virtual_stages, [False] * virtual_stages

    def now(*, computing: bool) -> _Moment:
        return _Moment(tuple(held), tuple(waiting), tuple(begun), computing, split)

    for action in order:
        stage = action.stage // ranks
        if action.op is Op.FORWARD:
            held[stage] += 1
        yield now(computing=True)
        if action.op is Op.INPUT_GRAD and split:
            waiting[stage] += 1
        if action.op is Op.WEIGHT_GRAD and split:
            waiting[stage] -= 1
        if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD if split else Op.INPUT_GRAD):
            held[stage] -= 1
        if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD) and not begun[stage]:
            begun[stage] = True
            yield now(computing=False)


def _kept_by_layer(layers: Sequence[PlannedLayer], config: ResolvedConfig, *, on_cpu: bool) -> list[float]:
    """Activations of one microbatch in the blocks of a stage."""
    recompute, first = config.training.recompute, config.training.recompute_num_layers
    sizes: dict[tuple[int, str], float] = {}
    kept, blocks = [], 0
    for layer in layers:
        if layer.block is None:
            kept.append(0.0)
            continue
        how = recompute if recompute != "full" or first is None or blocks < first else "none"
        blocks += 1
        if (key := (id(layer.block), how)) not in sizes:
            sizes[key] = block_bytes(config, layer.block, on_cpu=on_cpu, recompute=how)
        kept.append(sizes[key])
    return kept


def _distinct(blocks: Iterable[ResolvedModel]) -> list[tuple[ResolvedModel, int]]:
    """The blocks that are not one and the same, and how many of each there are."""
    counts = Counter(map(id, blocks := list(blocks)))
    return [(block, counts[number]) for number, block in {id(block): block for block in blocks}.items()]


def _largest_block(config: ResolvedConfig, blocks: Iterable[ResolvedModel], *, on_cpu: bool) -> float:
    """What a block keeps of a microbatch where nothing is computed again; 0 where there is none."""
    kept = (block_bytes(config, block, on_cpu=on_cpu, recompute="none") for block, _ in _distinct(blocks))
    return max(kept, default=0.0)


def _computed_again(config: ResolvedConfig, blocks: Sequence[ResolvedModel], *, on_cpu: bool) -> float:
    """What the block that is computed again keeps besides its input."""
    if config.training.recompute == "light" and not config.training.compile:  # one output of a norm or an activation
        inner = max((block.inner_size for block in blocks), default=0) / config.parallel.tp
        return max(inner / config.model.hidden_size, 1.0) * residual_bytes(config) if blocks else 0.0
    if config.training.recompute == "selective":
        cores = (attention_core_bytes(config, block, on_cpu=on_cpu) for block, _ in _distinct(blocks))
        return max(cores, default=0.0)
    if config.training.recompute == "full":
        return max(_largest_block(config, blocks, on_cpu=on_cpu) - residual_bytes(config), 0.0)
    return 0.0


def _building_bytes(config: ResolvedConfig, state: Mapping[str, float], layers: Iterable[PlannedLayer]) -> float:
    """What exists when the last layer has been made: parameters and master weights, and on stage 3 that layer whole."""
    replicas, kept = ranks_of_role("replicas", config.parallel), config.optimizer_settings.bytes_per_parameter
    master = 0.0
    if config.precision.precision != "fp32" and not config.parallel.offload_optimizer:
        master = state["optimizer"] * 4 / (kept + 4)
    whole = 4.0 * _largest_layer(layers) if replicas > 1 and config.parallel.zero_stage == 3 else 0.0
    return state["params"] + master + whole


def _late_bytes(config: ResolvedConfig, state: Mapping[str, float], *, on_cpu: bool) -> float:
    """The optimizer's state without master weights, in a run of one step: it is made after the first backward."""
    if config.training.train_iters > 1 or config.checkpoint.load is not None:
        return 0.0
    if config.parallel.offload_optimizer and not on_cpu:
        return 0.0  # in host memory
    kept = config.optimizer_settings.bytes_per_parameter
    master = 4 if config.parallel.offload_optimizer or config.precision.precision != "fp32" else 0
    return state["optimizer"] * kept / (kept + master) if kept else 0.0


def _largest_layer(layers: Iterable[PlannedLayer]) -> int:
    """Parameters that a rank holds of its largest layer."""
    return max((layer.parameters if layer.held is None else layer.held for layer in layers), default=0)


def _forgets_gradients(config: ResolvedConfig) -> bool:
    """Whether no buffer of gradients outlives a step."""
    if ranks_of_role("replicas", config.parallel) == 1:
        return config.precision.precision == config.precision.grad_reduce_dtype and not config.training.reproducible
    return config.parallel.zero_stage >= 2


class _Backward(NamedTuple):
    """Attributes of a rank's memory by these names."""

    passing: float
    reducing: float


def _passing(
    config: ResolvedConfig,
    chunks: Sequence[Sequence[PlannedLayer]],
    *,
    head: float,
    again: float,
    working: float,
    on_cpu: bool,
) -> _Backward:
    """What exists for a moment of backward, at the layer where it is most.

    Activations of the layers that backward has passed are freed. Besides what `_beside` counts, ZeRO adds:

    - stage 2: a bucket that is reduced and one that is filled, each of its limit and the parameter that exceeds it;
    - stage 3: these of two layers, and the parameters of two, or with a split backward of all.

    Args:
        config: a resolved configuration.
        chunks: the layers of each of the rank's stages.
        head: what exists in the head while its gradients are computed.
        again: what a block that is computed again keeps besides its input.
        working: as much of this as the rank's memory counts already.
        on_cpu: whether the ranks compute in host memory.
    """
    e, term = ELEMENT_BYTES[config.precision.precision], _term_bytes(config)
    replicas, splits = ranks_of_role("replicas", config.parallel), config.parallel.may_split_backward
    stage = config.parallel.zero_stage if replicas > 1 else 0
    table, sizes_by_chunk = _shared_table(chunks), _held_by_layer(chunks)
    found = [(0.0, 0.0)]
    beside: dict[int, float] = {}  # blocks that are alike are one object
    for chunk, sizes in zip(chunks, sizes_by_chunk, strict=True):
        limit = term / 4 * grown(min(int(config.parallel.bucket_size_mb * 2**20), sum(sizes)), replicas)
        kept = _kept_by_layer(chunk, config, on_cpu=on_cpu)
        waiting = _kept_gradients(config, chunk) if splits else [0.0] * len(chunk)
        freed, later_size, later_bucket = 0.0, 0, limit
        for number in reversed(range(len(chunk))):
            layer, size = chunk[number], sizes[number]
            if (key := id(layer.block or layer)) not in beside:
                beside[key] = _beside(config, layer, table, head=head, again=again, on_cpu=on_cpu)
            matrix = min(_largest_gradient(config, layer), size)  # a shared table is in its first layer's bucket
            moment, reducing, bucket = beside[key], 0.0, limit + term * matrix
            if stage == 2:
                if layer.block is not None:
                    later_bucket = max(later_bucket, bucket)  # of the same block
                reducing = later_bucket / replicas
                moment += bucket + later_bucket
            if stage == 3:
                gathered = sum(sizes) if splits else sum(sizes[max(number - 1, 0) : number + 1])
                reducing = term * later_size / replicas
                moment += e * gathered + term * (size + later_size)
            found.append((moment - freed - working, reducing))
            freed += kept[number] + waiting[number]
            later_size, later_bucket = size, bucket
    passing, reducing = max(found, key=sum)
    return _Backward(passing, reducing)


def _beside(
    config: ResolvedConfig, layer: PlannedLayer, table: int, *, head: float, again: float, on_cpu: bool
) -> float:
    """What exists beside activations while backward is at a layer: gradients of activations, the largest gradient that
    one operator gives, and of a `table` that the head shares with the embedding the head's gradient, which autograd
    keeps until it has both; it then has both and their sum."""
    e = ELEMENT_BYTES[config.precision.precision]
    gradient = 0.0 if _sums_take_products(config, layer, table, on_cpu=on_cpu) else e * _largest_gradient(config, layer)
    if layer.block is not None:
        return again + gradient + e * table + activation_gradient_bytes(config, layer.block, on_cpu=on_cpu)
    if layer.name == "embedding":
        return residual_bytes(config) + max(gradient, 3.0 * e * table)
    return head + gradient


def _held_by_layer(chunks: Sequence[Sequence[PlannedLayer]]) -> list[list[int]]:
    """Parameters that a rank holds of each layer of each stage; those that two of its layers share are the first's."""
    names = {layer.name for chunk in chunks for layer in chunk}

    def held(layer: PlannedLayer) -> int:
        count = layer.parameters if layer.held is None else layer.held
        owners = layer.tied.values()
        is_shared = any(owner.startswith(f"{name}.") for owner in owners for name in names - {layer.name})
        return count - layer.shared if is_shared else count

    return [[held(layer) for layer in chunk] for chunk in chunks]


def _shared_table(chunks: Sequence[Sequence[PlannedLayer]]) -> int:
    """Parameters of a table that two layers of one stage share: their gradients meet in one backward."""
    tables = [
        layer.shared
        for chunk in chunks
        for layer in chunk
        if any(owner.startswith(f"{other.name}.") for owner in layer.tied.values() for other in chunk)
    ]
    return max(tables, default=0)


def _largest_gradient(config: ResolvedConfig, layer: PlannedLayer) -> int:
    """Parameters of a layer whose gradients one operator gives at a time, the most; where the layer is not known, all
    of it."""
    ranks = ranks_of_role("layer", config.parallel)
    if layer.block is not None:
        return largest_product(layer.block, ranks)
    held = layer.parameters if layer.held is None else layer.held
    if not config.model.vocab_size:
        return held
    return min(held, max(vocabulary_rows(config.model, ranks) * config.model.hidden_size, layer.shared))


def _sums_take_products(config: ResolvedConfig, layer: PlannedLayer, table: int, *, on_cpu: bool) -> bool:
    """Whether products add the gradients of the layer's weights to sums in fp32, so that they never exist apart."""
    precision = config.precision
    sums = precision.precision != "fp32" and precision.grad_reduce_dtype == "fp32" and not config.training.reproducible
    is_product = layer.block is not None or (layer.name == "head" and not table)
    return sums and is_product and not on_cpu and not config.training.compile


def _kept_gradients(config: ResolvedConfig, layers: Sequence[PlannedLayer]) -> list[float]:
    """Where backward is split, gradients of a microbatch that wait for those of the weights, by layer."""
    sizes: dict[int, float] = {}
    for layer in layers:
        if layer.block is not None and id(layer.block) not in sizes:
            sizes[id(layer.block)] = kept_gradient_bytes(config, layer.block)
    return [sizes.get(id(layer.block), residual_bytes(config)) for layer in layers]
