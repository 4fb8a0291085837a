"""Microbatches of any model: a pair of inputs and targets, cut from a batch and moved to where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Any, Any]  # inputs and targets of a microbatch


@dataclass(frozen=True, kw_only=True)
class PlainMicrobatch:
    """What the runtime is given of a microbatch.

    Attributes:
        index: global number in the run, the same for every layout.
        inputs: of the model's first layer.
        targets: for the loss.
        count: terms of its loss, an fp64 scalar.
    """

    index: int
    inputs: Any
    targets: Any
    count: Tensor


def samples_of(inputs: Any) -> int:
    """The first dimension of a tensor, or of the first of a tuple."""
    return int((inputs if isinstance(inputs, Tensor) else inputs[0]).shape[0])


def cut(value: Any, pieces: int) -> list[Any]:
    """A tensor, or each of a tuple, cut along the first dimension as evenly as it goes."""
    if isinstance(value, Tensor):
        return list(value.tensor_split(pieces))
    return list(zip(*(cut(part, pieces) for part in value), strict=True))


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or each of a tuple, on the device; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
