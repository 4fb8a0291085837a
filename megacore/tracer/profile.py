"""What a rank holds while a step runs, action by action of its schedule: counted in a step of the real program. One
rank of the job is built on fake tensors (fake_job.py), with few layers of each kind, and takes two steps, the second
with all state in memory. What each layer adds to the rank's memory in each action is noted; from that step_memory.py
puts whole steps together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # as fake tensors do: here it is loaded once, before processes are forked
from torch import Tensor, nn

from megacore import ops
from megacore.config import RampupConfig, ResolvedConfig
from megacore.config.bert import ResolvedBertConfig
from megacore.config.dimensions import ranks_of_role
from megacore.data.loading.batch import Batch
from megacore.models.outline import ModelLayer, outline
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Mesh
from megacore.pipeline.partition import stage_ranges
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.schedule import Action, Op
from megacore.pipeline.stage import tensors_of
from megacore.plan.traffic import recomputed_whole
from megacore.tracer.fake_job import CPU, NoWeights, absent_accelerator, fake_job, in_words
from megacore.tracer.meter import Meter
from megacore.tracer.step_memory import Pass, Passage, StepProfile, alike, left_by, microbatches_that_run
from megacore.train import parallelize
from megacore.train.bert_task import BertTask
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from megacore.train.task import Task
from megacore.zero.memory import measured_bytes


def profile_of(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> StepProfile:
    """A step of one rank, the first of its stage. `config`: a resolved configuration, for any number of ranks. `rank`:
    its number in the pipeline. `on_cpu`: whether the ranks compute in host memory."""
    built = [[layers[number] for number in numbers] for layers, numbers in _stages(config)]
    again = {
        layer.name
        for layers, _ in _stages(config)
        for layer, is_again in zip(layers, recomputed_whole(config, layers), strict=True)
        if is_again
    }
    config = _traceable(config, rank, on_cpu=on_cpu)
    device = CPU if on_cpu else absent_accelerator()
    kernels: ops.Choice = "torch" if on_cpu or config.training.kernels == "torch" else "triton"
    number = rank * (config.parallel.ranks // config.parallel.pp)  # stages are outermost
    with fake_job(config.parallel, rank=number, device=device, kernels=kernels) as mesh, Meter(device) as meter:
        log, task = _Log(meter), make_task(config, mesh)
        by_name = {layer.name: layer for layer in task.layers}
        task.layers = [
            log.followed(by_name[one.name], n, stage) for stage, held in enumerate(built) for n, one in enumerate(held)
        ]
        stages = [range(*ends) for ends in pairwise([0, *accumulate(map(len, built))])]
        with (
            mock.patch.object(parallelize, "stage_ranges", return_value=stages),
            mock.patch.object(parallelize, "recomputed_blocks", partial(_named, names=again)),
        ):
            step = TrainStep(task, config, mesh)
        batch = [fake_microbatch(task.batch_type, config, mesh, index) for index in range(config.microbatches)]
        if config.parallel.schedule_csv is None:
            step.compute_gradients(batch[:1])
        else:  # it is made for a number of microbatches
            step.compute_gradients(batch)
        step.update_weights()
        log.count_state = partial(measured_bytes, step.model.data_parallel, step.update.optimizer, device=device)
        step.model.runtime.observer = log
        step.compute_gradients(batch)
        state = log.count_state()
        meter.restart()
        step.update_weights()
        return StepProfile(
            beside_state=log.begun - sum(log.state.values()),
            lasting_gradients=log.state["grads"] / max(state["grads"], 1),
            updating=meter.peak - sum(state.values()),
            passes=_by_stage(log.passages, config),
            messages=_messages(task, step.model.runtime, batch[0]),
        )


def try_profile(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> StepProfile | str:
    """`profile_of`, or why a rank cannot take a step: not every error can be sent to another process."""
    try:
        return profile_of(config, rank, on_cpu=on_cpu)
    except Exception as error:
        return in_words(error)


def _named(specs: Sequence[LayerSpec], _: ResolvedConfig, *, names: Collection[str]) -> list[int]:
    return [number for number, spec in enumerate(specs) if spec.name in names]


def make_task(config: ResolvedConfig, mesh: Mesh) -> Task:
    """What is trained, without values of weights."""
    if isinstance(config, ResolvedBertConfig):
        return BertTask(config, mesh, weights=NoWeights())
    return GPTTask(config, mesh, weights=NoWeights())


def fake_microbatch(kind: type[Batch], config: ResolvedConfig, mesh: Mesh, index: int) -> Batch:
    """A microbatch whose tensors have no values."""
    b, s = config.training.micro_batch_size, config.data.seq_length

    def tensor(name: str) -> Tensor:
        shape = (b,) if name == "sentence_labels" else (b, s)
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        return torch.zeros(shape, dtype=dtype, device=mesh.device)

    tensors: dict[str, Any] = {f.name: tensor(f.name) for f in fields(kind) if f.name != "index"}
    return kind(index=index, **tensors)


def _traceable(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> ResolvedConfig:
    """The configuration of a step of few microbatches and layers that fake tensors can take."""
    config = with_microbatches(config, microbatches_that_run(config, rank)).with_values({"compile": False})
    if getattr(config.optimizer_settings, "moments_dtype", None) == "int8":  # its scales follow from numbers
        config = replace(config, adamw=replace(config.adamw, moments_dtype="bf16"))
    return config


def with_microbatches(config: ResolvedConfig, count: int) -> ResolvedConfig:
    """The configuration of steps of so many microbatches for each replica."""
    samples = count * config.training.micro_batch_size * ranks_of_role("batch", config.parallel)
    # After the warm-up of a 1-bit optimizer a rank holds more: the second step is one of these.
    config = config.with_values({"global_batch_size": samples, "onebit_freeze_step": 1})
    return replace(config, rampup=RampupConfig())


class _Log:
    """Notes the passages of each action. `meter`: that counts bytes."""

    def __init__(self, meter: Meter) -> None:
        self.passages = list[tuple[Action, list[Passage]]]()  # of each action, in order
        self.count_state: Callable[[], dict[str, int]] = dict  # bytes of the rank's state by kind
        # `state`: by kind, before the first action.
        # `begun`: bytes on the device before the first action.
        self.begun, self.state = 0, dict[str, int]()
        self._meter, self._open = meter, list[Passage]()
        self._layer, self._began, self._on_host = -1, 0, 0
        self._stage: int | None = None  # of the action that runs

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        if not self.passages:
            self.begun, self.state = self._meter.held, self.count_state()
        self._open, self._stage = [], action.stage
        self._begin(-1)
        yield
        self._end()
        self._stage = None
        self.passages.append((action, self._open))

    def followed(self, spec: LayerSpec, number: int, stage: int) -> LayerSpec:
        def enter(*_: Any) -> None:
            # A tied parameter's gradient may be of a layer of another stage.
            if self._stage == stage and self._layer != number:
                self._end()
                self._begin(number)

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors_of(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(enter)

        def build() -> nn.Module:
            layer = spec.build()
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(enter)
            return layer

        return replace(spec, build=build)

    def _begin(self, layer: int) -> None:
        self._layer, self._began, self._on_host = layer, self._meter.restart(), self._meter.on_host

    def _end(self) -> None:
        meter = self._meter
        self._open.append(
            Passage(self._layer, meter.peak - self._began, meter.held - self._began, meter.on_host - self._on_host)
        )


def _by_stage(
    passages: Sequence[tuple[Action, list[Passage]]], config: ResolvedConfig
) -> dict[tuple[Op, int], list[Pass]]:
    found: dict[tuple[Op, int], list[Pass]] = {}
    before = left_by(config, [action for action, _ in passages])
    for (action, of_action), after in zip(passages, before, strict=True):
        found.setdefault((action.op, action.stage // config.parallel.pp), []).append(Pass(after, of_action))
    return found


def _stages(config: ResolvedConfig) -> Iterator[tuple[Sequence[ModelLayer], list[int]]]:
    """The layers of each stage, and the numbers of those that are built."""
    layers = outline(config)
    for numbers in stage_ranges(layers, config):
        held = layers[numbers.start : numbers.stop]
        yield held, alike(config, held)[0]


def _messages(task: Task, runtime: PipelineRuntime, microbatch: Batch) -> dict[tuple[Op, int], int]:
    def size(stage: int, *, gradients: bool) -> int:
        specs = task.stage_input_specs(microbatch, stage)
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in specs if one.has_gradient or not gradients)

    found: dict[tuple[Op, int], int] = {}
    for number, stage in enumerate(runtime.stages):
        if stage > 0:
            found[Op.RECV_INPUT, number] = size(stage, gradients=False)
            found[Op.SEND_GRAD, number] = -size(stage, gradients=True)
        if stage < runtime.last_stage:
            found[Op.SEND_OUTPUT, number] = -size(stage + 1, gradients=False)
            found[Op.RECV_GRAD, number] = size(stage + 1, gradients=True)
    return found
