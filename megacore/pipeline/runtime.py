"""Executes a schedule: a small loop over a rank's actions, and a timer for them. The schedule decides the order of
actions; this module decides what each one does. Training, evaluation and a model on one stage, whose schedule has no
transfers, run through the same loop. Only a schedule that has been proven (validation.py) is executed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from megacore.config import ParallelConfig
from megacore.errors import UserError
from megacore.parallel.heartbeat import Phase, phase
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.parallel.turns import Turns
from megacore.pipeline.backward import WeightHalf, accumulate_gradients, input_half
from megacore.pipeline.schedule import (
    Action,
    Kind,
    Op,
    Schedule,
    Timed,
    backwards_beside,
    build_schedule,
    peer_stage,
)
from megacore.pipeline.schedule_file import placement, training_schedule
from megacore.pipeline.stage import Stage, TensorSpec, tensors_of
from megacore.pipeline.transport import Arrival, Receive, Send, Transfer, Transport
from megacore.pipeline.validation import prove

OnLoss = Callable[[int, Tensor], None]  # number of a microbatch in the step, and its summed loss
StageMicrobatch = tuple[int, int]  # number of a stage, number of a microbatch in the step


class PipelineTask(Protocol):
    """The part of `megacore.train.task.Task` that the runtime calls."""

    @property
    def streams(self) -> RandomStreams:
        """The source of dropout masks; the runtime sets which microbatch is computed."""

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """Shape of what `loss` returns; () is a scalar."""

    @property
    def evaluation_shape(self) -> tuple[int, ...]:
        """Shape of what `evaluation_loss` returns."""

    def first_input(self, microbatch: Any) -> Any:
        """The input of the model's first layer: a tensor or a tuple of tensors."""

    def last_inputs(self, weight: LossWeight | None, microbatch: Any) -> tuple[Tensor, ...]:
        """What the model's last layer gets besides the output of the layer before it; `weight` is that of its loss."""

    def loss(self, output: Any, microbatch: Any) -> Tensor:
        """The summed loss of the last layer's output, or several sums."""

    def evaluation_loss(self, output: Any, microbatch: Any) -> Tensor:
        """What evaluations sum up instead of the loss."""

    def stage_input_specs(self, microbatch: Any, stage: int) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that stage number `stage` receives, which is not the first; equal on every rank."""


class LossWeight(Protocol):
    """The gradient of the summed loss, with which backward begins."""

    def value(self) -> Tensor:
        """One over the global batch's count of each loss term, times the fp16 loss scale; fp32, of the loss's shape or
        a scalar. Called as late as possible: the reduction of the counts overlaps with the first forward."""


class GradientSink(Protocol):
    """Receives the gradients of a backward, and provides the weights for it."""

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None:
        """A backward through a chunk begins. `chunk`: its number on this rank. `last`: whether it is the chunk's last
        backward of the step. `all_weights`: whether it needs weights in another order than layer by layer."""

    def end_backward(self, chunk: int) -> None:
        """The backward is done: its weights are no longer needed."""


class ActionObserver(Protocol):
    """Sees a pass, computation by computation."""

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """What the computation of an action runs in."""


class PipelineRuntime:
    """Runs microbatches through this rank's stages. `chunks`: the stages of this rank, in the order of the forward.
    `transport`: how tensors reach the other stages. `task`: the model's input and loss, and the shapes that stages
    exchange. `turns`: lets DualPipeV's backward run where a forward waits for experts; None: none does."""

    def __init__(
        self,
        chunks: Sequence[Stage],
        group: Group,
        *,
        transport: Transport,
        parallel: ParallelConfig,
        task: PipelineTask,
        turns: Turns | None = None,
    ) -> None:
        self.chunks, self.group, self.transport, self.task = list(chunks), group, transport, task
        self.turns = turns
        self.placement = placement(parallel)
        self.stages = self.placement.stages_of(group.rank)  # numbers of the chunks among the stages of the model
        self.last_stage = self.placement.stages - 1
        self.holds_loss = self.stages[-1] == self.last_stage
        self.timer = ActionTimer(transport.device)  # when each computation of a step ran
        # Of the last training step's microbatches by their number, summed, on the device; on the last stage.
        self.losses: dict[int, Tensor] = {}
        self.observer: ActionObserver | None = None  # of each computation of a pass; None: there is none
        self._parallel = parallel
        self._plans: dict[tuple[bool, int], _Plan] = {}  # by whether it trains, and its microbatches

    def train_step(
        self,
        microbatches: Sequence[Any],
        loss_weight: LossWeight,
        gradients: GradientSink,
        *,
        on_loss: OnLoss | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        `microbatches`: this data-parallel rank's share of the global batch; each has a global `index`. `loss_weight`:
        given to backward as the gradient of the summed loss, or of each of its sums. `on_loss`: is given each loss, on
        the last stage. Returns the summed loss of the microbatches, without its weight, on the last stage; 0 elsewhere.
        Raises UserError where a stage returns other shapes or types than the next one expects, or a backward that is to
        be split cannot be.
        """
        for chunk in self.chunks:
            chunk.train()
        plan = self._plan(len(microbatches), trains=True)
        run = _Run(self, plan, microbatches, loss_weight, gradients, on_loss)
        with self.timer.measure_step():
            total = run.execute()
        self.losses = run.losses
        return total

    def replay(
        self,
        microbatches: Sequence[Any],
        number: int,
        loss_weight: LossWeight,
        gradients: GradientSink,
        *,
        on_loss: OnLoss,
    ) -> None:
        """Forward and backward of one microbatch, by the actions that a step's schedule has for it; untimed. `number`:
        of the one to compute. `on_loss`: is given the loss, on the last stage."""
        plan = self._plan(len(microbatches), trains=True).only(number)
        _Run(self, plan, microbatches, loss_weight, gradients, on_loss).execute()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed `evaluation_loss` of the microbatches on the last stage; 0 elsewhere. Dropout is off."""
        for chunk in self.chunks:
            chunk.eval()
        return _Run(self, self._plan(len(microbatches), trains=False), microbatches).execute()

    def schedule(self, microbatches: int, *, trains: bool) -> Schedule:
        """The proven schedule of a step, or of an evaluation, of `microbatches` microbatches."""
        return self._plan(microbatches, trains=trains).schedule

    def _plan(self, microbatches: int, *, trains: bool) -> _Plan:
        if (trains, microbatches) not in self._plans:
            forward = "forward-only-v" if self.placement.is_v else "forward-only"
            schedule = (
                training_schedule(self._parallel, microbatches)
                if trains
                else build_schedule(forward, self.group.size, microbatches, len(self.chunks))
            )
            prove(schedule, trains=trains)
            beside = {} if self.turns is None else backwards_beside(schedule, self.group.rank)
            self._plans[trains, microbatches] = _Plan(schedule, list(schedule.action_groups(self.group.rank)), beside)
        return self._plans[trains, microbatches]


@dataclass(frozen=True)
class _Plan:
    """A proven schedule, and this rank's part of it."""

    schedule: Schedule  # of all ranks of the pipeline
    action_groups: list[tuple[bool, list[Action]]]  # this rank's actions, with whether each group is of transfers
    beside: Mapping[Action, Action] = field(default_factory=dict)  # backwards that begin beside a forward, by this one

    def only(self, microbatch: int) -> _Plan:
        """The part of the plan that computes one microbatch, which waits for nothing of others."""
        parts = [
            (is_transfer, [action for action in group if action.microbatch == microbatch])
            for is_transfer, group in self.action_groups
        ]
        return _Plan(self.schedule, [(is_transfer, group) for is_transfer, group in parts if group])

    @cached_property
    def backwards(self) -> Counter[int]:
        """How many backwards compute weight gradients of a stage, by the stage's number."""
        actions = (action for _, group in self.action_groups for action in group)
        return Counter(action.stage for action in actions if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD))


