"""Every layout of a run on a number of ranks: those that are valid and fit, ranked by the time of a step.

The time is first estimated without simulating the pipeline; the best and those of the frontier are simulated. Memory is
computed for all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import multiprocessing
import operator
import os
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore.config import ResolvedConfig
from megacore.models.outline import ModelLayer, outline
from megacore.plan.checked import range_of
from megacore.plan.cluster import Cluster
from megacore.plan.memory import (
    GIB,
    RankMemory,
    fullest_rank,
    held_on_host,
    needed_on_host,
    plan_memory,
)
from megacore.plan.plan_json import layout_flags
from megacore.plan.planner import FindsMemory, usable_bytes, usable_host_bytes
from megacore.plan.search_space import (
    RECOMPUTED,
    Choice,
    Constraints,
    StagedModels,
    Validity,
    divisions_of,
    variants,
    with_choice,
    worthwhile_recomputation,
)
from megacore.plan.shared_results import share_results
from megacore.plan.size_unit import SizeUnit, memory_unit
from megacore.plan.stages import StagedModel
from megacore.plan.state import held_experts, state_bytes, whole_parameters
from megacore.plan.step_time import step_seconds, step_time

ALIKE = 0.005
"""Part of a time, or of memory, that tells two layouts of the frontier apart: less than the formulas know."""
SAVING = 0.02
"""Part of the memory of a layout that another recomputation must save to be listed beside it."""
_SIMULATED = 48  # the best by the estimate
_TRIES = 3  # layouts whose memory is found for each that is listed
_LISTED = 10  # the fastest, all simulated: as many as are listed unless more are asked for
# Of the memory that a rank has. Larger microbatches need more, but for small terms; schedules other than 1F1B may keep
# less with fewer and larger ones.
_FAR = 1.1
# Of the time of a smaller microbatch. A larger one that takes longer than that, and needs more memory, is worse in
# both, and so are still larger ones: the bubble grows faster than products save.
_SLOWER = 1.05
_MANY_DIVISIONS = 16  # of a model, which one core would take long to evaluate


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout with what it takes.

    Attributes:
        config: of the run.
        memory_bytes: of the fullest rank.
        memory: of its pipeline ranks; None: it is an estimate, which is not kept.
        estimate: bytes of the fullest rank as they were estimated, where `memory` is known; None: `memory_bytes`.
        seconds: of a step, expected.
        range: of it from the fast to the slow case, once it is simulated.
        named: fields of which its flags have one, as the user has given none: `global_batch_size`,
            `offload_optimizer`; and `defaults`, those that have their defaults, as a --config file may say otherwise.
    """

    config: ResolvedConfig
    memory_bytes: float
    seconds: float
    range: tuple[float, float] | None = None
    memory: Sequence[RankMemory] | None = None
    estimate: float | None = None
    named: frozenset[str] = frozenset()

    @property
    def is_simulated(self) -> bool:
        """Whether `seconds` is simulated; otherwise it is an estimate by closed forms."""
        return self.range is not None

    def memory_and_that_of(self, other: Layout) -> tuple[float, float]:
        """Bytes of the fullest rank of both, found in the same way: as estimated, unless both are known."""
        if (self.memory is None) == (other.memory is None):
            return self.memory_bytes, other.memory_bytes
        mine, others = (one.memory_bytes if one.estimate is None else one.estimate for one in (self, other))
        return mine, others

    @property
    def division(self) -> tuple[object, ...]:
        """What it has in common with layouts that differ only in how the pipeline's stages take turns and are cut."""
        parallel, training = self.config.parallel, self.config.training
        kept = parallel.zero_stage, parallel.sequence_parallel, parallel.expert_split, parallel.offload_optimizer
        return *parallel.degrees.values(), parallel.ep, *kept, training.micro_batch_size, training.recompute

    @property
    def flags(self) -> str:
        """The flags that make it."""
        flags = layout_flags(self.config, with_defaults="defaults" in self.named)
        flags += "".join(f" {flag}" for flag in self.config.offload_flags if "offload_optimizer" in self.named)
        batch = f" --global-batch-size {self.config.training.global_batch_size}"
        return flags + (batch if "global_batch_size" in self.named else "")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        layouts: that fit, the fastest first; the first ones and those of the frontier are simulated.
        tried: valid layouts.
        left_out: of these, those not evaluated, because with larger microbatches they take longer and need more memory.
        least_memory: bytes that the smallest of them needs; None: some fit on the device, or none is valid.
        capacity: bytes that a rank may take.
        cluster: that computes.
        wall_seconds: that the search took.
        fixed: values that were given, by field; only layouts with them were tried.
        least_on_host: bytes of host memory that a node needs at the least, of the layouts that fit on the device; None:
            some fit there too, or none fits on the device.
    """

    layouts: Sequence[Layout]
    tried: int
    left_out: int
    least_memory: float | None
    capacity: float
    cluster: Cluster
    wall_seconds: float
    fixed: Mapping[str, Any] = field(default_factory=dict)
    least_on_host: float | None = None

    @property
    def run(self) -> ResolvedConfig:
        """One of the configurations, for what all have in common: model, batch and the settings that were given."""
        config = self.layouts[0].config
        offloads = config.parallel.offload_optimizer and "offload_optimizer" not in self.layouts[0].named
        return config.with_values({"offload_optimizer": offloads})

    @property
    def times_too_large(self) -> float:
        """How many times the memory that there is the smallest layout needs, where none fits."""
        if self.least_on_host is not None:
            usable = usable_host_bytes(self.cluster)
            assert usable is not None
            return self.least_on_host / usable
        assert self.least_memory is not None
        return self.least_memory / self.capacity

    @property
    def frontier(self) -> list[Layout]:
        """`frontier_of` the layouts."""
        return frontier_of(self.layouts)

    def unit(self, top: int) -> SizeUnit:
        """Of the memory in a report on the `top` first divisions."""
        return memory_unit(rank for layout, *_ in self.divisions[:top] for rank in memory_of(layout, self.cluster))

    @property
    def divisions(self) -> list[list[Layout]]:
        """The layouts by `Layout.division`, the fastest first, as are those of each. A division that differs from a
        faster one in recomputation alone, and saves less than `SAVING` of its memory or 0.1 GiB, is left out."""
        groups: dict[tuple[object, ...], list[Layout]] = {}
        for layout in self.layouts:
            groups.setdefault(layout.division, []).append(layout)
        found: dict[tuple[object, ...], list[list[Layout]]] = {}
        for (*division, _), group in groups.items():
            faster = found.setdefault(tuple(division), [])
            pairs = [group[0].memory_and_that_of(one[0]) for one in faster]
            if all(others - mine >= max(SAVING * mine, 0.1 * GIB) for mine, others in pairs):
                faster.append(group)
        kept = {id(group) for groups_alike in found.values() for group in groups_alike}
        return [group for group in groups.values() if id(group) in kept]


def frontier_of(layouts: Iterable[Layout]) -> list[Layout]:
    """The layouts that no other one beats in both time and memory, the fastest first. Of those whose times differ by
    less than `ALIKE` the one that needs least memory stands for all; and one that saves less than that of the memory of
    a faster one is left out."""
    best: list[Layout] = []
    alike = 0.0  # times up to this one are that of the last of `best`
    for layout in sorted(layouts, key=lambda one: (one.seconds, one.memory_bytes)):
        if best:
            mine, others = layout.memory_and_that_of(best[-1])
            if mine > (1 - ALIKE) * others:
                continue
        if layout.seconds < alike:
            best[-1] = layout
        else:
            best.append(layout)
            alike = layout.seconds * (1 + ALIKE)
    return best


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """For what keeps much until its end, and has no cycles to find in it; processes that it starts inherit this."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def search(
    config: ResolvedConfig,
    cluster: Cluster,
    constraints: Constraints,
    *,
    named: frozenset[str] = frozenset(),
) -> Found:
    """All layouts of a run.

    Args:
        config: of any layout; model, batch and precision are kept.
        cluster: that computes.
        constraints: what a layout may be.
        named: as `Layout` has it.
    """
    start, named = time.perf_counter(), named | ({"offload_optimizer"} if constraints.may_offload else set())
    evaluation = _Evaluation(config, cluster, constraints)
    divisions = list(divisions_of(config, cluster, constraints))
    results = _evaluated(evaluation, divisions)
    fitting = [
        Layout(config=with_choice(config, choice), memory_bytes=memory, seconds=seconds, named=named)
        for result in results
        for choice, memory, seconds in result.fitting
    ]
    fitting.sort(key=lambda layout: layout.seconds)
    layouts = [*(_simulated(layout, cluster) for layout in fitting[:_SIMULATED]), *fitting[_SIMULATED:]]
    tried = sum(result.tried for result in results)
    least: float | None = None
    least_on_host = None if fitting else min((result.least_on_host for result in results), default=math.inf)
    if least_on_host == math.inf:
        least_on_host = None
        least = _least_memory(evaluation, divisions, results) if tried else None
    return Found(
        layouts=_with_simulated_frontier(layouts, cluster),
        tried=tried,
        left_out=sum(result.left_out for result in results),
        least_memory=least,
        least_on_host=least_on_host,
        capacity=evaluation.capacity,
        cluster=cluster,
        wall_seconds=time.perf_counter() - start,
        fixed=constraints.fixed,
    )


