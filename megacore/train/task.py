"""A task: a model's layers, the inputs of a microbatch, and the loss of the output. The trainer, the pipeline and the
recipe (parallelize.py) ask it for all that depends on the model. GPT's is in gpt_task.py, BERT's in bert_task.py, that
of any list of layers in plain_task.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megacore.data import Batch, Microbatch
from megacore.models.spec import LayerSpec
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter
from megacore.parallel.turns import Turns
from megacore.pipeline.runtime import LossWeight
from megacore.pipeline.stage import TensorSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of parameters and activations by the name of the precision."""


class Task(ABC):
    """A model and its loss.

    A loss is one sum or several, each with a count. Each sum is divided by its count over the global batch, on any
    ranks and in any microbatches. Training minimizes the sum of these means, each times its factor in `loss_factors`.

    Args:
        layers: specs of the whole model.
        streams: the source of the layers' dropout masks.
        loss_names: of the loss's sums, under which their means are reported; none if the loss is one sum, a scalar.
        evaluation_names: the same for evaluations; of those in `loss_names` the first `main_losses` make up the
            reported loss.
    """

    loss_factors: float | Tensor = 1.0  # what training multiplies each sum of the loss by
    main_losses: int | None = None  # how many of the means, from the first, add up to the reported loss; None: all
    turns: Turns | None = None  # which exchanges of experts pause for another computation; None: there are none
    blocks: Blocks = ONE_BLOCK  # where sums over features, heads and positions are cut, for --reproducible
    batch_type: type[Batch] = Microbatch
    # What describes the layers: the configuration, a program for the model of a configuration, or only the caller.
    layers_from: Literal["configuration", "program", "caller"] = "caller"

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        streams: RandomStreams,
        *,
        loss_names: tuple[str, ...] = (),
        evaluation_names: tuple[str, ...] = (),
    ) -> None:
        self.layers, self.streams = list(layers), streams
        self.loss_names, self.evaluation_names = loss_names, evaluation_names
        # `evaluation_shape`: of an evaluation's sums and counts.
        # `loss_shape`: of the loss's sums and counts; () is a scalar.
        self.loss_shape, self.evaluation_shape = (
            (len(names),) if names else () for names in (loss_names, evaluation_names)
        )

    @abstractmethod
    def initialize(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""

    def initialize_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give values, in place and by global name, to what is no parameter of a rank's layers and differs from new
        layers'."""
        return

    def of_rank(self, microbatch: Any) -> Any:
        """A microbatch as this rank computes it, from one with whole sequences: its own positions, where ranks divide
        them. Every other method is given what this returns."""
        return microbatch

    @abstractmethod
    def first_input(self, microbatch: Any) -> Any:
        """The input of the model's first layer: a tensor or a tuple of tensors."""

    @abstractmethod
    def stage_input_specs(self, microbatch: Any, stage: int) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that stage number `stage` receives, which is not the first; equal on every rank."""

    def last_inputs(self, weight: LossWeight | None, microbatch: Any) -> tuple[Tensor, ...]:
        """What the model's last layer gets besides its input, such as what it computes the loss from. `weight`: what
        backward will multiply the loss by; None: there is no backward, or another weight."""
        return ()

    @abstractmethod
    def loss(self, output: Any, microbatch: Any) -> Tensor:
        """The loss summed over the microbatch, or several sums: fp32, of `loss_shape`."""

    @abstractmethod
    def counts(self, microbatch: Any) -> Tensor:
        """The number of terms of each sum of the loss, such as its tokens: fp64, of `loss_shape`."""

    def evaluation_loss(self, output: Any, microbatch: Any) -> Tensor:
        """What evaluations sum up instead of the loss: of `evaluation_shape`."""
        return self.loss(output, microbatch)

    def evaluation_counts(self, microbatch: Any) -> Tensor:
        """The number of terms of each sum of an evaluation: fp64, of `evaluation_shape`."""
        return self.counts(microbatch)

    def flops_per_sequence(self) -> float:
        """FLOPs of one sequence, forward and backward, for the reported speed; 0 if unknown."""
        return 0.0
