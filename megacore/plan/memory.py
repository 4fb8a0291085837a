"""What training takes of a rank's memory, by formula: state, activations, and the moment of building.

State is that of state.py. Activations are those of activations.py, times the microbatches that the schedule keeps in
flight (pipeline/in_flight.py). Backward adds what exists for a moment (backward_memory.py), and so does the update of
the weights (update_memory.py). Three sums are made of them: what a rank certainly takes, by which a run may be refused;
what it is expected to take, by which a way out is recommended; and the low end of this, for reports.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.models.size import ELEMENT_BYTES, logits_bytes
from megacore.pipeline.in_flight import in_flight, moments
from megacore.plan.activations import residual_bytes
from megacore.plan.backward_memory import Passing
from megacore.plan.cut import Cut, OnRank
from megacore.plan.experts import expert_copies
from megacore.plan.once import once_per_microbatches, once_per_state
from megacore.plan.optimizer_state import kept_of_rank
from megacore.plan.rank_activations import layers_of, passing_of, passing_of_whole, peaks_of, products
from megacore.plan.state import (
    PlannedLayer,
    building_bytes,
    forgets_gradients,
    held_errors,
    late_bytes,
    state_bytes,
    term_bytes,
    zero_stage,
)
from megacore.plan.update_memory import updating_bytes

GIB = 2.0**30
MOST_MEMORY = 1.1
"""What a rank may take at the most, as a multiple of what is expected."""
# torch, its threads and its allocator in a process that computes on a CPU; on an accelerator workspaces of its
# libraries and buffers of its communication, beside the context that is there before anything is counted.
CPU_OVERHEAD, ACCELERATOR_OVERHEAD = 0.4 * GIB, 1.0 * GIB
# A process that only loads torch takes this on a CPU: less than what any run takes.
_CERTAIN_CPU_OVERHEAD = 0.15 * GIB
_FRAGMENTATION = 0.03


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank takes.

    Attributes:
        pp_rank: its number in the pipeline.
        parameters: how many it holds, padding included.
        state: by kind, as `state_bytes` has them; where the optimizer is offloaded also what lies in host memory.
        host: what lies in host memory while the rank computes on an accelerator: by kind of the state, and
            `activations`, which are not among the rank's `activations`.
        activations: kept for backward by the microbatches in flight, with what other stages have sent ahead, when they
            take most.
        in_flight: microbatches whose activations the rank keeps, summed over its stages.
        working: what exists beside them at the end of a forward, of the stage where it is most: logits, or a block that
            is computed again.
        building: what exists when the last layer has been made.
        updating: what exists beside the state while weights are updated, at most.
        late: bytes of the state that do not exist while there are activations: the moments of a run of one step, which
            the optimizer makes after backward. 0 in other runs.
        computing: most bytes of gradients and activations at a time while a microbatch is computed, less `working`.
            Gradients that a step makes anew exist from the first backward on.
        completing: the same at the end of a first backward, when its gradients exist and its activations are freed.
        waiting: where a schedule splits backward, what is kept from the gradients of a stage's input to those of its
            weights, at the peak: the activations that are kept for longer, and the gradients of outputs.
        passing: bytes that exist for a moment of backward, as an estimate: gradients of weights before they are added
            up, gradients of activations, buckets that are being reduced.
        reducing: on ZeRO's stages 2 and 3 the rank's shard of the bucket that is being reduced.
        overhead: of the process, certain and expected.
        microbatch: activations of one microbatch, by the rank's stages.
        output_gradients: of one microbatch that waits for the gradients of weights, by the rank's stages.
        gradients_on_host: whether the gradients among `state` lie in host memory, and `computing` and `completing` have
            none.
    """

    pp_rank: int
    parameters: int
    state: Mapping[str, float]
    host: Mapping[str, float]
    activations: float
    in_flight: int
    working: float
    building: float
    updating: float
    late: float
    computing: float
    completing: float
    waiting: float
    passing: float
    reducing: float
    overhead: tuple[float, float]
    microbatch: Sequence[float] = ()
    output_gradients: Sequence[float] = ()
    gradients_on_host: bool = False

    @property
    def certain(self) -> float:
        """Bytes without which the run cannot proceed, of the memory in which the rank computes: a run that does not
        have them is refused."""
        state = self._computing_state
        return max(self.building, state, self._in_backward(state)) + self.overhead[0]

    @property
    def least(self) -> float:
        """Bytes that the rank takes at its peak at the least: `certain`, and in backward `waiting` as well, which the
        formulas count as exactly as other activations."""
        state = self._computing_state
        return max(self.building, state, self._in_backward(state) + self.waiting) + self.overhead[0]

    @property
    def expected_tensors(self) -> float:
        """Bytes of tensors that the rank is expected to hold at its peak, in the memory in which it computes: those
        that are certain, in backward `waiting`, `passing` and `reducing` as well, and in the update `updating`."""
        state = self._computing_state
        in_backward = self._in_backward(state) + self.waiting + self.passing + self.reducing
        return max(self.building, state + self.updating, in_backward)

    @property
    def on_host(self) -> float:
        """Bytes of all that lies in host memory while the rank computes on an accelerator."""
        return sum(self.host.values())

    @property
    def is_fullest_in_backward(self) -> bool:
        """Whether the peak is in forward and backward."""
        return self.expected_tensors > max(self.building, self._computing_state + self.updating)

    @property
    def is_fullest_in_update(self) -> bool:
        """Whether the peak is in the optimizer step."""
        return self.updating > 0 and self._computing_state + self.updating == self.expected_tensors

    @property
    def _computing_state(self) -> float:
        """State in the memory in which the rank computes."""
        return sum(size - self.host.get(kind, 0.0) for kind, size in self.state.items())

    @property
    def _computing_gradients(self) -> float:
        """Gradients in the memory in which the rank computes, from step to step."""
        return 0.0 if self.gradients_on_host else self.state["grads"]

    def _in_backward(self, state: float) -> float:
        """State and activations at the peak of forward and backward.

        Args:
            state: `_computing_state`.
        """
        without_gradients = state - self.late - self._computing_gradients
        return without_gradients + max(self.computing + self.working, self.completing)

    @functools.cached_property
    def expected(self) -> float:
        """Bytes that the rank is expected to take at its peak, with what the allocator and the process add."""
        return self.expected_tensors * (1 + _FRAGMENTATION) + self.overhead[1]


