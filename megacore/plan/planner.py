"""A run as it will be on a cluster: memory of every rank, the time of a step, what travels, what it costs.

Puts together what memory.py, step_time.py and traffic.py compute. Every figure says where it is from: `exact` figures
are counted, `traced` ones are those of a step on fake tensors, `formula` ones follow from the configuration, `fitted`
ones use constants of a measured run (--calibrate), `assumed` ones use shares of a data sheet that a step is thought to
reach, with a range from the slow to the fast case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.models.flops import Attention, block_flops, blocks_of, flops_per_sequence, idle_parameters, linear_flops
from megacore.models.outline import LayerOutline, ModelLayer, outline
from megacore.parallel.host_memory import AvailableMemory
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule_choice import is_open, with_stages_that_fit
from megacore.plan.checked import is_small, range_of
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Case
from megacore.plan.fastest_schedule import fastest_that_fits
from megacore.plan.memory import (
    CERTAIN,
    MOST_MEMORY,
    RankMemory,
    held_on_host,
    plan_memory,
)
from megacore.plan.state import whole_parameters
from megacore.plan.step_time import StepTime, step_time
from megacore.plan.suggestions import Limits, Suggestion, suggestions
from megacore.plan.traffic import LinkClass, Sent, bytes_by_link, rank_traffic, recomputed_whole

Origin = Literal["exact", "traced", "formula", "fitted", "assumed"]
CASES: tuple[Case, ...] = ("slow", "expected", "fast")
# What other programs and the libraries' own contexts take: a planned device is full below its capacity, as is a host.
_USABLE = 0.97
LOW_CONFIDENCE = "the model is small for this device; kernel launches can take as long as the kernels"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with its unit, where it is from, and what it may be at its least and most."""

    value: float
    unit: str
    origin: Origin
    low: float
    high: float


def exact(value: float, unit: str) -> Figure:
    """A counted number."""
    return Figure(value=value, unit=unit, origin="exact", low=value, high=value)


def by_formula(size: float, *, low: float) -> Figure:
    """Bytes of memory, of which some are certain."""
    return Figure(value=size, unit="bytes", origin="formula", low=low, high=size * MOST_MEMORY)


def peak_figure(*ranks: RankMemory) -> Figure:
    """The highest peak of some ranks. It is no lower than what any of them takes at the least."""
    figure = by_formula(max(rank.expected for rank in ranks), low=max(rank.certain for rank in ranks))
    return replace(figure, origin="traced") if all(rank.is_traced for rank in ranks) else figure


