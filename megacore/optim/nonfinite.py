"""Which weights, moments and gradients are not finite, of all ranks, in the order in which the forward uses them.
Weights and moments: for the launch, for saves, and after a step in which something was not finite; all of the state is
read. Gradients: in such a step."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacore.optim.optimizer import Optimizer
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import Slices
from megacore.zero.data_parallel import DataParallel, NonFiniteGradient
from megacore.zero.local_segments import LocalSegment

WEIGHT = "weight"
IMPLAUSIBLE_WEIGHT = 1e12
"""No useful weight is that large, and products of such weights are near an overflow."""
ROUNDED = "rounded weight"
"""The weight in the 16-bit format of training, where the fp32 weight itself is finite."""


@dataclass(frozen=True, order=True)
class NonFinite:
    """A tensor that is not finite on a rank; in order of their use in the forward."""

    stage: int  # number of the pipeline stage
    position: int  # of the parameter among those of its rank
    rank: int  # that holds the numbers
    kind: str  # weight, rounded weight, or a kind of the optimizer's state such as exp_avg
    name: str  # global name of the parameter
    count: int  # numbers that are not finite, on this rank
    size: int  # numbers on this rank

    def __str__(self) -> str:
        kind = "" if self.kind == WEIGHT else f"{self.kind} of "
        return f"{kind}{self.name} on rank {self.rank} ({self.count:,} of {self.size:,} numbers)"


@torch.no_grad()
def non_finite_state(data_parallel: DataParallel, optimizer: Optimizer[Any], mesh: Mesh) -> list[NonFinite]:
    """The weights and moments of all ranks that are not finite, in forward order; all ranks call this together."""
    known = list(_state(data_parallel, optimizer))
    counts = _counts([tensor for _, _, tensor in known])
    bad: dict[tuple[str, str], list[int]] = {}  # of one tensor the segments add up
    for (kind, local, tensor), count in zip(known, counts, strict=True):
        total = bad.setdefault((kind, local.spec.name), [0, 0])
        total[0] += count
        total[1] += tensor.numel()
    entries = []
    for (kind, name), (count, size) in bad.items():
        if count and not (kind == ROUNDED and bad[WEIGHT, name][0]):
            stage, position = data_parallel.place_of(name)
            entries.append(NonFinite(stage, position, mesh.world.rank, kind, name, count, size))
    return sorted(each for of_rank in all_gather_objects(entries, mesh.world) for each in of_rank)


class Copies(NamedTuple):
    """Where a tensor is that is not finite on one rank."""

    host: str  # of that rank
    finite: tuple[int, ...]  # other ranks, which hold the same part of it in numbers that are finite


@torch.no_grad()
def copies_of(entry: NonFinite, data_parallel: DataParallel, optimizer: Optimizer[Any], mesh: Mesh) -> Copies:
    """The finite copies of a tensor that is not finite on a rank; all ranks call this together. Every copy takes the
    same update: where only some are not finite, something else changed them. `entry`: of `non_finite_state`."""
    own: dict[tuple[Slices, int, int], bool] = {}  # part of the global parameter -> whether it is finite
    for kind, local, tensor in _state(data_parallel, optimizer):
        if (kind, local.spec.name) == (entry.kind, entry.name):
            start = local.segment.start
            own[local.spec.slices, start, start + tensor.numel()] = bool(tensor.isfinite().all())
    everyone = all_gather_objects((socket.gethostname(), own), mesh.world)
    host, there = everyone[entry.rank]
    bad = [part for part, is_finite in there.items() if not is_finite]
    finite = (rank for rank, (_, parts) in enumerate(everyone) if any(parts.get(part, False) for part in bad))
    return Copies(host, tuple(finite))


def describe_non_finite(entries: Sequence[NonFinite]) -> str:
    """The first of them in forward order, and how many follow; there is one at least."""
    first = entries[0]
    beside = [each.kind for each in entries if each.name == first.name and each.rank == first.rank and each != first]
    names = len({each.name for each in entries}) - 1
    also = f", its {' and '.join(beside)} too" if beside else ""
    return f"{first}{also}" + (f"; {names} more parameters" if names else "")


def _state(data_parallel: DataParallel, optimizer: Optimizer[Any]) -> Iterator[tuple[str, LocalSegment, Tensor]]:
    """Kind, segment of a parameter, and values of everything that this rank updates."""
    for local in data_parallel.segments:
        yield WEIGHT, local, local.master
        parameters = local.bucket.part_of_parameters(0, 1)
        if parameters.dtype != torch.float32:
            yield ROUNDED, local, parameters[local.segment.shard_slice]
        for kind in optimizer.state[local.run]:
            if kind != "step" and (values := optimizer.values(local, kind)) is not None:
                yield kind, local, values


def _counts(tensors: Sequence[Tensor]) -> list[int]:
    """How many numbers of each tensor are not finite. A sum, which is many times as fast, shows where to count."""
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
    counts = [0] * len(tensors)
    for device in {each.device for each in sums}:
        here = [number for number, each in enumerate(sums) if each.device == device]
        finite = torch.stack([sums[number] for number in here]).isfinite().tolist()  # one copy to the host
        for number in (number for number, is_finite in zip(here, finite, strict=True) if not is_finite):
            counts[number] = int(torch.count_nonzero(~tensors[number].isfinite()))
    return counts


class LargestWeight(NamedTuple):
    """The weight of the largest magnitude, the first rank that holds it, and its parameter."""

    value: float
    rank: int
    name: str

    def __str__(self) -> str:
        return f"the largest weight is {self.value:.3g}, in {self.name} on rank {self.rank}"


@torch.no_grad()
def largest_weight(data_parallel: DataParallel, mesh: Mesh) -> LargestWeight:
    """Over all ranks, which call this together; all weights are finite."""
    own = LargestWeight(0.0, mesh.world.rank, "no parameter")
    for local in data_parallel.segments:
        if local.master.numel():
            value = max(abs(float(end)) for end in torch.aminmax(local.master))  # as fast as a sum
            own = max(own, LargestWeight(value, mesh.world.rank, local.spec.name))
    return max(all_gather_objects(own, mesh.world), key=lambda each: (each.value, -each.rank))


# ---- gradients


class Culprit(NamedTuple):
    """The parameter and the rank of a gradient that is not finite, and all ranks that have one."""

    name: str
    rank: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} on rank {self.rank}"


class _LargestEntry(NamedTuple):
    value: float
    name: str


def non_finite_gradient(data_parallel: DataParallel, mesh: Mesh) -> Culprit | None:
    """The first gradient of the finished backward that was not finite, of all ranks, which call this together."""
    return _first_of(all_gather_objects(data_parallel.non_finite_gradient(), mesh.world))


def describe_source(data_parallel: DataParallel, mesh: Mesh, *, loss_is_finite: bool, scaled: bool) -> str:
    """The first value of the last backward that is not finite, over all ranks, in words; all ranks call this together.
    `data_parallel`: holds the gradients, summed over replicas. `loss_is_finite`: whether the loss of all ranks is.
    `scaled`: whether the gradients have a loss scale as a factor."""
    options, first = data_parallel.options, data_parallel.non_finite_gradient()
    everyone = all_gather_objects((first, _largest_entry(data_parallel)), mesh.world)
    value, name = max(largest for _, largest in everyone)
    if loss_is_finite and not options.exact_terms and math.isfinite(value):  # only their squares overflow
        scale = " with the loss scale" if scaled else ""
        return f"the sum of squared gradients in fp32 (largest entry{scale} {value:.3g}, of {name})"
    source = _first_of([first for first, _ in everyone])
    if source is None:
        return f"the gradient of {name}, summed over ranks," if loss_is_finite else "the loss"
    limit = f" (--reproducible takes entries up to {options.largest_exact:.3g})" if options.exact_terms else ""
    gradient = f"the gradient of {source}{limit}"
    return gradient if loss_is_finite else f"the loss (and {gradient})"


def _largest_entry(data_parallel: DataParallel) -> _LargestEntry:
    """The largest summed gradient entry of this rank; infinite for NaN."""
    names, largest = [], []
    for local in data_parallel.segments:
        if (gradient := local.gradient) is not None:
            names.append(local.spec.name)
            largest.append(gradient.abs().max().float())
    values = torch.stack(largest).tolist() if largest else []  # one copy to the host
    finite_or_inf = (value if math.isfinite(value) else math.inf for value in values)
    return max([_LargestEntry(0.0, ""), *map(_LargestEntry, finite_or_inf, names)])


def _first_of(sources: Sequence[NonFiniteGradient | None]) -> Culprit | None:
    """Of the ranks' sources the one that the forward uses last, because backward computes it first."""
    ranked = [(source, -rank) for rank, source in enumerate(sources) if source is not None]
    if not ranked:
        return None
    source, negative_rank = max(ranked, key=lambda pair: (pair[0].stage, pair[0].position, pair[1]))
    return Culprit(source.name, -negative_rank, tuple(-rank for _, rank in ranked))
