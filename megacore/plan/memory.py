"""What training takes of a rank's memory: state, exactly (state.py), and an estimate of the rest (activations.py).

megacore/tracer/memory.py traces the rest in a step on fake tensors. A search, and a run before torch is loaded, ask for
too many layouts, or too soon, for that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.fp8 import is_fp8
from megacore.config.logits import logits_bytes
from megacore.config.lora import adapter_parameters
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.outline import ModelLayer
from megacore.pipeline.schedule import Op
from megacore.plan.activations import layer_bytes, passing_bytes, passing_logits, residual_bytes, waiting_bytes
from megacore.plan.in_flight import fullest_loads, in_flight
from megacore.plan.shared_results import once_per
from megacore.plan.stages import RankStages, StagedModel
from megacore.plan.state import (
    building_bytes,
    expert_copies,
    forgets_gradients,
    held_errors,
    late_bytes,
    state_bytes,
    term_bytes,
    updated_parameters,
    zero_stage,
)
from megacore.plan.traffic import recomputed_whole
from megacore.plan.whole_matrices import Updated, whole_state

GIB = 2.0**30
MOST_MEMORY = 1.1
"""What a rank may take at the most, as a multiple of what is expected."""
# torch, its threads and its allocator in a process that computes on a CPU; on an accelerator workspaces of its
# libraries and buffers of its communication, beside the context that is there before anything is counted.
CPU_OVERHEAD, ACCELERATOR_OVERHEAD = 0.4 * GIB, 1.0 * GIB
# A process that only loads torch takes this on a CPU: less than what any run takes.
_CERTAIN_CPU_OVERHEAD = 0.15 * GIB
_FRAGMENTATION = 0.03
# Of an estimate of what is not state, the part that is certain: a test holds the estimate to that.
CERTAIN = 0.8
COPIES = "copies of --survive"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank takes.

    Attributes:
        pp_rank: its number in the pipeline.
        parameters: how many it holds, padding included.
        state: by kind, as `state_bytes` has them; where the optimizer is offloaded also what lies in host memory.
        host: what lies in host memory while the rank computes on an accelerator: by kind of the state, and
            `activations`, which are not among the rank's `activations`.
        activations: kept for backward by the microbatches in flight, when the rank takes most.
        in_flight: microbatches whose activations the rank keeps, summed over its stages.
        working: what exists beside them and the state for a moment of forward or backward.
        building: what exists when the last layer has been made.
        updating: what exists beside the state while weights are updated, at most.
        absent: bytes of the state that do not exist while there are activations: gradients that a step makes anew
            while it frees activations, and the moments of a run of one step.
        overhead: of the process, certain and expected.
        microbatch: activations of one microbatch, by the rank's stages.
        is_traced: whether `activations`, `working` and `updating` are counted in a step; else they are estimates.
    """

    pp_rank: int
    parameters: int
    state: Mapping[str, float]
    host: Mapping[str, float]
    activations: float = 0.0
    in_flight: int = 0
    working: float = 0.0
    building: float = 0.0
    updating: float = 0.0
    absent: float = 0.0
    overhead: tuple[float, float] = (0.0, 0.0)
    microbatch: Sequence[float] = ()
    is_traced: bool = False

    @property
    def certain(self) -> float:
        """Bytes without which the run cannot proceed, of the memory in which the rank computes: a run that does not
        have them is refused."""
        share = 1.0 if self.is_traced else CERTAIN
        in_step = self._state_in_step + share * (self.activations + self.working)
        return max(self.building, self._computing_state, in_step) + self.overhead[0]

    @property
    def expected_tensors(self) -> float:
        """Bytes of tensors that the rank is expected to hold at its peak, in the memory in which it computes."""
        in_step = self._state_in_step + self.activations + self.working
        return max(self.building, self._computing_state + self.updating, in_step)

    @property
    def on_host(self) -> float:
        """Bytes of all that lies in host memory while the rank computes on an accelerator."""
        return sum(self.host.values())

    @property
    def is_fullest_in_update(self) -> bool:
        """Whether the peak is in the optimizer step."""
        return self.updating > 0 and self._computing_state + self.updating == self.expected_tensors

    @property
    def _computing_state(self) -> float:
        """State in the memory in which the rank computes."""
        return sum(size - self.host.get(kind, 0.0) for kind, size in self.state.items())

    @property
    def _state_in_step(self) -> float:
        """The same at the peak of forward and backward."""
        return self._computing_state - self.absent

    @functools.cached_property
    def expected(self) -> float:
        """Bytes that the rank is expected to take at its peak, with what the allocator and the process add."""
        return self.expected_tensors * (1 + _FRAGMENTATION) + self.overhead[1]


