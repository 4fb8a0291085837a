"""`--dry-run=full`: one train step of every kind of rank of a layout, on fake tensors.

A rank's kind is its pipeline stage, and whether it is the first or the last of the other dimensions: these differ in
padding, in the shards of ZeRO, and in what only the first of a group does. The first rank of every stage takes steps,
so that every layer of the model does; ranks at the other ends are of one kind in all stages that have equal layers and
take the same actions. One rank of each kind is built and takes a step by the code of a run: model, parallelism,
schedule, gradient reduction and optimizer. Wrong shapes, types and devices fail as in the job, and the bytes that a
rank holds are counted beside the planner's formulas. Nothing is computed, sent or allocated.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megacore
from megacore import ops
from megacore.config import RampupConfig, ResolvedConfig
from megacore.config.bert import ResolvedBertConfig
from megacore.config.dimensions import DIMENSIONS, coordinates_of, pipeline_dimension, ranks_of_role
from megacore.data.loading.batch import Batch
from megacore.errors import ConfigError, UserError
from megacore.models.outline import outline
from megacore.models.spec import LayerSpec
from megacore.ops.block_attention import tiles_of
from megacore.parallel.mesh import Mesh
from megacore.pipeline.in_flight import in_flight
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import training_schedule
from megacore.pipeline.stage import tensors_of
from megacore.plan.memory import RankMemory, plan_memory
from megacore.train.bert_task import BertTask
from megacore.train.fake_job import CPU, HOST_READS, NoWeights, absent_accelerator, fake_job
from megacore.train.fake_settings import unfit_settings
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from megacore.train.task import Task
from megacore.zero.memory import measured_bytes

# By how much counted bytes may differ from a formula: of state, besides padding; numbers that are no part of the state
# of a parameter; of the peak, what exists for a moment, as a share and in bytes.
_ROUNDING, _SCALARS, _TRANSIENT, _SMALL = 0.001, 4096, 0.05, 2**20


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's steps.

    Attributes:
        rank: its number in the job.
        microbatches: that it computed, in each step.
        planned: what the planner's formulas say of the last step.
        planned_state: bytes by kind that it holds after it by formula.
        parameters: that it holds, padding included.
        state: bytes that it holds after the last step, by kind; empty where it failed.
        padding: share of the flat buffers that is padding.
        peak: most bytes of tensors on its device at one time.
        problem: why it failed, and where; None: it did not.
        alike: numbers of the ranks of other stages that are of the same kind.
    """

    rank: int
    microbatches: Sequence[int]
    planned: RankMemory
    planned_state: Mapping[str, float]
    parameters: int = 0
    state: Mapping[str, int] = field(default_factory=dict)
    padding: float = 0.0
    peak: int = 0
    problem: str | None = None
    alike: Sequence[int] = ()

    @property
    def is_filled(self) -> bool:
        """Whether the rank had as many microbatches in flight as in the job, so that its peak counts."""
        return len(self.microbatches) > 1

    @property
    def result(self) -> str:
        """One word."""
        return "fails" if self.problem is not None else "differs" if self.differences else "OK"

    @property
    def differences(self) -> list[str]:
        """Where what was counted is not what the formulas say."""
        if self.problem is not None:
            return []
        lines = []
        if self.parameters != self.planned.parameters:
            lines.append(f"{self.parameters:,} parameters, {self.planned.parameters:,} by formula")
        for kind, held in self.state.items():
            formula = self.planned_state[kind]
            if abs(held - formula) > (_ROUNDING + self.padding) * formula + _SCALARS:
                lines.append(f"{held:,} bytes of {kind}, {formula:,.0f} by formula")
        least, most = self.planned.certain - self.planned.overhead[0], self.planned.expected_tensors
        if self.is_filled and not (1 - _TRANSIENT) * least <= self.peak <= (1 + _TRANSIENT) * most + _SMALL:
            lines.append(f"peak of {self.peak:,} bytes, {least:,.0f} to {most:,.0f} by formula")
        return lines


