"""How long a training step takes: the stages of the pipeline by its schedule, and what follows the last backward.

What a stage takes (stage_time.py) is given to the schedule's simulator (pipeline/simulator.py), so that uneven stages
and every schedule are treated alike. The end of the step (step_end.py) is that of the slowest rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megacore.config import ParallelConfig, ResolvedConfig
from megacore.models.outline import ModelLayer
from megacore.pipeline.schedule import computations
from megacore.pipeline.schedule_file import placement, training_schedule
from megacore.pipeline.simulator import Costs, Simulator, Timeline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Case
from megacore.plan.shared_results import once_per
from megacore.plan.stage_time import Parts, Speed, StageTime, largest_of_normal, speed_of, stage_times
from megacore.plan.stages import StagedModel
from megacore.plan.step_end import step_ends
from megacore.plan.traffic import stage_message, tied_gradients


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step of the slowest rank, in seconds, by what takes it.

    The parts from `gemm` to `constant` add up to `seconds`.

    Attributes:
        seconds: of the step.
        gemm, attention, memory: computing on the busiest pipeline rank.
        tensor: exposed transfers of the layer group, and of keys and values.
        experts: exchange of rows between experts.
        replicas: exposed transfers between replicas.
        tied: the sum of tied gradients.
        pipeline: transfers between stages that the schedule does not hide.
        bubble: waiting for other stages while no transfer is the cause.
        slowest: waiting for the slowest node.
        optimizer: the update.
        host: copies to and from host memory that computing does not hide.
        constant: what a step takes in any layout.
        hidden: transfers beside computing, by role.
        stages: of one microbatch.
    """

    seconds: float
    gemm: float
    attention: float
    memory: float
    tensor: float
    experts: float
    replicas: float
    tied: float
    pipeline: float
    bubble: float
    slowest: float
    optimizer: float
    host: float
    constant: float
    hidden: dict[str, float]
    stages: tuple[StageTime, ...]

    def times(self, factor: float) -> StepTime:
        """All of it, as many times as long."""
        if factor == 1.0:
            return self
        scaled: dict[str, Any] = {
            name: value * factor for name, value in vars(self).items() if isinstance(value, float)
        }
        hidden = {role: seconds * factor for role, seconds in self.hidden.items()}
        stages = tuple(
            StageTime(
                passes=stage.passes.times(factor),
                replicas_hidden=stage.replicas_hidden * factor,
                replicas_exposed=stage.replicas_exposed * factor,
            )
            for stage in self.stages
        )
        return replace(self, **scaled, hidden=hidden, stages=stages)


def step_time(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
    cluster: Cluster,
    *,
    case: Case = "expected",
    simulated: bool = True,
) -> StepTime:
    """The time of a step.

    Args:
        config: a resolved configuration.
        layers: the whole model.
        cluster: that computes it, with its software.
        case: which of the assumed values.
        simulated: simulate the pipeline; otherwise estimate it, which is faster.
    """
    step = _Step(config, layers, cluster, case=case, simulated=simulated)
    config, stages, speed, parallel = step.config, step.stages, step.speed, step.config.parallel
    length, m = step.length, config.microbatches
    without = length
    if step.costs.transfer and simulated:
        without = pipeline_seconds(config, pipeline_costs(config, stages, speed, instant=True))
    parts, end = step.parts, step.end
    waited = sum(stages[number].replicas_exposed for number in step.on_busiest) * m
    messages = 2 * m * _message_seconds(config, speed) if parallel.pp > 1 else 0.0
    time = StepTime(
        seconds=step.unscaled,
        gemm=parts.gemm,
        attention=parts.attention,
        memory=parts.memory,
        tensor=parts.exposed - waited,
        experts=parts.dispatch,
        replicas=waited + end.exposed,
        tied=step.tied,
        pipeline=length - without,
        bubble=max(without - step.busiest_seconds, 0.0) if parallel.pp > 1 else 0.0,  # but for rounding it is not less
        slowest=step.slowest,
        optimizer=end.optimizer,
        host=end.host,
        constant=cluster.software.step_seconds,
        hidden={
            _beside_layers(parallel): parts.hidden,
            "data parallel": end.hidden + sum(stages[number].replicas_hidden for number in step.on_busiest) * m,
            "pipeline": max(messages - (length - without), 0.0),
            "host memory": end.host_hidden,
        },
        stages=stages,
    )
    return time.times(step.factor)


