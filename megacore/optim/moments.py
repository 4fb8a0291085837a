"""Adam's moments in fewer bits than fp32: how an update reaches them, part by part. The update itself is computed in
fp32: a part is read into new fp32 tensors, updated, and written back. What is written depends on the parameter, the
number of the update and positions in the whole parameter only, so that every layout keeps the same numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.config.optimizers import PART, StateKind
from megacore.parallel.sharding import ShardSpec
from megacore.zero.local_segments import LocalRun, LocalSegment


class Moments(NamedTuple):
    """The means and the squares of a part, each [n] fp32."""

    mean: Tensor
    square: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Consecutive elements of a segment, which are updated at a time."""

    local: LocalSegment
    in_segment: slice  # its elements of the segment
    in_run: slice  # its elements of the run


class KeptMoments(ABC):
    """The moments of what this rank updates. An optimizer reads a part, updates its values, writes it, and once all
    parts are written, settles. `kinds`: of the mean and of the square. `state`: of the optimizer, where the tensors are
    kept."""

    def __init__(
        self,
        segments: Sequence[LocalSegment],
        kinds: tuple[StateKind, ...],
        state: Mapping[LocalRun, dict[str, Tensor]],
    ) -> None:
        self.kinds, self.state = kinds, state
        self.parts: dict[LocalRun, list[Part]] = {local.run: [] for local in segments}
        for local in segments:
            first = local.segment.shard_slice.start - local.run.shard_slice.start
            for elements in self.elements_of_parts(local):
                in_run = slice(first + elements.start, first + elements.stop)
                self.parts[local.run].append(Part(local=local, in_segment=elements, in_run=in_run))

    def elements_of_parts(self, local: LocalSegment) -> list[slice]:
        """The parts into which a segment is divided, each as its elements of the segment."""
        size = local.segment.stop - local.segment.start
        return [slice(first, min(first + PART, size)) for first in range(0, size, PART)]

    @abstractmethod
    def read(self, part: Part) -> Moments:
        """The values of a part, in new tensors; zeros before the first update."""

    @abstractmethod
    def write(self, part: Part, moments: Moments, step: Tensor) -> None:
        """Keep the values of a part after an update; they may change. `step`: number of the update, a scalar."""

    @abstractmethod
    def values(self, local: LocalSegment, column: int) -> Tensor | None:
        """The values of a segment, flat; None before the first update. `column`: 0 for the mean, 1 for the square."""

    @abstractmethod
    def set_values(self, local: LocalSegment, column: int, values: Tensor) -> None:
        """Keep values of a segment, rounded to the nearest, until `settle`; other arguments as for `values`."""

    @abstractmethod
    def settle(self) -> None:
        """Keep what needs numbers of other ranks; all ranks call this together, after writing."""

    @property
    def waits(self) -> bool:
        """Whether `settle` has anything to do, on any rank."""
        return False


def local_shape(local: LocalSegment) -> tuple[int, ...]:
    """The shape of the local tensor of a segment's parameter, with padding."""
    return next(tuple(p.shape) for p in local.bucket.parameters if p.spec.name == local.spec.name)


def global_indices(spec: ShardSpec, shape: tuple[int, ...], start: int, stop: int, device: torch.device) -> Tensor:
    """The positions of elements in the flat global tensor, [stop - start] int64; at least its size for padding. `spec`:
    the global tensor, and the slice of it that the local one holds. `shape`: of the local tensor, with padding.
    `start`: the first element of the flat local tensor."""
    flat = torch.arange(start, stop, device=device)
    if not shape:
        return flat
    if shape[1:] == spec.shape[1:]:
        (first, last), width = spec.slices[0], math.prod(spec.shape[1:])
        held = (last - first) * width
        index = flat + first * width
        return index if stop <= held else index.masked_fill_(flat >= held, spec.shape[0] * width)
    index, coordinate = torch.zeros_like(flat), torch.empty_like(flat)
    padding = torch.zeros_like(flat, dtype=torch.bool)
    stride, inner = 1, 1
    for size, whole, (first, last) in zip(reversed(shape), reversed(spec.shape), reversed(spec.slices), strict=True):
        torch.div(flat, inner, rounding_mode="floor", out=coordinate).remainder_(size)
        padding |= coordinate >= last - first
        index += coordinate.add_(first).mul_(stride)
        stride, inner = stride * whole, inner * size
    return index.masked_fill_(padding, stride)