def with_memory(found: Found, count: int, find_memory: FindsMemory) -> Found:
    """What was found, with the memory that `find_memory` finds of the fastest layouts of the first `count` divisions.
    Those that need more than there is are left out, and the next ones take their place, up to `_TRIES` for each; what
    is listed beyond that is an estimate."""
    layouts, on_host = list(found.layouts), usable_host_bytes(found.cluster)
    least = least_on_host = math.inf  # of those that do not fit on the device, and of those that fit only there
    for _ in range(_TRIES * count + 1):
        found = dataclasses.replace(found, layouts=layouts)
        if not layouts and least_on_host < math.inf:
            found = dataclasses.replace(found, least_on_host=least_on_host)
        elif not layouts and least < math.inf:
            found = dataclasses.replace(found, least_memory=least)
        layout = next((layout for layout, *_ in found.divisions[:count] if layout.memory is None), None)
        if layout is None:
            return found
        at = next(number for number, other in enumerate(layouts) if other is layout)
        ranks = memory_of(layout, found.cluster, find_memory)
        needed = max(rank.expected for rank in ranks)
        held = held_on_host(layout.config, ranks, found.cluster.device.node_ranks)
        traced = dataclasses.replace(layout, memory_bytes=needed, memory=ranks, estimate=layout.memory_bytes)
        if needed > found.capacity:
            layouts[at : at + 1], least = [], min(least, needed)
        elif on_host is not None and held > on_host:
            layouts[at : at + 1], least_on_host = [], min(least_on_host, held)
        else:
            layouts[at] = traced
    return found


