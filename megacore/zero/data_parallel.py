"""Data parallelism with ZeRO stages 0 to 3 over a rank's pipeline stages: who holds what, and when it travels.

Gradients are taken from autograd as they appear. On stages 0 and 1 a bucket is reduced during the last microbatch's
backward, as soon as its last gradient is there (Li et al. 2020, arXiv 2006.15704, section 3.2); on stages 2 and 3 in
every microbatch's, and only this rank's shard of the sum is kept. On stages 1 and 2 updated parameters are gathered
after the step, while the next forward begins; on stage 3 layer by layer, before forward and before backward, the next
layer's ahead of its use. Messages carry no name: ranks pair them by their order, which must not depend on what
gradients a rank has, so that buckets are reduced in one order, the last used first. Gradients are summed: the loss was
already divided by the tokens of the whole global batch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardedParameter, ShardSpec, sharded_parameters
from megacore.plan.buckets import grown
from megacore.zero.backward_hooks import OwnGradient, when_backward
from megacore.zero.bucket import Bucket, ZeroOptions
from megacore.zero.flat import Segment, assign_buckets

# A chunk has at least about so many buckets, however small it is: the first must be full early for its reduction to
# overlap with the rest of backward.
_BUCKETS = 4
# A shard of a bucket has room for at least so many parameters that no shard may cut, so that little of it stays empty.
_WHOLE_PER_SHARD = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedRun:
    """Segments that lie side by side in a shard and decay alike: what the optimizer updates as one tensor.

    Attributes:
        bucket: where they lie.
        place: in the bucket's shard.
        master: their fp32 weights, a view of the bucket's shard.
        is_matrix: whether they are parts of matrices, judged by the global shape, and not of vectors.
        shape: of the one parameter that the run is, if the optimizer takes it whole; None: the run is flat.
    """

    bucket: Bucket
    place: slice
    master: nn.Parameter
    is_matrix: bool
    shape: tuple[int, ...] | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient, flat; None where the parameters took no part in any loss."""
        return self.bucket.gradient(self.place)


class HasState(Protocol):
    """An optimizer, as far as ZeRO looks into it."""

    @property
    def state(self) -> Mapping[OwnedRun, Mapping[str, Tensor]]:
        """The tensors that it keeps for each run, by name."""


