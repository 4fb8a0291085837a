"""Why a step was not finite: weights, moments, hardware, data or overflow; which layer, rank, microbatch and samples.

It runs only after such a step, whose weights are as before, and may take the time of a few steps. All ranks take part:

1. Weights and moments are counted. What is not finite there never heals.
2. The step is computed again, with the same dropout masks, which belong to the microbatch. If it is finite now,
   hardware is to blame, and no sample.
3. The losses of the microbatches say which of them are bad. The first of these runs forward again, and the outputs of
   all layers are looked at, in forward order.
4. If all losses are finite, a gradient is not: the step is computed again with some of its microbatches in place of the
   others, by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from megacore.config.messages import ranks_in_words
from megacore.data import KnowsDocuments
from megacore.optim.nonfinite import IMPLAUSIBLE_WEIGHT, Culprit, NonFinite, describe_non_finite
from megacore.parallel.collectives import all_gather_objects
from megacore.pipeline.stage import tensors_of
from megacore.train.step import BatchLossWeight, Diagnosis, TrainStep

_LARGE = {"fp16": 1e3, "bf16": 1e12, "fp32": 1e12}
"""Activations above this are near an overflow, because products of them are summed; by --precision."""
_WRONG_FROM_THE_START = (
    "no useful weight is as large as this one, and no step has updated it: the model is wrong from the start; use "
    "--init-method-std 0.02, or other weights to start from"
)
IMPLAUSIBLE_LOSS = 1e3
"""No useful loss is that large: a model that knows nothing has the logarithm of the vocabulary's size."""
_MOST_NAMED = 4  # documents


class _Microbatch(NamedTuple):
    """A microbatch of the step."""

    replica: int  # rank in the batch group
    number: int  # in the step
    in_run: int  # its number in the run
    loss: float  # summed, or NaN
    bad_inputs: tuple[str, ...]  # names of its tensors that are not finite

    def with_part(self, other: _Microbatch) -> _Microbatch:
        """The same microbatch with what another rank has of its sequences."""
        bad = tuple(dict.fromkeys(self.bad_inputs + other.bad_inputs))
        return self._replace(loss=self.loss + other.loss, bad_inputs=bad)


class _Output(NamedTuple):
    """The output of a layer: its place in forward order, whether it is finite, its largest finite magnitude."""

    layer: int
    name: str
    rank: int
    replica: int
    is_finite: bool
    largest: float


class _Again(NamedTuple):
    """A step that was computed again: whether losses and gradients are finite, and the first gradient that is not."""

    is_finite: bool
    culprit: Culprit | None


def diagnose(steps: TrainStep, microbatches: Sequence[Any], weight: BatchLossWeight, *, last_loss: float) -> Diagnosis:
    """Find the cause; all ranks call this together, after a step that was skipped. `last_loss`: mean loss of the last
    step that updated the weights."""
    non_finite = steps.update.non_finite_state()
    if non_finite:
        is_weight = any("weight" in each.kind for each in non_finite)
        text = f"first in forward order {describe_non_finite(non_finite)}; no later step can be finite"
        fault = fault_in_words(steps, non_finite)
        return Diagnosis(
            cause="weights" if is_weight else "moments",
            lines=(text,) if fault is None else (text, fault),
            is_permanent=True,
            is_corruption=fault is not None,
        )
    largest, remarks = steps.update.largest_weight(), list[str]()
    if last_loss >= IMPLAUSIBLE_LOSS:
        remarks.append(
            f"the loss of the last step that updated the weights was {last_loss:.3g}: training had diverged already"
        )
    if largest.value >= IMPLAUSIBLE_WEIGHT and steps.update.updates == 0:
        remarks.append(_WRONG_FROM_THE_START)
    elif largest.value >= IMPLAUSIBLE_WEIGHT:
        remarks.append("no useful weight is as large as this one: training had diverged already")
    found = _Case(steps, microbatches, weight).diagnosis(remarks)
    names_remedy = _WRONG_FROM_THE_START in remarks
    return replace(found, lines=(*found.lines, str(largest)), names_remedy=names_remedy)


def fault_in_words(steps: TrainStep, non_finite: Sequence[NonFinite]) -> str | None:
    """Why a fault of a machine made weights or moments not finite; None where that is open. All ranks call this
    together."""
    first = non_finite[0]
    copies = steps.update.copies_of(first)
    if not copies.finite:
        return None
    return (
        f"its copies on {ranks_in_words(copies.finite)} are finite, and updates are equal on all copies: memory or a "
        f"processor of {copies.host} (rank {first.rank}) may be faulty"
    )


