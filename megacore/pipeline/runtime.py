"""Executes a schedule: a small loop over a rank's actions.

What an action means is here; in which order actions come is the schedule's business alone. Training and evaluation run
through the same loop, and so does a model on one stage, whose schedule has no transfers. Only a schedule that has been
proven (proof.py) is executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.config import ParallelConfig
from megacore.errors import UserError
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.pipeline.actions import Action, Op, Schedule, peer_stage
from megacore.pipeline.backward import WeightHalf, input_half
from megacore.pipeline.schedule import build_schedule
from megacore.pipeline.schedule_file import training_schedule
from megacore.pipeline.stage import Stage, tensors_of
from megacore.pipeline.timing import ActionTimer
from megacore.pipeline.transport import Arrival, Receive, Send, TensorSpec, Transfer, Transport
from megacore.pipeline.validation import prove

StageMicrobatch = tuple[int, int]  # number of a stage, number of a microbatch in the step


class PipelineTask(Protocol):
    """What the runtime asks of a task about a microbatch; `megacore.train.task.Task` is the whole of it."""

    @property
    def streams(self) -> RandomStreams:
        """The source of dropout masks, which the runtime tells which microbatch is computed."""

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """Shape of what `loss` returns; () is a scalar."""

    @property
    def evaluation_shape(self) -> tuple[int, ...]:
        """Shape of what `evaluation_loss` returns."""

    def first_input(self, microbatch: Any) -> Any:
        """The input of the model's first layer: a tensor or a tuple of tensors."""

    def last_inputs(self, microbatch: Any) -> tuple[Tensor, ...]:
        """What the model's last layer gets beside the output of the layer before it."""

    def loss(self, output: Any, microbatch: Any) -> Tensor:
        """The summed loss of the last layer's output, or several sums."""

    def evaluation_loss(self, output: Any, microbatch: Any) -> Tensor:
        """The same for an evaluation."""

    def stage_input_specs(self, microbatch: Any, stage: int) -> tuple[TensorSpec, ...]:
        """What stage number `stage`, which is not the first, receives; the same on every rank of the pipeline."""


class LossWeight(Protocol):
    """What scales the summed loss before backward."""

    def value(self) -> Tensor:
        """One over the global batch's count of each loss term, times the fp16 loss scale; fp32, of the shape of the
        loss or a scalar. Asked for as late as possible, so that the reduction of the counts overlaps with the first
        forward."""


class GradientSink(Protocol):
    """Who takes the weights' gradients that appear during a backward, and provides the weights."""

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None:
        """Gradients of the rank's chunk of this number begin to appear; `last` says that they are its last, and
        `all_weights` that weights are needed out of the layers' order."""

    def end_backward(self, chunk: int) -> None:
        """All of the microbatch's gradients are there, or it had none to give: its weights are not needed now."""


