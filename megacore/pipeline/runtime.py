"""Executes a schedule: a small loop over a rank's actions.

What an action means is here; in which order actions come is the schedule's business alone. Training and evaluation run
through the same loop, and so does a model on one stage, whose schedule has no transfers. Only a schedule that has been
proven (proof.py) is executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.errors import UserError
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.pipeline.actions import Action, Op, Schedule, peer_stage
from megacore.pipeline.backward import WeightHalf, input_half
from megacore.pipeline.schedule import build_schedule
from megacore.pipeline.stage import Stage, tensors_of
from megacore.pipeline.timing import ActionTimer
from megacore.pipeline.transport import Arrival, Receive, Send, TensorForm, Transfer, Transport
from megacore.pipeline.validation import prove

Place = tuple[int, int]  # stage, microbatch
Loss = Callable[[Any, Any], Tensor]
Forms = Sequence[tuple[TensorForm, ...] | None]  # of each stage's input


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
        forms: microbatch -> what every stage receives from the one before, for each stage of the model; None for the
            first. The same on every rank of the pipeline.
        schedule: number of microbatches -> what all ranks do.
        streams: told which microbatch is being computed.
        first_input: microbatch -> input of the model's first layer.
        loss: (output of the last layer, microbatch) -> summed loss of the microbatch, or several sums.
        loss_shape: of what `loss` returns; () is a scalar.
        eval_loss: the same for `evaluate`; None: `loss`.
        eval_shape: of what `eval_loss` returns.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        group: Group,
        *,
        transport: Transport,
        forms: Callable[[Any], Forms],
        schedule: Callable[[int], Schedule],
        streams: RandomStreams,
        first_input: Callable[[Any], Any],
        loss: Loss,
        loss_shape: tuple[int, ...] = (),
        eval_loss: Loss | None = None,
        eval_shape: tuple[int, ...] = (),
    ) -> None:
        self.chunks, self.group, self.transport, self.streams = list(chunks), group, transport, streams
        self.forms, self.last_stage = forms, len(chunks) * group.size - 1
        self.first_input, self.loss, self.eval_loss = first_input, loss, eval_loss or loss
        self.loss_shape, self.eval_shape = loss_shape, eval_shape
        self.timer = ActionTimer(transport.device)
        self.training_schedule = cache(lambda microbatches: _proven(schedule(microbatches)))
        self.evaluation_schedule = cache(
            lambda microbatches: _proven(
                build_schedule("forward-only", group.size, microbatches, len(chunks)), trains=False
            )
        )

    def train_step(
        self, microbatches: Sequence[Any], loss_scale: Callable[[], Tensor | float], gradients: GradientSink
    ) -> Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        Args:
            microbatches: this data-parallel rank's share of the global batch; each has a global `index`.
            loss_scale: factor of the summed loss before backward (one over the global batch's tokens), or of each of
                its sums; asked for as late as possible, so that its reduction overlaps with the first forward.
            gradients: told when a microbatch's backward begins and ends.

        Returns:
            The summed loss of the microbatches, unscaled, on the last stage; 0 elsewhere.

        Raises:
            UserError: a stage returns other shapes or types than the next one expects, or a backward that is to be
                split cannot be.
        """
        for chunk in self.chunks:
            chunk.train()
        schedule = self.training_schedule(len(microbatches))
        with self.timer.measure_step():
            return _Run(self, schedule, microbatches, loss_scale, gradients).execute()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed `eval_loss` of the microbatches on the last stage; 0 elsewhere. Dropout is off."""
        for chunk in self.chunks:
            chunk.eval()
        return _Run(self, self.evaluation_schedule(len(microbatches)), microbatches).execute()


def _proven(schedule: Schedule, *, trains: bool = True) -> Schedule:
    prove(schedule, trains=trains)
    return schedule


class _Run:
    """The state of one pass over a schedule: what is in flight on this rank."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        schedule: Schedule,
        microbatches: Sequence[Any],
        loss_scale: Callable[[], Tensor | float] | None = None,
        sink: GradientSink | None = None,
    ) -> None:
        self.runtime, self.schedule, self.microbatches = runtime, schedule, microbatches
        self.loss_scale, self.sink = loss_scale, sink
        self.arrivals: dict[tuple[Op, int, int], Arrival] = {}
        self.inputs: dict[Place, tuple[Tensor, ...]] = {}  # leaves, whose gradients go to the stage before
        self.outputs: dict[Place, tuple[GradientEdge | None, ...]] = {}  # graphs alone: tensors are freed once sent
        self.anchors: dict[Place, tuple[GradientEdge, ...]] = {}
        self.halves: dict[Place, WeightHalf] = {}
        self.to_send: dict[tuple[Op, int, int], tuple[Tensor, ...]] = {}
        mine = schedule.computations(runtime.group.rank)
        self.weight_gradients_left = Counter(a.stage for a in mine if a.op in (Op.BACKWARD, Op.WEIGHT_GRAD))
        shape = runtime.eval_shape if loss_scale is None else runtime.loss_shape
        self.total_loss = torch.zeros(shape, dtype=torch.float64, device=runtime.transport.device)

    def execute(self) -> Tensor:
        does = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.INPUT_GRAD: self.input_grad,
            Op.WEIGHT_GRAD: self.weight_grad,
        }
        for is_transfer, run in self.schedule.batches(self.runtime.group.rank):
            if is_transfer:
                self.transfer(run)
                continue
            for action in run:
                does[action.op](action)
        with self.runtime.timer.waiting():
            self.runtime.transport.drain()
        return self.total_loss

    # ---- computations

    def forward(self, action: Action) -> None:
        runtime, place = self.runtime, (action.stage, action.microbatch)
        microbatch, stage = self.microbatches[action.microbatch], runtime.chunks[self.chunk(action)]
        x = self.stage_input(action)
        with runtime.timer.measure(action), runtime.streams.microbatch(microbatch.index):
            y = stage(x)
            if action.stage == runtime.last_stage:
                y = (runtime.eval_loss if self.loss_scale is None else runtime.loss)(y, microbatch)
                # A multiple of 2^-24: fp64 sums of several hundred million of them are exact, on every layout alike.
                self.total_loss += y.detach().double().mul_(2.0**24).round_().mul_(2.0**-24)
        outputs = tensors_of(y)
        if action.stage < runtime.last_stage:
            self.require_forms(action, outputs)
            self.to_send[Op.SEND_OUTPUT, *place] = tuple(tensor.detach() for tensor in outputs)
        if self.loss_scale is not None:
            self.outputs[place] = tuple(
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for tensor in outputs
                if TensorForm.of(tensor).has_gradient
            )
            self.anchors[place] = tuple(map(get_gradient_edge, self.inputs.get(place, ()))) or stage.first_outputs

    def backward(self, action: Action) -> None:
        place = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.runtime.timer.measure(action):
            self.begin_weight_gradients(action)
            if outputs:
                torch.autograd.backward(outputs, gradients)
            self.end_weight_gradients(action)
        self.anchors.pop(place)
        self.keep_input_gradients(action, [x.grad for x in self.inputs.pop(place, ())])

    def input_grad(self, action: Action) -> None:
        place = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.runtime.timer.measure(action):
            found, self.halves[place] = input_half(outputs, gradients, self.anchors.pop(place))
            self.end_weight_gradients(action)
        self.keep_input_gradients(action, found[: len(self.inputs.pop(place, ()))])

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
            return self.runtime.first_input(self.microbatches[action.microbatch])
        tensors = self.arrived(Action(Op.RECV_INPUT, action.microbatch, action.stage))
        if self.loss_scale is not None:
            for tensor in tensors:
                tensor.requires_grad_(TensorForm.of(tensor).has_gradient)
            self.inputs[action.stage, action.microbatch] = tuple(t for t in tensors if t.requires_grad)
        return tensors[0] if len(tensors) == 1 else tensors

    def outputs_and_gradients(self, action: Action) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where a backward begins, and with what."""
        outputs = self.outputs.pop((action.stage, action.microbatch))
        if action.stage == self.runtime.last_stage:
            assert self.loss_scale is not None
            scale = torch.as_tensor(self.loss_scale(), dtype=torch.float32, device=self.total_loss.device)
            gradients: tuple[Tensor, ...] = (scale.expand(self.runtime.loss_shape),)
        else:
            gradients = self.arrived(Action(Op.RECV_GRAD, action.microbatch, action.stage))
        pairs = [(edge, grad) for edge, grad in zip(outputs, gradients, strict=True) if edge is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def keep_input_gradients(self, action: Action, gradients: Sequence[Tensor | None]) -> None:
        if action.stage > 0:
            self.to_send[Op.SEND_GRAD, action.stage, action.microbatch] = tuple(
                self.total_loss.new_zeros(form.shape, dtype=form.dtype) if gradient is None else gradient
                for gradient, form in zip(gradients, self.gradient_forms(action, action.stage), strict=True)
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
            return Receive(peer, self.input_forms(action, action.stage))
        if action.op is Op.RECV_GRAD:
            return Receive(peer, self.gradient_forms(action, action.stage + 1))
        return Send(peer, self.to_send.pop((action.op, action.stage, action.microbatch)))

    def require_forms(self, action: Action, outputs: Sequence[Tensor]) -> None:
        """Refuse what the next stage does not expect, before it is read there as something else."""
        found, expected = tuple(map(TensorForm.of, outputs)), self.input_forms(action, action.stage + 1)
        if found != expected:
            names = self.runtime.chunks[self.chunk(action)].names
            returns = (
                f"layer {names[0]!r} returns" if len(names) == 1 else f"layers {', '.join(map(repr, names))} return"
            )
            mode = "evaluation" if self.loss_scale is None else "training"
            raise UserError(
                f"{returns} ({', '.join(map(str, found))}) in {mode}, but returned ({', '.join(map(str, expected))}) "
                "when tried in evaluation mode on an input of this form: shapes and types of what a stage hands on "
                "must depend on those of its input alone"
            )

    def input_forms(self, action: Action, stage: int) -> tuple[TensorForm, ...]:
        return self.runtime.forms(self.microbatches[action.microbatch])[stage] or ()

    def gradient_forms(self, action: Action, stage: int) -> tuple[TensorForm, ...]:
        """What the gradients of a stage's input look like."""
        return tuple(form for form in self.input_forms(action, stage) if form.has_gradient)