def memory_of(layout: Layout, cluster: Cluster, find_memory: FindsMemory = plan_memory) -> Sequence[RankMemory]:
    """The memory of a layout's pipeline ranks, if it is not known yet as `find_memory` finds it."""
    if layout.memory is not None:
        return layout.memory
    config, copies_logits = layout.config, cluster.software.copies_logits
    return find_memory(config, outline(config), on_cpu=cluster.on_cpu, copies_logits=copies_logits)


def _least_memory(evaluation: _Evaluation, divisions: Sequence[Mapping[str, Any]], results: Sequence[_Result]) -> float:
    """Bytes that the smallest layout needs, where none fits. What one of them needs is enough; with that capacity all
    that need less are found."""
    enough = min(evaluation.needed(result.smallest) for result in results if result.smallest is not None)
    again = _evaluated(evaluation.within(enough), divisions)
    return min((memory for result in again for _, memory, _ in result.fitting), default=enough)


def _with_simulated_frontier(layouts: list[Layout], cluster: Cluster) -> list[Layout]:
    """The layouts, the fastest first, of which those of the frontier and `_LISTED` are all simulated. Where simulating
    one changes its time, others may take its place."""
    while True:
        layouts = sorted(layouts, key=lambda layout: layout.seconds)
        shown = {id(layout) for layout in [*frontier_of(layouts), *layouts[:_LISTED]] if not layout.is_simulated}
        if not shown:
            return layouts
        layouts = [_simulated(layout, cluster) if id(layout) in shown else layout for layout in layouts]