class PipelineRuntime:
    """Runs microbatches through this rank's stages.

    Args:
        chunks: the stages of this rank, each stage s = chunk number x p + rank.
        group: the pipeline group.
        transport: how tensors reach the other stages.
        parallel: names the training schedule.
        task: the model's input and loss, and the shapes that stages exchange.

    Attributes:
        timer: when each computation of a step ran.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        group: Group,
        *,
        transport: Transport,
        parallel: ParallelConfig,
        task: PipelineTask,
    ) -> None:
        self.chunks, self.group, self.transport, self.task = list(chunks), group, transport, task
        self.last_stage = len(chunks) * group.size - 1
        self.timer = ActionTimer(transport.device)
        self._parallel = parallel
        self._proven: dict[tuple[bool, int], Schedule] = {}  # by whether it trains, and its microbatches

    def train_step(self, microbatches: Sequence[Any], loss_weight: LossWeight, gradients: GradientSink) -> Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        Args:
            microbatches: this data-parallel rank's share of the global batch; each has a global `index`.
            loss_weight: factor of the summed loss, or of each of its sums, before backward.
            gradients: told when a microbatch's backward begins and ends.

        Returns:
            The summed loss of the microbatches, without its weight, on the last stage; 0 elsewhere.

        Raises:
            UserError: a stage returns other shapes or types than the next one expects, or a backward that is to be
                split cannot be.
        """
        for chunk in self.chunks:
            chunk.train()
        schedule = self.schedule(len(microbatches), trains=True)
        with self.timer.measure_step():
            return _Run(self, schedule, microbatches, loss_weight, gradients).execute()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed `evaluation_loss` of the microbatches on the last stage; 0 elsewhere. Dropout is off."""
        for chunk in self.chunks:
            chunk.eval()
        return _Run(self, self.schedule(len(microbatches), trains=False), microbatches).execute()

    def schedule(self, microbatches: int, *, trains: bool) -> Schedule:
        """What all ranks of the pipeline do in a step, or in an evaluation, of so many microbatches; proven."""
        if (trains, microbatches) not in self._proven:
            schedule = (
                training_schedule(self._parallel, microbatches)
                if trains
                else build_schedule("forward-only", self.group.size, microbatches, len(self.chunks))
            )
            prove(schedule, trains=trains)
            self._proven[trains, microbatches] = schedule
        return self._proven[trains, microbatches]


class _Run:
    """The state of one pass over a schedule: what is in flight on this rank."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        schedule: Schedule,
        microbatches: Sequence[Any],
        loss_weight: LossWeight | None = None,
        sink: GradientSink | None = None,
    ) -> None:
        self.runtime, self.schedule, self.microbatches = runtime, schedule, microbatches
        self.loss_weight, self.sink = loss_weight, sink
        self.arrivals: dict[tuple[Op, int, int], Arrival] = {}
        self.inputs: dict[StageMicrobatch, tuple[Tensor, ...]] = {}  # leaves, whose gradients go to the stage before
        self.outputs: dict[
            StageMicrobatch, tuple[GradientEdge | None, ...]
        ] = {}  # graphs alone: tensors are freed once sent
        self.anchors: dict[StageMicrobatch, tuple[GradientEdge, ...]] = {}
        self.halves: dict[StageMicrobatch, WeightHalf] = {}
        self.to_send: dict[tuple[Op, int, int], tuple[Tensor, ...]] = {}
        mine = schedule.computations(runtime.group.rank)
        self.weight_gradients_left = Counter(a.stage for a in mine if a.op in (Op.BACKWARD, Op.WEIGHT_GRAD))
        shape = runtime.task.evaluation_shape if loss_weight is None else runtime.task.loss_shape
        self.total_loss = torch.zeros(shape, dtype=torch.float64, device=runtime.transport.device)

    def execute(self) -> Tensor:
        for is_transfer, run in self.schedule.batches(self.runtime.group.rank):
            if is_transfer:
                self.transfer(run)
                continue
            for action in run:
                self.compute(action)
        with self.runtime.timer.waiting():
            self.runtime.transport.drain()
        return self.total_loss

    # ---- computations

    def compute(self, action: Action) -> None:
        match action.op:
            case Op.FORWARD:
                self.forward(action)
            case Op.BACKWARD:
                self.backward(action)
            case Op.INPUT_GRAD:
                self.input_grad(action)
            case Op.WEIGHT_GRAD:
                self.weight_grad(action)
            case _:
                raise AssertionError(f"{action} is a transfer")

    def forward(self, action: Action) -> None:
        runtime, task, key = self.runtime, self.runtime.task, (action.stage, action.microbatch)
        microbatch, stage = self.microbatches[action.microbatch], runtime.chunks[self.chunk(action)]
        x = self.stage_input(action)
        with runtime.timer.measure(action), task.streams.microbatch(microbatch.index):
            y = stage(x, task.last_inputs(microbatch) if action.stage == runtime.last_stage else ())
            if action.stage == runtime.last_stage:
                y = task.evaluation_loss(y, microbatch) if self.loss_weight is None else task.loss(y, microbatch)
                # A multiple of 2^-24: fp64 sums of several hundred million of them are exact, on every layout alike.
                self.total_loss += y.detach().double().mul_(2.0**24).round_().mul_(2.0**-24)
        outputs = tensors_of(y)
        if action.stage < runtime.last_stage:
            self.require_specs(action, outputs)
            self.to_send[Op.SEND_OUTPUT, *key] = tuple(tensor.detach() for tensor in outputs)
        if self.loss_weight is not None:
            self.outputs[key] = tuple(
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for tensor in outputs
                if TensorSpec.of(tensor).has_gradient
            )
            self.anchors[key] = tuple(map(get_gradient_edge, self.inputs.get(key, ()))) or stage.first_outputs

    def backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.runtime.timer.measure(action):
            self.begin_weight_gradients(action)
            if outputs:
                torch.autograd.backward(outputs, gradients)
            self.end_weight_gradients(action)
        self.anchors.pop(key)
        self.keep_input_gradients(action, [x.grad for x in self.inputs.pop(key, ())])

    def input_grad(self, action: Action) -> None:
        key = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.runtime.timer.measure(action):
            grads, self.halves[key] = input_half(outputs, gradients, self.anchors.pop(key))
            self.end_weight_gradients(action)
        self.keep_input_gradients(action, grads[: len(self.inputs.pop(key, ()))])

    def weight_grad(self, action: Action) -> None:
        with self.runtime.timer.measure(action):
            self.begin_weight_gradients(action)
            self.halves.pop((action.stage, action.microbatch)).run()
            self.end_weight_gradients(action)

    # ---- what computations need and leave

    def chunk(self, action: Action) -> int:
        return action.stage // self.schedule.ranks

    def stage_input(self, action: Action) -> Any:
        if action.stage == 0:
            return self.runtime.task.first_input(self.microbatches[action.microbatch])
        tensors = self.arrived(Action(Op.RECV_INPUT, action.microbatch, action.stage))
        if self.loss_weight is not None:
            for tensor in tensors:
                tensor.requires_grad_(TensorSpec.of(tensor).has_gradient)
            self.inputs[action.stage, action.microbatch] = tuple(t for t in tensors if t.requires_grad)
        return tensors[0] if len(tensors) == 1 else tensors

    def outputs_and_gradients(self, action: Action) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where a backward begins, and with what."""
        outputs = self.outputs.pop((action.stage, action.microbatch))
        if action.stage == self.runtime.last_stage:
            assert self.loss_weight is not None
            gradients: tuple[Tensor, ...] = (self.loss_weight.value().expand(self.runtime.task.loss_shape),)
        else:
            gradients = self.arrived(Action(Op.RECV_GRAD, action.microbatch, action.stage))
        pairs = [(edge, grad) for edge, grad in zip(outputs, gradients, strict=True) if edge is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def keep_input_gradients(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        if action.stage > 0:
            self.to_send[Op.SEND_GRAD, action.stage, action.microbatch] = tuple(
                self.total_loss.new_zeros(spec.shape, dtype=spec.dtype) if gradient is None else gradient
                for gradient, spec in zip(gradients, self.gradient_specs(action, action.stage), strict=True)
            )

    def begin_weight_gradients(self, action: Action) -> None:
        assert self.sink is not None
        self.weight_gradients_left[action.stage] -= 1
        self.sink.begin_backward(
            self.chunk(action),
            last=self.weight_gradients_left[action.stage] == 0,
            all_weights=action.op is Op.WEIGHT_GRAD,
        )

    def end_weight_gradients(self, action: Action) -> None:
        assert self.sink is not None
        self.sink.end_backward(self.chunk(action))

    # ---- transfers

    def transfer(self, actions: Sequence[Action]) -> None:
        """Post a run of transfers together, and file what is to come."""
        with self.runtime.timer.posting(actions):
            arrivals = iter(self.runtime.transport.post([self.as_transfer(action) for action in actions]))
        for action in actions:
            if action.op.is_receive:
                self.arrivals[action.op, action.stage, action.microbatch] = next(arrivals)

    def arrived(self, receive: Action) -> tuple[Tensor, ...]:
        """What a receive brings, once it may be read."""
        arrival = self.arrivals.pop((receive.op, receive.stage, receive.microbatch))
        with self.runtime.timer.waiting(receive):
            return arrival.wait()

    def as_transfer(self, action: Action) -> Transfer:
        peer = peer_stage(action) % self.schedule.ranks
        if action.op is Op.RECV_INPUT:
            return Receive(peer, self.input_specs(action, action.stage))
        if action.op is Op.RECV_GRAD:
            return Receive(peer, self.gradient_specs(action, action.stage + 1))
        return Send(peer, self.to_send.pop((action.op, action.stage, action.microbatch)))

    def require_specs(self, action: Action, outputs: Sequence[Tensor]) -> None:
        """Refuse what the next stage does not expect, before it is read there as something else."""
        returned, expected = tuple(map(TensorSpec.of, outputs)), self.input_specs(action, action.stage + 1)
        if returned != expected:
            names = self.runtime.chunks[self.chunk(action)].names
            returns = (
                f"layer {names[0]!r} returns" if len(names) == 1 else f"layers {', '.join(map(repr, names))} return"
            )
            mode = "evaluation" if self.loss_weight is None else "training"
            raise UserError(
                f"{returns} ({', '.join(map(str, returned))}) in {mode}, but returned "
                f"({', '.join(map(str, expected))}) when tried in evaluation mode on an input of this shape: shapes "
                "and types of what a stage passes on must depend on those of its input and on nothing else"
            )

    def input_specs(self, action: Action, stage: int) -> tuple[TensorSpec, ...]:
        """What a stage after the first receives of the action's microbatch."""
        return self.runtime.task.stage_input_specs(self.microbatches[action.microbatch], stage)

    def gradient_specs(self, action: Action, stage: int) -> tuple[TensorSpec, ...]:
        """What the gradients of a stage's input look like."""
        return tuple(spec for spec in self.input_specs(action, stage) if spec.has_gradient)
