"""What is trained: a model's layers, how a microbatch enters them, and the loss that comes out.

A task is everything that the trainer, the pipeline and the recipe (parallelize.py) do not know about a model. GPT's is
in gpt_task.py, BERT's in bert_task.py, that of any list of layers in plain_task.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.data.loading.batch import Batch
from megacore.data.loading.loader import Microbatch
from megacore.models.spec import LayerSpec
from megacore.optim.precision import DTYPES
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter
from megacore.pipeline.transport import TensorSpec


class Task(ABC):
    """What is trained.

    A loss is one sum, or several, each with a count of its own. A sum is divided by its count over the whole global
    batch, on whatever ranks and in whatever microbatches it is computed. What is trained is the sum of these means.

    Args:
        layers: the whole model, described.
        streams: where the layers' dropout masks come from.

    Attributes:
        batch_type: what a microbatch is.
        loss_names: of the loss's sums, under which their means are reported; none where there is one sum, a scalar.
        evaluation_names: the same for evaluations; those that are in `loss_names` make up the reported loss.
    """

    batch_type: type[Batch] = Microbatch

    def __init__(self, layers: Sequence[LayerSpec], streams: RandomStreams) -> None:
        self.layers, self.streams = list(layers), streams
        self.loss_names: tuple[str, ...] = ()
        self.evaluation_names: tuple[str, ...] = ()

    @abstractmethod
    def initialize(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""

    @abstractmethod
    def first_input(self, microbatch: Any) -> Any:
        """The input of the model's first layer: a tensor or a tuple of tensors."""

    @abstractmethod
    def stage_input_specs(self, microbatch: Any, stage: int) -> tuple[TensorSpec, ...]:
        """What pipeline stage number `stage`, which is not the first, receives; the same on every rank."""

    def last_inputs(self, microbatch: Any) -> tuple[Tensor, ...]:
        """What the model's last layer gets beside the output of the layer before it: the labels, where it computes the
        loss with its output."""
        return ()

    @abstractmethod
    def loss(self, output: Any, microbatch: Any) -> Tensor:
        """The loss summed over the microbatch, or several sums: fp32, of `loss_shape`.

        Args:
            output: of the last layer.
            microbatch: that it was computed from.
        """

    @abstractmethod
    def counts(self, microbatch: Any) -> Tensor:
        """How many of what each sum of the loss is over: fp64, of `loss_shape`."""

    def evaluation_loss(self, output: Any, microbatch: Any) -> Tensor:
        """What evaluations sum up instead of the loss: of `evaluation_shape`."""
        return self.loss(output, microbatch)

    def evaluation_counts(self, microbatch: Any) -> Tensor:
        """How many of what each sum of an evaluation is over: fp64, of `evaluation_shape`."""
        return self.counts(microbatch)

    def flops_per_sequence(self) -> float:
        """Operations of one sequence, forward and backward, by which speed is reported; 0 where they are not known."""
        return 0.0

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """Of the loss's sums and counts."""
        return _shape(self.loss_names)

    @property
    def evaluation_shape(self) -> tuple[int, ...]:
        """Of an evaluation's sums and counts."""
        return _shape(self.evaluation_names)


def hidden_states_spec(config: ResolvedConfig, group: Group) -> TensorSpec:
    """What a transformer block of the configured shape takes and gives: [b, s, h], or [b, s/t, h] where the ranks of
    the layer group split the sequence."""
    positions = config.data.seq_length // (group.size if config.parallel.sequence_parallel else 1)
    shape = (config.training.micro_batch_size, positions, config.model.hidden_size)
    return TensorSpec(shape, DTYPES[config.precision.precision])


def document_numbers_spec(config: ResolvedConfig) -> TensorSpec:
    """The document numbers of a microbatch's positions, which travel beside the hidden states: [b, s]."""
    return TensorSpec((config.training.micro_batch_size, config.data.seq_length), torch.int64)


def _shape(names: Sequence[str]) -> tuple[int, ...]:
    return (len(names),) if names else ()