def run_ranks(config: ResolvedConfig, *, on_cpu: bool, workers: int) -> Iterator[RankReport]:
    """Steps of one rank of each kind, by rank.

    Args:
        config: resolved, for any number of ranks.
        on_cpu: whether the job computes on CPUs; otherwise on accelerators, with Triton's kernels unless `--kernels`
            says otherwise.
        workers: processes that share the ranks; 1: this one.

    Raises:
        ConfigError: a setting cannot run on fake tensors.
    """
    if problems := list(unfit_settings(config)):
        raise ConfigError(problems)
    return _reports(config.for_device(on_cpu=on_cpu), on_cpu=on_cpu, workers=workers)


def _reports(config: ResolvedConfig, *, on_cpu: bool, workers: int) -> Iterator[RankReport]:
    kinds = rank_kinds(config)
    run, firsts = partial(run_rank, config, on_cpu=on_cpu), [kind[0] for kind in kinds]
    with ExitStack() as stack:
        reports: Iterator[RankReport]
        if workers == 1:
            reports = map(run, firsts)
        else:
            pool = ProcessPoolExecutor(min(workers, len(kinds)), mp_context=get_context("fork"))
            reports = stack.enter_context(pool).map(run, firsts)
        for report, kind in zip(reports, kinds, strict=True):
            yield replace(report, alike=kind[1:])