def step_seconds(
    config: ResolvedConfig,
    layers: Sequence[ModelLayer],
    cluster: Cluster,
    *,
    simulated: bool = True,
    staged: StagedModel | None = None,
) -> float:
    """Seconds of a step as `step_time` has them, and with its arguments; in half of the time, for it leaves out the
    parts. `staged`: the model in stages, if it is known."""
    return _Step(config, layers, cluster, simulated=simulated, staged=staged).seconds


class _Run(NamedTuple):
    """From the first forward of a step to its last backward; attributes are those of `_Step`."""

    stages: tuple[StageTime, ...]
    costs: Costs
    on_busiest: Sequence[int]
    busiest_seconds: float
    parts: Parts
    length: float


@once_per("microbatches")
def _run(config: ResolvedConfig, staged: StagedModel, speed: Speed, *, simulated: bool) -> _Run:
    m = config.microbatches
    stages = stage_times(config, staged.chunks, speed)
    costs = pipeline_costs(config, stages, speed)
    held = {rank: staged.placement.stages_of(rank) for rank in staged.unlike_ranks}
    busy = {rank: sum([stages[number].total for number in numbers]) * m for rank, numbers in held.items()}
    busiest = max(busy, key=busy.__getitem__)
    on_busiest = held[busiest]
    length = pipeline_seconds(config, costs) if simulated else _estimated_seconds(config, costs, busy[busiest])
    parts = functools.reduce(Parts.__add__, (stages[number].sum for number in on_busiest)).times(m)
    return _Run(stages, costs, on_busiest, busy[busiest], parts, length)


