"""Every layout of a run on a number of ranks: those that are valid and fit, ranked by the time of a step.

The time is first estimated without simulating the pipeline; the best and those of the frontier are simulated. Memory is
computed for all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from megacore.config import ResolvedConfig, ResolvedParallel, ResolvedTraining, validate
from megacore.config.fields import flag_and_value
from megacore.pipeline.partition import stage_ranges
from megacore.plan.activations import block_bytes
from megacore.plan.cluster import Cluster
from megacore.plan.cut import Cut
from megacore.plan.memory import GIB, fullest_rank, least_expected
from megacore.plan.outline import LayerOutline, outline
from megacore.plan.plan_json import layout_flags, layout_json, run_json, training_json
from megacore.plan.planner import Figure, Origin, usable_bytes
from megacore.plan.state import held_experts, state_bytes, whole_parameters
from megacore.plan.step_time import step_time

T = TypeVar("T")

ALIKE = 0.005
"""Part of a time, or of memory, that tells two layouts of the frontier apart: less than the formulas know."""
SAVING = 0.02
"""Part of the memory of a layout that another recomputation must save to be listed beside it."""
_SIMULATED = 48  # the best by the estimate
_LISTED = 10  # the fastest, all simulated: as many as are listed unless more are asked for
# Of the memory that a rank has. Larger microbatches need more, but for small terms; schedules other than 1F1B may keep
# less with fewer and larger ones.
_FAR = 1.1
# Of the time of a smaller microbatch. A larger one that takes longer than that, and needs more memory, is worse in
# both, and so are still larger ones: the bubble grows faster than products save.
_SLOWER = 1.05
_MANY_DIVISIONS = 16  # of a model, which one core would take long to evaluate
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
Recomputed = Literal["none", "selective", "light", "full"]
# Each with those that keep more activations: what does not fit with one of them does not fit with these.
_RECOMPUTED: Mapping[Recomputed, frozenset[Recomputed]] = {
    "full": frozenset({"light", "selective", "none"}),
    "light": frozenset({"none"}),
    "selective": frozenset({"none"}),
    "none": frozenset(),
}
_LEAST_SAVING = 0.01  # of activations; recomputation that saves less takes time for nothing
_VIRTUAL_STAGES = (2, 3, 4, 5, 6, 8, 12)
_LEAST_POSITIONS = 4096  # of a rank: with fewer, more ranks for a sequence save nothing that matters


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a layout may be.

    Attributes:
        world_size: number of ranks.
        most: largest values, by field.
        least: smallest values, by field.
        fixed: values that the user has given, by field; they are not searched for.
        memory_bytes: of a device; None: the cluster's.
    """

    world_size: int
    most: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: float | None = None

    def allow(self, name: str, value: int) -> bool:
        """Whether a field may have a value."""
        return self.fixed.get(name, value) == value and (
            self.least.get(name, value) <= value <= self.most.get(name, value)
        )

    def among(self, name: str, values: Iterable[T]) -> list[T]:
        """What a field may be: its given value, or those of `values` that are within the limits."""
        if name in self.fixed:
            return [self.fixed[name]]
        return [value for value in values if not isinstance(value, int) or self.allow(name, value)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout with what it takes.

    Attributes:
        config: of the run.
        memory_bytes: of the fullest rank.
        seconds: of a step, expected.
        range: of it from the fast to the slow case, once it is simulated.
    """

    config: ResolvedConfig
    memory_bytes: float
    seconds: float
    range: tuple[float, float] | None = None

    @property
    def is_simulated(self) -> bool:
        """Whether `seconds` is simulated; otherwise it is an estimate by closed forms."""
        return self.range is not None

    @property
    def division(self) -> tuple[object, ...]:
        """What it has in common with layouts that differ only in how the pipeline's stages take turns and are cut."""
        parallel, training = self.config.parallel, self.config.training
        kept = parallel.zero_stage, parallel.sequence_parallel, parallel.expert_split
        return *parallel.degrees.values(), parallel.ep, *kept, training.micro_batch_size, training.recompute

    @property
    def flags(self) -> str:
        """The flags that make it."""
        return layout_flags(self.config)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        layouts: that fit, the fastest first; the first ones and those of the frontier are simulated.
        tried: valid layouts.
        left_out: of these, those not evaluated, because with larger microbatches they take longer and need more memory.
        least_memory: of all of them, bytes, at least; None: some fit, or none is valid.
        capacity: bytes that a rank may take.
        cluster: that computes.
        wall_seconds: that the search took.
        fixed: values that were given, by field; only layouts with them were tried.
    """

    layouts: Sequence[Layout]
    tried: int
    left_out: int
    least_memory: float | None
    capacity: float
    cluster: Cluster
    wall_seconds: float
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def frontier(self) -> list[Layout]:
        """`frontier_of` the layouts."""
        return frontier_of(self.layouts)

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
            saved = (one[0].memory_bytes - group[0].memory_bytes for one in faster)
            least = max(SAVING * group[0].memory_bytes, 0.1 * GIB)
            if all(size >= least for size in saved):
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
        if best and layout.memory_bytes > (1 - ALIKE) * best[-1].memory_bytes:
            continue
        if layout.seconds < alike:
            best[-1] = layout
        else:
            best.append(layout)
            alike = layout.seconds * (1 + ALIKE)
    return best


def search(config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> Found:
    """All layouts of a run.

    Args:
        config: of any layout; model, batch and precision are kept.
        cluster: that computes.
        constraints: what a layout may be.
    """
    start = time.perf_counter()
    evaluation = _Evaluation(config, cluster, constraints)
    results = _evaluated(evaluation, list(_divisions(config, cluster, constraints)))
    least = min((result.least for result in results), default=math.inf)
    fitting = [
        Layout(config=_chosen(config, choice), memory_bytes=memory, seconds=seconds)
        for result in results
        for choice, memory, seconds in result.fitting
    ]
    if not fitting:  # how much is missing?
        too_large = (_chosen(config, choice) for result in results for choice in result.too_large)
        needs = (fullest_rank(one, outline(one), on_cpu=cluster.on_cpu).expected for one in too_large)
        least = min([least, *needs])
    fitting.sort(key=lambda layout: layout.seconds)
    layouts = [*(_simulated(layout, cluster) for layout in fitting[:_SIMULATED]), *fitting[_SIMULATED:]]
    tried = sum(result.tried for result in results)
    return Found(
        layouts=_with_simulated_frontier(layouts, cluster),
        tried=tried,
        left_out=sum(result.left_out for result in results),
        least_memory=least if tried and not fitting else None,
        capacity=evaluation.capacity,
        cluster=cluster,
        wall_seconds=time.perf_counter() - start,
        fixed=constraints.fixed,
    )


def _with_simulated_frontier(layouts: list[Layout], cluster: Cluster) -> list[Layout]:
    """The layouts, the fastest first, of which those of the frontier and `_LISTED` are all simulated. Where simulating
    one changes its time, others may take its place."""
    while True:
        layouts = sorted(layouts, key=lambda layout: layout.seconds)
        shown = {id(layout) for layout in [*frontier_of(layouts), *layouts[:_LISTED]] if not layout.is_simulated}
        if not shown:
            return layouts
        layouts = [_simulated(layout, cluster) if id(layout) in shown else layout for layout in layouts]


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The sections that make a layout of the configuration that is searched for."""

    parallel: ResolvedParallel
    training: ResolvedTraining


def _chosen(config: ResolvedConfig, choice: _Choice) -> ResolvedConfig:
    return dataclasses.replace(config, parallel=choice.parallel, training=choice.training)


@dataclass(kw_only=True)
class _Result:
    """What was found of one division of the model.

    Attributes:
        tried: valid layouts.
        left_out: of these, those of larger microbatches that are worse in time and memory.
        least: bytes of state of those whose state alone does not fit, at least.
        too_large: those that do not fit with their activations.
        fitting: those that fit, with memory and time.
    """

    tried: int = 0
    left_out: int = 0
    least: float = math.inf
    too_large: list[_Choice] = field(default_factory=list)
    fitting: list[tuple[_Choice, float, float]] = field(default_factory=list)


class _Evaluation:
    """Evaluates the layouts that divide a model in the same way.

    Args:
        config, cluster, constraints: as for `search`.
    """

    def __init__(self, config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> None:
        self.capacity = make_capacity(cluster, constraints)
        self._config, self._cluster, self._constraints = config, cluster, constraints
        self._recomputed = _worthwhile(config, on_cpu=cluster.on_cpu)
        self._outlines: dict[tuple[int, int], list[LayerOutline]] = {}
        self._is_valid = _Validity(config, constraints.world_size)

    def __call__(self, degrees: Mapping[str, Any]) -> _Result:
        """The layouts of these degrees."""
        result = _Result()
        even: tuple[int, int] | None = None
        exceeding = set[tuple[int, str]]()  # what is far from fitting, and so with larger microbatches
        at_this_size = set[tuple[int, int, str]]()  # the same with more activations of a microbatch
        fastest: dict[tuple[int, str], float] = {}  # of smaller microbatches
        slower = set[tuple[int, str]]()
        cuts = _Cuts(self._constraints)
        states: dict[int, float] = {}  # bytes on each of ZeRO's stages, which all other flags have in common
        for choice in _variants(self._config, self._constraints, degrees, self._recomputed):
            if not self._is_valid(choice):
                continue
            parallel, training = choice.parallel, choice.training
            if parallel.pipeline_balance != "time" and self._cut(cuts, choice).is_as_by_time:
                continue
            result.tried += 1
            if parallel.zero_stage not in states:
                candidate = _chosen(self._config, choice)
                even = even or _even_parameters(candidate, self._layers(candidate))
                states[parallel.zero_stage] = sum(state_bytes(even[0], candidate, experts=even[1]).values())
            state = states[parallel.zero_stage]
            if state > self.capacity and not parallel.offload_optimizer:
                result.least = min(result.least, state)
                continue
            kind, size = training.recompute, training.micro_batch_size
            alike = id(choice.parallel)
            if (alike, kind) in slower:
                result.left_out += 1
                continue
            if (alike, kind) in exceeding or (alike, size, kind) in at_this_size:
                continue
            candidate, on_cpu, cut = _chosen(self._config, choice), self._cluster.on_cpu, self._cut(cuts, choice).stages
            layers = self._layers(candidate)
            needed = least_expected(candidate, cut, on_cpu=on_cpu)
            if needed <= _FAR * self.capacity:
                needed = fullest_rank(candidate, layers, on_cpu=on_cpu, limit=self.capacity, cut=cut).expected
            if needed > self.capacity:
                if needed > _FAR * self.capacity:
                    more = {kind, *_RECOMPUTED[kind]}
                    at_this_size |= {(alike, size, other) for other in more}
                    if parallel.schedule == "1f1b":
                        exceeding |= {(alike, other) for other in more}
                result.too_large.append(choice)
            else:
                seconds = step_time(candidate, layers, self._cluster, simulated=False, cut=cut).seconds
                result.fitting.append((choice, needed, seconds))
                best = fastest[alike, kind] = min(seconds, fastest.get((alike, kind), math.inf))
                if seconds > _SLOWER * best:
                    slower.add((alike, kind))
        return result

    def _cut(self, cuts: _Cuts, choice: _Choice) -> _CutOnce:
        if (cut := cuts.of(choice)) is None:
            candidate = _chosen(self._config, choice)
            cut = cuts.make(candidate, self._layers(candidate))
        return cut

    def _layers(self, config: ResolvedConfig) -> list[LayerOutline]:
        sizes = config.parallel.tp, config.parallel.ep * config.parallel.expert_split
        if sizes not in self._outlines:
            self._outlines[sizes] = outline(config)
        return self._outlines[sizes]


_evaluation: _Evaluation | None = None  # in a process that shares a search


def _evaluated(evaluation: _Evaluation, divisions: Sequence[Mapping[str, Any]]) -> list[_Result]:
    """The results of all divisions, in order; the processor's cores share a large search."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1  # where processes may be forked
    if cores == 1 or len(divisions) < _MANY_DIVISIONS:
        return [evaluation(degrees) for degrees in divisions]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(cores, fork, initializer=_share, initargs=(evaluation,)) as pool:
        return list(pool.map(_evaluate, divisions))


def _share(evaluation: _Evaluation) -> None:
    global _evaluation
    _evaluation = evaluation


def _evaluate(degrees: Mapping[str, Any]) -> _Result:
    assert _evaluation is not None
    return _evaluation(degrees)


def _even_parameters(config: ResolvedConfig, layers: Sequence[LayerOutline]) -> tuple[int, int]:
    """Parameters of a rank, if all pipeline ranks held as many, and how many of them are of experts. They depend on the
    degrees alone."""
    parallel = config.parallel
    held = held_experts(config, layers, [range(len(layers))])
    dense = whole_parameters(config, layers) - held * parallel.ep * parallel.expert_split
    return dense // (parallel.tp * parallel.pp) + held // parallel.pp, held // parallel.pp


class _CutOnce(NamedTuple):
    """A cut, and whether it is the one that balancing by time, which is tried too, gives."""

    stages: Cut
    is_as_by_time: bool


class _Cuts:
    """How the model is cut into stages by the layouts of the same degrees; ZeRO's stages have them in common."""

    def __init__(self, constraints: Constraints) -> None:
        self._tries_time = "pipeline_balance" not in constraints.fixed
        self._known: dict[tuple[object, ...], _CutOnce] = {}
        self._by_stages: dict[tuple[object, ...], Cut] = {}

    def of(self, choice: _Choice) -> _CutOnce | None:
        """The cut of a choice, if it is known."""
        return self._known.get(self._key(choice.parallel, choice.training))

    def make(self, config: ResolvedConfig, layers: Sequence[LayerOutline]) -> _CutOnce:
        """That of a layout."""
        stages, as_by_time = tuple(stage_ranges(layers, config)), False
        if config.parallel.pipeline_balance != "time" and self._tries_time:
            by_time = dataclasses.replace(
                config, parallel=dataclasses.replace(config.parallel, pipeline_balance="time")
            )
            as_by_time = tuple(stage_ranges(layers, by_time)) == stages
        if stages not in self._by_stages:
            self._by_stages[stages] = Cut(config, layers, stages)
        found = self._known[self._key(config.parallel, config.training)] = _CutOnce(self._by_stages[stages], as_by_time)
        return found

    @staticmethod
    def _key(parallel: ResolvedParallel, training: ResolvedTraining) -> tuple[object, ...]:
        stages = parallel.schedule, parallel.virtual_stages, parallel.pipeline_balance, parallel.sequence_parallel
        return *stages, training.micro_batch_size, training.recompute


class _Validity:
    """Whether layouts are valid. The rules that bind them are about one of three: the degrees and the microbatch; the
    schedule, for so many stages; what a ZeRO stage and recomputation go with. Each is validated once."""

    def __init__(self, config: ResolvedConfig, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._known: dict[tuple[object, ...], bool] = {}

    def __call__(self, choice: _Choice) -> bool:
        parallel, training = choice.parallel, choice.training
        degrees = (parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.expert_split)
        shape = (*degrees, training.micro_batch_size, parallel.sequence_parallel)
        schedule = (parallel.pp, parallel.schedule, parallel.virtual_stages)
        savings = (parallel.zero_stage, training.recompute, parallel.tp > 1, parallel.pp > 1, parallel.schedule)

        def plain(**of_schedule: Any) -> _Choice:
            return _Choice(
                parallel=dataclasses.replace(parallel, zero_stage=0, **of_schedule),
                training=dataclasses.replace(training, recompute="none", recompute_num_layers=None),
            )

        return (
            self._is_valid(shape, lambda: plain(schedule="1f1b", virtual_stages=1))
            and self._is_valid(schedule, plain)
            and self._is_valid(savings, lambda: choice)
        )

    def _is_valid(self, key: tuple[object, ...], choice: Callable[[], _Choice]) -> bool:
        if key not in self._known:
            self._known[key] = not validate(_chosen(self._config, choice()), self._world_size)
        return self._known[key]


def make_capacity(cluster: Cluster, constraints: Constraints) -> float:
    """Bytes that a rank may take."""
    if constraints.memory_bytes is not None:
        return constraints.memory_bytes
    return usable_bytes(cluster, constraints.world_size)


def _simulated(layout: Layout, cluster: Cluster) -> Layout:
    layers = outline(layout.config)
    seconds = step_time(layout.config, layers, cluster).seconds
    ratios = [
        step_time(layout.config, layers, cluster, case=case, simulated=False).seconds / layout.seconds
        for case in ("fast", "slow")
    ]
    return dataclasses.replace(layout, seconds=seconds, range=(seconds * ratios[0], seconds * ratios[1]))


def _divisions(config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> Iterator[Mapping[str, Any]]:
    """Numbers of ranks by which the model and the batch may be divided."""
    layers, world = config.model.num_layers, _ranks_to_divide(config, constraints)
    most_tp = constraints.most.get("tp", cluster.device.node_ranks)
    asked = constraints.fixed.get("tp", constraints.least.get("tp", 1))
    if "tp" not in constraints.most and asked > most_tp:  # across nodes, as is asked for
        most_tp = world
    for tp, cp in itertools.product(_divisors(world), _context_degrees(config, constraints)):
        if (
            world % (tp * cp)
            or tp > most_tp
            or config.model.num_attention_heads % tp
            or not constraints.allow("tp", tp)
        ):
            continue
        for pp in _divisors(world // tp // cp):
            dp = world // tp // cp // pp
            if pp > layers or config.training.global_batch_size % dp:
                continue
            if constraints.allow("pp", pp) and constraints.allow("dp", dp):
                degrees = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
                for of_experts in _expert_degrees(config, constraints, degrees):
                    yield {**degrees, **of_experts}


def _expert_degrees(
    config: ResolvedConfig, constraints: Constraints, degrees: Mapping[str, int]
) -> Iterator[Mapping[str, int | None]]:
    """How experts may be divided: each split by --tp ranks as long as that is the default, or by none."""
    experts = config.model.experts
    if experts is None:
        yield {}
        return
    block = degrees["tp"] * degrees["cp"] * degrees["dp"]
    splits = constraints.among("etp", (degrees["tp"], 1)) if degrees["tp"] > 1 else [1]
    for split in splits:
        for ep in _divisors(math.gcd(block // split, experts.num_experts)):
            if constraints.allow("ep", ep):
                yield {"ep": ep, "etp": None if split == degrees["tp"] else split}


def _ranks_to_divide(config: ResolvedConfig, constraints: Constraints) -> int:
    """The product of the degrees that a search chooses."""
    parallel = config.parallel
    return constraints.world_size // (parallel.ranks // (parallel.tp * parallel.cp * parallel.pp * parallel.dp))


def impossible_limits(config: ResolvedConfig, constraints: Constraints) -> list[str]:
    """What is wrong with limits and given values that leave a degree no value, whatever the other degrees are.

    Limits of which the smallest value is above the largest are left to the caller.
    """
    heads, layers = config.model.num_attention_heads, config.model.num_layers
    batch, sequence = config.training.global_batch_size, config.data.seq_length
    divisors, experts = _divisors(_ranks_to_divide(config, constraints)), config.model.experts
    possible = {
        "tp": ([d for d in divisors if heads % d == 0], f"divide --num-attention-heads {heads}"),
        "cp": ([d for d in divisors if sequence % d == 0], f"divide --seq-length {sequence}"),
        "pp": ([d for d in divisors if d <= layers], f"are at most --num-layers {layers}"),
        "dp": ([d for d in divisors if batch % d == 0], f"divide --global-batch-size {batch}"),
    }
    problems = []
    if experts is not None:
        number = experts.num_experts
        possible["ep"] = [d for d in divisors if number % d == 0], f"divide --num-experts {number}"
    else:
        of_experts = {flag_and_value(n, v) for n, v in constraints.fixed.items() if n in ("ep", "etp")}
        for limit, values_of in (("min", constraints.least), ("max", constraints.most)):
            of_experts |= {f"--{limit}-ep {value}" for name, value in values_of.items() if name == "ep"}
        problems += [
            f"{flag} has no effect without experts: leave it out, or use --num-experts" for flag in sorted(of_experts)
        ]
    for name, (values, reason) in possible.items():
        least, most = constraints.least.get(name), constraints.most.get(name)
        inverted = least is not None and most is not None and least > most
        if inverted or any(constraints.allow(name, value) for value in values):
            continue
        flags = {f"--min-{name}": least, f"--max-{name}": most}
        if name in constraints.fixed:
            flags = {f"--{name}": constraints.fixed[name]}
        texts = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
        said = "is not possible" if name in constraints.fixed else f"leave{'s' if len(texts) == 1 else ''} no --{name}"
        problems.append(
            f"{' and '.join(texts)} {said}: those that divide --world-size {constraints.world_size} and {reason} are "
            f"{', '.join(map(str, values))}"
        )
    return problems


def _context_degrees(config: ResolvedConfig, constraints: Constraints) -> list[int]:
    """The given --cp, or those that leave each rank `_LEAST_POSITIONS`; within the limits, which may ask for more."""
    if config.parallel.cp > 1:
        return [config.parallel.cp]
    most = constraints.most.get("cp", max(config.data.seq_length // _LEAST_POSITIONS, constraints.least.get("cp", 1)))
    return [cp for cp in _divisors(config.data.seq_length) if cp <= most and constraints.allow("cp", cp)]


def _worthwhile(config: ResolvedConfig, *, on_cpu: bool) -> list[Recomputed]:
    """The kinds of recomputation that save activations, those that keep least first; and none. Fused attention keeps
    little that `selective` could drop, and compiled code nothing that `light` could."""
    config = config.for_device(on_cpu=on_cpu)
    blocks = {id(layer.block): layer.block for layer in outline(config) if layer.block is not None}.values()

    def kept(kind: Recomputed) -> float:
        return sum(block_bytes(config, block, on_cpu=on_cpu, recompute=kind) for block in blocks)

    whole = kept("none")
    return [kind for kind in _RECOMPUTED if kind == "none" or kept(kind) <= (1 - _LEAST_SAVING) * whole]


def _variants(
    config: ResolvedConfig,
    constraints: Constraints,
    degrees: Mapping[str, Any],
    recomputed: Sequence[Recomputed],
) -> Iterator[_Choice]:
    """The layouts of these degrees, smaller microbatches first, and of equal ones those that keep least of them."""
    parallel, training = config.parallel, config.training
    per_replica = training.global_batch_size // degrees["dp"]
    # Half as many samples at a time with half the --cp compute as much, and exchange fewer keys and values.
    tried = _MICRO_BATCHES if degrees["cp"] == parallel.cp else (1,)
    sizes = [b for b in constraints.among("micro_batch_size", tried) if per_replica % b == 0]
    # With a pipeline stages 2 and 3 would reduce each microbatch by itself.
    shards = 1 if degrees["dp"] * degrees["cp"] == 1 else 2 if degrees["pp"] > 1 else 4
    stages = constraints.among("zero_stage", range(shards))
    kinds = constraints.among("recompute", recomputed)
    unit = dataclasses.replace(parallel, tp=degrees["tp"], cp=degrees["cp"]).sequence_unit(sequence_parallel=True)
    may_split = degrees["tp"] > 1 and config.data.seq_length % unit == 0
    split = constraints.among("sequence_parallel", (False, True)) if may_split else [False]
    shapes = _shapes(config, constraints, degrees["pp"])
    layers = constraints.fixed.get("recompute_num_layers")
    # Many layouts have these sections in common.
    trainings = {
        (size, kind): dataclasses.replace(
            training, micro_batch_size=size, recompute=kind, recompute_num_layers=layers if kind == "full" else None
        )
        for size, kind in itertools.product(sizes, kinds)
    }
    unset: dict[str, Any] = {"schedule_csv": None, "pipeline_layout": None}
    parallels = {
        (stage, sequence, number): dataclasses.replace(
            parallel, **degrees, **shapes[number], **unset, zero_stage=stage, sequence_parallel=sequence
        )
        for stage, sequence, number in itertools.product(stages, split, range(len(shapes)))
    }
    for size, kind, stage, sequence, number in itertools.product(sizes, kinds, stages, split, range(len(shapes))):
        yield _Choice(parallel=parallels[stage, sequence, number], training=trainings[size, kind])


def _shapes(config: ResolvedConfig, constraints: Constraints, pp: int) -> list[dict[str, Any]]:
    """Schedules, stages per rank and partitions."""
    if pp == 1:
        return [{"schedule": "1f1b", "virtual_stages": 1, "pipeline_balance": "time"}]
    given = constraints.fixed.get("virtual_stages")
    names = ("1f1b", "zero-bubble", "interleaved") if given in (None, 1) else ("interleaved",)
    balances = constraints.among("pipeline_balance", ("time", "parameters"))
    return [
        {"schedule": name, "virtual_stages": v, "pipeline_balance": balance}
        for balance in balances
        for name in constraints.among("schedule", names)
        if name != "interleaved" or balance == balances[0]
        for v in (constraints.among("virtual_stages", _VIRTUAL_STAGES) if name == "interleaved" else [1])
        if pp * v <= config.model.num_layers
    ]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# ---- what is printed -------------------------------------------------------------------------------------------------


def search_table(found: Found, *, top: int, tokens: float | None = None, goodput: float = 0.9) -> str:
    """The best layouts as a Markdown table: of each way to divide the model the fastest schedule."""
    frontier = {id(layout) for layout in found.frontier}
    given = ", ".join(f"`{flag_and_value(name, value)}`" for name, value in found.fixed.items())
    left_out = f"; {found.left_out:,} with larger, slower microbatches are left out" if found.left_out else ""
    lines = [
        f"# {len(found.layouts):,} of {found.tried:,} valid layouts fit {found.capacity / GIB:.1f} GiB per rank of "
        f"{found.cluster.name}, software {found.cluster.software.name} "
        f"(searched in {found.wall_seconds:.1f} s{left_out})",
        *(["", f"As given, and not searched for: {given}."] if given else []),
        "",
        f"| # | s/step | range | tokens/s | GiB | flags |{' days | USD |' if tokens else ''}",
        f"|---|---|---|---|---|---|{'---|---|' if tokens else ''}",
    ]
    for number, (layout, *others) in enumerate(found.divisions[:top], start=1):
        training, s = layout.config.training, layout.config.data.seq_length
        rate = training.global_batch_size * s / layout.seconds
        spread = "estimated" if layout.range is None else f"{layout.range[0]:.4g} to {layout.range[1]:.4g}"
        mark = " (frontier)" if id(layout) in frontier else ""
        if others:
            slowest = max(other.seconds for other in others)
            mark += f"; {len(others)} other schedule{'s' * (len(others) > 1)}, up to {slowest:.4g} s"
        row = (
            f"| {number} | {layout.seconds:.4g} | {spread} | {rate:,.0f} | {layout.memory_bytes / GIB:.1f} | "
            f"`{layout.flags}`{mark} |"
        )
        if tokens:
            days = tokens / rate / goodput / 86400
            price = days * 24 * layout.config.parallel.ranks * found.cluster.price_per_hour
            row += f" {days:,.2f} | {price:,.0f} |"
        lines.append(row)
    lines += ["", "Times are assumed, memory is by formula (docs/guides/planner.md); plan one of them for its details."]
    return "\n".join(lines)


def search_json(found: Found, *, top: int, tokens: float | None = None, goodput: float = 0.9) -> dict[str, Any]:
    """The best layouts, and the frontier, by the names of a plan's JSON; arguments as for `search_table`."""
    config, cluster = found.layouts[0].config, found.cluster
    ranks = config.parallel.ranks
    origin: Origin = "fitted" if cluster.source.startswith("fitted") else "assumed"

    def row(layout: Layout) -> dict[str, Any]:
        low, high = layout.range or (None, None)

        def timed(value: float, unit: str, *, is_rate: bool = False) -> Figure:
            ratios = [seconds / layout.seconds for seconds in (low or layout.seconds, high or layout.seconds)]
            ends = sorted(value / ratio if is_rate else value * ratio for ratio in ratios)
            return Figure(value=value, unit=unit, origin=origin, low=ends[0], high=ends[1])

        rate = config.training.global_batch_size * config.data.seq_length / layout.seconds
        fields = {
            "flags": layout.flags,
            "layout": layout_json(layout.config),
            "fits": True,
            "peak_bytes": layout.memory_bytes,
            "step_seconds": asdict(timed(layout.seconds, "s")),
            "throughput": {"tokens/s": asdict(timed(rate, "tokens/s", is_rate=True))},
            "simulated": layout.is_simulated,
        }
        if tokens is not None:
            days = tokens / rate / goodput / 86400
            price = days * 24 * ranks * cluster.price_per_hour
            fields["training"] = training_json(tokens, goodput, days=timed(days, "days"), price=timed(price, "USD"))
        return fields

    return {
        **run_json(config, outline(config), cluster, world_size=ranks, capacity=found.capacity),
        "fixed": dict(found.fixed),
        "valid": found.tried,
        "left_out": found.left_out,
        "fit": len(found.layouts),
        "wall_seconds": found.wall_seconds,
        "layouts": [row(layout) for layout in found.layouts[:top]],
        "frontier": [row(layout) for layout in found.frontier],
    }
