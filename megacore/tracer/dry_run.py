"""`--dry-run=full`: one train step of every kind of rank of a layout, on fake tensors.

A rank's kind is its pipeline stage, and whether it is the first or the last of the other dimensions: these differ in
padding, in the shards of ZeRO, and in what only the first of a group does. The first rank of every stage takes steps,
so that every layer of the model does; ranks at the other ends are of one kind in all stages that have equal layers and
take the same actions. One rank of each kind is built and takes a step by the code of a run: model, parallelism,
schedule, gradient reduction and optimizer. Wrong shapes, types and devices fail as in the job, and the bytes that a
rank holds are counted beside what the planner says. Nothing is computed, sent or allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from megacore import ops
from megacore.config import ResolvedConfig
from megacore.config.dimensions import DIMENSIONS, coordinates_of, pipeline_dimension, ranks_of_role
from megacore.errors import ConfigError
from megacore.models.outline import outline
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Mesh
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import training_schedule
from megacore.pipeline.stage import tensors_of
from megacore.plan.in_flight import in_flight
from megacore.plan.memory import RankMemory, plan_memory
from megacore.tracer.fake_job import CPU, absent_accelerator, fake_job, in_words
from megacore.tracer.fake_settings import unfit_settings
from megacore.tracer.memory import traced_rank
from megacore.tracer.meter import Meter
from megacore.tracer.profile import fake_microbatch, make_task, with_microbatches
from megacore.tracer.workers import in_processes
from megacore.train.step import TrainStep
from megacore.zero.memory import measured_bytes

# By how much counted bytes may differ from planned ones: of state, besides padding; numbers that are no part of the
# state of a parameter; of the peak, which few layers stand for, as a share and in bytes.
_ROUNDING, _SCALARS, _TRANSIENT, _SMALL = 0.001, 4096, 0.01, 2**20


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's steps."""

    rank: int  # its number in the job
    microbatches: Sequence[int]  # that it computed, in each step
    planned: RankMemory  # what the planner says of the last step
    planned_state: Mapping[str, float] = field(default_factory=dict)  # bytes by kind that it holds after it
    parameters: int = 0  # that it holds, padding included
    # Bytes that it holds after the last step, by kind; empty where it failed.
    state: Mapping[str, int] = field(default_factory=dict)
    padding: float = 0.0  # share of the flat buffers that is padding
    peak: int = 0  # most bytes of tensors on its device at one time
    problem: str | None = None  # why it failed, and where; None: it did not
    alike: Sequence[int] = ()  # numbers of the ranks of other stages that are of the same kind

    @property
    def is_filled(self) -> bool:
        """Whether the rank had as many microbatches in flight as in the job, so that its peak counts."""
        return len(self.microbatches) > 1

    @property
    def result(self) -> str:
        return "fails" if self.problem is not None else "differs" if self.differences else "OK"

    @property
    def differences(self) -> list[str]:
        if self.problem is not None:
            return []
        lines = []
        if self.parameters != self.planned.parameters:
            lines.append(f"{self.parameters:,} parameters, {self.planned.parameters:,} planned")
        for kind, held in self.state.items():
            planned = self.planned_state[kind]
            padding = self.padding / (1 - self.padding)  # `padding` is a share of what is held
            if abs(held - planned) > (_ROUNDING + padding) * planned + _SCALARS:
                lines.append(f"{held:,} bytes of {kind}, {planned:,.0f} planned")
        planned = self.planned.expected_tensors
        if self.is_filled and abs(self.peak - planned) > _TRANSIENT * planned + _SMALL:
            lines.append(f"peak of {self.peak:,} bytes, {planned:,.0f} planned")
        return lines


def run_ranks(config: ResolvedConfig, *, on_cpu: bool, workers: int) -> Iterator[RankReport]:
    """Steps of one rank of each kind, by rank. `config`: resolved, for any number of ranks. `on_cpu`: whether the job
    computes on CPUs; otherwise on accelerators, with Triton's kernels unless `--kernels` says otherwise. `workers`:
    processes that share the ranks; 1: this one. Raises ConfigError where a setting cannot run on fake tensors."""
    if problems := list(unfit_settings(config)):
        raise ConfigError(problems)
    return _reports(config.for_device(on_cpu=on_cpu), on_cpu=on_cpu, workers=workers)


def _reports(config: ResolvedConfig, *, on_cpu: bool, workers: int) -> Iterator[RankReport]:
    kinds = rank_kinds(config)
    run, firsts = partial(run_rank, config, on_cpu=on_cpu), [kind[0] for kind in kinds]
    reports = map(run, firsts) if workers == 1 else in_processes(run, firsts, min(workers, len(kinds)))
    for report, kind in zip(reports, kinds, strict=True):
        yield replace(report, alike=kind[1:])