def plan_memory(
    config: ResolvedConfig,
    layers: Sequence[PlannedLayer],
    *,
    on_cpu: bool,
    torch_is_loaded: bool = False,
    number: int | None = None,
    copies_logits: bool = False,
) -> list[RankMemory]:
    """The memory of the ranks of a pipeline. It is the same on all ranks of a stage, unless the optimizer takes
    matrices whole: ranks that shard have different ones.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        on_cpu: whether the ranks compute in host memory.
        torch_is_loaded: whether what torch takes of host memory is taken already, and does not count again.
        number: of the rank in its stage; None: the one that keeps most.
        copies_logits: whether the software's loss makes an fp32 copy of all logits.
    """
    config = _for_device(config, on_cpu=on_cpu)
    cut = Cut(config, layers)
    ranks = [
        _rank_memory(config, cut, rank, on_cpu=on_cpu, number=number, copies_logits=copies_logits)
        for rank in range(cut.ranks)
    ]
    if on_cpu and torch_is_loaded:
        overhead = (0.0, CPU_OVERHEAD - _CERTAIN_CPU_OVERHEAD)
        return [dataclasses.replace(rank, overhead=overhead) for rank in ranks]
    return ranks


def fullest_rank(
    config: ResolvedConfig,
    layers: Sequence[PlannedLayer],
    *,
    on_cpu: bool,
    limit: float = math.inf,
    cut: Cut | None = None,
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
        cut: the model in stages, if it is known.
        copies_logits: whether the software's loss makes an fp32 copy of all logits.
    """
    config = _for_device(config, on_cpu=on_cpu)
    cut = cut or Cut(config, layers)
    ranks, last = [], config.parallel.may_split_backward
    for rank in range(cut.ranks) if config.parallel.schedule_csv is not None else cut.distinct_ranks(last=last):
        ranks.append(_rank_memory(config, cut, rank, on_cpu=on_cpu, copies_logits=copies_logits))
        if ranks[-1].expected > limit:
            return ranks[-1]
    return max(ranks, key=lambda rank: rank.expected)


def held_at_least(config: ResolvedConfig, cut: Cut, *, on_cpu: bool, limit: float) -> float:
    """A lower bound of the `expected` bytes of `fullest_rank` that takes less time: state, and activations of the
    microbatches in flight. What may be in host memory does not count.

    Args:
        config: a resolved configuration.
        cut: the model in stages.
        on_cpu: whether the ranks compute in host memory.
        limit: bytes; ranks after the first one that holds more are not looked at.
    """
    config, most = _for_device(config, on_cpu=on_cpu), 0.0
    for rank in cut.distinct_ranks(last=False):
        most = max(most, _held_at_least(config, cut, rank, on_cpu=on_cpu))
        if most > limit:
            break
    return most


def _held_at_least(config: ResolvedConfig, cut: Cut, rank: int, *, on_cpu: bool) -> float:
    on_rank, parallel = cut.on_rank(config, rank), config.parallel
    held = _state_of(config, on_rank, on_cpu=on_cpu, number=None)
    state = held.lasting - held.late
    if not parallel.offload_params:
        state += held.by_kind["params"]
    if on_cpu or not parallel.offload_optimizer:
        state += held.by_kind["optimizer"]
    kept = layers_of(config, on_rank, on_cpu=on_cpu).kept
    activations = products(in_flight(parallel, rank, config.microbatches), kept)
    return (state + activations) * (1 + _FRAGMENTATION)


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
        return sum(count * rank.on_host for count, rank in parts)

    return max(map(held, nodes))


def needed_on_host(config: ResolvedConfig, cut: Cut, node_ranks: int) -> float:
    """`held_on_host` of ranks that compute on accelerators.

    Args:
        config: a resolved configuration.
        cut: the model in stages.
        node_ranks: on each node.
    """
    if not config.offloads:
        return 0.0
    config = _for_device(config, on_cpu=False)
    ranks = [_rank_memory(config, cut, rank, on_cpu=False) for rank in range(cut.ranks)]
    return held_on_host(config, ranks, node_ranks)


def _for_device(config: ResolvedConfig, *, on_cpu: bool) -> ResolvedConfig:
    """What a run does where its ranks compute: on a CPU parameters are in host memory anyway."""
    config = config.for_device(on_cpu=on_cpu)
    if not on_cpu or not config.parallel.offload_params:
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, offload_params=False))


def fullest_state(ranks: Iterable[RankMemory]) -> dict[str, float]:
    """Bytes of state by kind, each on the rank that keeps most of it."""
    states = [rank.state for rank in ranks]
    return {kind: max(state[kind] for state in states) for kind in states[0]}


class _State(NamedTuple):
    """What a rank holds beside activations.

    Attributes:
        by_kind: as `state_bytes` has it.
        building: what exists when the last layer has been made.
        late: what does not exist while there are activations.
        grads: by stage, gradients that its first backward in a step makes.
        lasting: gradients that are there from the beginning.
        makes_whole: whether a first backward makes gradients that no replica has a part of.
    """

    by_kind: dict[str, float]
    building: float
    late: float
    grads: tuple[float, ...]
    lasting: float
    makes_whole: bool


@once_per_state
def _state_of(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool, number: int | None) -> _State:
    chunks = on_rank.chunks
    kept = kept_of_rank(config, on_rank, on_cpu=on_cpu, number=number)
    moments, padding = kept.moments, {"padding": kept.padding, "expert_padding": kept.expert_padding}
    state = state_bytes(on_rank.parameters, config, experts=on_rank.experts, moments=moments, **padding)
    grads, lasting, makes_whole = [0.0] * len(chunks), 0.0, False
    if not config.parallel.offload_params:
        forgets, forgets_experts = forgets_gradients(config), forgets_gradients(config, of_experts=True)
        copies = expert_copies(config.parallel) if zero_stage(config) >= 2 else 1
        of_experts = [term_bytes(config) * experts / copies for experts in on_rank.experts_by_chunk]
        if forgets:
            totals = [sum(sizes) - n for sizes, n in zip(on_rank.by_layer, on_rank.experts_by_chunk, strict=True)]
            of_others = state["grads"] - sum(of_experts)
            grads = [of_others * total / max(sum(totals), 1) for total in totals]
        if forgets_experts:
            grads = [size + experts for size, experts in zip(grads, of_experts, strict=True)]
        makes_whole = ranks_of_role("replicas", config.parallel) == 1 and forgets
        makes_whole |= copies == 1 and forgets_experts and any(of_experts)
        lasting = state["grads"] - sum(grads)
    return _State(
        by_kind=state,
        building=building_bytes(config, state, [layer for chunk in chunks for layer in chunk], moments=moments),
        late=late_bytes(config, moments, on_cpu=on_cpu),
        grads=tuple(grads),
        lasting=lasting,
        makes_whole=makes_whole,
    )


class _InBackward(NamedTuple):
    """What a rank has beside its state while the microbatches of a step are computed; attributes are those of
    `RankMemory`, and `on_host` its activations in host memory."""

    activations: float
    in_flight: int
    working: float
    computing: float
    completing: float
    waiting: float
    passing: float
    reducing: float
    microbatch: Sequence[float]
    output_gradients: Sequence[float]
    on_host: float


@once_per_microbatches
def _in_backward(
    config: ResolvedConfig,
    on_rank: OnRank,
    rank: int,
    *,
    grads: tuple[float, ...],
    lasting: float,
    makes_whole: bool,
    on_cpu: bool,
) -> _InBackward:
    """Of a pipeline rank; `grads`, `lasting` and `makes_whole` as `_State` has them."""
    layers = layers_of(config, on_rank, on_cpu=on_cpu)
    flying = in_flight(config.parallel, rank, config.microbatches)
    makes_anew = any(grads) or zero_stage(config) >= 2 or config.parallel.offload_params
    offloads = config.training.offload_activations and not on_cpu
    schedule = moments(config.parallel, rank, config.microbatches, adds_gradients=makes_anew, in_forward=offloads)
    peaks = peaks_of(config, on_rank, schedule, flying, grads=grads, lasting=lasting, on_cpu=on_cpu)
    is_like_others = config.parallel.zero_stage < 2 and not makes_anew
    passes = passing_of_whole if is_like_others else passing_of
    at_least, kept_until_weights = max(peaks.certain), max(peaks.expected)
    found = [Passing(0.0, 0.0)]
    in_backward = max(kept + layers.working[backward.stage] for backward, kept in peaks.by_backward.items())
    for backward, kept in peaks.by_backward.items():
        computing = kept + layers.working[backward.stage]
        repeats = any(grads) and computing + sum(grads) <= in_backward
        if backward.is_first and not makes_whole and repeats:
            continue  # a later backward takes more than the first
        size = passes(config, on_rank, backward, on_cpu=on_cpu)
        found.append(size._replace(passing=size.passing + computing - kept_until_weights))
    passing = max(found, key=sum)
    working = max(layers.working)
    return _InBackward(
        activations=peaks.activations,
        in_flight=sum(flying),
        working=working,
        computing=peaks.certain[0] - working,
        completing=peaks.certain[1],
        waiting=kept_until_weights - at_least,
        passing=passing.passing,
        reducing=passing.reducing,
        microbatch=[size + logits for size, logits in zip(layers.kept, layers.head_kept, strict=True)],
        output_gradients=layers.kept_grads,
        on_host=products(flying, layers.on_host),
    )


def _rank_memory(
    config: ResolvedConfig,
    cut: Cut,
    rank: int,
    *,
    on_cpu: bool,
    number: int | None = None,
    copies_logits: bool = False,
) -> RankMemory:
    on_rank, offloads = cut.on_rank(config, rank), config.training.offload_activations and not on_cpu
    held = _state_of(config, on_rank, on_cpu=on_cpu, number=number)
    grads, lasting, makes_whole = held.grads, held.lasting, held.makes_whole
    in_backward = _in_backward(
        config, on_rank, rank, grads=grads, lasting=lasting, makes_whole=makes_whole, on_cpu=on_cpu
    )
    state, params_on_host = held.by_kind, config.parallel.offload_params
    host = dict[str, float]()
    if config.parallel.offload_optimizer and not on_cpu:
        host |= {"optimizer": state["optimizer"] - held_errors(config, state), "buffers": state["buffers"]}
    if params_on_host:
        host |= {"params": state["params"], "grads": state["grads"]}
    if offloads:
        host["activations"] = in_backward.on_host
    return RankMemory(
        pp_rank=rank,
        parameters=on_rank.parameters,
        state=state,
        host=host,
        activations=in_backward.activations,
        in_flight=in_backward.in_flight,
        working=max(in_backward.working, _copied_logits(config) if copies_logits and rank == cut.ranks - 1 else 0.0),
        building=held.building,
        updating=updating_bytes(config, on_rank, on_cpu=on_cpu),
        late=held.late,
        computing=in_backward.computing,
        completing=in_backward.completing,
        waiting=in_backward.waiting,
        passing=in_backward.passing,
        reducing=in_backward.reducing,
        overhead=(_CERTAIN_CPU_OVERHEAD, CPU_OVERHEAD) if on_cpu else (0.0, ACCELERATOR_OVERHEAD),
        microbatch=in_backward.microbatch,
        output_gradients=in_backward.output_gradients,
        gradients_on_host=params_on_host,
    )


def _copied_logits(config: ResolvedConfig) -> float:
    """The logits, an fp32 copy of all of them, and the head's input with its norm."""
    copy = 4.0 / ELEMENT_BYTES[config.precision.precision]
    return (1.0 + copy) * logits_bytes(config) + 2 * residual_bytes(config)