@dataclass(frozen=True, kw_only=True)
class OwnedSegment:
    """A segment that this rank updates.

    Attributes:
        spec: of the parameter that it is a part of.
        segment: which part.
        run: what it is updated with.
    """

    spec: ShardSpec
    segment: Segment
    run: OwnedRun

    @property
    def bucket(self) -> Bucket:
        return self.run.bucket

    @property
    def master(self) -> Tensor:
        """Its fp32 weights, a view."""
        return self.run.master.detach()[self._part]

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient, flat; None where the parameter took no part in any loss."""
        return self.bucket.gradient(self.segment.place)

    def state(self, optimizer: HasState, kind: str) -> Tensor | None:
        """What the optimizer keeps for it under a name such as `exp_avg`, a flat view; None before the first update."""
        whole = optimizer.state[self.run].get(kind)
        if whole is None or self.run.shape is not None:  # a run of its own
            return None if whole is None else whole.view(-1)
        return whole[self._part]

    @property
    def _part(self) -> slice:
        """Its elements of the run."""
        first = self.run.place.start
        return slice(self.segment.place.start - first, self.segment.place.stop - first)


@dataclass(frozen=True, kw_only=True)
class Offender:
    """A parameter with a gradient that is not finite.

    Attributes:
        chunk: number of its pipeline stage on its rank.
        position: its number among the rank's parameters, in the order of their use.
        name: its global name.
    """

    chunk: int
    position: int
    name: str


class DataParallel:
    """Divides a rank's parameters, gradients and optimizer state over the replica groups that its parameters name.

    Args:
        chunks: the layers of each of the rank's pipeline stages, initialised, in the order of their use. No bucket
            holds parameters of two, as their gradients are complete at different times. They may come from generators
            that build them: on stage 3 a layer is divided before the next one is asked for.
        mesh: this rank's groups.
        options: ZeRO stage, dtypes, overlap; a group of one rank has stage 0.
        bucket_bytes: a bucket is closed once it holds this many bytes or more, or a quarter of its chunk, and more in a
            large group (see `grown`); on stage 3 a bucket holds a layer.
        separate: global names of parameters of which each gets a bucket for itself (tied ones, whose sum has a further
            step).

    Attributes:
        parameters: of the stage, each once, in the order of their use.
        buckets: that the parameters lie in, the last used first.
        runs: what this rank updates.
        segments: of which parameters these are which parts.
    """

    def __init__(
        self,
        chunks: Iterable[Iterable[nn.Module]],
        mesh: Mesh,
        *,
        options: ZeroOptions,
        bucket_bytes: int,
        separate: frozenset[str] = frozenset(),
    ) -> None:
        self._mesh, self._separate = mesh, separate
        self.options = options = options if mesh.replicas.size > 1 else replace(options, stage=0)
        layers: list[nn.Module] = []
        new: list[list[ShardedParameter]] = []  # of each layer the parameters that no earlier layer has
        self._chunks: list[range] = []  # of each, the numbers of its layers
        self._buckets_of_chunk: list[list[Bucket]] = []
        for chunk in chunks:
            first, buckets = len(layers), list[Bucket]()
            for layer in chunk:
                layers.append(layer)
                new.append(_without(sharded_parameters(layer), new))
                if options.stage == 3:
                    buckets = [*self._make_buckets(new[-1], None), *buckets]
            if options.stage < 3:
                members = [parameter for layer_parameters in new[first:] for parameter in layer_parameters]
                total = sum(p.numel() * p.element_size() for p in members)
                buckets = self._make_buckets(members, min(bucket_bytes, total // _BUCKETS))
            self._chunks.append(range(first, len(layers)))
            self._buckets_of_chunk.append(buckets)
        self.parameters = [parameter for members in new for parameter in members]
        self.buckets = [bucket for buckets in reversed(self._buckets_of_chunk) for bucket in buckets]
        self._bucket_of = {p.spec.name: bucket for bucket in self.buckets for p in bucket.parameters}
        # Of each bucket the first layer that uses it: its gradients are there once backward has passed that layer.
        self._first_layer = {
            id(self._bucket_of[p.spec.name]): number for number in reversed(range(len(new))) for p in new[number]
        }
        self._needs = [_unique(self._bucket_of[p.spec.name] for p in sharded_parameters(layer)) for layer in layers]
        users = [{id(b) for number in numbers for b in self._needs[number]} for numbers in self._chunks]
        self._shared_by_chunks = [b for b in self.buckets if sum(id(b) in used for used in users) > 1]
        self._repeated = _later_uses(layers) if options.exact_terms else [{} for _ in layers]
        self._holders: dict[int, set[int]] = {id(bucket): set() for bucket in self.buckets}
        self._computing: list[Bucket] = []  # whose gradients appear now
        self._due: list[Bucket] = []  # of these, in order, those whose reduction is to begin in this backward
        self._by_layer = True  # whether this backward is through with a layer when it comes to the one before
        self._under_way: Bucket | None = None  # the bucket whose reduction began last
        self.segments = [owned for bucket in reversed(self.buckets) for owned in _own_segments(bucket)]
        self.runs = list(dict.fromkeys(owned.run for owned in self.segments))
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    def _make_buckets(self, parameters: Sequence[ShardedParameter], bucket_bytes: int | None) -> list[Bucket]:
        """Buckets of at least `bucket_bytes`, more in a large replica group; None: as large as may be."""
        groups = {role: self._mesh.replica_group(role) for role in {p.spec.replica_role for p in parameters}}
        takes_whole = self.options.optimizer.takes_whole
        uncut = max((4 * p.numel() for p in parameters if takes_whole(p.spec.name, p.spec.shape)), default=0)
        limits = {
            role: sys.maxsize
            if bucket_bytes is None
            else max(grown(bucket_bytes, group.size), _WHOLE_PER_SHARD * group.size * uncut)
            for role, group in groups.items()
        }
        buckets = []
        for members in assign_buckets(parameters, limits, self._separate):
            group = groups[members[0].spec.replica_role]
            options = self.options if group.size > 1 else replace(self.options, stage=0)
            buckets.append(Bucket(members, group, options))
        return buckets

    # ---- around the layers

    def run_layer(self, chunk: int, number: int, layer: nn.Module, x: Any) -> Any:
        """layer(x), its parameters present while it computes, forward and backward.

        Args:
            chunk: number of the pipeline stage on this rank.
            number: of the layer in it.
            layer: that layer.
            x: its input, a tensor or a tuple of tensors.
        """
        index = self._chunks[chunk][number]
        self._acquire(index)
        self._prefetch(index + 1, self._chunks[chunk])
        if self.options.stage < 3:
            return self._apply(index, layer, x)
        y = self._apply(index, layer, when_backward(x, _AfterBackward(self, index)))
        self._release(index)
        return when_backward(y, _BeforeBackward(self, index, self._chunks[chunk]))

    def _apply(self, index: int, layer: nn.Module, x: Any) -> Any:
        """layer(x). Where gradients are summed exactly, those of a parameter that an earlier layer has too are taken
        apart from that layer's, as if the two lay on different stages: autograd would add them in floating point."""
        if not self._repeated[index]:
            return layer(x)
        separate = {name: OwnGradient.apply(p, self._take_part) for name, p in self._repeated[index].items()}
        return functional_call(layer, separate, (x,))

    def _take_part(self, parameter: ShardedParameter, gradient: Tensor) -> None:
        self._bucket_of[parameter.spec.name].add_part(parameter.spec.name, gradient)

    def _before_backward(self, index: int, chunk: range) -> None:
        if self._by_layer:
            self._begin_reductions(index)  # before the next gathering, on every rank
        self._acquire(index)
        self._prefetch(index - 1, chunk)

    def _acquire(self, index: int) -> None:
        for bucket in self._needs[index]:
            self._holders[id(bucket)].add(index)
            bucket.wait()

    def _prefetch(self, index: int, chunk: range) -> None:
        if self.options.stage == 3 and index in chunk:
            for bucket in self._needs[index]:
                self._holders[id(bucket)].add(index)
                bucket.prefetch()

    def _release(self, index: int) -> None:
        for bucket in self._needs[index]:
            holders = self._holders[id(bucket)]
            holders.discard(index)
            if not holders:
                bucket.release()

    # ---- gradients of a step

    def begin_step(self, loss_scale: float) -> None:
        """Forget the gradients of the last step; those to come carry the factor `loss_scale`."""
        for bucket in self.buckets:
            bucket.begin_step(loss_scale)

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None:
        """A chunk's gradients of a microbatch begin to appear.

        Args:
            chunk: number of the pipeline stage on this rank.
            last: whether they complete the sums of the step.
            all_weights: whether the chunk's parameters are needed at once, and their gradients appear in any order, and
                not layer by layer.
        """
        self._by_layer = not all_weights
        self._computing = [b for b in self._buckets_of_chunk[chunk] if b not in self._shared_by_chunks]
        for bucket in self._computing:
            bucket.begin_backward()
        self._due = [bucket for bucket in self._computing if last or bucket.options.stage >= 2]
        for index in self._chunks[chunk] if all_weights else ():
            self._acquire(index)

    def end_backward(self, chunk: int) -> None:
        """The chunk's gradients of a microbatch are all there: reduce what is due and has not begun, and let go of its
        parameters."""
        self._begin_reductions(-1)
        self._computing = []
        for index in self._chunks[chunk]:
            self._release(index)

    def finish(self) -> None:
        """Return once every gradient is the sum over its replica group."""
        for bucket in self._shared_by_chunks:
            bucket.reduce()
        for bucket in self.buckets:
            bucket.finish_reduction()

    def settle(self) -> None:
        """Turn exact sums into fp32 gradients without the loss scale; in floating point there is nothing to turn."""
        for bucket in self.buckets:
            bucket.settle()

    def overflow(self) -> Tensor | float:
        """0 if the terms of exact sums on this rank were finite, and not finite otherwise; a scalar."""
        return torch.stack([bucket.overflow for bucket in self.buckets]).sum() if self.buckets else 0.0

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, ShardedParameter)
        bucket = self._bucket_of[parameter.spec.name]
        if bucket.add(parameter.spec.name) and bucket in self._due:
            self._begin_reductions(len(self._needs))

    def _begin_reductions(self, reached: int) -> None:
        """Begin what is due, in order, up to the first bucket that still waits for a gradient.

        Args:
            reached: backward has passed the layers after this one: what they have not given does not come.
        """
        while self._due and (not self._due[0].owes_gradients or self._first_layer[id(self._due[0])] > reached):
            self._reduce(self._due.pop(0))

    def _reduce(self, bucket: Bucket) -> None:
        """Begin a bucket's reduction; on stages 2 and 3 the one before ends first, so that complete gradients of two
        buckets are held at most: of the one that is reduced, and of the one that backward fills meanwhile."""
        if self._under_way is not None and self._under_way.options.stage >= 2:
            self._under_way.finish_reduction()
        bucket.reduce()
        self._under_way = bucket

    @property
    def padding(self) -> float:
        """Share of the flat buffers that holds no parameter; large if parameters that no shard may cut are few."""
        size = sum(bucket.layout.size for bucket in self.buckets)
        return sum(bucket.layout.padding for bucket in self.buckets) / max(size, 1)

    def segments_of(self, name: str) -> list[OwnedSegment]:
        """The segments of one parameter that this rank updates."""
        return [owned for owned in self.segments if owned.spec.name == name]

    # ---- weights

    def publish(self) -> None:
        """Make updated master weights the parameters' values, in the order in which layers use them."""
        for bucket in self.in_order_of_use():
            bucket.publish()

    def publish_parameter(self, name: str) -> None:
        """Make the updated master weights of one parameter's bucket the values of its parameters."""
        self._bucket_of[name].publish()
        if self._bucket_of[name].options.stage < 3:
            self._bucket_of[name].wait()

    def in_order_of_use(self) -> list[Bucket]:
        """The buckets, those that the first layers need first."""
        return _unique(bucket for needs in self._needs for bucket in needs)

    def ready(self) -> None:
        """Wait until no parameter is under way."""
        for bucket in self.buckets:
            if bucket.options.stage < 3:
                bucket.wait()

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's master weights from complete local tensors, then publish them."""
        with torch.no_grad():
            for owned in self.segments:
                segment = owned.segment
                owned.master.copy_(tensors[segment.name].reshape(-1)[segment.start : segment.stop])
        self.publish()

    def note(self, names: Collection[str]) -> None:
        """Remember whether these parameters' gradients are finite on this rank: other ranks' are about to be added."""
        for bucket in self.buckets:
            bucket.note(names)

    def offender(self) -> Offender | None:
        """A parameter whose gradient was not finite on this rank before any reduction: the last that the forward uses,
        because what is not finite spreads in the backward from there."""
        bad = {name for bucket in self.buckets for name in bucket.offenders()}
        positions = [number for number, parameter in enumerate(self.parameters) if parameter.spec.name in bad]
        if not positions:
            return None
        name = self.parameters[positions[-1]].spec.name
        chunk = next(c for c, buckets in enumerate(self._buckets_of_chunk) if self._bucket_of[name] in buckets)
        return Offender(chunk=chunk, position=positions[-1], name=name)