def rank_kinds(config: ResolvedConfig) -> list[list[int]]:
    """The first and last ranks along each dimension of every stage, by kind; both in ascending order.

    Ranks of different stages are of one kind if they are not the first of their stage, hold layers of the same sizes
    and take the same actions on the microbatches of their step.

    Args:
        config: resolved, for any number of ranks.
    """
    parallel, layers = config.parallel, outline(config)
    stages, degrees, pipeline = stage_ranges(layers, config), parallel.degrees, pipeline_dimension()
    schedule = training_schedule(parallel, _few(config))

    def work(stage: int) -> Hashable:
        actions = tuple(
            (is_transfer, tuple((a.op, a.microbatch, a.stage // parallel.pp) for a in batch))
            for is_transfer, batch in schedule.batches(stage)
        )
        held = [[layers[i] for i in numbers] for numbers in stages[stage :: parallel.pp]]
        return actions, tuple(tuple((layer.held, layer.shared, id(layer.block)) for layer in chunk) for chunk in held)

    works = [work(stage) for stage in range(parallel.pp)]
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


def _counts(config: ResolvedConfig, rank: int) -> list[int]:
    """How many microbatches a rank computes in each of its steps.

    The first rank of a stage takes a second step, with the optimizer's state in memory and as many microbatches as it
    keeps in flight, until the gradients of weights where the schedule splits backward. The others differ from it in
    shards and padding only.
    """
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
    """Build one rank of the job and take its steps.

    Args:
        config: resolved, with the defaults of its device.
        rank: which one.
        on_cpu: whether the job computes on CPUs.
    """
    counts = _counts(config, rank)
    training = config.training
    samples = counts[-1] * training.micro_batch_size * ranks_of_role("batch", config.parallel)
    config = replace(config, training=replace(training, global_batch_size=samples), rampup=RampupConfig())
    # After the warm-up of a 1-bit optimizer a rank holds more: its second step is one of these.
    config = replace(config, onebitadam=replace(config.onebitadam, onebit_freeze_step=1))
    pipeline_rank = coordinates_of(rank, config.parallel.degrees)[pipeline_dimension()]
    formula = (
        replace(config, model=replace(config.model, attention_dropout=0.0)) if on_cpu else config
    )  # see fake_job.py
    number = rank % (config.parallel.ranks // ranks_of_role("pipeline", config.parallel))  # stages are outermost
    planned = plan_memory(formula, outline(formula), on_cpu=on_cpu, number=number)[pipeline_rank]
    state = dict(planned.state)
    if training.reproducible:  # sums of 8 bytes become gradients of 4 when the step is over
        state["grads"] /= 2
    report = partial(RankReport, rank=rank, microbatches=counts, planned=planned, planned_state=state)
    device = CPU if on_cpu else absent_accelerator()
    kernels: ops.Choice = "torch" if on_cpu or training.kernels == "torch" else "triton"
    trail = _Trail()
    with fake_job(config.parallel, rank=rank, device=device, kernels=kernels) as mesh, Meter(device) as meter:
        try:
            step = _take_steps(config, mesh, counts, trail)
            data_parallel = step.model.data_parallel
            return report(
                parameters=sum(parameter.numel() for parameter in data_parallel.parameters),
                state=measured_bytes(data_parallel, step.update.optimizer),
                padding=data_parallel.padding,
                peak=meter.peak,
            )
        except Exception as error:
            return report(problem=f"{trail}: {_in_words(error)}")


def _take_steps(config: ResolvedConfig, mesh: Mesh, counts: Sequence[int], trail: _Trail) -> TrainStep:
    trail.enter("in building the model")
    task: Task
    if isinstance(config, ResolvedBertConfig):
        task = BertTask(config, mesh, weights=NoWeights())
    else:
        task = GPTTask(config, mesh, weights=NoWeights())
    task.layers = [trail.followed(layer) for layer in task.layers]
    step = TrainStep(task, config, mesh)
    for count in counts:
        trail.enter("in a train step")
        step.compute_gradients([_microbatch(task.batch_type, config, mesh, index) for index in range(count)])
        trail.enter("in the update of the weights")
        step.update_weights()
    return step


def _microbatch(kind: type[Batch], config: ResolvedConfig, mesh: Mesh, index: int) -> Batch:
    """A microbatch whose tensors have no values."""
    b, s = config.training.micro_batch_size, config.data.seq_length

    def tensor(name: str) -> Tensor:
        shape = (b,) if name == "sentence_labels" else (b, s)
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        return torch.zeros(shape, dtype=dtype, device=mesh.device)

    tensors: dict[str, Any] = {f.name: tensor(f.name) for f in fields(kind) if f.name != "index"}
    return kind(index=index, **tensors)


# ---- what a rank was doing


class _Trail:
    """What a rank is doing, for the message if it fails."""

    def __init__(self) -> None:
        self._doing = ""

    def __str__(self) -> str:
        return self._doing

    def enter(self, doing: str) -> None:
        """This is done from now on."""
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


def _in_words(error: Exception) -> str:
    """What went wrong, and where in megacore."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, UserError):
        return text
    package = str(Path(megacore.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
    here = __file__
    where = [f"{Path(f.filename).relative_to(package)}:{f.lineno}" for f in frames if f.filename != here]
    return f"{type(error).__name__}: {text}" + (f" (megacore/{where[-1]})" if where else "")


# ---- what it holds


_DEVICE_OF = torch.ops.prim.device.default


def _kind_of(operand: Any) -> Hashable:
    """What decides the sizes that an operator makes of this operand."""
    return (operand.shape, operand.stride(), operand.dtype) if isinstance(operand, Tensor) else operand


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors on a device that exist at one time; each storage once.

    The host reads the values of fake tensors as `HOST_READS` says.

    Args:
        device: whose tensors count.

    Attributes:
        peak: most bytes so far.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.peak = 0
        self._kind, self._held, self._total = device.type, dict[int, int](), 0
        self._within: dict[Hashable, int] = {}
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", self._resize_and_count())

    def __enter__(self) -> Meter:
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:  # of most calls; the mode below takes longer to say the same
            return args[0].fake_device
        name = func._schema.name.split("::")[1]
        if name in HOST_READS:
            return HOST_READS[name]
        if (tiles := tiles_of(func, args)) is not None:
            self._count_within(tiles, (func, *map(_kind_of, args)), args)
        out = func(*args, **(kwargs or {}))
        for value in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, FakeTensor) and value.fake_device.type == self._kind:
                self._count(value.untyped_storage())
        return out

    def _count_within(self, code: Callable[..., Any], alike: Hashable, args: Any) -> None:
        """Count what exists while `code` runs; of calls that are alike the first runs it."""
        if alike not in self._within:
            before, most = self._total, self.peak
            self.peak = before
            super().__enter__()
            try:
                code(*args)
            finally:
                super().__exit__(None, None, None)
            self._within[alike], self.peak = self.peak - before, most
        self.peak = max(self.peak, self._total + self._within[alike])

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._held:
            weakref.finalize(storage, self._set, key, None)
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        """A storage has this size from now on; None: it is freed."""
        self._total += (size or 0) - (self._held.pop(key, 0))
        if size is not None:
            self._held[key] = size
        self.peak = max(self.peak, self._total)

    def _resize_and_count(self) -> Callable[..., Any]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._held:
                self._set(storage._cdata, size)
            return result

        return resized
