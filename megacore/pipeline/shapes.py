"""Which tensors stages hand to each other, found by trying: one forward of a microbatch, stage by stage.

Every rank of the pipeline tries its own stages in turn, in evaluation mode and without gradients, and tells the others
the forms of what came out; the next stage tries zeros of these forms. A layer that cannot be used is refused on all
ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megacore.errors import UserError
from megacore.parallel.collectives import all_gather_objects
from megacore.pipeline.runtime import Forms
from megacore.pipeline.stage import Stage, tensors_of
from megacore.pipeline.transport import TensorForm, Transport

Key = tuple[TensorForm, ...]


class StageForms:
    """The forms that every stage receives, by those of the model's input.

    Args:
        chunks: the stages of this rank.
        names: of each of their layers, for messages.
        transport: of the pipeline.
    """

    def __init__(self, chunks: Sequence[Stage], names: Sequence[Sequence[str]], transport: Transport) -> None:
        self._chunks, self._names, self._transport = chunks, names, transport
        self._found: dict[Key, Forms] = {}
        self._cause: Exception | None = None

    def of(self, inputs: Any) -> Forms:
        """What every stage receives for these inputs of the model, whose forms have been tried."""
        return self._found[_key(inputs)]

    def unknown(self, inputs: Iterable[Any]) -> list[Any]:
        """One of each of the forms that have not been tried."""
        return list({key: one for one in inputs if (key := _key(one)) not in self._found}.values())

    @torch.no_grad()
    def find(self, inputs: Any) -> None:
        """Try a microbatch; all ranks of the pipeline call this together.

        Args:
            inputs: of the model's first layer, on the device where this rank holds that layer.

        Raises:
            UserError: a layer fails, or returns what cannot be handed on; with the same message on every rank.
        """
        group = self._transport.group
        forms: list[Key | None] = [None]
        for stage in range(len(self._chunks) * group.size):
            answer: Key | str = ""
            if stage % group.size == group.rank:
                before = forms[-1]
                answer = self._try(stage // group.size, inputs if before is None else self._zeros(before))
            answer = all_gather_objects(answer, group)[stage % group.size]
            if isinstance(answer, str):
                raise UserError(answer) from self._cause
            forms.append(answer)
        self._found[_key(inputs)] = forms[:-1]

    def _try(self, chunk: int, x: Any) -> Key | str:
        """The forms of a stage's outputs, or what is wrong."""
        stage = self._chunks[chunk].eval()
        for index, (layer, name) in enumerate(zip(stage.layers, self._names[chunk], strict=True)):
            given = ", ".join(map(str, _key(x)))
            try:
                x = stage.run_layer(index, layer, x)
            except Exception as error:
                self._cause = error
                return f"layer {name!r} fails on its input ({given}): {type(error).__name__}: {error}"
            if wrong := _wrong_output(x):
                return f"layer {name!r} returns {wrong}: it must return a tensor, or a tuple of two tensors or more"
        return _key(x)

    def _zeros(self, forms: Key) -> Any:
        tensors = tuple(torch.zeros(form.shape, dtype=form.dtype, device=self._transport.device) for form in forms)
        return tensors[0] if len(tensors) == 1 else tensors


def _wrong_output(value: Any) -> str | None:
    try:
        count = len(tensors_of(value))
    except TypeError:
        inside = f" of {', '.join(type(v).__name__ for v in value)}" if isinstance(value, tuple) else ""
        return f"a {type(value).__name__}{inside}"
    return f"a tuple of {count}" if isinstance(value, tuple) and count < 2 else None


def _key(value: Any) -> Key:
    return tuple(TensorForm.of(tensor) for tensor in tensors_of(value))