# ---- estimated -------------------------------------------------------------------------------------------------------


def plan_memory(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
    *,
    on_cpu: bool,
    torch_is_loaded: bool = False,
    copies_logits: bool = False,
) -> list[RankMemory]:
    """An estimate of the memory of the ranks of a pipeline; state is exact. It is the same on all ranks of a stage,
    unless the optimizer takes matrices whole: ranks that shard have different ones, and the fullest counts.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        on_cpu: whether the ranks compute in host memory.
        torch_is_loaded: whether what torch takes of host memory is taken already, and does not count again.
        copies_logits: whether the software's loss makes an fp32 copy of all logits.
    """
    config = as_computed(config, on_cpu=on_cpu)
    staged = StagedModel(config, layers)
    ranks = [
        _estimated(config, staged, rank, on_cpu=on_cpu, copies_logits=copies_logits) for rank in range(staged.ranks)
    ]
    if on_cpu and torch_is_loaded:
        overhead = (0.0, CPU_OVERHEAD - _CERTAIN_CPU_OVERHEAD)
        return [dataclasses.replace(rank, overhead=overhead) for rank in ranks]
    return ranks


def fullest_rank(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
    *,
    on_cpu: bool,
    limit: float = math.inf,
    staged: StagedModel | None = None,
    copies_logits: bool = False,
) -> RankMemory:
    """The rank that is expected to take most: `plan_memory` of the ranks that may be it.

    Of ranks whose layers are alike the first takes most: in every built-in schedule it has as many microbatches in
    flight as the later ones, or more. Where a schedule splits backward, it is the last: all have equally many
    microbatches in flight until the gradients of weights, and on the last rank most of them wait for these.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        on_cpu: whether the ranks compute in host memory.
        limit: bytes; the first rank that takes more is returned in place of the fullest.
        staged: the model in stages, if it is known.
        copies_logits: whether the software's loss makes an fp32 copy of all logits.
    """
    config = as_computed(config, on_cpu=on_cpu)
    staged = staged or StagedModel(config, layers)
    ranks, last = list[RankMemory](), config.parallel.may_split_backward
    for rank in range(staged.ranks) if config.parallel.schedule_csv is not None else staged.distinct_ranks(last=last):
        ranks.append(_estimated(config, staged, rank, on_cpu=on_cpu, copies_logits=copies_logits))
        if ranks[-1].expected > limit:
            return ranks[-1]
    return max(ranks, key=lambda rank: rank.expected)


def _estimated(
    config: ResolvedConfig, staged: StagedModel, rank: int, *, on_cpu: bool, copies_logits: bool = False
) -> RankMemory:
    on_rank = staged.on_rank(config, rank)
    held = held_state(config, on_rank, rank=rank, on_cpu=on_cpu)
    microbatch, on_host, working = of_layers(config, on_rank, on_cpu=on_cpu)
    flying, until_weights = microbatches_in_flight(config, rank), _waiting_gradients(config, on_rank)
    loads = fullest_loads(config.parallel, rank, config.microbatches)
    host = {"activations": max(sum(map(operator.mul, load.kept, on_host)) for load in loads)} if on_host else {}
    gradients = held.state["grads"] - held.host.get("grads", 0.0)
    activations = max(
        sum(map(operator.mul, load.kept, microbatch)) + sum(map(operator.mul, load.waiting, until_weights))
        for load in loads
    )
    if copies_logits and on_rank.is_last:
        working = max(working, copied_logits(config))
    makes_anew = forgets_gradients(config) and not on_rank.experts  # gradients, while it frees activations
    absent = min(gradients, activations) if config.microbatches == 1 and makes_anew else 0.0
    return dataclasses.replace(
        held,
        host={**held.host, **host},
        activations=activations,
        in_flight=sum(flying),
        working=working + _of_replicas(config, on_rank) + _quantised(config, on_rank),
        absent=held.absent + absent,
        microbatch=microbatch,
    )


