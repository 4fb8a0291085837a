"""Which layouts a search tries: the degrees of parallelism, and for each of them the schedules, microbatch sizes, ZeRO
stages and types of recomputation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from megacore.config import Config, ResolvedConfig, ResolvedParallel, ResolvedTraining, violations
from megacore.config.dimensions import ranks_of_role
from megacore.config.messages import divisors
from megacore.config.parallel import STAGED_SCHEDULES, V_SCHEDULES
from megacore.models.outline import outline
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule_file import placement
from megacore.plan.activations import block_bytes
from megacore.plan.cluster import Cluster
from megacore.plan.fastest_schedule import VIRTUAL_STAGES
from megacore.plan.stages import DistinctStages, StagedModel

T = TypeVar("T")

_LARGEST_MICRO_BATCH = 64
Recomputed = Literal["none", "selective", "light", "full"]
# Each with those that keep more activations: what does not fit with one of them does not fit with these.
RECOMPUTED: Mapping[Recomputed, frozenset[Recomputed]] = {
    "full": frozenset({"light", "selective", "none"}),
    "light": frozenset({"none"}),
    "selective": frozenset({"none"}),
    "none": frozenset(),
}
_LEAST_SAVING = 0.01  # of activations; recomputation that saves less takes time for nothing
LEAST_POSITIONS = 4096  # of a rank: with fewer, more ranks for a sequence save nothing that matters


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a layout may be.

    Attributes:
        world_size: number of ranks.
        most: largest values, by field.
        least: smallest values, by field.
        fixed: values that the user has given, by field; they are not searched for.
        memory_bytes: that a rank may take; None: what a device of the cluster has for it.
        may_offload: whether a layout that does not fit is tried with --offload-optimizer, which is not given.
    """

    world_size: int
    most: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: float | None = None
    may_offload: bool = False

    def allow(self, name: str, value: int) -> bool:
        """Whether a field may have a value."""
        return self.fixed.get(name, value) == value and self.within_limits(name, value)

    def within_limits(self, name: str, value: Any) -> bool:
        """Whether the limits allow a field a value; None is within any."""
        return value is None or self.least.get(name, value) <= value <= self.most.get(name, value)

    def among(self, name: str, values: Iterable[T]) -> list[T]:
        """What a field may be: its given value, or those of `values` that are within the limits."""
        if name in self.fixed:
            values = [self.fixed[name]]
        return [value for value in values if self.within_limits(name, value)]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The sections that make a layout of the configuration that is searched for."""

    parallel: ResolvedParallel
    training: ResolvedTraining


def with_choice(config: ResolvedConfig, choice: Choice) -> ResolvedConfig:
    """The configuration with the sections of a choice."""
    return dataclasses.replace(config, parallel=choice.parallel, training=choice.training)


def with_batch(config: ResolvedConfig, batch: int) -> ResolvedConfig:
    """The configuration with another global batch size."""
    return config.with_values({"global_batch_size": batch})


def divisions_of(config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> Iterator[Mapping[str, Any]]:
    """Numbers of ranks by which the model and the batch may be divided."""
    layers, world = config.model.num_layers, _ranks_to_divide(config, constraints)
    most_tp = constraints.most.get("tp", cluster.device.node_ranks)
    asked = constraints.fixed.get("tp", constraints.least.get("tp", 1))
    if "tp" not in constraints.most and asked > most_tp:  # across nodes, as is asked for
        most_tp = world
    for tp, cp in itertools.product(divisors(world, most=None), context_degrees(config, constraints)):
        if (
            world % (tp * cp)
            or tp > most_tp
            or config.model.num_attention_heads % tp
            or not constraints.allow("tp", tp)
        ):
            continue
        for pp in divisors(world // tp // cp, most=None):
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
    splits = constraints.among("etp", dict.fromkeys((degrees["tp"], 1)))
    for split in splits:
        for ep in divisors(math.gcd(block // split, experts.num_experts), most=None):
            if constraints.allow("ep", ep):
                yield {"ep": ep, "etp": None if split == degrees["tp"] else split}


def _ranks_to_divide(config: ResolvedConfig, constraints: Constraints) -> int:
    """The product of the degrees that a search chooses."""
    parallel = config.parallel
    return constraints.world_size // (parallel.ranks // (parallel.tp * parallel.cp * parallel.pp * parallel.dp))


def context_degrees(config: Config | ResolvedConfig, constraints: Constraints) -> list[int]:
    """The given --cp; or those that leave each rank `LEAST_POSITIONS` or are at most that of the run that the search
    begins from; within the limits, which may ask for more."""
    asked = constraints.fixed.get("cp", constraints.least.get("cp", config.parallel.cp))
    most = constraints.most.get("cp", max(config.data.seq_length // LEAST_POSITIONS, asked))
    return [cp for cp in divisors(config.data.seq_length, most=None) if cp <= most and constraints.allow("cp", cp)]


def worthwhile_recomputation(config: ResolvedConfig, *, on_cpu: bool) -> list[Recomputed]:
    """The kinds of recomputation that save activations, those that keep least first; and none. Fused attention keeps
    little that `selective` could drop, and compiled code nothing that `light` could."""
    config = config.for_device(on_cpu=on_cpu)
    blocks = {id(layer.block): layer.block for layer in outline(config) if layer.block is not None}.values()

    def kept(kind: Recomputed) -> float:
        return sum(block_bytes(config, block, on_cpu=on_cpu, recompute=kind) for block in blocks)

    whole = kept("none")
    return [kind for kind in RECOMPUTED if kind == "none" or kept(kind) <= (1 - _LEAST_SAVING) * whole]


def variants(
    config: ResolvedConfig,
    constraints: Constraints,
    degrees: Mapping[str, Any],
    recomputed: Sequence[Recomputed],
) -> Iterator[Choice]:
    """The layouts of these degrees, smaller microbatches first, and of equal ones those that keep least of them. Each
    is followed by the same with an offloaded optimizer, if the constraints have it.

    The ZeRO stage of the run that the search begins from is always tried: its other flags may need it.
    """
    parallel, training = config.parallel, config.training
    per_replica = training.global_batch_size // degrees["dp"]
    # Half as many samples at a time with half the --cp compute as much, and exchange fewer keys and values.
    is_least = degrees["cp"] in (parallel.cp, min(context_degrees(config, constraints)))
    tried = [d for d in divisors(per_replica, most=None) if d <= _LARGEST_MICRO_BATCH] if is_least else [1]
    sizes = [b for b in constraints.among("micro_batch_size", tried) if per_replica % b == 0]
    # With a pipeline stages 2 and 3 would reduce each microbatch by itself.
    shards = 1 if degrees["dp"] * degrees["cp"] == 1 else 2 if degrees["pp"] > 1 else 4
    stages = constraints.among("zero_stage", sorted({*range(shards), parallel.zero_stage}))
    layers = constraints.fixed.get("recompute_num_layers")
    kinds = [kind for kind in constraints.among("recompute", recomputed) if layers is None or kind == "full"]
    unit = dataclasses.replace(parallel, tp=degrees["tp"], cp=degrees["cp"]).sequence_unit(sequence_parallel=True)
    if degrees["tp"] == 1:
        split = [False]
    else:
        can_split = config.data.seq_length % unit == 0
        split = [is_split for is_split in (False, can_split) if constraints.allow("sequence_parallel", is_split)]
    shapes = _shapes(config, constraints, degrees["pp"])
    # Many layouts have these sections in common.
    trainings = {
        (size, kind): dataclasses.replace(training, micro_batch_size=size, recompute=kind, recompute_num_layers=layers)
        for size, kind in itertools.product(sizes, kinds)
    }
    unset: dict[str, Any] = {"schedule_csv": None, "pipeline_layout": None}
    offloads = {parallel.offload_optimizer, constraints.may_offload or parallel.offload_optimizer}
    parallels = {
        (stage, sequence, number): [
            dataclasses.replace(
                parallel,
                **degrees,
                **shapes[number],
                **unset,
                zero_stage=stage,
                sequence_parallel=sequence,
                offload_optimizer=offload,
            )
            for offload in sorted(offloads)
        ]
        for stage, sequence, number in itertools.product(stages, split, range(len(shapes)))
    }
    for size, kind, stage, sequence, number in itertools.product(sizes, kinds, stages, split, range(len(shapes))):
        if kind == "full" and shapes[number]["schedule"] in ("zero-bubble", *V_SCHEDULES):
            continue  # 1F1B (Config.has_whole_backwards), or not valid
        for one in parallels[stage, sequence, number]:
            yield Choice(parallel=one, training=trainings[size, kind])


def _shapes(config: ResolvedConfig, constraints: Constraints, pp: int) -> list[dict[str, Any]]:
    """Schedules, stages per rank and partitions."""
    given = constraints.fixed.get("virtual_stages")
    if pp == 1:  # any other schedule computes the same, and keeps as much or more
        return [{"schedule": "1f1b", "virtual_stages": 1, "pipeline_balance": "time"}] if given in (None, 1) else []
    names = ("1f1b", "zero-bubble", *STAGED_SCHEDULES) if given in (None, 1) else STAGED_SCHEDULES
    balances = constraints.among("pipeline_balance", ("time", "parameters"))
    return [
        {"schedule": name, "virtual_stages": v, "pipeline_balance": balance}
        for balance in balances
        for name in constraints.among("schedule", names)
        if name not in STAGED_SCHEDULES or balance == balances[0]
        for v in (constraints.among("virtual_stages", VIRTUAL_STAGES) if name in STAGED_SCHEDULES else [1])
        if pp * v <= config.model.num_layers and (v == 2 or name not in V_SCHEDULES)
    ]


# ---- which of them are valid -----------------------------------------------------------------------------------------


class Validity:
    """Whether layouts are valid. The rules that bind them are about one of four: the degrees; the microbatch, for so
    many replicas; the schedule, for so many stages; what a ZeRO stage and recomputation go with. Each is validated
    once, with the rest as in the run that the search begins from, which is valid: no rule may bind a ZeRO stage or
    recomputation of that run to degrees or a schedule that other layouts do not have."""

    def __init__(self, config: ResolvedConfig, world_size: int) -> None:
        self._config, self._world_size = config, world_size
        self._known: dict[tuple[object, ...], bool] = {}

    def __call__(self, choice: Choice) -> bool:
        parallel, training = choice.parallel, choice.training
        degrees = (parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.expert_split)
        shape = (*degrees, parallel.sequence_parallel)
        batch = (ranks_of_role("batch", parallel), training.micro_batch_size)
        schedule = (parallel.pp, parallel.schedule, parallel.virtual_stages)
        memory = (parallel.zero_stage, training.recompute, parallel.offload_optimizer)
        savings = (*memory, parallel.tp > 1, parallel.pp > 1, parallel.schedule)

        plain = {"schedule": "1f1b", "virtual_stages": 1}
        return (
            self._is_valid(shape, lambda: self._plain(choice, plain, micro_batch_size=1))
            and self._is_valid(batch, lambda: self._plain(choice, plain))
            and self._is_valid(schedule, lambda: self._plain(choice, {}))
            and self._is_valid(savings, lambda: choice)
        )

    def _is_valid(self, key: tuple[object, ...], choice: Callable[[], Choice]) -> bool:
        if key not in self._known:
            self._known[key] = not violations(with_choice(self._config, choice()), self._world_size)
        return self._known[key]

    def _plain(self, choice: Choice, of_schedule: Mapping[str, Any], **of_training: Any) -> Choice:
        """The choice with what saves memory as in the run that the search begins from."""
        saving = {name: getattr(self._config.parallel, name) for name in ("zero_stage", "offload_optimizer")}
        start = self._config.training
        recomputed: dict[str, Any] = {
            "recompute": start.recompute,
            "recompute_num_layers": start.recompute_num_layers,
        }
        return Choice(
            parallel=dataclasses.replace(choice.parallel, **saving, **of_schedule),
            training=dataclasses.replace(choice.training, **recomputed, **of_training),
        )


# ---- how they cut the model ------------------------------------------------------------------------------------------

Balance = Literal["time", "parameters", "flops", "uniform"]
Stages = tuple[range, ...]


class StagedModels:
    """How layouts cut the model into stages, of which many have the same.

    Args:
        config: of any layout.
        constraints: what a layout may be.
    """

    def __init__(self, config: ResolvedConfig, constraints: Constraints) -> None:
        self._config = config
        self._tries_time = "pipeline_balance" not in constraints.fixed
        self._distinct_stages: dict[Hashable, DistinctStages] = {}
        self._stages: dict[Hashable, Stages] = {}
        self._alike: dict[Stages, Stages] = {}  # equal ones are one object
        self._staged: dict[Hashable, StagedModel] = {}

    def parts(self, config: ResolvedConfig) -> DistinctStages:
        """The parts into which these degrees may cut the model."""
        key = config.parallel.tp, config.parallel.ep, config.parallel.expert_split
        if key not in self._distinct_stages:
            self._distinct_stages[key] = DistinctStages(config, outline(config))
        return self._distinct_stages[key]

    def of(self, config: ResolvedConfig) -> StagedModel:
        """The cut of a layout."""
        parts = self.parts(config)
        stages = self._stages_of(Choice(parallel=config.parallel, training=config.training))
        key = id(parts), placement(config.parallel), id(stages)
        if key not in self._staged:
            self._staged[key] = StagedModel(config, parts, stages)
        return self._staged[key]

    def is_as_by_time(self, choice: Choice) -> bool:
        """Whether balancing by time, which is tried too, cuts the model in the same way."""
        if choice.parallel.pipeline_balance == "time" or not self._tries_time:
            return False
        return self._stages_of(choice) is self._stages_of(choice, "time")

    def _stages_of(self, choice: Choice, balance: Balance | None = None) -> Stages:
        parallel, training = choice.parallel, choice.training
        balance = balance or parallel.pipeline_balance
        key: tuple[Hashable, ...] = balance, parallel.pp * parallel.virtual_stages
        if balance == "time":  # that of layers
            key += parallel.tp, parallel.cp, parallel.sequence_parallel, training.micro_batch_size, training.recompute
        if key not in self._stages:
            parallel = dataclasses.replace(parallel, pipeline_balance=balance)
            balanced = with_choice(self._config, Choice(parallel=parallel, training=training))
            stages = tuple(stage_ranges(self.parts(balanced).layers, balanced))
            self._stages[key] = self._alike.setdefault(stages, stages)
        return self._stages[key]
