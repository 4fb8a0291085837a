"""What training takes of a rank's memory, by formula: state, activations, and the moment of building.

The state is ZeRO's (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1), the activations those of activations.py,
times the microbatches that the schedule keeps in flight. Two sums are made of them: what a rank certainly takes, by
which a run may be refused, and what it is expected to take, by which a way out is recommended.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megacore.config import ParallelConfig, ResolvedConfig, ResolvedModel
from megacore.config.dimensions import ranks_of_role
from megacore.pipeline.partition import LayerCost, stage_ranges
from megacore.pipeline.schedule import Action, Op, rank_order
from megacore.pipeline.schedule_file import load_schedule
from megacore.plan.activations import (
    ELEMENT_BYTES,
    attention_core_bytes,
    attention_passing_bytes,
    block_bytes,
    head_bytes,
    residual_bytes,
    shared_bytes,
)
from megacore.plan.buckets import grown

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
        gradients_apart: whether all gradients and all activations never exist at the same time: the step has one
            microbatch, and no buffer of gradients outlives the step.
        passing: bytes that exist for a moment of backward, as an estimate: gradients of one layer before they are
            added up, buckets that are being reduced.
        received: bytes that a rank of ZeRO-1 holds at the end of the last backward, beside the buffer of gradients: its
            shard of every reduced bucket, which the step copies into the buffer, and the last gradient.
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
    gradients_apart: bool
    passing: float
    received: float
    overhead: tuple[float, float]

    @property
    def certain(self) -> float:
        """Bytes without which the run cannot proceed, of the memory in which the rank computes: a run that does not
        have them is refused."""
        return max(self.building, self._computing_state, self._backward) + self.overhead[0]

    @property
    def expected_tensors(self) -> float:
        """Bytes of tensors that the rank is expected to hold at its peak, in the memory in which it computes: those
        that are certain, in backward `passing` as well, and at its end `received`."""
        end_of_backward = self._computing_state - self.late + self.received
        return max(self.building, self._computing_state, self._backward + self.passing, end_of_backward)

    @property
    def _computing_state(self) -> float:
        """State in the memory in which the rank computes."""
        return sum(self.state.values()) - self.on_host

    @property
    def _backward(self) -> float:
        """State and activations at the peak of forward and backward. Gradients that a step makes anew grow as the
        activations are freed: of such gradients and activations the larger counts."""
        gradients, kept = self.state["grads"], self.activations + self.working
        both = max(gradients, kept) if self.gradients_apart else gradients + kept
        return self._computing_state - self.late - gradients + both

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


def _received_bytes(config: ResolvedConfig, parameters: int, layers: Sequence[PlannedLayer]) -> float:
    """What `RankMemory.received` says; stages 2 and 3 have no other buffer, and stage 0 reduces in the buffer."""
    ranks = ranks_of_role("replicas", config.parallel)
    if config.parallel.zero_stage != 1 or ranks == 1:
        return 0.0
    # Of a table that two layers share autograd has both gradients and their sum.
    has_embedding = any(layer.name == "embedding" for layer in layers)
    last = 3 * max(layer.shared for layer in layers) if has_embedding else 0
    return parameters * _term_bytes(config) / ranks + ELEMENT_BYTES[config.precision.precision] * last


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
    chunks = [_kept_by_stage([layers[i] for i in numbers], config, on_cpu=on_cpu) for numbers in on_rank]
    blocks = [block for numbers in on_rank for i in numbers if (block := layers[i].block) is not None]
    flying = in_flight(config.parallel, rank, config.microbatches)
    longer = in_flight(config.parallel, rank, config.microbatches, until=Op.WEIGHT_GRAD)
    has_head = stages[-1] in on_rank and layers[-1].block is None and bool(blocks)
    again = _computed_again(config, blocks, on_cpu=on_cpu)
    head = head_bytes(config) if has_head else 0.0
    # Gradients in autograd's hands, or divided ones, are forgotten when a step begins.
    forgotten = state["grads"] if _forgets_gradients(config) else 0.0
    return RankMemory(
        pp_rank=rank,
        parameters=parameters,
        state=state,
        on_host=0.0 if on_cpu or not config.parallel.offload_optimizer else state["optimizer"] + state["buffers"],
        activations=_products(flying, chunks) + (shared_bytes(config) if blocks else 0.0),
        in_flight=sum(flying),
        working=max(head, again),
        building=_building_bytes(config, state, [layers[i] for numbers in on_rank for i in numbers]),
        late=_late_bytes(config, state, on_cpu=on_cpu),
        gradients_apart=forgotten > 0 and sum(flying) == 1 and config.microbatches == 1,
        passing=_passing_bytes(config, [layers[i] for numbers in on_rank for i in numbers], blocks, on_cpu=on_cpu)
        + max(_products(longer, chunks) - _products(flying, chunks), 0.0),
        received=_received_bytes(config, parameters, [layers[i] for numbers in on_rank for i in numbers]),
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
    held = [layers[i] for numbers in stages for i in numbers]
    names = {layer.name for layer in held}
    count = 0
    for layer in held:
        count += layer.parameters if layer.held is None else layer.held
        if any(owner.startswith(f"{name}.") for owner in layer.tied.values() for name in names - {layer.name}):
            count -= layer.shared
    return count


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


def _kept_by_stage(layers: Sequence[PlannedLayer], config: ResolvedConfig, *, on_cpu: bool) -> float:
    """Activations of one microbatch in the blocks of a stage."""
    recompute, first = config.training.recompute, config.training.recompute_num_layers
    blocks = [layer.block for layer in layers if layer.block is not None]
    again, whole = (blocks[:first], blocks[first:]) if recompute == "full" and first is not None else (blocks, [])
    return sum(
        count * block_bytes(config, block, on_cpu=on_cpu, recompute=how)
        for group, how in ((again, recompute), (whole, "none"))
        for block, count in _distinct(group)
    )


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


def _passing_bytes(
    config: ResolvedConfig, layers: Sequence[PlannedLayer], blocks: Sequence[ResolvedModel], *, on_cpu: bool
) -> float:
    """What exists for a moment: the gradients of a layer before they are added up, those of the activations of a block,
    what attention needs for a block of queries, buckets of ZeRO's stages 2 and 3, and on stage 3 the parameters of two
    layers."""
    e = ELEMENT_BYTES[config.precision.precision]
    largest = _largest_layer(layers)
    replicas = ranks_of_role("replicas", config.parallel)
    stage = config.parallel.zero_stage if replicas > 1 else 0
    attention = (attention_passing_bytes(config, block, on_cpu=on_cpu) for block, _ in _distinct(blocks))
    moment = e * largest + _largest_block(config, blocks, on_cpu=on_cpu) / 2 + max(attention, default=0.0)
    if stage == 2:
        bucket = grown(int(config.parallel.bucket_size_mb * 2**20), replicas)
        moment += 2 * min(bucket, 4.0 * sum(layer.parameters for layer in layers) / 4)
    if stage == 3:
        moment += 2 * largest * (4 + e)
    return moment
