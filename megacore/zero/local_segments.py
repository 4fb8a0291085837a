"""The parts of parameters that this rank updates, as the optimizer sees them: segments, and the runs that hold them. A
segment is the part of one parameter in this rank's shard of a bucket. Adjacent segments with the same rates make up a
run, which the optimizer updates as one tensor; a parameter that it needs whole is a run by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from megacore.config.parameter_groups import USUAL, ParameterScale
from megacore.parallel.sharding import ShardSpec
from megacore.zero.layout import Segment, round_up

if TYPE_CHECKING:
    from megacore.zero.bucket import Bucket


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalRun:
    """Adjacent segments of this rank's shard with the same rates, which the optimizer updates as one tensor."""

    bucket: Bucket  # that holds them
    shard_slice: slice  # their elements of the bucket's shard
    master: nn.Parameter  # their fp32 weights, a view of the bucket's shard
    is_matrix: bool  # whether they are parts of matrices, judged by the global shape, and not of vectors
    # Of the local parameter, if the run is exactly one that the optimizer needs whole; None: the run is flat.
    shape: tuple[int, ...] | None = None
    scale: ParameterScale = USUAL  # of the learning rate and the weight decay

    @property
    def has_gradient(self) -> bool:
        """Whether a loss used the parameters."""
        return self.bucket.has_gradient(self.shard_slice)

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient, flat; None where no loss used the parameters."""
        return self.bucket.gradient(self.shard_slice)

    @property
    def gradient_is_copied(self) -> bool:
        """Whether the optimizer gets an fp32 copy, on the device, of a reduced 16-bit gradient, which stays as it
        is."""
        return not self.bucket.options.offload and self.bucket.options.summed_dtype != torch.float32


class HasState(Protocol):
    """The state of an optimizer."""

    @property
    def state(self) -> Mapping[LocalRun, Mapping[str, Tensor]]:
        """The tensors of each run, by name."""


@dataclass(frozen=True, kw_only=True)
class LocalSegment:
    """A segment that this rank updates."""

    spec: ShardSpec  # of the parameter
    segment: Segment  # which part of the parameter
    run: LocalRun  # that contains it

    @property
    def bucket(self) -> Bucket:
        return self.run.bucket

    @property
    def master(self) -> Tensor:
        """Its fp32 weights, a view."""
        return self.run.master.detach()[self._part]

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient, flat; None where no loss used the parameter."""
        return self.bucket.gradient(self.segment.shard_slice)

    def write_gradient(self, gradient: Tensor) -> None:
        """Keep what `gradient` gave, changed in place."""
        self.bucket.write_gradient(self.segment.shard_slice, gradient)

    def state(self, optimizer: HasState, kind: str) -> Tensor | None:
        """The optimizer state of a kind such as `exp_avg`, a flat view; None before the first update."""
        whole = optimizer.state[self.run].get(kind)
        if whole is None or self.run.shape is not None:  # the segment is the whole run
            return None if whole is None else whole.view(-1)
        return whole[self._part]

    @property
    def _part(self) -> slice:
        first = self.run.shard_slice.start
        return slice(self.segment.shard_slice.start - first, self.segment.shard_slice.stop - first)


def local_segments(bucket: Bucket) -> Iterator[LocalSegment]:
    """The segments of a bucket's shard, in runs as long as possible. An elementwise operator over a run computes the
    same bits as one over each segment. Gradients that stay where autograd puts them are not contiguous, and a parameter
    that the optimizer needs whole is a run by itself."""
    specs = {member.name: member.parameter.spec for member in bucket.members}

    def kind(segment: Segment) -> tuple[bool, ParameterScale]:
        is_matrix = len(specs[segment.name].shape) >= 2 and not segment.name.endswith("bias")  # experts' are [E, o]
        return is_matrix, bucket.options.groups.scale_of(segment.name)

    runs: list[list[Segment]] = []
    for segment in bucket.segments:
        last = runs[-1][-1] if runs and not bucket.in_place else None
        if (
            last is not None
            and bucket.unsplit.isdisjoint((last.name, segment.name))
            and last.shard_slice.stop == segment.shard_slice.start
            and kind(last) == kind(segment)
        ):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    shapes = {member.name: tuple(member.parameter.shape) for member in bucket.members}
    for members in runs:
        is_matrix, scale = kind(members[0])
        shape = shapes[members[0].name] if members[0].name in bucket.unsplit else None
        stop = members[-1].shard_slice.stop
        if bucket.options.exact_terms and shape is None:
            # With the padding that follows: operators may round the last elements of a tensor otherwise than others,
            # and layouts differ in which elements are the last.
            stop = min(round_up(stop), bucket.layout.shard_size)
        elements = slice(members[0].shard_slice.start, stop)
        run = LocalRun(
            bucket=bucket,
            shard_slice=elements,
            master=nn.Parameter(bucket.master[elements].detach(), requires_grad=False),
            is_matrix=is_matrix,
            shape=shape,
            scale=scale,
        )
        for segment in members:
            yield LocalSegment(spec=specs[segment.name], segment=segment, run=run)