class _Run:
    """One pass over a schedule, and what is in flight on this rank."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        plan: _Plan,
        microbatches: Sequence[Any],
        loss_weight: LossWeight | None = None,
        sink: GradientSink | None = None,
        on_loss: OnLoss | None = None,
    ) -> None:
        self.runtime, self.plan, self.microbatches = runtime, plan, microbatches
        self.loss_weight, self.sink, self.on_loss = loss_weight, sink, on_loss
        self.trains = loss_weight is not None  # otherwise it evaluates
        self.arrivals: dict[tuple[Op, int, int], Arrival] = {}
        self.inputs: dict[StageMicrobatch, tuple[Tensor, ...]] = {}  # leaves, whose gradients go to the stage before
        # Edges of graphs, at which backward begins, and its input half ends: the tensors are freed once sent.
        self.output_edges: dict[StageMicrobatch, tuple[GradientEdge | None, ...]] = {}
        self.input_edges: dict[StageMicrobatch, tuple[GradientEdge, ...]] = {}
        self.pending_weight_halves: dict[StageMicrobatch, WeightHalf] = {}
        self.to_send: dict[tuple[Op, int, int], tuple[Tensor, ...]] = {}
        self.weight_gradients_left = plan.backwards.copy()
        self.losses: dict[int, Tensor] = {}  # on the last stage, of each microbatch
        shape = runtime.task.loss_shape if self.trains else runtime.task.evaluation_shape
        self.total_loss = torch.zeros(shape, dtype=torch.float64, device=runtime.transport.device)

    def execute(self) -> Tensor:
        observer, timer = self.runtime.observer, self.runtime.timer
        # An observer, and who computes with fake tensors on this thread, sees computations one after the other.
        is_alone = observer is not None or is_in_torch_dispatch_mode()
        turns, begun = None if is_alone else self.runtime.turns, set[Action]()
        for is_transfer, group in self.plan.action_groups:
            if is_transfer:
                self.transfer(group)
                continue
            for action in group:
                if turns is not None and action in self.plan.beside:
                    begun.add(self.plan.beside[action])
                    turns.begin(partial(self.compute, self.plan.beside[action]))
                if turns is not None and action in begun:
                    # What is left of one that has begun: the time before is the forward's.
                    with timer.measure(action) if turns.has_begun else nullcontext():
                        turns.finish()
                    continue
                with nullcontext() if observer is None else observer.action(action):
                    self.compute(action)
        if self.plan.schedule.ranks > 1:
            with timer.waiting():
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
        is_last, x = action.stage == runtime.last_stage, self.stage_input(action)
        task.streams.microbatch = microbatch.index
        watched = phase(Phase.FORWARD, stage=action.stage, microbatch=action.microbatch)
        with watched, runtime.timer.measure(action):
            if is_last:
                y = self.loss(stage(x, partial(task.last_inputs, self.loss_weight, microbatch)), action.microbatch)
            else:
                y = stage(x)
        outputs = tensors_of(y)
        if not is_last:
            self.require_specs(action, outputs)
            self.to_send[Op.SEND_OUTPUT, *key] = tuple(tensor.detach() for tensor in outputs)
        if self.trains:
            self.output_edges[key] = tuple(
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for tensor in outputs
                if TensorSpec.of(tensor).has_gradient
            )
            # On stage 0, whose input has no gradient: the outputs of its first layer.
            self.input_edges[key] = tuple(map(get_gradient_edge, self.inputs.get(key, ()))) or stage.first_outputs
            stage.first_outputs = ()  # it would keep the graph of the step's last microbatch

    def loss(self, output: Any, number: int) -> Tensor:
        """The loss of the last layer's output, which is added to that of the pass. `number`: of the microbatch."""
        task, microbatch = self.runtime.task, self.microbatches[number]
        loss = task.loss(output, microbatch) if self.trains else task.evaluation_loss(output, microbatch)
        if self.trains and loss.shape != task.loss_shape:  # that of the gradient
            raise ValueError(f"the loss has the shape {tuple(loss.shape)}, and its task says {task.loss_shape}")
        if self.on_loss is not None:
            self.on_loss(number, loss.detach())
        # A multiple of 2^-24: fp64 sums of several hundred million of them are exact, on every layout alike.
        self.losses[number] = loss.detach().double().mul_(2.0**24).round_().mul_(2.0**-24)
        self.total_loss += self.losses[number]
        return loss

    def backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.backward_phase(action), self.runtime.timer.measure(action):
            self.begin_backward(action)
            if outputs:
                accumulate_gradients(tuple(outputs), tuple(gradients))
            self.end_backward(action)
        self.input_edges.pop(key)
        self.keep_input_gradients(action, [x.grad for x in self.inputs.pop(key, ())])

    def input_grad(self, action: Action) -> None:
        key = action.stage, action.microbatch
        outputs, gradients = self.outputs_and_gradients(action)
        with self.backward_phase(action), self.runtime.timer.measure(action):
            # Nothing to begin: a layer's weights are gathered when backward reaches it, and no gradient of a weight
            # arrives. The weights are released.
            grads, self.pending_weight_halves[key] = input_half(outputs, gradients, self.input_edges.pop(key))
            self.end_backward(action)
        self.keep_input_gradients(action, grads[: len(self.inputs.pop(key, ()))])

    def weight_grad(self, action: Action) -> None:
        with self.backward_phase(action), self.runtime.timer.measure(action):
            self.begin_backward(action)
            self.pending_weight_halves.pop((action.stage, action.microbatch)).run()
            self.end_backward(action)

    def backward_phase(self, action: Action) -> AbstractContextManager[Any]:
        """Marks a backward, or half of one, for the watchdog."""
        return phase(Phase.BACKWARD, stage=action.stage, microbatch=action.microbatch)

    # ---- inputs and outputs of computations

    def chunk(self, action: Action) -> int:
        return action.stage // self.plan.schedule.ranks

    def stage_input(self, action: Action) -> Any:
        if action.stage == 0:
            return self.runtime.task.first_input(self.microbatches[action.microbatch])
        tensors = self.arrived(Action(Op.RECV_INPUT, action.microbatch, action.stage))
        if self.trains:
            for tensor in tensors:
                tensor.requires_grad_(TensorSpec.of(tensor).has_gradient)
            self.inputs[action.stage, action.microbatch] = tuple(t for t in tensors if t.requires_grad)
        return tensors[0] if len(tensors) == 1 else tensors

    def outputs_and_gradients(self, action: Action) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges of the graph at which a backward begins, and their gradients."""
        outputs = self.output_edges.pop((action.stage, action.microbatch))
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

    def begin_backward(self, action: Action) -> None:
        assert self.sink is not None
        self.weight_gradients_left[action.stage] -= 1
        self.sink.begin_backward(
            self.chunk(action),
            last=self.weight_gradients_left[action.stage] == 0,
            all_weights=action.op is Op.WEIGHT_GRAD,
        )

    def end_backward(self, action: Action) -> None:
        assert self.sink is not None
        self.sink.end_backward(self.chunk(action))

    # ---- transfers

    def transfer(self, actions: Sequence[Action]) -> None:
        with self.runtime.timer.posting(actions):
            arrivals = iter(self.runtime.transport.post([self.as_transfer(action) for action in actions]))
        for action in actions:
            if action.op.is_receive:
                self.arrivals[action.op, action.stage, action.microbatch] = next(arrivals)

    def arrived(self, receive: Action) -> tuple[Tensor, ...]:
        """The tensors of a receive, once they may be read; or of this rank's stage before or after, where a V turns."""
        sender, rank_of = peer_stage(receive), self.runtime.placement.rank_of
        if rank_of(sender) == rank_of(receive.stage):
            sent = Op.SEND_OUTPUT if receive.op is Op.RECV_INPUT else Op.SEND_GRAD
            return self.to_send.pop((sent, sender, receive.microbatch))
        arrival = self.arrivals.pop((receive.op, receive.stage, receive.microbatch))
        with self.runtime.timer.waiting(receive):
            return arrival.wait()

    def as_transfer(self, action: Action) -> Transfer:
        peer = self.runtime.placement.rank_of(peer_stage(action))
        if action.op is Op.RECV_INPUT:
            return Receive(peer, self.input_specs(action, action.stage))
        if action.op is Op.RECV_GRAD:
            return Receive(peer, self.gradient_specs(action, action.stage + 1))
        return Send(peer, self.to_send.pop((action.op, action.stage, action.microbatch)))

    def require_specs(self, action: Action, outputs: Sequence[Tensor]) -> None:
        """Refuse tensors of other specs than the next stage expects: it would read them as something else."""
        returned, expected = tuple(map(TensorSpec.of, outputs)), self.input_specs(action, action.stage + 1)
        if returned != expected:
            names = self.runtime.chunks[self.chunk(action)].names
            returns = (
                f"layer {names[0]!r} returns" if len(names) == 1 else f"layers {', '.join(map(repr, names))} return"
            )
            mode = "training" if self.trains else "evaluation"
            raise UserError(
                f"{returns} ({', '.join(map(str, returned))}) in {mode}, but returned "
                f"({', '.join(map(str, expected))}) when tried in evaluation mode on an input of this shape: shapes "
                "and types of what a stage passes on must depend on those of its input and on nothing else"
            )

    def input_specs(self, action: Action, stage: int) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that a stage after the first receives for the action's microbatch."""
        return self.runtime.task.stage_input_specs(self.microbatches[action.microbatch], stage)

    def gradient_specs(self, action: Action, stage: int) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.input_specs(action, stage) if spec.has_gradient)


