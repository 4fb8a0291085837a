"""The specs of the tensors that stages exchange, from a trial: one forward of a microbatch, stage by stage. The ranks
of the pipeline run their stages in turn, in evaluation mode and without gradients, and send the specs of the outputs to
the others; the next stage runs on zeros of these. A layer that cannot be used is refused on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megacore.errors import UserError
from megacore.parallel.collectives import all_gather_objects
from megacore.pipeline.runtime import PipelineRuntime
from megacore.pipeline.stage import TensorSpec, tensors_of

Specs = tuple[TensorSpec, ...]


class StageShapes:
    """The specs of the inputs of every stage, by those of the model's input. `runtime`: of this rank's stages."""

    def __init__(self, runtime: PipelineRuntime) -> None:
        self._chunks, self._transport, self._placement = runtime.chunks, runtime.transport, runtime.placement
        self._known: dict[Specs, list[Specs]] = {}
        self._cause: Exception | None = None

    def of(self, inputs: Any, stage: int) -> Specs:
        """The specs of the inputs of a stage after the first, for inputs of the model whose specs have been tried."""
        return self._known[_specs_of(inputs)][stage - 1]

    def unknown(self, inputs: Iterable[Any]) -> list[Any]:
        """One of the inputs for each of their specs that have not been tried."""
        return list({key: one for one in inputs if (key := _specs_of(one)) not in self._known}.values())

    @torch.no_grad()
    def learn(self, inputs: Any, first: Any) -> None:
        """Try a microbatch; all ranks of the pipeline call this together. `inputs`: of the model, whose specs are the
        key. `first`: the input of the first layer, on the device if this rank holds that layer. Raises UserError where
        a layer fails, or returns what cannot be sent; with the same message on every rank."""
        group = self._transport.group
        outputs: list[Specs] = []
        for stage in range(self._placement.stages):
            answer: Specs | str = ""
            holder = self._placement.rank_of(stage)
            if holder == group.rank:
                answer = self._try(stage // group.size, self._zeros(outputs[-1]) if outputs else first)
            answer = all_gather_objects(answer, group)[holder]
            if isinstance(answer, str):
                raise UserError(answer) from self._cause
            outputs.append(answer)
        self._known[_specs_of(inputs)] = outputs[:-1]

    def _try(self, chunk: int, x: Any) -> Specs | str:
        """The specs of a stage's outputs, or the message of an error."""
        stage = self._chunks[chunk].eval()
        for index, name in enumerate(stage.names):
            given = ", ".join(map(str, _specs_of(x)))
            try:
                x = stage.run_layer(index, x)
            except Exception as error:
                self._cause = error
                return f"layer {name!r} fails on its input ({given}): {type(error).__name__}: {error}"
            if wrong := _wrong_output(x):
                return f"layer {name!r} returns {wrong}: it must return a tensor, or a tuple of two tensors or more"
        return _specs_of(x)

    def _zeros(self, specs: Specs) -> Any:
        tensors = tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=self._transport.device) for spec in specs)
        return tensors[0] if len(tensors) == 1 else tensors


def _wrong_output(value: Any) -> str | None:
    try:
        count = len(tensors_of(value))
    except TypeError:
        inside = f" of {', '.join(type(v).__name__ for v in value)}" if isinstance(value, tuple) else ""
        return f"a {type(value).__name__}{inside}"
    return f"a tuple of {count}" if isinstance(value, tuple) and count < 2 else None


def _specs_of(value: Any) -> Specs:
    return tuple(TensorSpec.of(tensor) for tensor in tensors_of(value))
