"""The engine's task: any list of layers, and a loss function of its output and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.errors import UserError
from megacore.models.spec import LayerSpec
from megacore.parallel.context import SequenceShards
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter
from megacore.pipeline.shapes import StageShapes
from megacore.pipeline.stage import TensorSpec
from megacore.train.task import Task

Pair = tuple[Any, Any]  # inputs and targets of a microbatch
LossFunction = Callable[[Any, Any], Tensor]  # (output of the last layer, targets) -> a scalar
Divide = Callable[[SequenceShards, Any, Any], Pair]  # (shards, inputs, targets) -> those of this rank's positions


@dataclass(frozen=True, kw_only=True)
class PlainMicrobatch:
    """A microbatch, for the runtime."""

    index: int  # global number in the run, the same for every layout
    inputs: Any  # of the model's first layer
    targets: Any  # for the loss
    count: Tensor  # terms of its loss, an fp64 scalar


class PlainTask(Task):
    """Any model and any loss. `is_mean`: whether the loss is the mean of what is counted, and not the sum. `dtype`: of
    parameters and activations: inputs are converted to it, and outputs to fp32 before the loss."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        streams: RandomStreams,
        *,
        loss: LossFunction,
        is_mean: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layers, streams)
        # Of what stages exchange, learned from trials; there once the model is built.
        self.shapes: StageShapes | None = None
        self.metric: LossFunction | None = None  # what an evaluation sums up; None: the loss
        self._loss, self._is_mean, self._dtype = loss, is_mean, dtype

    def initialize(self, parameters: Iterable[ShardedParameter]) -> None:
        """Nothing: the layers come with their values."""

    def first_input(self, microbatch: PlainMicrobatch) -> Any:
        return self.in_training_format(microbatch.inputs)

    def in_training_format(self, inputs: Any) -> Any:
        return _converted(inputs, torch.float32, self._dtype)

    def stage_input_specs(self, microbatch: PlainMicrobatch, stage: int) -> tuple[TensorSpec, ...]:
        assert self.shapes is not None
        return self.shapes.of(microbatch.inputs, stage)

    def loss(self, output: Any, microbatch: PlainMicrobatch) -> Tensor:
        """The summed loss, a scalar. Raises UserError where the loss function returns anything else."""
        output = _converted(output, self._dtype, torch.float32)
        counts = microbatch.count > 0
        if self._is_mean:
            _drop_gradients_unless(counts, output)
        value = self._loss(output, microbatch.targets)
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"the loss returns {what}: it must return a scalar tensor, a mean or a sum")
        return torch.where(counts, value, 0.0) * microbatch.count.to(value.dtype) if self._is_mean else value

    def counts(self, microbatch: PlainMicrobatch) -> Tensor:
        return microbatch.count

    def evaluation_loss(self, output: Any, microbatch: PlainMicrobatch) -> Tensor:
        if self.metric is None:
            return self.loss(output, microbatch)
        value = self.metric(_converted(output, self._dtype, torch.float32), microbatch.targets)
        return torch.as_tensor(value, device=microbatch.count.device)


def _drop_gradients_unless(counts: Tensor, output: Any) -> None:
    """Sets the gradients of a model's output to 0 where nothing of a microbatch counts: a mean over nothing is NaN."""
    if isinstance(output, tuple):
        for part in output:
            _drop_gradients_unless(counts, part)
    elif isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda grad: torch.where(counts, grad, 0.0))


def samples_of(inputs: Any) -> int:
    """The first dimension of a tensor, or of the first of a tuple."""
    return int((inputs if isinstance(inputs, Tensor) else inputs[0]).shape[0])


def cut(value: Any, pieces: int) -> list[Any]:
    """A tensor, or each of a tuple, cut along the first dimension as evenly as possible."""
    if isinstance(value, Tensor):
        return list(value.tensor_split(pieces))
    return list(zip(*(cut(part, pieces) for part in value), strict=True))


def divide_positions(shards: SequenceShards, inputs: Any, targets: Any) -> Pair:
    """This rank's positions of inputs and targets: of every tensor of two dimensions or more, along the second. Raises
    UserError where the ranks cannot divide that dimension."""
    return _positions(inputs, shards), _positions(targets, shards)


def _positions(value: Any, shards: SequenceShards) -> Any:
    if isinstance(value, tuple):
        return tuple(_positions(part, shards) for part in value)
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    ranks = shards.group.size
    if value.shape[1] % (2 * ranks):
        raise UserError(
            f"cp {ranks} cannot divide a tensor of shape {list(value.shape)} along dimension 1, which must be a "
            f"multiple of {2 * ranks}: pad it, or give the engine a function `divide`"
        )
    return shards.take(value, 1)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or each of a tuple, on the device; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _converted(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """A tensor, or each of a tuple, in format `target` where it is in format `source`."""
    if isinstance(value, tuple):
        return tuple(_converted(part, source, target) for part in value)
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value
