"""Train any model in a pipeline: a list of layers in, the loss of a step out.

    layers = [Layer("stem", nn.Conv2d, 3, 16, 3), ..., Layer("head", nn.Linear, 64, 10)]
    engine = PipelineEngine(layers, loss=F.cross_entropy, parallel=ParallelConfig(pp=2, dp=2), train_iters=100)
    loss = engine.train_batch(engine.split(images, labels))

The engine is what `Trainer` is for GPT, without its loop, its data and its log: the train step (step.py) is the same.
In the spirit of DeepSpeed's PipelineModule; docs/guides/any-model.md is its manual.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.checkpoint import CheckpointSaver
from megacore.errors import UserError
from megacore.models.plain import (
    BuiltLayer,
    Layer,
    as_layers,
    describe_call,
    describe_layers,
    take_values_of_first_rank,
)
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.context import SequenceShards
from megacore.parallel.heartbeat import Current, Phase, phase, section
from megacore.parallel.mesh import build_mesh, compute_reproducibly, has_fast_bf16, leave, world_size
from megacore.parallel.random import RandomStreams
from megacore.parallel.recompute import Recomputed
from megacore.parallel.sharding import ShardSpec
from megacore.pipeline.schedule_file import check_schedule
from megacore.pipeline.shapes import StageShapes
from megacore.remote import Location, location
from megacore.train.callbacks import Callback, Callbacks
from megacore.train.engine_settings import EngineSettings
from megacore.train.memory_check import check_memory_of_ranks
from megacore.train.observers import observers
from megacore.train.plain_task import (
    LossFunction,
    Pair,
    PlainMicrobatch,
    PlainTask,
    cut,
    moved,
    samples_of,
)
from megacore.train.same_run import refuse_different_ranks
from megacore.train.step import StepResult, TrainStep
from megacore.train.task import DTYPES
from megacore.train.watchdog import watchdog

__all__ = ["Layer", "PipelineEngine"]


class PipelineEngine:
    """Trains a model, given as a list of layers, on this rank of the mesh.

    Args:
        layers: the whole model, the same on every rank; a rank builds only the layers of its stages. Of an
            nn.Sequential, or a list of modules, copies are trained, from the values that the modules have on rank
            0.
        settings: see `EngineSettings`.

    Raises:
        ConfigError: everything that is wrong with the layers' names and ties, or with the configuration; or the
            ranks were given different ones; or the state does not fit into memory.
        ScheduleError: a schedule from a file does not fit.
    """

    def __init__(self, layers: nn.Module | Sequence[Layer | nn.Module], **settings: Any) -> None:
        self.layers, given = as_layers(layers), EngineSettings.of(settings)
        self.config = given.resolved(self.layers)
        check_schedule(self.config)
        if given.reproducible:
            compute_reproducibly()
        if world_size() > 1:
            watchdog().begin(self.config, leaves_if_hung=False)
            watchdog().rest_in(Phase.OUTSIDE)
        self.num_microbatches, self._count = given.num_microbatches, given.count
        with phase(Phase.BUILD):
            self.mesh = given.mesh or build_mesh(self.config.parallel)
            for layer in self.layers:
                if isinstance(layer, BuiltLayer):
                    take_values_of_first_rank(layer.module, self.mesh)
            chosen = self.config.precision.for_device(bf16=has_fast_bf16(self.mesh.device))
            self.config = dataclasses.replace(self.config, precision=chosen)
            streams, dtype = RandomStreams(given.seed, self.mesh.device), DTYPES[self.config.precision.precision]
            # `sequence`: which positions of each sequence this rank holds.
            self.sequence, self._divide = SequenceShards(self.mesh.sequence), given.divide
            described = describe_layers(
                self.layers,
                seed=given.seed,
                device=self.mesh.device,
                streams=streams,
                dtype=dtype,
                shard=self.mesh.sequence.rank,
            )
            further = {f"module of layer {layer.name!r}": layer.description for layer in self.layers}
            further |= {
                "loss": describe_call(given.loss),
                "reduction": given.reduction,
                "count": describe_call(given.count),
            }
            refuse_different_ranks(self.config, self.mesh.world, described, further)
            check_memory_of_ranks(self.config, self.mesh, described)
            self.task = PlainTask(described, streams, loss=given.loss, is_mean=given.reduction == "mean", dtype=dtype)
            self.train_steps = TrainStep(self.task, self.config, self.mesh)
        self.model, self.update = self.train_steps.model, self.train_steps.update
        self.stages = self.model.stages  # numbers of the layers of every pipeline stage
        self._shapes = StageShapes(self.model.runtime)
        self.task.shapes = self._shapes
        # `grad_norm`: global gradient norm of the last step before clipping, an fp64 scalar.
        # `lr`: learning rate of the last step.
        self.lr, self.grad_norm = 0.0, torch.zeros((), dtype=torch.float64)
        self._callbacks = Callbacks(self, [*observers().of_engine(self), *given.callbacks])
        self._request: str | None = None
        # Why a callback of any rank has asked to stop (`request_stop`), or None. It is the same on all ranks after a
        # step, and the program's loop must end.
        self.stop_reason: str | None = None

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.train_steps.step

    # ---- what callbacks may use besides the attributes

    def emit(self, kind: str, **values: Any) -> None:
        """Let callbacks know of an event."""
        self._callbacks.emit(kind, **values)

    def say(self, text: str) -> None:
        """Tell the callbacks something; the engine itself prints nothing."""
        self._callbacks.say(text)

    def request_stop(self, reason: str) -> None:
        """Ask the program to end its loop: after the next step `stop_reason` has the reason, on every rank."""
        self._request = self._request or reason

    def unclocked(self) -> contextlib.AbstractContextManager[None]:
        """A context without effect, because the engine does not time steps."""
        return contextlib.nullcontext()

    # ---- steps

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Marks a step for the watchdog and the callbacks, whose end of a step is a part of it."""
        number = self.step + 1
        self._callbacks.call(Callback.on_step_begin, number)
        heartbeat = Current.heartbeat
        if heartbeat is not None:
            heartbeat.begin_step(number)
        try:
            yield
        except BaseException as error:
            if heartbeat is not None:
                heartbeat.leave_step()
            self._callbacks.on_error(error)
            raise
        if heartbeat is not None:
            heartbeat.end_step()

    def train_batch(self, microbatches: Sequence[Pair]) -> Tensor:
        """One update of the weights. Returns the mean loss over the batch of all replicas, an fp64 scalar that is equal
        on every rank.

        Args:
            microbatches: (inputs, targets) of each, this replica's share of the batch, the same on every rank of
                the pipeline, with whole sequences. Inputs are a tensor or a tuple of tensors; targets whatever the
                loss takes. Sizes may differ.

        Raises:
            UserError: the number of microbatches or of steps is not the one that was announced, or a layer cannot
                take the microbatches.
            TrainingDiverged: losses or gradients of many steps in a row were not finite.
            SilentCorruption: replicas differ; on every rank.
        """
        if len(microbatches) != self.num_microbatches:
            raise UserError(
                f"train_batch got {len(microbatches)} microbatches, but num_microbatches is {self.num_microbatches}: "
                "give that many, or announce another number"
            )
        if self.step >= (last := self.config.training.train_iters):
            raise UserError(
                f"train_batch is called after step {last}, but train_iters is {last}, where the learning "
                "rate's schedule ends: announce more steps"
            )
        with self._step():
            self.train_steps.compute_gradients(self._prepare(microbatches))
            return self._update_weights().loss

    def update_weights(self) -> StepResult:
        """Update the weights from gradients that the caller has computed through `train_steps`, which is the second
        half of a step; all ranks call this together. Raises TrainingDiverged where losses or gradients of many steps in
        a row were not finite; SilentCorruption where replicas differ; on every rank."""
        with self._step():
            return self._update_weights()

    def _update_weights(self) -> StepResult:
        """Keep what a step results in, and warn of a skipped one."""
        result = self.train_steps.update_weights(votes=[int(self._request is not None)])
        if result.votes[0]:
            self.stop_reason = self._request or "a callback of another rank"
        if result.skipped is not None and self.mesh.world.rank == 0:
            cause = "" if result.diagnosis is None else f" ({result.diagnosis})"
            warnings.warn(f"step {result.step} is skipped: {result.skipped}{cause}", stacklevel=2)
        elif result.spike is not None and self.mesh.world.rank == 0:
            warnings.warn(f"step {result.step} is a spike: {result.spike}", stacklevel=2)
        self.lr, self.grad_norm = result.lr, result.grad_norm
        self._callbacks.end_step(result)
        return result

    def evaluate(self, microbatches: Sequence[Pair], metric: LossFunction | None = None) -> float:
        """The mean loss, or another mean, over the microbatches of all replicas; in evaluation mode. Raises UserError
        where there are none; or, on ZeRO stage 3, replicas have different numbers of them.

        Args:
            microbatches: as for `train_batch`, but of any number above 0.
            metric: (output of the last layer, targets) -> sum over the microbatch, to be divided by what `count`
                counts (the number of right answers, for the accuracy); None: the loss.
        """
        numbers = all_gather_objects(len(microbatches), self.mesh.batch)
        if min(numbers) == 0 or (len(set(numbers)) > 1 and self.config.parallel.zero_stage == 3):
            raise UserError(
                f"evaluate got {numbers} microbatches on the replicas: every one needs one or more, "
                "and with zero_stage 3 all the same number"
            )
        self.task.metric = metric
        mean = float(self.train_steps.evaluate([self._prepare(microbatches)]).means)
        self._callbacks.call(
            Callback.on_evaluate, {"step": self.step, "eval/loss" if metric is None else "eval/metric": mean}
        )
        return mean

    def split(self, inputs: Any, targets: Any) -> list[Pair]:
        """This replica's microbatches of a batch that every rank has in full.

        The batch is cut into num_microbatches x dp pieces, as even as its samples allow, which the replicas take in
        turn. Raises UserError where the batch has fewer samples than there are microbatches.

        Args:
            inputs: a tensor, or a tuple of tensors, with samples along the first dimension.
            targets: likewise.
        """
        pieces, samples = self.num_microbatches * self.mesh.batch.size, samples_of(inputs)
        if samples < pieces:
            raise UserError(
                f"{samples} samples are too few for {self.num_microbatches} microbatches on each of "
                f"{self.mesh.batch.size} replicas: give {pieces} or more"
            )
        share = slice(self.mesh.batch.rank, None, self.mesh.batch.size)
        return list(zip(cut(inputs, pieces)[share], cut(targets, pieces)[share], strict=True))

    def log(self, values: Mapping[str, float]) -> None:
        """Pass metrics of the last step on to the callbacks, and on rank 0 to the trackers of `logging`.

        With callbacks, all ranks call this together.

        Args:
            values: by name; docs/reference/metrics.md has the names that GPT's trainer uses.
        """
        self._callbacks.call(Callback.on_log, {"step": self.step, **values, **self._callbacks.figures()})

    def close(self) -> None:
        """End the callbacks, close the trackers, wait for all ranks and leave the job; the last thing to do."""
        with section(Phase.EXIT):
            self._callbacks.call(Callback.on_stop, self.stop_reason)
            self.model.data_parallel.ready()  # a gloo group that ends before its last message may never end
            leave(self.mesh)
        watchdog().end()

    # ---- weights

    def state_dict(self) -> dict[str, Tensor]:
        """Every weight and buffer of the model by global name, whole and on the CPU; all ranks call this together. A
        tied parameter is there once, under the name of its first use. Buffers are those of this rank's replica."""
        shards: dict[str, tuple[ShardSpec, Tensor]] = {}
        for bucket in self.model.data_parallel.buckets:
            for name, tensor in bucket.gather(bucket.master).items():
                spec = self.model.parameters[name].spec
                shards[name] = (spec, spec.unpadded(tensor).cpu())
        state = {name: buffer.cpu() for name, buffer in self._buffers().items()}
        for part in all_gather_objects(shards, self.mesh.layer):
            for name, (spec, shard) in part.items():
                spec.take(state.setdefault(name, torch.empty(spec.shape))).copy_(shard)
        parts = all_gather_objects(state, self.mesh.pipeline)
        return {name: tensor.clone() for part in parts for name, tensor in part.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights and buffers from what `state_dict` returned, on any layout. Raises UserError where a tensor is
        missing, or has another shape."""
        buffers, parameters = self._buffers(), self.model.parameters
        shapes = {name: parameter.spec.shape for name, parameter in parameters.items()}
        for name, shape in (shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}).items():
            if name not in state or tuple(state[name].shape) != shape:
                given = list(state[name].shape) if name in state else "missing"
                raise UserError(f"state of {name!r} is {given}, but the model has shape {list(shape)}")
        shards = {}
        for name, parameter in parameters.items():
            shards[name] = torch.zeros(parameter.shape)
            parameter.spec.unpadded(shards[name]).copy_(parameter.spec.take(state[name]))
        self.model.data_parallel.load_masters(shards)
        self.model.data_parallel.ready()
        for name, buffer in buffers.items():
            buffer.copy_(state[name])

    # ---- checkpoints

    @section(Phase.SAVE)
    def save(self, directory: Location | str) -> Location:
        """Publish a checkpoint: weights, the optimizer's state, buffers and counters; all ranks call this together.
        Returns the checkpoint's directory.

        Args:
            directory: in which the checkpoint becomes a directory, named after the step; or a URL of an object
                store.

        Raises:
            StorageError: it could not be written; on every rank, and nothing is left of it.
            SilentCorruption: replicas differ, and nothing is written; on every rank.
            TrainingDiverged: a weight or a moment is not finite.
        """
        self._callbacks.call(Callback.before_save)
        self.train_steps.require_finite()
        saver = CheckpointSaver(self.config.saving_to(str(directory)), self.mesh)
        samples = self.step * self.num_microbatches * self.mesh.batch.size
        in_doubt = self.train_steps.doubt() is not None
        saver.begin(self.train_steps.state(consumed_samples=samples, in_doubt=in_doubt, buffers=self._buffers()))
        saved = saver.finish()
        assert saved is not None
        for note in saved.notes if self.mesh.world.rank == 0 else ():
            warnings.warn(f"{note}; the checkpoint itself is whole", stacklevel=2)
        self._callbacks.call(Callback.on_save, saved)
        return saved.path

    def load(self, directory: Location | str) -> None:
        """Continue from a checkpoint, whatever layout saved it; all ranks call this together. Raises CheckpointError
        where a file is missing or damaged, or a tensor is missing or of another shape, each by name.

        Args:
            directory: a checkpoint, or a directory given to `save`, whose newest checkpoint is loaded.
        """
        path = location(directory)
        self.train_steps.load(path, buffers=self._buffers())
        self.lr = self.train_steps.lr()
        self._callbacks.emit("load", path=path)

    def _buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers by global name."""
        buffers: dict[str, Tensor] = {}
        for chunk in self.model.chunks:
            for wrapped, name in zip(chunk.layers, chunk.names, strict=True):
                layer = wrapped.layer if isinstance(wrapped, Recomputed) else wrapped
                kept = layer.state_dict().keys()
                buffers |= {f"{name}.{local}": buffer for local, buffer in layer.named_buffers() if local in kept}
        return buffers

    # ---- microbatches

    def _prepare(self, microbatches: Sequence[Pair]) -> list[PlainMicrobatch]:
        """Move to the device what this rank needs there, and learn what stages will exchange."""
        device, runtime, readers = self.mesh.device, self.model.runtime, self.mesh.batch
        batch = []
        ranks = self.sequence.group.size
        for position, (inputs, targets) in enumerate(microbatches):
            if ranks > 1:
                inputs, targets = self._divide(self.sequence, inputs, targets)
            number = samples_of(inputs) / ranks if self._count is None else self._count(targets)
            batch.append(
                PlainMicrobatch(
                    index=(self.step * self.num_microbatches + position) * readers.size + readers.rank,
                    inputs=moved(inputs, device) if runtime.stages[0] == 0 else inputs,
                    targets=moved(targets, device) if runtime.holds_loss else targets,
                    count=number.to(device, torch.float64, non_blocking=True)
                    if isinstance(number, Tensor)
                    else torch.full((), number, dtype=torch.float64, device=device),
                )
            )
        self._learn_shapes([microbatch.inputs for microbatch in batch])
        return batch

    def _learn_shapes(self, inputs: Sequence[Any]) -> None:
        """Try inputs of shapes that are new. Other replicas may know theirs, and take no part: on ZeRO stage 3 a trial
        gathers no weights from them, since their values do not change a shape."""
        for tried in self._shapes.unknown(inputs):
            with self.model.data_parallel.zeros_for_weights():
                self._shapes.learn(tried, self.task.in_training_format(tried))