def rank_kinds(config: ResolvedConfig) -> list[list[int]]:
    """The first and last ranks along each dimension of every stage, by kind; both in ascending order. Ranks of
    different stages are of one kind if they are not the first of their stage, hold layers of the same sizes and take
    the same actions on the microbatches of their step. `config`: resolved, for any number of ranks."""
    parallel, layers = config.parallel, outline(config)
    stages, degrees, pipeline = stage_ranges(layers, config), parallel.degrees, pipeline_dimension()
    schedule = training_schedule(parallel, _few(config))

    def work(rank: int) -> Hashable:
        actions = tuple(
            (is_transfer, tuple((a.op, a.microbatch, a.stage // parallel.pp) for a in batch))
            for is_transfer, batch in schedule.action_groups(rank)
        )
        held = [[layers[i] for i in stages[number]] for number in schedule.placement.stages_of(rank)]
        return actions, tuple(tuple((layer.held, layer.shared, id(layer.block)) for layer in chunk) for chunk in held)

    works = [work(rank) for rank in range(parallel.pp)]
    ends = [range(degrees[d.name]) if d.divides == "stages" else sorted({0, degrees[d.name] - 1}) for d in DIMENSIONS]
    kinds: dict[Hashable, list[int]] = {}
    for numbers in itertools.product(*ends):
        coordinates = dict(zip(degrees, numbers, strict=True))
        stage, rank = coordinates[pipeline], _rank_at(coordinates, degrees)
        others = tuple(number for name, number in coordinates.items() if name != pipeline)
        kinds.setdefault((others, works[stage]) if any(others) else rank, []).append(rank)
    return list(kinds.values())


def _rank_at(coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    rank = 0
    for name, degree in degrees.items():
        rank = rank * degree + coordinates[name]
    return rank


def _few(config: ResolvedConfig) -> int:
    """The fewest microbatches of a step: 1, unless a schedule from a file is made for a number of them."""
    return 1 if config.parallel.schedule_csv is None else config.microbatches


def microbatch_counts(config: ResolvedConfig, rank: int) -> list[int]:
    """How many microbatches a rank computes in each of its steps. The first rank of a stage takes a second step, with
    the optimizer's state in memory and as many microbatches as it keeps in flight, until the gradients of weights where
    the schedule splits backward. The others differ from it in shards and padding only."""
    parallel, few = config.parallel, _few(config)
    coordinates = coordinates_of(rank, parallel.degrees)
    is_first = not any(coordinates[d.name] for d in DIMENSIONS if d.divides != "stages")
    if not is_first:
        return [few]
    if parallel.schedule_csv is not None:
        return [few, few]
    filling = min(config.microbatches, parallel.pp)
    if parallel.pp > 1 and parallel.virtual_stages == 1:
        until = Op.WEIGHT_GRAD if parallel.may_split_backward else Op.INPUT_GRAD
        kept = sum(in_flight(parallel, coordinates[pipeline_dimension()], filling, until=until))
        filling = max(kept, min(config.microbatches, 2))
    return [few, filling]


def run_rank(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> RankReport:
    """Build one rank of the job and take its steps. `config`: resolved, with the defaults of its device."""
    counts = microbatch_counts(config, rank)
    config = with_microbatches(config, counts[-1])
    training = config.training
    pipeline_rank = coordinates_of(rank, config.parallel.degrees)[pipeline_dimension()]
    number = rank % (config.parallel.ranks // ranks_of_role("pipeline", config.parallel))  # stages are outermost
    device = CPU if on_cpu else absent_accelerator()
    kernels: ops.Choice = "torch" if on_cpu or training.kernels == "torch" else "triton"
    trail = _Trail()
    with fake_job(config.parallel, rank=rank, device=device, kernels=kernels) as mesh, Meter(device) as meter:
        try:
            step = _take_steps(config, mesh, counts, trail)
        except Exception as error:
            problem = f"{trail}: {in_words(error)}"
            planned = plan_memory(config, outline(config), on_cpu=on_cpu)[pipeline_rank]
            return RankReport(rank=rank, microbatches=counts, planned=planned, problem=problem)
        data_parallel, peak = step.model.data_parallel, meter.peak
        counted = measured_bytes(data_parallel, step.update.optimizer)
    planned = traced_rank(config, outline(config), pipeline_rank, on_cpu=on_cpu, number=number)
    planned_state = dict(planned.state)
    if training.reproducible:  # sums of 8 bytes become gradients of 4 when the step is over
        planned_state["grads"] /= 2
    return RankReport(
        rank=rank,
        microbatches=counts,
        planned=planned,
        planned_state=planned_state,
        parameters=sum(parameter.numel() for parameter in data_parallel.parameters),
        state=counted,
        padding=data_parallel.padding,
        peak=peak,
    )


def _take_steps(config: ResolvedConfig, mesh: Mesh, counts: Sequence[int], trail: _Trail) -> TrainStep:
    trail.enter("in building the model")
    task = make_task(config, mesh)
    task.layers = [trail.followed(layer) for layer in task.layers]
    step = TrainStep(task, config, mesh)
    for count in counts:
        trail.enter("in a train step")
        step.compute_gradients([fake_microbatch(task.batch_type, config, mesh, index) for index in range(count)])
        trail.enter("in the update of the weights")
        step.update_weights()
    return step


# ---- what a rank was doing


class _Trail:
    """What a rank is doing, for the message if it fails."""

    def __init__(self) -> None:
        self._doing = ""

    def __str__(self) -> str:
        return self._doing

    def enter(self, doing: str) -> None:
        self._doing = doing

    def followed(self, spec: LayerSpec) -> LayerSpec:
        """A layer that is on the trail while it is built, in its forward and in its backward."""

        def build() -> nn.Module:
            self.enter(f"in building layer {spec.name!r}")
            layer = spec.build()
            layer.register_forward_pre_hook(forward)
            layer.register_forward_hook(forwarded)
            return layer

        def forward(_: nn.Module, inputs: Any) -> None:
            self.enter(f"in the forward of layer {spec.name!r}")

        def backward(_: Any) -> None:
            self.enter(f"in the backward of layer {spec.name!r}")

        def forwarded(_: nn.Module, inputs: Any, output: Any) -> None:
            self.enter(f"after the forward of layer {spec.name!r}")
            for tensor in tensors_of(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(backward)

        return replace(spec, build=build)