@once_per("state")
def held_state(
    config: ResolvedConfig, on_rank: RankStages, *, rank: int, on_cpu: bool, number: int | None = None
) -> RankMemory:
    """A rank with its state alone.

    Args:
        config: a resolved configuration.
        on_rank: what it holds.
        rank: its number in the pipeline.
        on_cpu: whether it computes in host memory.
        number: of the rank in its stage; None: the one that keeps most.
    """
    state, moments = _state_of(config, on_rank, on_cpu=on_cpu, number=number)
    host = dict[str, float]()
    if config.parallel.offload_optimizer and not on_cpu:
        host |= {"optimizer": state["optimizer"] - held_errors(config, state), "buffers": state["buffers"]}
    if config.parallel.offload_params:
        host |= {"params": state["params"], "grads": state["grads"]}
    overhead = (_CERTAIN_CPU_OVERHEAD, CPU_OVERHEAD) if on_cpu else (0.0, ACCELERATOR_OVERHEAD)
    if copies := surviving_bytes(config, on_rank, moments):
        host |= {} if on_cpu else {COPIES: copies}
        overhead = overhead[0] + copies * on_cpu, overhead[1] + copies * on_cpu
    layers = [one for chunk in on_rank.chunks for one in chunk]
    return RankMemory(
        pp_rank=rank,
        parameters=on_rank.parameters,
        state=state,
        host=host,
        building=building_bytes(config, state, layers, moments=moments),
        absent=late_bytes(config, moments, on_cpu=on_cpu),
        overhead=overhead,
    )


def surviving_bytes(config: ResolvedConfig, on_rank: RankStages, moments: float) -> float:
    """What --survive keeps of a rank in shared memory: its part of two checkpoints, weights in fp32 and `moments`.
    Together the ranks of a stage have each element once."""
    if not config.watch.survive:
        return 0.0
    parameters, experts, copied = on_rank.parameters, on_rank.experts, _copied(on_rank)
    if config.lora.lora_rank is not None:
        parameters, experts, copied = _adapters(config, on_rank), 0, 0  # frozen weights are in no checkpoint
    replicas = ranks_of_role("replicas", config.parallel)
    part = (parameters - experts - copied) / replicas + experts / expert_copies(config.parallel)
    return 2 * part * (4.0 + moments / max(updated_parameters(parameters, config, experts=experts), 1))


def _copied(on_rank: RankStages) -> int:
    """Parameters of a rank that are copies of those of another stage, which alone writes them."""
    layers = {layer.name: layer for chunk in on_rank.chunks for layer in chunk}
    copies = {
        owner: layer.shared
        for layer in layers.values()
        for owner in layer.tied.values()
        if not any(owner.startswith(f"{name}.") for name in layers)
    }
    return sum(copies.values())


def _adapters(config: ResolvedConfig, on_rank: RankStages) -> int:
    """Parameters of LoRA's adapters on a rank."""
    blocks = [layer.block for chunk in on_rank.chunks for layer in chunk if layer.block is not None]
    return sum(adapter_parameters(config.lora, block, config.parallel.tp) for block in blocks)


def _state_of(
    config: ResolvedConfig, on_rank: RankStages, *, on_cpu: bool, number: int | None
) -> tuple[dict[str, float], float]:
    """Bytes of state by kind, and how many of them are the optimizer's without master weights."""
    if config.lora.lora_rank is not None:
        learn = _adapters(config, on_rank)
        frozen = state_bytes(on_rank.parameters, config, experts=on_rank.experts)["params"]
        state = state_bytes(learn, config)
        moments = updated_parameters(learn, config) * config.kept_per_parameter
        return {**state, "params": state["params"] + frozen}, moments
    kept = kept_of_rank(config, on_rank, on_cpu=on_cpu, number=number)
    padding = {"padding": kept.padding, "expert_padding": kept.expert_padding}
    state = state_bytes(on_rank.parameters, config, experts=on_rank.experts, moments=kept.moments, **padding)
    return state, kept.moments