class FindsMemory(Protocol):
    """As `plan_memory`."""

    def __call__(
        self, config: ResolvedConfig, layers: Sequence[ModelLayer], /, *, on_cpu: bool, copies_logits: bool = False
    ) -> Sequence[RankMemory]: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on a cluster.

    Attributes:
        config: a resolved configuration.
        cluster: that computes.
        layers: the whole model.
        times: of a step, by case.
        traffic: what each pipeline rank sends in a step.
        find_memory: finds the memory of the ranks.
    """

    config: ResolvedConfig
    cluster: Cluster
    layers: Sequence[LayerOutline]
    times: Mapping[Case, StepTime]
    traffic: Sequence[Sequence[Sent]]
    find_memory: FindsMemory

    @functools.cached_property
    def memory(self) -> Sequence[RankMemory]:
        """Of each pipeline rank."""
        copies_logits = self.cluster.software.copies_logits
        return self.find_memory(self.config, self.layers, on_cpu=self.cluster.on_cpu, copies_logits=copies_logits)

    @property
    def time(self) -> StepTime:
        """Of a step, as expected."""
        return self.times["expected"]

    @property
    def parameters(self) -> int:
        """Of the model."""
        return whole_parameters(self.config, self.layers)

    @property
    def active_parameters(self) -> int:
        """Those that a token uses."""
        return self.parameters - idle_parameters(self.config.model)

    @property
    def capacity(self) -> float:
        """Bytes that a rank may take."""
        return usable_bytes(self.cluster, self.config.parallel.ranks)

    @property
    def fullest(self) -> RankMemory:
        """The rank that takes most."""
        return max(self.memory, key=lambda rank: rank.expected)

    @property
    def host_capacity(self) -> float | None:
        """`usable_host_bytes` of the cluster."""
        return usable_host_bytes(self.cluster)

    @property
    def on_host(self) -> float:
        """Bytes in the memory of the fullest host, of all ranks of its node."""
        return held_on_host(self.config, self.memory, self.cluster.device.node_ranks)

    @property
    def fits_device(self) -> bool:
        """Whether each rank has the memory in which it computes."""
        return self.fullest.expected <= self.capacity

    @property
    def fits_host(self) -> bool:
        """Whether each host has the memory for what its ranks offload; True where that is not known."""
        return self.host_capacity is None or self.on_host <= self.host_capacity

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def timed_origin(self) -> Origin:
        """Where the times are from."""
        return "fitted" if self.cluster.is_fitted else "assumed"

    @property
    def is_small(self) -> bool:
        """Whether its time is of low confidence."""
        return is_small(self.config, self.cluster)

    def timed(self, value: float, unit: str, *, of: str = "seconds") -> Figure:
        """A figure in proportion to the step's time (`seconds`), or inversely (`rate`)."""
        slow, middle, fast = (self.times[case].seconds for case in CASES)
        least, most = range_of(fast, middle, slow, self.config, self.cluster)
        low, high = (least / middle, most / middle) if of == "seconds" else (middle / most, middle / least)
        return Figure(value=value, unit=unit, origin=self.timed_origin, low=value * low, high=value * high)

    def part(self, name: str, unit: str = "s") -> Figure:
        """One of the parts of a step's time."""
        values = [float(getattr(self.times[case], name)) for case in CASES]
        return Figure(value=values[1], unit=unit, origin=self.timed_origin, low=min(values), high=max(values))

    def hidden(self) -> dict[str, Figure]:
        """Seconds of communication and copies that overlap with computation, by what they are for."""
        return {
            role: Figure(value=size, unit="s", origin=self.timed_origin, low=min(of_cases), high=max(of_cases))
            for role, size in self.time.hidden.items()
            for of_cases in [[self.times[case].hidden[role] for case in CASES]]
        }

    @property
    def tokens_per_second(self) -> float:
        return self.config.training.global_batch_size * self.config.data.seq_length / self.time.seconds

    def flops(self, attention: Attention, *, hardware: bool) -> float:
        """Of a step, by a convention; `hardware` counts what is computed again too."""
        return step_flops(self.config, attention=attention, hardware=hardware)

    def utilization(self, attention: Attention, *, hardware: bool) -> float:
        """MFU, or HFU with what is computed again: share of the peak of all ranks."""
        return self.tflops(attention, hardware=hardware) * 1e12 / self.peak

    def tflops(self, attention: Attention, *, hardware: bool) -> float:
        """TFLOP/s per rank."""
        flops = self.flops(attention, hardware=hardware)
        return flops / self.time.seconds / self.config.parallel.ranks / 1e12

    @property
    def peak(self) -> float:
        """FLOP/s of one device."""
        given = self.config.logging.peak_tflops
        peak = self.cluster.peak(self.config.precision.precision) if given is None else given * 1e12
        assert peak is not None
        return peak

    def link_bytes(self) -> dict[tuple[str, LinkClass], float]:
        """Bytes that the rank which sends most of each kind sends in a step, by kind and class of links."""
        most: dict[tuple[str, LinkClass], float] = {}
        for sent in self.traffic:
            for key, size in bytes_by_link(sent, self.cluster.device.node_ranks).items():
                most[key] = max(size, most.get(key, 0.0))
        return most

    def suggestions(self) -> list[Suggestion]:
        """What would fit."""
        return suggestions(self.config, limits_of(self.cluster, self.config.parallel.ranks))

    def cost(self, tokens: float, *, goodput: float) -> tuple[float, float]:
        """Days and USD of training on this number of tokens, if a share of the time makes progress."""
        ranks = self.config.parallel.ranks
        return self.cluster.cost(tokens, tokens_per_second=self.tokens_per_second, goodput=goodput, ranks=ranks)


def usable_bytes(cluster: Cluster, ranks: int) -> float:
    """Bytes that each of a number of ranks may take."""
    shared = min(ranks, cluster.device.node_ranks) if cluster.on_cpu else 1
    return cluster.device.memory_bytes * _USABLE / shared


def usable_host_bytes(cluster: Cluster) -> float | None:
    """Bytes that the ranks of a node may take of their host for what they offload; None: not known, or ranks compute
    there."""
    size = cluster.device.host_memory
    return None if size is None or cluster.on_cpu else size * _USABLE


def limits_of(cluster: Cluster, ranks: int) -> Limits:
    """The memory that a number of ranks may take of a cluster."""
    source, host, node_ranks = f"--cluster {cluster.name}", usable_host_bytes(cluster), cluster.device.node_ranks
    return Limits(
        memory=AvailableMemory(cluster.device.memory_bytes * _USABLE, source),
        host=None if host is None else AvailableMemory(host, source),
        host_ranks=node_ranks,
        on_cpu=cluster.on_cpu,
        local_ranks=min(node_ranks, ranks) if cluster.on_cpu else 1,
        cluster=cluster,
    )


def scheduled(config: ResolvedConfig, cluster: Cluster) -> ResolvedConfig:
    """The configuration with the schedule that --schedule auto is on a cluster, and with stages that fit."""
    fits = limits_of(cluster, config.parallel.ranks).fits
    if is_open(config):
        config = fastest_that_fits(config, outline(config), cluster, fits)
    return with_stages_that_fit(config, fits)


