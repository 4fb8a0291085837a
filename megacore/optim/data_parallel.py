"""Data parallelism with ZeRO stages 0 to 3 over one pipeline stage: who holds what, and when it travels.

Gradients are taken from autograd as they appear. On stages 0 and 1 a bucket is reduced during the last microbatch's
backward, as soon as its last gradient is there (Li et al. 2020, arXiv 2006.15704, section 3.2); on stages 2 and 3 in
every microbatch's, and only the own shard of the sum is kept. On stages 1 and 2 updated parameters are gathered after
the step, while the next forward begins; on stage 3 layer by layer, before forward and before backward, the next layer's
ahead of its use. Gradients are summed: the loss was already divided by the tokens of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megacore.optim.bucket import Bucket, ZeroOptions
from megacore.optim.flat import Segment, assign_buckets
from megacore.parallel.mesh import Group
from megacore.parallel.sharding import ShardedParameter, ShardSpec, sharded_parameters


@dataclass(frozen=True, kw_only=True)
class OwnedSegment:
    """A segment that this rank updates.

    Attributes:
        spec: of the parameter that it is a part of.
        segment: which part.
        bucket: where it lies.
        master: its fp32 weights, a view of the bucket's shard.
    """

    spec: ShardSpec
    segment: Segment
    bucket: Bucket
    master: nn.Parameter

    @property
    def gradient(self) -> Tensor | None:
        return self.bucket.gradient(self.segment)


class DataParallel:
    """Divides a stage's parameters, gradients and optimizer state over the data-parallel group.

    Args:
        layers: the stage's layers, initialised, in the order of their use.
        group: the data-parallel group.
        options: ZeRO stage, dtypes, overlap.
        bucket_bytes: a bucket is closed once it holds this many bytes or more; on stage 3 a layer is a bucket.
        alone: global names of parameters that get a bucket of their own (tied ones, whose sum has a further step).

    Attributes:
        parameters: of the stage, each once, in the order of their use.
        buckets: that the parameters lie in, the last used first.
        segments: what this rank updates.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        group: Group,
        *,
        options: ZeroOptions,
        bucket_bytes: int,
        alone: frozenset[str] = frozenset(),
    ) -> None:
        self.group = group
        self.options = options = options if group.size > 1 else replace(options, stage=0)
        own = _first_uses(layers)
        self.parameters = [parameter for members in own for parameter in members]
        if options.stage == 3:
            runs = [run for members in own for run in assign_buckets(members, 1 << 62, alone)]
        else:
            runs = assign_buckets(self.parameters, bucket_bytes, alone)
        self.buckets = [Bucket(run, group, options) for run in runs]
        self._bucket_of = {p.spec.name: bucket for bucket in self.buckets for p in bucket.parameters}
        self._needs = [_unique(self._bucket_of[p.spec.name] for p in sharded_parameters(layer)) for layer in layers]
        self._repeated = _later_uses(layers) if options.exact_terms else [{} for _ in layers]
        self._holders: dict[int, set[int]] = {id(bucket): set() for bucket in self.buckets}
        self._reduces_now = False
        self._under_way: Bucket | None = None  # the bucket whose reduction began last
        self.segments = list(self._own_segments())
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    # ---- around the layers

    def run_layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        """layer(x), its parameters present while it computes, forward and backward."""
        self._acquire(index)
        self._prefetch(index + 1)
        if self.options.stage < 3:
            return self._apply(index, layer, x)
        if x.requires_grad:
            x = _WhenBackward.apply(x, lambda: self._release(index))
        y = self._apply(index, layer, x)
        self._release(index)
        return _WhenBackward.apply(y, lambda: self._before_backward(index)) if y.requires_grad else y

    def _apply(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        """layer(x). Where gradients are summed exactly, those of a parameter that an earlier layer has too are taken
        apart from that layer's, as if the two lay on different stages: autograd would add them in floating point."""
        if not self._repeated[index]:
            return layer(x)
        own = {name: _OwnGradient.apply(p, self._take_part) for name, p in self._repeated[index].items()}
        y: Tensor = functional_call(layer, own, (x,))
        return y

    def _take_part(self, parameter: ShardedParameter, gradient: Tensor) -> None:
        self._bucket_of[parameter.spec.name].add_part(parameter.spec.name, gradient)

    def _before_backward(self, index: int) -> None:
        self._acquire(index)
        self._prefetch(index - 1)

    def _acquire(self, index: int) -> None:
        for bucket in self._needs[index]:
            self._holders[id(bucket)].add(index)
            bucket.wait()

    def _prefetch(self, index: int) -> None:
        if self.options.stage == 3 and 0 <= index < len(self._needs):
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

    def begin_backward(self, *, last: bool) -> None:
        """A microbatch's backward begins; `last` says that it completes the gradients."""
        self._reduces_now = last or self.options.stage >= 2
        for bucket in self.buckets:
            bucket.begin_backward()

    def end_backward(self) -> None:
        """The microbatch's gradients are all there: reduce what is due and has not begun, and let go of parameters."""
        for bucket in self.buckets:
            if self._reduces_now and bucket.owes_gradients:
                self._reduce(bucket)
        for index in range(len(self._needs)):
            self._release(index)

    def finish(self) -> None:
        """Return once every gradient is the sum over the group."""
        for bucket in self.buckets:
            bucket.finish_reduction()

    def settle(self) -> None:
        """Turn exact sums into fp32 gradients without the loss scale; in floating point there is nothing to turn."""
        for bucket in self.buckets:
            bucket.settle()

    def overflow(self) -> Tensor:
        """0 if the terms of exact sums on this rank were finite, and not finite otherwise; a scalar."""
        return torch.stack([bucket.overflow for bucket in self.buckets]).sum()

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, ShardedParameter)
        bucket = self._bucket_of[parameter.spec.name]
        if bucket.add(parameter.spec.name) and self._reduces_now:
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Begin a bucket's reduction; on stages 2 and 3 the one before ends first, so that whole gradients of two
        buckets are held at most: of the one that is reduced, and of the one that backward fills meanwhile."""
        if self._under_way is not None and self.options.stage >= 2:
            self._under_way.finish_reduction()
        bucket.reduce()
        self._under_way = bucket

    def segments_of(self, name: str) -> list[OwnedSegment]:
        """What this rank owns of one parameter."""
        return [owned for owned in self.segments if owned.spec.name == name]

    # ---- weights

    def publish(self) -> None:
        """Make updated master weights the parameters' values, in the order in which layers use them."""
        for bucket in self.in_order_of_use():
            bucket.publish()

    def in_order_of_use(self) -> list[Bucket]:
        """The buckets, those that the first layers need first."""
        return _unique(bucket for needs in self._needs for bucket in needs)

    def ready(self) -> None:
        """Wait until no parameter is under way."""
        if self.options.stage < 3:
            for bucket in self.buckets:
                bucket.wait()

    def load_masters(self, whole: Mapping[str, Tensor]) -> None:
        """Set the own master weights from whole local tensors, then publish them."""
        with torch.no_grad():
            for owned in self.segments:
                segment = owned.segment
                owned.master.copy_(whole[segment.name].reshape(-1)[segment.start : segment.stop])
        self.publish()

    def offender(self) -> str | None:
        """Global name of a parameter whose gradient was not finite on this rank before any reduction, the last used."""
        return next((name for bucket in self.buckets if (name := bucket.offender())), None)

    def _own_segments(self) -> Iterator[OwnedSegment]:
        for bucket in reversed(self.buckets):
            specs = {p.spec.name: p.spec for p in bucket.parameters}
            for segment in bucket.segments:
                master = nn.Parameter(bucket.master[segment.place].detach(), requires_grad=False)
                yield OwnedSegment(spec=specs[segment.name], segment=segment, bucket=bucket, master=master)


class _WhenBackward(torch.autograd.Function):
    """The identity; calls back when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class _OwnGradient(torch.autograd.Function):
    """The identity; hands its gradient to `take` instead of passing it on."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.parameter, ctx.take = parameter, take
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.take(ctx.parameter, grad)
        return None, None


def _later_uses(layers: Sequence[nn.Module]) -> list[dict[str, ShardedParameter]]:
    """For each layer its parameters that an earlier layer has too, by their name in the layer."""
    seen: set[str] = set()
    found = []
    for layer in layers:
        named = {n: p for n, p in layer.named_parameters() if isinstance(p, ShardedParameter)}
        found.append({name: p for name, p in named.items() if p.spec.name in seen})
        seen |= {p.spec.name for p in named.values()}
    return found


def _first_uses(layers: Sequence[nn.Module]) -> list[list[ShardedParameter]]:
    """The parameters of each layer that no earlier layer has."""
    seen: set[str] = set()
    found = []
    for layer in layers:
        members = [p for p in sharded_parameters(layer) if p.spec.name not in seen]
        seen |= {p.spec.name for p in members}
        found.append(members)
    return found


def _unique(buckets: Any) -> list[Bucket]:
    return list(dict.fromkeys(buckets))
