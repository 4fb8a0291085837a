"""What a microbatch is for the loader and the trainer: tensors by name, and its number in the run. A dataset's samples
are dicts of arrays; a batch type is a frozen dataclass with a tensor of the same name for each, stacked along a new
first dimension. Nothing here imports torch, so that a batch type can be named beside its dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one forward pass reads: every other field of a batch type is a tensor."""

    index: int  # global number of the microbatch in the run, the same for every layout

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        names = (field.name for field in fields(self) if field.name != "index")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)