@dataclass(frozen=True)
class _BeforeBackward:
    """On stage 3, when backward comes to a layer's output: gather the layer's parameters."""

    data_parallel: DataParallel
    index: int
    chunk: range

    def gradients_pass(self) -> None:
        self.data_parallel._before_backward(self.index, self.chunk)


@dataclass(frozen=True)
class _AfterBackward:
    """On stage 3, when backward has passed a layer: let go of the layer's parameters."""

    data_parallel: DataParallel
    index: int

    def gradients_pass(self) -> None:
        self.data_parallel._release(self.index)


def _own_segments(bucket: Bucket) -> Iterator[OwnedSegment]:
    """The segments of a bucket's shard, in runs as long as may be."""
    specs = {parameter.spec.name: parameter.spec for parameter in bucket.parameters}

    def is_matrix(segment: Segment) -> bool:
        return len(specs[segment.name].shape) >= 2

    for members in bucket.runs(is_matrix):
        place = slice(members[0].place.start, members[-1].place.stop)
        run = OwnedRun(
            bucket=bucket,
            place=place,
            master=nn.Parameter(bucket.master[place].detach(), requires_grad=False),
            is_matrix=is_matrix(members[0]),
            shape=tuple(specs[members[0].name].shape) if members[0].name in bucket.uncut else None,
        )
        for segment in members:
            yield OwnedSegment(spec=specs[segment.name], segment=segment, run=run)


def _later_uses(layers: Sequence[nn.Module]) -> list[dict[str, ShardedParameter]]:
    """For each layer its parameters that an earlier layer has too, by their name in the layer."""
    seen: set[str] = set()
    repeated = []
    for layer in layers:
        named = {n: p for n, p in layer.named_parameters() if isinstance(p, ShardedParameter)}
        repeated.append({name: p for name, p in named.items() if p.spec.name in seen})
        seen |= {p.spec.name for p in named.values()}
    return repeated


def _without(
    parameters: Sequence[ShardedParameter], earlier: Sequence[Sequence[ShardedParameter]]
) -> list[ShardedParameter]:
    """The parameters that no earlier layer has."""
    seen = {parameter.spec.name for members in earlier for parameter in members}
    return [parameter for parameter in parameters if parameter.spec.name not in seen]


def _unique(buckets: Any) -> list[Bucket]:
    return list(dict.fromkeys(buckets))
