"""Executes a schedule: a small loop over a rank's actions.

What an action means is here; in which order actions come is the schedule's business alone. Training and evaluation run
through the same loop, and so does a model on one stage, whose schedule has no transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.pipeline.schedule import Action, Op, forward_only, one_forward_one_backward
from megacore.pipeline.stage import Stage
from megacore.pipeline.transport import Transfer, Transport


class GradientSink(Protocol):
    """Who takes the gradients that appear during a backward."""

    def begin_backward(self, *, last: bool) -> None:
        """A microbatch's backward begins; `last` says that it completes the gradients."""

    def end_backward(self) -> None:
        """All of the microbatch's gradients are there."""


class PipelineRuntime:
    """Runs microbatches through this rank's stage.

    Args:
        stage: this rank's layers.
        group: the pipeline group.
        transport: how tensors reach the neighbouring stages.
        streams: told which microbatch is being computed.
        first_input: microbatch -> input of the model's first layer.
        loss: (output of the last layer, microbatch) -> summed loss of the microbatch.
        eval_loss: the same for `evaluate`; None: `loss`.
    """

    def __init__(
        self,
        stage: Stage,
        group: Group,
        *,
        transport: Transport,
        streams: RandomStreams,
        first_input: Callable[[Any], Tensor],
        loss: Callable[[Tensor, Any], Tensor],
        eval_loss: Callable[[Tensor, Any], Tensor] | None = None,
    ) -> None:
        self.stage, self.group, self.transport, self.streams = stage, group, transport, streams
        self.first_input, self.loss, self.eval_loss = first_input, loss, eval_loss or loss

    def train_step(
        self, microbatches: Sequence[Any], loss_scale: Callable[[], Tensor | float], gradients: GradientSink
    ) -> Tensor:
        """Forward and backward of all microbatches; gradients accumulate in the parameters.

        Args:
            microbatches: this data-parallel rank's share of the global batch; each has a global `index`.
            loss_scale: factor of the summed loss before backward (one over the global batch's tokens); asked for as
                late as possible, so that its reduction overlaps with the first forward.
            gradients: told when a microbatch's backward begins and ends.

        Returns:
            The summed loss of the microbatches, unscaled, on the last stage; 0 elsewhere.
        """
        self.stage.train()
        actions = one_forward_one_backward(self.group.rank, self.group.size, len(microbatches))
        return _Run(self, microbatches, loss_scale, gradients).execute(actions)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed `eval_loss` of the microbatches on the last stage; 0 elsewhere. Dropout is off."""
        self.stage.eval()
        actions = forward_only(self.group.rank, self.group.size, len(microbatches))
        return _Run(self, microbatches).execute(actions)


class _Run:
    """The state of one pass over a list of actions: what is in flight."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        microbatches: Sequence[Any],
        loss_scale: Callable[[], Tensor | float] | None = None,
        gradients: GradientSink | None = None,
    ) -> None:
        self.runtime, self.microbatches = runtime, microbatches
        self.loss_scale, self.sink = loss_scale, gradients
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.backwards_left = len(microbatches)
        self.total_loss = torch.zeros((), dtype=torch.float64, device=next(runtime.stage.parameters()).device)

    def execute(self, actions: Sequence[Action]) -> Tensor:
        for is_transfer, run in groupby(actions, key=lambda action: action.op.is_transfer):
            if is_transfer:
                self.transfer(list(run))
                continue
            for action in run:
                self.forward(action.microbatch) if action.op is Op.FORWARD else self.backward(action.microbatch)
        self.runtime.transport.drain()
        return self.total_loss

    def forward(self, i: int) -> None:
        runtime, microbatch = self.runtime, self.microbatches[i]
        x = runtime.first_input(microbatch) if runtime.group.is_first else self.inputs[i]
        with runtime.streams.microbatch(microbatch.index):
            output = runtime.stage(x)
        if runtime.group.is_last:
            loss = runtime.eval_loss if self.loss_scale is None else runtime.loss
            output = loss(output, microbatch)
            # A multiple of 2^-24: fp64 sums of a few hundred million of them are exact, and so equal on every layout.
            self.total_loss += output.detach().double().mul_(2.0**24).round_().mul_(2.0**-24)
        if self.loss_scale is None:
            self.inputs.pop(i, None)
            if runtime.group.is_last:
                return
        self.outputs[i] = output

    def backward(self, i: int) -> None:
        assert self.loss_scale is not None
        assert self.sink is not None
        self.backwards_left -= 1
        self.sink.begin_backward(last=self.backwards_left == 0)
        output = self.outputs.pop(i)
        if self.runtime.group.is_last:
            (output * self.loss_scale()).backward()
        else:
            torch.autograd.backward(output, self.gradients.pop(i))
        self.sink.end_backward()

    def transfer(self, actions: Sequence[Action]) -> None:
        """Post a run of transfers together, then file what came in."""
        received = iter(self.runtime.transport.exchange([self._as_transfer(action) for action in actions]))
        for action in actions:
            if action.op is Op.RECV_INPUT:
                self.inputs[action.microbatch] = next(received).requires_grad_(self.loss_scale is not None)
            elif action.op is Op.RECV_GRAD:
                self.gradients[action.microbatch] = next(received)

    def _as_transfer(self, action: Action) -> Transfer:
        rank, i = self.runtime.group.rank, action.microbatch
        if action.op is Op.RECV_INPUT:
            return Transfer(rank - 1)
        if action.op is Op.RECV_GRAD:
            return Transfer(rank + 1)
        if action.op is Op.SEND_OUTPUT:
            output = self.outputs[i] if self.loss_scale is not None else self.outputs.pop(i)
            return Transfer(rank + 1, output.detach())
        gradient = self.inputs.pop(i).grad
        assert gradient is not None
        return Transfer(rank - 1, gradient)
