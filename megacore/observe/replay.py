"""Computes one microbatch of a step again, and compares its loss and gradients with the first time, bit by bit.

A processor that sometimes computes wrongly spoils a run without a trace: its error is averaged into the gradients of
all replicas, which stay equal. The same rank computing the same microbatch twice is the only witness. The second pass
follows the step's schedule without the other microbatches, before the weights change; its gradients are hashed and
dropped, and what layers write into their buffers is undone. Training does not see it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.errors import ConfigError, SilentCorruption
from megacore.observe.bit_hash import bit_hash
from megacore.parallel.collectives import all_gather_objects, all_reduce_job_
from megacore.parallel.fp8 import fp8_products
from megacore.parallel.mesh import Mesh
from megacore.pipeline.runtime import LossWeight
from megacore.pipeline.schedule import Op, Schedule
from megacore.train.parallelize import ParallelModel
from megacore.train.step_hooks import ComputesGradients, StepHook
from megacore.zero.data_parallel import DataParallel

_LOSS = "the loss"


class Replay(StepHook):
    """Replays a microbatch every `--replay-interval` steps; all ranks call each method together. `model`: this rank's
    part of the model. Raises ConfigError where operators of the device may give other bits each time, or the schedule
    has no microbatch that comes first everywhere."""

    def __init__(self, model: ParallelModel, config: ResolvedConfig, mesh: Mesh) -> None:
        self._model, self._mesh, self._interval = model, mesh, config.watch.replay_interval
        training, given = config.training, f"--replay-interval {self._interval}"
        if mesh.device.type != "cpu" and not (training.reproducible or training.deterministic):
            raise ConfigError(
                [
                    f"{given} compares bits, but operators of {mesh.device.type} may add in another order each time: "
                    "add --deterministic, or leave --replay-interval out"
                ]
            )
        count = training.global_batch_size // training.micro_batch_size // mesh.batch.size
        # Only the gradients of the first backward are to be seen before others are added to them.
        number = _first_backward(model.runtime.schedule(count, trains=True))
        if number is None:
            raise ConfigError(
                [
                    f"{given} needs one microbatch that comes first in the backward of every stage, but in "
                    f"--schedule-csv {config.parallel.schedule_csv} stages begin with different ones: change the "
                    "schedule, or leave --replay-interval out"
                ]
            )
        self._number = number

    def computes(self, step: int) -> ComputesGradients | None:
        """The steps of which a microbatch is replayed."""
        return None if step % self._interval else partial(self.train_step, step=step)

    def train_step(self, microbatches: Sequence[Any], loss_weight: LossWeight, *, step: int) -> Tensor:
        """`PipelineRuntime.train_step`, and the first microbatch of it once more; waits for an accelerator. Raises
        SilentCorruption where a rank did not get the same numbers again; on every rank, with the same text."""
        runtime, data_parallel = self._model.runtime, self._model.data_parallel
        buffers = [buffer for chunk in self._model.chunks for buffer in chunk.buffers()]
        before = [buffer.clone() for buffer in buffers]
        once = _Recorded(data_parallel, self._number, discards=False)
        with data_parallel.observed_by(once):
            loss = runtime.train_step(microbatches, loss_weight, once, on_loss=once.see_loss)
        after = [buffer.clone() for buffer in buffers]
        # Layers write into their buffers in forward; training must not see the second pass.
        _set(buffers, before)
        for products in (found for chunk in self._model.chunks for found in fp8_products(chunk)):
            # What is kept of the first pass would hide an error in it.
            products.kept = None if products.kept is None else {}  # quantised again too
        again = _Recorded(data_parallel, self._number, discards=True)
        with data_parallel.observed_by(again):
            runtime.replay(microbatches, self._number, loss_weight, again, on_loss=again.see_loss)
        _set(buffers, after)
        self._compare(once.hashes, again.hashes, step=step, microbatch=microbatches[self._number].index)
        return loss

    def _compare(self, once: dict[str, Tensor], again: dict[str, Tensor], *, step: int, microbatch: int) -> None:
        names = once.keys() | again.keys()
        pad = torch.zeros((), dtype=torch.int64, device=self._mesh.device)  # a stage may have no parameter
        first, second = (torch.stack([pad, *(seen.get(name, pad) for name in names)]) for seen in (once, again))
        different = (first != second).any().to(torch.int64)
        if not all_reduce_job_(different, self._mesh, "max").item():
            return
        ordered = [_LOSS, *(parameter.spec.name for parameter in self._model.data_parallel.parameters)]
        own = [name for name in ordered if int(once.get(name, pad)) != int(again.get(name, pad))]
        compared = len(names - {_LOSS})
        everyone = all_gather_objects((socket.gethostname(), microbatch, own, compared), self._mesh.world)
        lines = [
            f"  rank {rank} ({self._mesh.describe(rank)}, on {host}), microbatch {index}: {_in_words(names, compared)}"
            for rank, (host, index, names, compared) in enumerate(everyone)
            if names
        ]
        raise SilentCorruption(
            "\n".join(
                [
                    f"step {step}: a microbatch that was computed again gave other numbers",
                    *lines,
                    "the weights are those of the step before, and no checkpoint is written of this one. A processor "
                    "or memory may be faulty: continue with --load auto, and without that machine if it happens again "
                    "(docs/guides/watching.md)",
                ]
            )
        )


class _Recorded:
    """The gradients of the first backward of every stage, as hashes by parameter, and the loss of microbatch
    `number`."""

    def __init__(self, data_parallel: DataParallel, number: int, *, discards: bool) -> None:
        self._data_parallel, self._number, self.discards = data_parallel, number, discards
        self.hashes: dict[str, Tensor] = {}  # by the parameter's name; of the loss where this rank computes it
        self._begun: set[int] = set()
        self._records = False

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None:
        """Record, if it is the chunk's first."""
        self._records = chunk not in self._begun
        self._begun.add(chunk)
        if self.discards and all_weights:
            self._data_parallel.gather_parameters(chunk)
        elif not self.discards:
            self._data_parallel.begin_backward(chunk, last=last, all_weights=all_weights)

    def end_backward(self, chunk: int) -> None:
        """Record no longer."""
        if self.discards:
            self._data_parallel.release_parameters(chunk)
        else:
            self._data_parallel.end_backward(chunk)
        self._records = False

    def see(self, name: str, gradient: Tensor) -> None:
        """A gradient of the backward under way; of several of one parameter the sum of the hashes is kept."""
        if self._records:
            new = bit_hash(gradient)
            self.hashes[name] = self.hashes[name] + new if name in self.hashes else new

    def see_loss(self, microbatch: int, loss: Tensor) -> None:
        if microbatch == self._number:
            self.hashes[_LOSS] = bit_hash(loss)


@torch.no_grad()
def _set(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _in_words(names: Sequence[str], compared: int) -> str:
    """What differs on a rank; names in the order of the forward."""
    gradients = [name for name in names if name != _LOSS]
    parts = [_LOSS] if _LOSS in names else []
    if gradients:
        span = gradients[0] if len(gradients) == 1 else f"first {gradients[0]}, last {gradients[-1]}"
        parts.append(f"the gradients of {counted(len(gradients), 'parameter')} of {compared} (in forward order {span})")
    return " and ".join(parts)


def _first_backward(schedule: Schedule) -> int | None:
    """The microbatch whose weight gradients every stage computes before those of others; None: stages differ."""
    first: dict[int, int] = {}  # by stage
    for rank in range(schedule.ranks):
        for action in schedule.computations(rank):
            if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD):
                first.setdefault(action.stage, action.microbatch)
    numbers = set(first.values())
    return numbers.pop() if len(numbers) == 1 else None