# ---- the time of each action
#
# An accelerator computes asynchronously, and the program must not wait for it, or a timed step would not be like the
# others. So a time is an event in the stream that computes, and is read after the step. A receive that was posted ahead
# of its use runs on another stream, and does not delay the event.

_UNTIMED = nullcontext()
Mark = float | torch.Event  # seconds on the wall clock, or a point in the accelerator's work


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """A pass over a schedule; times are seconds on the wall clock."""

    start: float  # when it began
    end: float  # when it ended
    read: float  # when the times were read: after what was computed since
    actions: tuple[Timed, ...]  # with their times, in order

    @property
    def computations(self) -> list[Timed]:
        return [timed for timed in self.actions if timed.kind == "compute"]

    @property
    def busy_seconds(self) -> float:
        return sum(timed.end - timed.start for timed in self.computations)


class _Record(NamedTuple):
    """One entry of the timer: what was done, and the marks before and after it."""

    kind: Kind
    actions: tuple[Action, ...]
    start: Mark
    end: Mark


class ActionTimer:
    """Records the times of the actions of a training step. `tracing`: whether to time its transfers too."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = self.tracing = False  # whether to time the computations of the next step
        self._device = device
        self._records: list[_Record] = []
        self._pass: tuple[Mark, Mark] | None = None
        self.is_open = False

    def measure(self, action: Action) -> AbstractContextManager[None]:
        return _Timing(self, "compute", (action,)) if self.is_open else _UNTIMED

    def waiting(self, *actions: Action) -> AbstractContextManager[None]:
        """Times the wait for the arrival of a tensor, or, without an action, for the last sends."""
        return _Timing(self, "wait", actions) if self.is_open and self.tracing else _UNTIMED

    def posting(self, actions: Sequence[Action]) -> AbstractContextManager[None]:
        return _Timing(self, "post", tuple(actions)) if self.is_open and self.tracing else _UNTIMED

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Times a pass over a schedule, if enabled, and drops the times of the one before."""
        self._records, self._pass = [], None
        if not self.enabled:
            yield
            return
        start, self.is_open = self.mark(), True
        try:
            yield
        finally:
            self.is_open = False
        self._pass = start, self.mark()

    def read(self) -> TimedPass:
        """The times of the last step; waits until an accelerator has computed it."""
        assert self._pass is not None, "the last step was not timed"
        marks = [*self._pass, self.mark(), *(mark for one in self._records for mark in (one.start, one.end))]
        start, end, read, *seconds = self.seconds(marks)
        actions = (
            Timed(one.kind, one.actions, begin, stop)
            for one, begin, stop in zip(self._records, seconds[::2], seconds[1::2], strict=True)
        )
        return TimedPass(start=start, end=end, read=read, actions=tuple(actions))

    def record(self, kind: Kind, actions: tuple[Action, ...], start: Mark) -> None:
        self._records.append(_Record(kind, actions, start, self.mark()))

    def mark(self) -> Mark:
        """The time now; on an accelerator an event after all that is queued now."""
        if self._device.type == "cpu":
            return time.time()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """The wall-clock times of marks that the device has reached when it has computed all that is queued in the
        current stream, by the time between each event and one whose time is known."""
        last = self.mark()
        if isinstance(last, float):
            return [mark for mark in marks if isinstance(mark, float)]
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks if isinstance(mark, torch.Event)]


class _Timing:
    """Times its body; a class, because it costs half as much as a generator."""

    __slots__ = ("_actions", "_kind", "_start", "_timer")

    def __init__(self, timer: ActionTimer, kind: Kind, actions: tuple[Action, ...]) -> None:
        self._timer, self._kind, self._actions = timer, kind, actions

    def __enter__(self) -> None:
        self._start = self._timer.mark()
        self._timer.is_open = False  # a computation that takes turns with this one has no times of its own

    def __exit__(self, *_: object) -> None:
        self._timer.is_open = True
        self._timer.record(self._kind, self._actions, self._start)