def make_plan(config: ResolvedConfig, cluster: Cluster, *, find_memory: FindsMemory = plan_memory) -> Plan:
    """The plan of a run.

    Args:
        config: a resolved configuration.
        cluster: that computes, with its software.
        find_memory: `plan_memory` estimates it, and `megacore.tracer.memory.traced_memory` traces a step.
    """
    config = config.for_device(on_cpu=cluster.on_cpu)
    layers = outline(config)
    return Plan(
        config=config,
        cluster=cluster,
        layers=layers,
        times={case: step_time(config, layers, cluster, case=case) for case in CASES},
        traffic=[rank_traffic(config, layers, rank) for rank in range(config.parallel.pp)],
        find_memory=find_memory,
    )


def memory_with(plan: Plan, microbatches: int) -> Sequence[RankMemory]:
    """The memory of each pipeline rank in a step with another number of microbatches per replica."""
    config = plan.config
    if microbatches == config.microbatches:
        return plan.memory
    other = config.with_values({"global_batch_size": microbatches * config.replica_batch_size})
    return replace(plan, config=other).memory


def step_flops(config: ResolvedConfig, *, attention: Attention, hardware: bool) -> float:
    """Floating-point operations of a step: of the model, or also those that are computed again.

    Args:
        config: a resolved configuration.
        attention: the convention.
        hardware: with recomputation, as in the hardware FLOPs of Narayanan et al. 2021.
    """
    model, s, batch = config.model, config.data.seq_length, config.training.global_batch_size
    flops = flops_per_sequence(model, s, attention=attention)
    if hardware and config.training.recompute == "full":
        flops += s * sum(block_flops(block, s, attention=attention) for block in _computed_again(config))
    elif hardware and config.training.recompute == "selective":
        keys = sum(number * min(s, block.window_size or s) for block, number in blocks_of(model) if not block.is_linear)
        width = (model.head_size + model.value_size) * (0.5 if attention == "causal" else 1.0)
        flops += s * 2.0 * keys * model.num_attention_heads * width
        flops += s * sum(number * linear_flops(block) for block, number in blocks_of(model) if block.is_linear)
    return batch * flops


def _computed_again(config: ResolvedConfig) -> Iterator[ResolvedModel]:
    """The blocks of the model whose forward backward repeats."""
    layers = outline(config)
    for numbers in stage_ranges(layers, config):
        held = layers[numbers.start : numbers.stop]
        for layer, again in zip(held, recomputed_whole(config, held), strict=True):
            if again and layer.block is not None:
                yield layer.block


# ---- memory in words -------------------------------------------------------------------------------------------------

STATE_NAMES = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state", "buffers": "offload buffers"}


def memory_terms(rank: RankMemory) -> dict[str, float]:
    """Bytes of a rank by what takes them, in the memory in which it computes."""
    terms = {STATE_NAMES[kind]: size - rank.host.get(kind, 0.0) for kind, size in rank.state.items()}
    return {
        **terms,
        "activations": rank.activations,
        "temporary tensors of a layer": rank.working,
        "temporary tensors of the update": rank.updating if rank.is_fullest_in_update else 0.0,
        "process, allocator": rank.expected - rank.expected_tensors,
    }


def memory_figures(rank: RankMemory) -> dict[str, Figure]:
    """`memory_terms` with their ranges, which add up to that of the peak where the terms add up to it."""
    terms = memory_terms(rank)
    least = {"process, allocator": rank.overhead[0]}
    if not rank.is_traced:
        passing = "temporary tensors of a layer"
        least |= {"activations": CERTAIN * rank.activations, passing: CERTAIN * rank.working}
    origin: Origin = "traced" if rank.is_traced else "formula"
    figures = {
        name: replace(by_formula(size, low=least.get(name, size)), origin=origin) for name, size in terms.items()
    }
    figures["process, allocator"] = replace(figures["process, allocator"], origin="assumed")
    return figures


def host_terms(rank: RankMemory) -> dict[str, float]:
    """Bytes of a rank by what takes them in host memory, while it computes on an accelerator."""
    return {STATE_NAMES.get(kind, kind): size for kind, size in rank.host.items()}


def largest_term(rank: RankMemory) -> tuple[str, float]:
    """What takes most of the memory in which a rank computes."""
    return max(memory_terms(rank).items(), key=lambda item: item[1])


def rank_kinds(memory: Sequence[RankMemory]) -> Iterator[tuple[range, RankMemory]]:
    """Consecutive pipeline ranks that take the same, and one of them."""
    first = 0
    for number in range(1, len(memory) + 1):
        if number == len(memory) or _key(memory[number]) != _key(memory[first]):
            yield range(first, number), memory[first]
            first = number


def _key(rank: RankMemory) -> tuple[object, ...]:
    terms = rank.activations, rank.working, rank.updating
    return rank.parameters, rank.in_flight, terms