class _Case:
    """The step that was not finite."""

    def __init__(self, steps: TrainStep, microbatches: Sequence[Any], weight: BatchLossWeight) -> None:
        self._steps, self._microbatches, self._weight = steps, list(microbatches), weight
        self._mesh, self._model = steps.mesh, steps.model
        self._replicas: list[int] = all_gather_objects(self._mesh.batch.rank, self._mesh.world)  # of every rank
        self._everyone = self._losses()

    @property
    def _bad(self) -> list[_Microbatch]:
        return [each for each in self._everyone if not math.isfinite(each.loss)]

    def diagnosis(self, remarks: Sequence[str]) -> Diagnosis:
        """The cause; `remarks` show that training had diverged before."""
        if (broken := next((each for each in self._bad if each.bad_inputs), None)) is not None:
            text = f"{' and '.join(broken.bad_inputs)} of {self._describe(broken)} has numbers that are not finite"
            return Diagnosis(cause="data", lines=(text, *remarks))
        before, again = self._bad, self._backward(range(len(self._microbatches)))
        if again.is_finite:
            return self._of_hardware(before, remarks)
        self._everyone = self._losses()
        return self._of_loss(remarks) if self._bad else self._of_gradient(again.culprit, remarks)

    def _losses(self) -> list[_Microbatch]:
        """Every microbatch of the step, by its number in the run."""
        mesh, mine = self._mesh, list[_Microbatch]()
        for number, loss in self._model.runtime.losses.items() if mesh.layer.is_first and mesh.copies.is_first else ():
            microbatch = self._microbatches[number]
            bad_inputs = tuple(_bad_inputs(microbatch))
            mine.append(_Microbatch(mesh.batch.rank, number, microbatch.index, float(loss.sum()), bad_inputs))
        whole: dict[int, _Microbatch] = {}
        for each in (each for of_rank in all_gather_objects(mine, mesh.world) for each in of_rank):
            held = whole.get(each.in_run)  # by another rank, of other positions
            whole[each.in_run] = each if held is None else held.with_part(each)
        return sorted(whole.values(), key=lambda each: each.in_run)

    def _of_hardware(self, before: Sequence[_Microbatch], remarks: Sequence[str]) -> Diagnosis:
        """The cause of a step that is finite if it is computed again; `before` are the microbatches that were not at
        first."""
        lines = ["the step is finite if it is computed again, with the same weights and samples"]
        if before:
            ranks = [rank for rank, replica in enumerate(self._replicas) if replica == before[0].replica]
            where = f"microbatch {before[0].number} of replica {before[0].replica} ({ranks_in_words(ranks)})"
            lines.insert(0, f"the loss of {self._share(before)} was not finite, first that of {where}")
        if remarks:  # near an overflow, rounding decides, which need not be the same
            return Diagnosis(cause="overflow", lines=(*lines, *remarks), suspects_weights=True)
        lines.append(
            "memory or a processor may be faulty, or a computation not deterministic; the data is not to blame"
        )
        return Diagnosis(cause="hardware", lines=tuple(lines), is_corruption=True)

    def _share(self, bad: Sequence[_Microbatch]) -> str:
        return f"{len(bad)} of {len(self._everyone)} microbatches"

    def _of_loss(self, remarks: Sequence[str]) -> Diagnosis:
        first = self._bad[0]
        lines = [f"the loss of {self._share(self._bad)} is not finite, first that of {self._describe(first)}", *remarks]
        outputs = [each for each in self._forward(first.number) if each.replica == first.replica]
        culprit = next((each for each in outputs if not each.is_finite), None)
        before = (each.largest for each in outputs if culprit is None or each.layer < culprit.layer)
        largest = max(before, default=0.0)
        if culprit is not None:
            where = f"the output of {culprit.name} on rank {culprit.rank}"
            lines.append(f"first not finite in forward order: {where}, after activations of up to {largest:.3g}")
        if remarks or largest >= _LARGE[self._steps.config.precision.precision]:
            return Diagnosis(cause="overflow", lines=tuple(lines), suspects_weights=True)
        return self._data_or_not(lines, others_are_finite=len(self._bad) < len(self._everyone))

    def _of_gradient(self, culprit: Culprit | None, remarks: Sequence[str]) -> Diagnosis:
        """The cause of gradients that are not finite, where all losses are finite; `culprit` is the first of them."""
        numbers = list(range(len(self._microbatches)))
        if culprit is None:
            text = "each gradient is finite: their sum overflowed"
            return Diagnosis(cause="overflow", lines=(text, *remarks), suspects_weights=bool(remarks))
        # By halves: a few steps find the microbatch, where one at a time would take a step for each.
        while len(numbers) > 1:
            half = numbers[: len(numbers) // 2]
            numbers = half if self._backward(half).culprit is not None else numbers[len(numbers) // 2 :]
        # Once more by itself: gradients of one half may each be finite, and their sum not.
        (number,), culprit = numbers, self._backward(numbers).culprit
        if culprit is None:
            text = "the gradient of no microbatch alone is not finite: a sum of them overflowed"
            return Diagnosis(cause="overflow", lines=(text, *remarks), suspects_weights=bool(remarks))
        replica = self._replicas[culprit.rank]
        which = next(each for each in self._everyone if (each.replica, each.number) == (replica, number))
        lines = (f"first in the backward of {self._describe(which)}: the gradient of {culprit}", *remarks)
        # In fp16 scaled gradients overflow at 65,504, which is no sign of bad data.
        if remarks or self._steps.config.precision.precision == "fp16":
            return Diagnosis(cause="overflow", lines=lines, suspects_weights=bool(remarks))
        others = [each for each in range(len(self._microbatches)) if each != number]
        is_alone = {self._replicas[rank] for rank in culprit.ranks} == {replica} and len(self._everyone) > 1
        return self._data_or_not(lines, others_are_finite=is_alone and not (others and self._backward(others).culprit))

    def _data_or_not(self, lines: Sequence[str], *, others_are_finite: bool) -> Diagnosis:
        if others_are_finite:
            return Diagnosis(cause="data", lines=(*lines, "other microbatches are finite with the same weights"))
        lines = (*lines, "weights and moments are finite")
        return Diagnosis(cause="undetermined", lines=tuple(lines), suspects_weights=True)

    def _describe(self, microbatch: _Microbatch) -> str:
        """Where the microbatch was, its samples, and their documents where the data know them."""
        dataset, size = self._steps.dataset, self._steps.config.training.micro_batch_size
        text = f"microbatch {microbatch.number} of replica {microbatch.replica} (rank "
        text += str(self._replicas.index(microbatch.replica))
        if dataset is None:
            return f"{text})"
        samples = range(microbatch.in_run * size, (microbatch.in_run + 1) * size)
        text += f"; sample{'' if size == 1 else 's'} {samples.start:,}"
        text += "" if size == 1 else f" to {samples.stop - 1:,}"
        if not isinstance(dataset, KnowsDocuments):
            return f"{text})"
        documents = list(dict.fromkeys(dataset.documents_of(sample) for sample in samples))
        more = f" and {len(documents) - _MOST_NAMED} more" if len(documents) > _MOST_NAMED else ""
        return f"{text}: {'; '.join(documents[:_MOST_NAMED])}{more})"

    # ---- the step once more

    def _forward(self, number: int) -> list[_Output]:
        """The outputs of all layers for microbatch `number` of each replica, in forward order; in evaluation mode."""
        mesh, outputs = self._mesh, list[_Output]()

        def look(layer: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                numbers = [tensor.detach().float() for tensor in tensors_of(output) if tensor.is_floating_point()]
                finite = all(bool(tensor.isfinite().all()) for tensor in numbers)
                largest = max((float(_magnitude(tensor)) for tensor in numbers), default=0.0)
                outputs.append(_Output(layer, name, mesh.world.rank, mesh.batch.rank, finite, largest))

            return hook

        with ExitStack() as stack:
            for chunk in self._model.chunks:
                stage = self._model.stages[self._model.runtime.stages[chunk.number]]
                for layer, name, module in zip(stage, chunk.names, chunk.layers, strict=True):
                    stack.enter_context(module.register_forward_hook(look(layer, name)))
            self._model.runtime.evaluate([self._microbatches[number]])
        return sorted(each for of_rank in all_gather_objects(outputs, mesh.world) for each in of_rank)

    def _backward(self, numbers: Sequence[int]) -> _Again:
        """Compute the step with only some of its microbatches, each as often as it takes."""
        count, model, steps, weight = len(self._microbatches), self._model, self._steps, self._weight
        chosen = [self._microbatches[numbers[position % len(numbers)]] for position in range(count)]
        kept = [(buffer, buffer.clone()) for chunk in model.chunks for buffer in chunk.buffers()]
        model.data_parallel.begin_step(steps.update.scaler.scale, compresses=False)
        loss = model.runtime.train_step(chosen, weight, model.data_parallel)
        for buffer, before in kept:
            buffer.copy_(before)
        norm = steps.update.gradient_norm(loss, step=steps.step, per_count=weight.per_count())
        return _Again(bool(norm.isfinite()), steps.update.non_finite_gradient())


def _magnitude(tensor: Tensor) -> Tensor:
    """The largest finite magnitude; 0 where there is none."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax() if tensor.numel() else tensor.new_zeros(())


def _bad_inputs(microbatch: Any) -> Iterator[str]:
    """The fields of a microbatch that hold numbers that are not finite."""
    for field in fields(microbatch):
        value = getattr(microbatch, field.name)
        tensors = [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor)]
        if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in tensors):
            yield field.name
