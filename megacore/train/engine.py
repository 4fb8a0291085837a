"""Train any model in a pipeline: a list of layers in, the loss of a step out.

    layers = [Layer("stem", nn.Conv2d, 3, 16, 3), ..., Layer("head", nn.Linear, 64, 10)]
    engine = PipelineEngine(layers, loss=F.cross_entropy, parallel=ParallelConfig(pp=2, dp=2), train_iters=100)
    loss = engine.train_batch(engine.split(images, labels))

The engine is what `Trainer` is for GPT, without its files and its data: the same recipe (parallelize.py), runtime and
update. In the spirit of DeepSpeed's PipelineModule; docs/any-model.md is its manual.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from megacore.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ResolvedConfig,
    TrainingConfig,
    validate,
)
from megacore.errors import ConfigError, UserError
from megacore.models.plain import Layer, describe_layers
from megacore.optim.lr_schedules import learning_rate
from megacore.optim.update import WeightUpdate
from megacore.parallel.collectives import all_gather_objects, all_reduce_, start_all_reduce_
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly, leave, world_size
from megacore.parallel.random import RandomStreams
from megacore.pipeline.schedule_file import check_schedule
from megacore.pipeline.shapes import StageForms
from megacore.train.batches import Pair, PlainMicrobatch, cut, moved, samples_of
from megacore.train.memory_check import check_memory_of_ranks
from megacore.train.parallelize import Task, parallelize

__all__ = ["Layer", "PipelineEngine"]


class PipelineEngine:
    """Trains a model, given as a list of layers, on this rank's place of the mesh.

    Args:
        layers: the whole model, the same on every rank; a rank builds its own layers only.
        loss: (output of the last layer, targets) -> a scalar tensor.
        reduction: whether `loss` returns the mean or the sum of what `count` counts.
        count: targets -> how many terms the loss of a microbatch has (samples, or tokens that are not masked), a number
            or a scalar tensor, by which microbatches are weighed; None: the samples, which is the first dimension of
            the inputs.
        train_iters: steps of the run, over which the learning rate decays.
        num_microbatches: of one step, on each data-parallel replica.
        parallel: pp, dp, schedule, ZeRO stage and so on; tp is 1, and pipeline_layout is GPT's.
        optimizer: with its learning-rate schedule and the clipping of gradients.
        seed: of initial weights and dropout.
        reproducible: makes losses and weights bitwise the same for every pp, dp, ZeRO stage and schedule.
        mesh: this rank's place; None: it is found.
        memory_check: refuse, before any layer is built, a model whose state needs more memory than there is.

    Attributes:
        step: steps taken.
        rate: learning rate of the last step.
        norm: global gradient norm of the last step before clipping, an fp64 scalar.
        stages: numbers of the layers of every pipeline stage.

    Raises:
        ConfigError: everything that is wrong with the layers' names and ties, or with the configuration; or the state
            does not fit into memory.
        ScheduleError: a schedule from a file does not fit.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        loss: Callable[[Any, Any], Tensor],
        train_iters: int,
        reduction: Literal["mean", "sum"] = "mean",
        count: Callable[[Any], Tensor | float] | None = None,
        num_microbatches: int = 1,
        parallel: ParallelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        seed: int = 1234,
        reproducible: bool = False,
        mesh: Mesh | None = None,
        memory_check: bool = True,
    ) -> None:
        training = TrainingConfig(
            memory_check=memory_check,
            train_iters=train_iters,
            seed=seed,
            reproducible=reproducible,
            global_batch_size=num_microbatches * _replicas(parallel or ParallelConfig()),
        )
        self.config = _checked_config(
            len(layers), parallel or ParallelConfig(), optimizer or OptimizerConfig(), training
        )
        check_schedule(self.config)
        if reproducible:
            compute_reproducibly()
        self.mesh = mesh or build_mesh(self.config.parallel)
        self.num_microbatches, self.layers = num_microbatches, list(layers)
        self._loss, self._mean, self._count = loss, reduction == "mean", count
        self._metric: Callable[[Any, Any], Tensor] | None = None
        streams = RandomStreams(seed, self.mesh.device)
        described = describe_layers(layers, seed=seed, device=self.mesh.device, streams=streams)
        check_memory_of_ranks(self.config, self.mesh, described)
        self.model = parallelize(
            Task(
                layers=described,
                first_input=lambda microbatch: microbatch.inputs,
                loss=self._summed_loss,
                eval_loss=self._summed_metric,
                streams=streams,
                initialize=lambda _: None,  # layers come with their values
                forms=lambda microbatch: self._forms.of(microbatch.inputs),
            ),
            self.config,
            self.mesh,
        )
        self.stages = self.model.stages
        self._names = [
            [layers[i].name for i in own] for own in self.stages[self.mesh.pipeline.rank :: self.mesh.pipeline.size]
        ]
        self._forms = StageForms(self.model.chunks, self._names, self.model.runtime.transport)
        self.update = WeightUpdate(
            self.model.data_parallel,
            self.mesh,
            self.config,
            shared=self.model.shared,
        )
        self.step, self.rate = 0, 0.0
        self.norm = torch.zeros((), dtype=torch.float64)

    # ---- steps

    def train_batch(self, microbatches: Sequence[Pair]) -> Tensor:
        """One update of the weights.

        Args:
            microbatches: (inputs, targets) of each, this replica's share of the batch, the same on every rank of the
                pipeline. Inputs are a tensor or a tuple of tensors; targets whatever the loss takes. Sizes may differ.

        Returns:
            The mean loss over the batch of all replicas, an fp64 scalar that is equal on every rank.

        Raises:
            UserError: the number of microbatches is not the one that was announced, or a layer cannot take them.
            TrainingStopped: losses or gradients of many steps in a row were not finite.
        """
        if len(microbatches) != self.num_microbatches:
            raise UserError(
                f"train_batch got {len(microbatches)} microbatches, but num_microbatches is {self.num_microbatches}: "
                "give that many, or announce another number"
            )
        batch = self._prepare(microbatches)
        total = torch.stack([microbatch.count for microbatch in batch]).sum()
        counted = start_all_reduce_(total, self.mesh.loss)

        def per_count() -> Tensor:
            counted.wait()
            return torch.where(total > 0, 1.0 / total, 0.0)

        data_parallel, scaler = self.model.data_parallel, self.update.scaler
        data_parallel.begin_step(scaler.scale)
        summed = self.model.runtime.train_step(batch, lambda: (per_count() * scaler.scale).float(), data_parallel)
        self.step += 1
        self.rate = learning_rate(self.step, self.config.optimizer, train_iters=self.config.training.train_iters)
        outcome = self.update.apply(summed, self.rate)
        if outcome.skipped is not None and self.mesh.world.rank == 0:
            warnings.warn(f"step {self.step} is skipped: {outcome.skipped}", stacklevel=2)
        self.norm = outcome.norm
        return outcome.loss * per_count()

    def evaluate(self, microbatches: Sequence[Pair], metric: Callable[[Any, Any], Tensor] | None = None) -> float:
        """The mean loss, or another mean, over the microbatches of all replicas; in evaluation mode.

        Args:
            microbatches: as for `train_batch`, but of any number above 0.
            metric: (output of the last layer, targets) -> sum over the microbatch, to be divided by what `count`
                counts (the number of right answers, for the accuracy); None: the loss.

        Raises:
            UserError: there are none; or, on ZeRO stage 3, replicas have different numbers of them.
        """
        numbers = all_gather_objects(len(microbatches), self.mesh.batch)
        if min(numbers) == 0 or (len(set(numbers)) > 1 and self.config.parallel.zero_stage == 3):
            raise UserError(
                f"evaluate got {numbers} microbatches on the replicas: every one needs one or more, "
                "and with zero_stage 3 all the same number"
            )
        batch = self._prepare(microbatches)
        self._metric = metric
        sums = torch.stack([torch.zeros((), dtype=torch.float64, device=self.mesh.device)] * 2)  # value, count
        sums[0] += self.model.runtime.evaluate(batch)
        if self.mesh.pipeline.is_last:
            sums[1] += sum(microbatch.count for microbatch in batch)
        all_reduce_(all_reduce_(sums, self.mesh.loss), self.mesh.pipeline)
        return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0

    def split(self, inputs: Any, targets: Any) -> list[Pair]:
        """This replica's microbatches of a batch that every rank has whole.

        The batch is cut into num_microbatches x dp pieces, as even as its samples allow, which the replicas take in
        turn.

        Args:
            inputs: a tensor, or a tuple of tensors, with samples along the first dimension.
            targets: likewise.

        Raises:
            UserError: the batch has fewer samples than there are microbatches.
        """
        pieces, samples = self.num_microbatches * self.mesh.batch.size, samples_of(inputs)
        if samples < pieces:
            raise UserError(
                f"{samples} samples are too few for {self.num_microbatches} microbatches on each of "
                f"{self.mesh.batch.size} replicas: give {pieces} or more"
            )
        own = slice(self.mesh.batch.rank, None, self.mesh.batch.size)
        return list(zip(cut(inputs, pieces)[own], cut(targets, pieces)[own], strict=True))

    def close(self) -> None:
        """Wait for all ranks and leave the job; the last thing to do."""
        leave(self.mesh)

    # ---- weights

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight and buffer of the model by global name, whole and on the CPU; all ranks call this together.

        A tied parameter is there once, under the name of its first use. Buffers are those of this rank's replica.
        """
        own = {name: buffer.cpu() for name, buffer in self._buffers().items()}
        for bucket in self.model.data_parallel.buckets:
            own |= {name: tensor.cpu() for name, tensor in bucket.gather(bucket.master).items()}
        parts = all_gather_objects(own, self.mesh.pipeline)
        return {name: tensor.clone() for part in parts for name, tensor in part.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights and buffers from what `state_dict` returned, on any layout.

        Raises:
            UserError: a tensor is missing, or has another shape.
        """
        buffers = self._buffers()
        for name, own in {**self.model.parameters, **buffers}.items():
            if name not in state or state[name].shape != own.shape:
                found = list(state[name].shape) if name in state else "missing"
                raise UserError(f"state of {name!r} is {found}, but the model has shape {list(own.shape)}")
        self.model.data_parallel.load_masters(state)
        self.model.data_parallel.ready()
        for name, buffer in buffers.items():
            buffer.copy_(state[name])

    def _buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers by global name."""
        found: dict[str, Tensor] = {}
        for chunk, names in zip(self.model.chunks, self._names, strict=True):
            for layer, name in zip(chunk.layers, names, strict=True):
                kept = layer.state_dict().keys()
                found |= {f"{name}.{local}": buffer for local, buffer in layer.named_buffers() if local in kept}
        return found

    # ---- microbatches

    def _prepare(self, microbatches: Sequence[Pair]) -> list[PlainMicrobatch]:
        """Move to the device what this rank needs there, and learn what stages will hand to each other."""
        device, pipeline, readers = self.mesh.device, self.mesh.pipeline, self.mesh.batch
        batch = []
        for position, (inputs, targets) in enumerate(microbatches):
            number = samples_of(inputs) if self._count is None else self._count(targets)
            batch.append(
                PlainMicrobatch(
                    index=(self.step * self.num_microbatches + position) * readers.size + readers.rank,
                    inputs=moved(inputs, device) if pipeline.is_first else inputs,
                    targets=moved(targets, device) if pipeline.is_last else targets,
                    count=number.to(device, torch.float64, non_blocking=True)
                    if isinstance(number, Tensor)
                    else torch.full((), number, dtype=torch.float64, device=device),
                )
            )
        self._learn_forms([microbatch.inputs for microbatch in batch])
        return batch

    def _learn_forms(self, inputs: Sequence[Any]) -> None:
        """Try inputs of forms that are new. On ZeRO stage 3 a replica whose are not tries along, as weights are
        gathered from all replicas: these must ask each other first, and so wait for the accelerator."""
        new = self._forms.unknown(inputs)
        tries = len(new)
        if self.config.parallel.zero_stage == 3 and self.mesh.replicas.size > 1:
            asked = torch.full((), tries, dtype=torch.int64, device=self.mesh.device)
            tries = int(all_reduce_(asked, self.mesh.replicas, "max"))
        for number in range(tries):
            self._forms.find(new[number] if number < len(new) else inputs[0])

    def _summed_loss(self, output: Any, microbatch: PlainMicrobatch) -> Tensor:
        value = self._loss(output, microbatch.targets)
        if not isinstance(value, Tensor) or value.dim():
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"the loss returns {what}: it must return a scalar tensor, a mean or a sum")
        return value * microbatch.count.to(value.dtype) if self._mean else value

    def _summed_metric(self, output: Any, microbatch: PlainMicrobatch) -> Tensor:
        if self._metric is None:
            return self._summed_loss(output, microbatch)
        return torch.as_tensor(self._metric(output, microbatch.targets), device=self.mesh.device)


def _replicas(parallel: ParallelConfig) -> int:
    return parallel.dp or max(1, world_size() // (parallel.tp * parallel.pp))


def _checked_config(
    layers: int, parallel: ParallelConfig, optimizer: OptimizerConfig, training: TrainingConfig
) -> ResolvedConfig:
    """The configuration of the run, resolved; its model and data sections mean nothing here.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    problems, stages = [], parallel.pp * parallel.virtual_stages
    if parallel.tp > 1:
        problems.append(f"tp {parallel.tp}: the layers of a plain model are not split; use tp 1")
    if parallel.pipeline_layout is not None:
        problems.append(f"pipeline_layout {parallel.pipeline_layout} is GPT's: leave it out")
    if parallel.pipeline_balance == "flops":
        problems.append("pipeline_balance flops: those of a plain layer are not known; use parameters or uniform")
    if stages > max(layers, 1):
        problems.append(
            f"pp {parallel.pp} x virtual_stages {parallel.virtual_stages} = {stages} stages, but the model has "
            f"{layers} layers: use {layers} stages or less, or cut the model into more layers"
        )
    elif not problems:
        model = ModelConfig(num_layers=max(layers, 1), vocab_size=1)
        config = Config(
            model=model, data=DataConfig(mock_data=True), parallel=parallel, optimizer=optimizer, training=training
        )
        problems += validate(config, world_size())
    if problems:
        raise ConfigError(problems)
    return config.resolve(world_size())