class _OfLayers(NamedTuple):
    """What the layers of a rank keep of one microbatch, by stage: on the device, and in host memory; and what exists
    for a moment beside that, where it is most."""

    kept: Sequence[float]
    on_host: Sequence[float]
    working: float


@once_per("layers")
def of_layers(config: ResolvedConfig, on_rank: RankStages, *, on_cpu: bool) -> _OfLayers:
    """What they keep, as an estimate."""
    offloads = config.training.offload_activations and not on_cpu
    kept, on_host, two_blocks = list[float](), list[float](), 0.0
    for chunk in on_rank.chunks:
        pairs = list(zip(chunk, recomputed_whole(config, chunk), strict=True))
        sizes = [layer_bytes(config, layer, on_cpu=on_cpu, again=again) for layer, again in pairs]
        of_blocks = sum(size for layer, size in zip(chunk, sizes, strict=True) if layer.block is not None)
        kept.append(sum(sizes) - (of_blocks if offloads else 0.0))
        on_host.append(of_blocks if offloads else 0.0)
        two_blocks = max(two_blocks, sum(sorted(sizes)[-2:]) if offloads else 0.0)
    working = [passing_bytes(config, block, on_cpu=on_cpu) for block in on_rank.distinct_blocks]
    if on_rank.is_last:
        working.append(passing_logits(config))
    return _OfLayers(kept, on_host if offloads else (), max(working, default=0.0) + two_blocks)


@once_per("layers")
def _waiting_gradients(config: ResolvedConfig, on_rank: RankStages) -> list[float]:
    """By stage, gradients of a microbatch that wait for those of weights."""
    blocks = ([layer.block for layer in chunk if layer.block is not None] for chunk in on_rank.chunks)
    return [sum(waiting_bytes(config, block) for block in of_stage) for of_stage in blocks]


def microbatches_in_flight(config: ResolvedConfig, rank: int) -> tuple[int, ...]:
    """Microbatches whose activations each of a rank's stages keeps, until the gradients of weights."""
    until = Op.WEIGHT_GRAD if config.parallel.may_split_backward else Op.INPUT_GRAD
    return in_flight(config.parallel, rank, config.microbatches, until=until)


def _of_replicas(config: ResolvedConfig, on_rank: RankStages) -> float:
    """Gradients of a layer before replicas divide them, and its parameters, which are gathered."""
    if zero_stage(config) < 2:
        return 0.0
    largest = max(map(max, on_rank.by_layer))
    gathered = ELEMENT_BYTES[config.precision.precision] if zero_stage(config) == 3 else 0
    return largest * (term_bytes(config) + gathered)


def _quantised(config: ResolvedConfig, on_rank: RankStages) -> float:
    """Weights in fp8, by rows and by columns, which the microbatches of a step share."""
    if config.precision.fp8 == "none" or config.microbatches == 1 or zero_stage(config) == 3:
        return 0.0
    held = (pair for both in zip(on_rank.chunks, on_rank.by_layer, strict=True) for pair in zip(*both, strict=True))
    return 2.0 * sum(count for layer, count in held if layer.block is not None and is_fp8(layer.name, config))


def copied_logits(config: ResolvedConfig) -> float:
    """The logits, an fp32 copy of all of them, and the head's input with its norm."""
    copy = 4.0 / ELEMENT_BYTES[config.precision.precision]
    return (1.0 + copy) * logits_bytes(config) + 2 * residual_bytes(config)


# ---- in host memory --------------------------------------------------------------------------------------------------