@dataclass(kw_only=True)
class _Result:
    """What was found of one division of the model.

    Attributes:
        tried: valid layouts.
        left_out: of these, those of larger microbatches that are worse in time and memory.
        smallest: of those that do not fit, the one that needs least as far as that is known.
        least_on_host: bytes of host memory that a node needs at the least, of those that fit on the device alone.
        fitting: those that fit, with memory and time.
    """

    tried: int = 0
    left_out: int = 0
    smallest: Choice | None = None
    least_on_host: float = math.inf
    fitting: list[tuple[Choice, float, float]] = field(default_factory=list)
    _least: float = math.inf

    def is_too_large(self, choice: Choice, at_least: float) -> None:
        """Counts a layout that does not fit, which needs at least so many bytes."""
        if at_least < self._least:
            self._least, self.smallest = at_least, choice


class _Evaluation:
    """Evaluates layouts.

    Args:
        config, cluster, constraints: as for `search`.
    """

    def __init__(self, config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> None:
        self.capacity = make_capacity(cluster, constraints)
        self._host_capacity = usable_host_bytes(cluster)
        self._config, self._cluster, self._constraints = config, cluster, constraints
        self._recomputed = worthwhile_recomputation(config, on_cpu=cluster.on_cpu)
        self._is_valid = Validity(config, constraints.world_size)
        self._staged = StagedModels(config, constraints)

    def within(self, capacity: float) -> _Evaluation:
        """The same for ranks that may take so many bytes, without layouts that offload what the run does not."""
        other = copy.copy(self)
        other.capacity = capacity
        other._constraints = dataclasses.replace(self._constraints, may_offload=False)
        return other

    def needed(self, choice: Choice) -> float:
        """Bytes that a layout needs."""
        config = with_choice(self._config, choice)
        staged = self._staged.of(config)
        copies = self._cluster.software.copies_logits
        return fullest_rank(
            config, staged.layers, on_cpu=self._cluster.on_cpu, staged=staged, copies_logits=copies
        ).expected

    def _on_host(self, config: ResolvedConfig, staged: StagedModel) -> float:
        """Bytes that a node needs in the memory of its host; 0 where there is no limit."""
        if self._host_capacity is None:
            return 0.0
        return needed_on_host(config, staged, self._cluster.device.node_ranks)

    def __call__(self, divisions: Iterable[Mapping[str, Any]]) -> list[_Result]:
        """The layouts of each of these degrees, which divide layers in the same way."""
        known: dict[Hashable, dict[Any, Any]] = {}  # as long as they are of use
        return [self._of_division(degrees, known) for degrees in divisions]

    def _of_division(self, degrees: Mapping[str, Any], known: dict[Hashable, dict[Any, Any]]) -> _Result:
        result = _Result()
        even: tuple[int, int] | None = None
        exceeding = set[tuple[int, str]]()  # what is far from fitting, and so with larger microbatches
        at_this_size = set[tuple[int, int, str]]()  # the same with more activations of a microbatch
        fastest: dict[tuple[int, str], float] = {}  # of smaller microbatches
        slower = set[tuple[int, str]]()
        states: dict[int, float] = {}  # bytes on each of ZeRO's stages, which all other flags have in common
        fits = False  # the layout before, of which the next one may be the same with an offloaded optimizer
        on_cpu, copies_logits = self._cluster.on_cpu, self._cluster.software.copies_logits
        for choice in variants(self._config, self._constraints, degrees, self._recomputed):
            if not self._is_valid(choice) or self._staged.is_as_by_time(choice):
                continue
            parallel, training = choice.parallel, choice.training
            is_another_try = parallel.offload_optimizer != self._config.parallel.offload_optimizer
            if is_another_try and fits:
                continue
            result.tried += 1
            fits = False
            if parallel.zero_stage not in states:
                candidate = with_choice(self._config, choice)
                even = even or _even_parameters(candidate, self._staged.parts(candidate).layers)
                states[parallel.zero_stage] = sum(state_bytes(even[0], candidate, experts=even[1]).values())
            state = states[parallel.zero_stage]
            if state > self.capacity and not parallel.offload_optimizer:
                result.is_too_large(choice, state)
                continue
            kind, size = training.recompute, training.micro_batch_size
            alike = id(choice.parallel)
            if (alike, kind) in slower:
                result.left_out += 1
                fits = True
                continue
            if (alike, kind) in exceeding or (alike, size, kind) in at_this_size:
                continue
            candidate = with_choice(self._config, choice)
            share_results(candidate, known)
            staged = self._staged.of(candidate)
            needed = fullest_rank(
                candidate, staged.layers, on_cpu=on_cpu, limit=self.capacity, staged=staged, copies_logits=copies_logits
            ).expected
            if needed > self.capacity:
                if needed > _FAR * self.capacity:
                    more = {kind, *RECOMPUTED[kind]}
                    at_this_size |= {(alike, size, other) for other in more}
                    if parallel.schedule == "1f1b":
                        exceeding |= {(alike, other) for other in more}
                if not is_another_try:
                    result.is_too_large(choice, needed)
            elif (on_host := self._on_host(candidate, staged)) > (self._host_capacity or math.inf):
                if not is_another_try:
                    result.least_on_host = min(result.least_on_host, on_host)
            else:
                fits = True
                seconds = step_seconds(candidate, staged.layers, self._cluster, simulated=False, staged=staged)
                result.fitting.append((choice, needed, seconds))
                best = fastest[alike, kind] = min(seconds, fastest.get((alike, kind), math.inf))
                if seconds > _SLOWER * best:
                    slower.add((alike, kind))
        return result


_evaluation: _Evaluation | None = None  # in a process that shares a search


def _evaluated(evaluation: _Evaluation, divisions: Sequence[Mapping[str, Any]]) -> list[_Result]:
    """The results of all divisions, in order; the processor's cores share a large search."""
    groups: dict[Hashable, list[int]] = {}  # of those which have results in common
    for number, degrees in enumerate(divisions):
        groups.setdefault(tuple(degrees.get(name) for name in ("tp", "cp", "ep", "etp")), []).append(number)
    numbered = sorted(groups.values(), key=len, reverse=True)  # cores that share them are done at about the same time
    work = [[divisions[number] for number in numbers] for numbers in numbered]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1  # where processes may be forked
    if cores == 1 or len(divisions) < _MANY_DIVISIONS:
        found = [evaluation(group) for group in work]
    else:
        fork = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(cores, fork, initializer=_share, initargs=(evaluation,)) as pool:
            found = list(pool.map(_evaluate, work))
    results = zip(itertools.chain(*numbered), itertools.chain(*found), strict=True)
    return [result for _, result in sorted(results, key=operator.itemgetter(0))]


def _share(evaluation: _Evaluation) -> None:
    global _evaluation
    _evaluation = evaluation


def _evaluate(group: Sequence[Mapping[str, Any]]) -> list[_Result]:
    assert _evaluation is not None
    return _evaluation(group)


def _even_parameters(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> tuple[int, int]:
    """Parameters of a rank, if all pipeline ranks held as many, and how many of them are of experts. They depend on the
    degrees alone."""
    parallel = config.parallel
    held = held_experts(config, layers)
    dense = whole_parameters(config, layers) - held * parallel.ep * parallel.expert_split
    return dense // (parallel.tp * parallel.pp) + held // parallel.pp, held // parallel.pp


def make_capacity(cluster: Cluster, constraints: Constraints) -> float:
    """Bytes that a rank may take: all that is given, but no more than the device has for it."""
    usable = usable_bytes(cluster, constraints.world_size)
    return usable if constraints.memory_bytes is None else min(constraints.memory_bytes, usable)


def _simulated(layout: Layout, cluster: Cluster) -> Layout:
    config, layers = layout.config, outline(layout.config)
    seconds = step_time(config, layers, cluster).seconds
    fast, slow = (
        seconds * (step_time(config, layers, cluster, case=case, simulated=False).seconds / layout.seconds)
        for case in ("fast", "slow")
    )
    return dataclasses.replace(layout, seconds=seconds, range=range_of(fast, seconds, slow, config, cluster))