class _Step:
    """What a step consists of; arguments as those of `step_time` and `step_seconds`.

    Attributes:
        config: with gradients in 16 bits where the software adds them up so.
        stages: of one microbatch.
        costs: of the stages, for the simulator.
        on_busiest: stages of the pipeline rank that computes longest.
        busiest_seconds: that it computes, with its layers' transfers.
        parts: the same, by what takes them.
        length: seconds from the first forward to the last backward.
        slowest: seconds of waiting for the slowest node.
        end: of the step, on the rank where it takes longest.
        tied: seconds of the sum of tied gradients.
        factor: by which steps of layouts like this one were measured to be longer.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        layers: Sequence[ModelLayer],
        cluster: Cluster,
        *,
        case: Case = "expected",
        simulated: bool = True,
        staged: StagedModel | None = None,
    ) -> None:
        if config.precision.precision == "fp16" and cluster.software.sums_fp16:  # gradients in 16 bits: as many bytes
            config = replace(config, precision=replace(config.precision, grad_reduce_dtype="bf16"))
        self.config = config
        self.speed = speed = speed_of(config, cluster, case)
        staged = staged or StagedModel(config, layers)
        run = _run(config, staged, speed, simulated=simulated)
        self.stages, self.costs, self.on_busiest, self.busiest_seconds, self.parts, self.length = run
        nodes = math.ceil(config.parallel.ranks / cluster.device.node_ranks)
        lag = 0.0 if cluster.on_cpu else cluster.device.node_spread.of(case) * largest_of_normal(nodes)
        self.slowest = self.parts.compute * lag
        self.end = max(step_ends(config, staged, self.stages, speed), key=lambda one: one.seconds)
        tied = tied_gradients(config)
        self.tied = 0.0 if tied is None else speed.transfers([tied])
        self.factor = 1.0 if cluster.layouts is None else cluster.layouts.factor(config)

    @property
    def unscaled(self) -> float:
        """Seconds by the constants alone."""
        return self.length + self.slowest + self.end.seconds + self.tied + self.speed.software.step_seconds

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.factor * self.unscaled


def _beside_layers(parallel: ParallelConfig) -> str:
    """Whose transfers are hidden beside the computations of layers."""
    if parallel.cp == 1:
        return "tensor parallel"
    return "context parallel" if parallel.tp == 1 else "tensor and context parallel"


def pipeline_costs(
    config: ResolvedConfig, stages: Sequence[StageTime], speed: Speed, *, instant: bool = False
) -> Costs:
    """What the simulator takes; `instant`: as if messages took no time."""
    transfer = 0.0 if config.parallel.pp == 1 or instant else _message_seconds(config, speed)
    waiting = transfer if config.parallel.schedule_name in speed.software.waits_in else 0.0
    forward, input_grad, weight_grad = zip(*(stage.totals for stage in stages), strict=True)
    return Costs(
        forward=[seconds + waiting for seconds in forward],
        input_grad=[seconds + waiting for seconds in input_grad],
        weight_grad=list(weight_grad),
        transfer=transfer,
    )


def _message_seconds(config: ResolvedConfig, speed: Speed) -> float:
    """Of an activation, or its gradient, on its way to the next stage."""
    whole, t = stage_message(config), config.parallel.tp
    if t == 1 or config.parallel.sequence_parallel or not speed.software.scatters_messages:
        return speed.transfers([whole])
    gathered = replace(whole, role="layer", pattern="all-gather", ranks=t, stride=1)
    return speed.transfers([replace(whole, bytes=whole.bytes / t), gathered])


def timeline(config: ResolvedConfig, costs: Costs, microbatches: int) -> Timeline:
    """What each rank computes when."""
    return _simulator_of(config, microbatches).timeline(costs)


def _simulator_of(config: ResolvedConfig, microbatches: int) -> Simulator:
    parallel = config.parallel
    if parallel.schedule_csv is not None:
        return Simulator.of_schedule(training_schedule(parallel, microbatches))
    return _simulator(parallel.schedule_name, parallel.pp, microbatches, parallel.virtual_stages)


@functools.lru_cache(maxsize=64)
def _simulator(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Simulator:
    return Simulator.of_computations(computations(name, ranks, microbatches, virtual_stages), ranks * virtual_stages)


def pipeline_seconds(config: ResolvedConfig, costs: Costs) -> float:
    """From the first forward to the last backward.

    From three times as many microbatches as there are ranks on, each further round of them takes as long as the last,
    and not less than the busiest rank computes: a round that is simulated may still be that of a less busy rank.
    """
    parallel, m = config.parallel, config.microbatches
    per_microbatch = [sum(parts) for parts in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    if parallel.pp == 1:
        return m * sum(per_microbatch)
    p = parallel.pp
    if parallel.schedule_csv is not None or (parallel.schedule == "gpipe" and m <= 64) or m <= 3 * p:
        return _simulator_of(config, m).end(costs)
    simulated = 2 * p + m % p, 3 * p + m % p
    before, end = (_simulator_of(config, count).end(costs) for count in simulated)
    stages_of = placement(parallel).stages_of
    busiest = max(sum(per_microbatch[stage] for stage in stages_of(rank)) for rank in range(p))
    return end + (m - simulated[1]) / p * max(end - before, p * busiest)


def _estimated_seconds(config: ResolvedConfig, costs: Costs, busy: float) -> float:
    """The busiest rank's computations, and the bubble by the closed form of the schedule (closed_forms.py)."""
    parallel, m = config.parallel, config.microbatches
    p, v = parallel.pp, parallel.virtual_stages
    rounds = max(1.0, p / m)
    f, b, w = (sum(part) / len(part) for part in (costs.forward, costs.input_grad, costs.weight_grad))
    idle = {"zero-bubble": f + b - w, "zb-v": max(f, b), "dualpipev": f + b - w}.get(parallel.schedule, f + b + w)
    return busy + (p - 1) * (max(idle, 0.0) + 2 * costs.transfer) * rounds + m * v * costs.transfer * (p > 1)