def held_on_host(config: ResolvedConfig, ranks: Sequence[RankMemory], node_ranks: int) -> float:
    """Bytes in the memory of the host on which most lies, of all ranks of its node.

    Args:
        config: a resolved configuration.
        ranks: of its pipeline. Nodes hold consecutive ranks, and so do the stages of the pipeline.
        node_ranks: on each node.
    """
    world, of_stage = config.parallel.ranks, config.parallel.ranks // len(ranks)
    nodes = set[int]()  # other nodes hold the same as one of these
    for first in range(0, world, of_stage):
        node, last = first // node_ranks, (first + of_stage - 1) // node_ranks
        nodes |= {node, min(node + 1, last), last}

    def held(node: int) -> float:
        begin, end = node * node_ranks, min((node + 1) * node_ranks, world)
        stages = range(begin // of_stage, (end - 1) // of_stage + 1)
        parts = ((min(end, (n + 1) * of_stage) - max(begin, n * of_stage), ranks[n]) for n in stages)
        # With several nodes each has the copies of another one too.
        others = world > node_ranks
        return sum(count * (rank.on_host + others * rank.host.get(COPIES, 0.0)) for count, rank in parts)

    return max(map(held, nodes))


def held_after_loss(config: ResolvedConfig, ranks: Sequence[RankMemory], node_ranks: int) -> float:
    """Bytes of copies of --survive in the memory of a node while a run continues without one of its nodes: the whole
    step that it continues from, and the first that it keeps, of which each node has its part and that of the node
    before; 0 where there is one node. Arguments as for `held_on_host`."""
    world, of_stage = config.parallel.ranks, config.parallel.ranks // len(ranks)
    left = -(-world // node_ranks) - 1
    whole = sum(rank.host.get(COPIES, 0.0) for rank in ranks) * of_stage / 2
    return whole * (1 + min(2, left) / left) if left else 0.0


def uses_host(config: ResolvedConfig) -> bool:
    """Whether something lies in host memory while ranks compute on accelerators."""
    return config.offloads or config.watch.survive


def needed_on_host(config: ResolvedConfig, staged: StagedModel, node_ranks: int) -> float:
    """`held_on_host` of ranks that compute on accelerators, as an estimate.

    Args:
        config: a resolved configuration.
        staged: the model in stages.
        node_ranks: on each node.
    """
    if not uses_host(config):
        return 0.0
    config = as_computed(config, on_cpu=False)
    ranks = [_estimated(config, staged, rank, on_cpu=False) for rank in range(staged.ranks)]
    return held_on_host(config, ranks, node_ranks)


def as_computed(config: ResolvedConfig, *, on_cpu: bool) -> ResolvedConfig:
    """What a run does where its ranks compute: on a CPU parameters are in host memory anyway."""
    config = config.for_device(on_cpu=on_cpu)
    if not on_cpu or not config.parallel.offload_params:
        return config
    return config.with_values({"offload_params": False})


def fullest_state(ranks: Iterable[RankMemory]) -> dict[str, float]:
    """Bytes of state by kind, each on the rank that keeps most of it."""
    states = [rank.state for rank in ranks]
    return {kind: max(state[kind] for state in states) for kind in states[0]}


# ---- state of the optimizer ------------------------------------------------------------------------------------------
# Most optimizers keep as many numbers of every parameter. One that takes matrices whole keeps others of these, and the
# ranks that shard have different matrices: the fullest rank decides.


class Kept(NamedTuple):
    """What a rank keeps.

    Attributes:
        moments: bytes of the optimizer's state and of an average of the weights.
        padding: elements of the buckets of whole matrices of all ranks that belong to no parameter, without those of
            experts.
        expert_padding: the same of experts.
    """

    moments: float
    padding: int = 0
    expert_padding: int = 0


@once_per("state")
def kept_of_rank(config: ResolvedConfig, on_rank: RankStages, *, on_cpu: bool, number: int | None) -> Kept:
    """What a rank keeps.

    Args:
        config: a resolved configuration.
        on_rank: what it holds.
        on_cpu: whether it computes in host memory.
        number: of the rank in its stage; None: the one that keeps most.
    """
    parameters, experts, settings = on_rank.parameters, on_rank.experts, config.optimizer_settings
    if not settings.takes_some_whole:
        return Kept(updated_parameters(parameters, config, experts=experts) * config.kept_per_parameter)
    whole, others = (settings.bytes_of(whole=kind) + config.average.bytes_per_parameter for kind in (True, False))
    found = whole_state(config, on_rank.chunks, parameters=parameters, experts=experts, on_cpu=on_cpu)

    def moments(updated: Updated) -> float:
        return updated.whole * whole + updated.others * others + updated.factors

    updated = found.updated if number is None else [found.updated[number % len(found.updated)]]
    return Kept(max(map(moments, updated)), found.padding, found.expert_padding)
