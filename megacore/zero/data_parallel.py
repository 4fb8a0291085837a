"""Data parallelism with ZeRO stages 0 to 3 over a rank's pipeline stages: what a rank holds, and when it communicates.

Gradients are taken from autograd as they appear. On stages 0 and 1 a bucket is reduced during the last microbatch's
backward, as soon as its last gradient has arrived (Li et al. 2020, arXiv 2006.15704, section 3.2); on stages 2 and 3 in
every microbatch's, and only this rank's shard of the sum is kept. On stages 1 and 2 updated parameters are gathered
after the step, while the next forward runs; on stage 3 layer by layer, before forward and before backward, the next
layer's ahead of its use. Ranks pair collectives by their order, which must not depend on the gradients that a rank has:
so buckets are reduced in one order, the last used first. Where only some replicas shard (--zero-shard-size, as MiCS
does: Zhang et al. 2022, arXiv 2205.00119), the sums of their shards are added up over the others once per step.
Gradients are summed and not averaged, because the loss is already divided by the tokens of the whole global batch.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from megacore.parallel.mesh import ALONE, Group, Mesh, ReplicaRole
from megacore.parallel.sharding import ShardedParameter, separate_term, sharded_parameters
from megacore.zero.bucket import Bucket, Member
from megacore.zero.host_shard import HostStreams
from megacore.zero.layout import assign_buckets, assign_whole
from megacore.zero.local_segments import LocalSegment
from megacore.zero.options import ZeroOptions
from megacore.zero.packing import grown

# Least number of buckets per chunk, about: the first must be full early for its reduction to overlap with the rest of
# backward.
_BUCKETS = 4
# Bytes of a bucket that is summed over no ranks: of a kernel's update, of which fewer buckets are fewer launches.
_SUMMED_NOWHERE = 160 * 2**20
# A final bucket of less than this part of the limit is no bucket of its own, where sums take long whatever their size.
_SMALLEST_OF_RING = 4
CHECKED_IN = 16
"""Number of steps in which all parameters are checked for numbers that are not finite."""


class GradientObserver(Protocol):
    """Sees the gradients of a rank's parameters as backward computes them."""

    discards: bool  # whether they are dropped instead of added up

    def see(self, name: str, gradient: Tensor) -> None:
        """A gradient of the parameter `name`, or the sum of what has been computed of it so far."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteGradient:
    """A parameter with a gradient that is not finite."""

    stage: int  # number of its pipeline stage
    position: int  # its number among the rank's parameters, in the order of their use
    name: str  # its global name


class DataParallel:
    """Shards a rank's parameters, gradients and optimizer state over the replica groups that its parameters name.

    Args:
        chunks: the layers of each of the rank's pipeline stages, initialised, in the order of their use. No bucket
            holds parameters of two, as their gradients are complete at different times. They may come from
            generators that build them: on stage 3 a layer is sharded before the next one is built.
        options: ZeRO stage, dtypes, overlap; a group of one rank has stage 0.
        bucket_bytes: a bucket is closed once it holds this many bytes or more, or a quarter of its chunk, and more
            in a large group (see `grown`), and of one rank; on stage 3 a bucket holds a layer.
        separate: global names of parameters that each get a separate bucket (tied ones that several stages use: of
            other ranks, which sum their gradients too, or of this one).
        stages: the numbers of the pipeline stages.
    """

    def __init__(
        self,
        chunks: Iterable[Iterable[nn.Module]],
        mesh: Mesh,
        *,
        options: ZeroOptions,
        bucket_bytes: int,
        separate: frozenset[str] = frozenset(),
        stages: Sequence[int] = (0,),
    ) -> None:
        self._mesh, self._separate, self._stages = mesh, separate, stages
        copies = options.offload and not options.offload_params and mesh.device.type != "cpu"
        self._downloads = torch.Stream(mesh.device) if copies else None
        self._streams = HostStreams(mesh.device) if options.offload_params else None
        self.options = options = options.for_group(mesh.replicas)
        self._busy: dict[ReplicaRole, list[float]] = {}  # work of the ranks of each group, with the buckets made
        self._chunks: list[list[Layer]] = []
        self.parameters: list[ShardedParameter] = []  # of the rank that learn, each once, in the order of their use
        self.buckets: list[Bucket] = []  # of the parameters, the last used first
        self.frozen_buckets: list[Bucket] = []  # of further parameters, which do not learn
        for chunk in chunks:
            self._add_chunk(chunk, bucket_bytes)
        # With streams no more than one sum is on the device.
        self._reductions = _Reductions(sums_across=options.overlap_grad_reduce and self._streams is None)
        self._observer: GradientObserver | None = None
        # The parts of parameters in this rank's shards; a run is several that the optimizer updates as one tensor.
        self.segments = [local for bucket in reversed(self.buckets) for local in bucket.make_segments()]
        self.runs = [run for bucket in reversed(self.buckets) for run in bucket.runs]
        self._frozen = [run for run in self.runs if run.scale.frozen]
        # The layers of all stages of the rank, in the order of their use.
        self.layers = [layer for chunk in self._chunks for layer in chunk]
        uses = Counter(parameter.spec.name for layer in self.layers for parameter in layer.parameters)
        self._inlets = [_Inlet(self, bucket, member) for bucket in self.buckets for member in bucket.members]
        for inlet in self._inlets:
            again = uses[inlet.parameter.spec.name] > 1 or inlet.parameter.used_again
            inlet.connect(is_used_once=not again)

    def _add_chunk(self, modules: Iterable[nn.Module], bucket_bytes: int) -> None:
        """Shard the layers of the rank's next pipeline stage, which a generator may build meanwhile."""
        number, first_new = len(self._chunks), len(self.parameters)
        before = sum(map(len, self._chunks))
        layers, buckets = list[Layer](), list[Bucket]()
        for module in modules:
            held = sharded_parameters(module)
            layer = Layer(before + len(layers), [parameter for parameter in held if parameter.requires_grad])
            known = {parameter.spec.name for parameter in self.parameters}
            new = [parameter for parameter in layer.parameters if parameter.spec.name not in known]
            layer.frozen = self._frozen_buckets([parameter for parameter in held if not parameter.requires_grad])
            if self.options.exact_terms:
                named = module.named_parameters()
                layer.again = {n: p for n, p in named if isinstance(p, ShardedParameter) and p.spec.name in known}
            layers.append(layer)
            self.parameters += new
            if self.options.stage == 3:
                buckets = [*self._make_buckets(new, None), *buckets]
        if self.options.stage < 3:
            new = self.parameters[first_new:]
            total = sum(p.numel() * p.element_size() for p in new)
            if self.options.one_pass and all(self._mesh.shard_group(p.spec.replica_role).size == 1 for p in new):
                bucket_bytes = max(bucket_bytes, _SUMMED_NOWHERE)
            buckets = self._make_buckets(new, min(bucket_bytes, total // _BUCKETS))
        self._chunks.append(layers)
        self.buckets = [*buckets, *self.buckets]
        for bucket in buckets:
            bucket.chunk = number
        owner = {member.name: bucket for bucket in self.buckets for member in bucket.members}
        for layer in reversed(layers):
            layer.buckets = _unique(owner[parameter.spec.name] for parameter in layer.parameters)
            for bucket in layer.buckets:
                if bucket.chunk == number:
                    bucket.first_layer = layer.position
                else:
                    bucket.spans_chunks = True

    def _frozen_buckets(self, parameters: Sequence[ShardedParameter]) -> list[Bucket]:
        """Buckets of a layer's parameters that do not learn: below stage 3 every rank has all of them."""
        owner = {member.name: bucket for bucket in self.frozen_buckets for member in bucket.members}
        if new := [parameter for parameter in parameters if parameter.spec.name not in owner]:
            made = self._make_buckets(new, None)
            self.frozen_buckets += made
            owner |= {member.name: bucket for bucket in made for member in bucket.members}
        return _unique(owner[parameter.spec.name] for parameter in parameters)

    def _make_buckets(self, parameters: Sequence[ShardedParameter], bucket_bytes: int | None) -> list[Bucket]:
        """Buckets of at least `bucket_bytes`, more in a large replica group; None: as large as possible."""
        groups = {role: self._mesh.shard_group(role) for role in {p.spec.replica_role for p in parameters}}
        takes_whole = self.options.optimizer.takes_whole
        unsplit = {p.spec.name for p in parameters if takes_whole(p.spec.name, p.spec.shape)} - self._separate
        if bucket_bytes is None or all(group.size == 1 for group in groups.values()):
            unsplit = set()
        # Apart from each other, for the ranks to have equal shares of the matrices: in one bucket with the embedding
        # some ranks' shards would hold nothing else.
        assigned = self._assigned([p for p in parameters if p.spec.name not in unsplit], bucket_bytes, groups)
        if unsplit:
            assert bucket_bytes is not None
            assigned += assign_whole(
                [p for p in parameters if p.spec.name in unsplit],
                {role: group.size for role, group in groups.items()},
                {role: grown(bucket_bytes, group.size) for role, group in groups.items()},
                unit=self.options.shard_unit,
            )
            first_use = {p.spec.name: number for number, p in enumerate(parameters)}
            assigned.sort(key=lambda members: -min(first_use[p.spec.name] for p in members))
        buckets = []
        for members in assigned:
            role = members[0].spec.replica_role
            options, across = self.options.for_group(groups[role]), self._mesh.across_group(role)
            if not members[0].requires_grad and options.stage < 3:
                options, across = replace(options, stage=0), ALONE
            busy = self._busy.get(role, ()) if members[0].requires_grad else ()
            bucket = Bucket(members, groups[role], options, across=across, streams=self._streams, busy=busy)
            if bucket.learns:
                self._busy[role] = bucket.layout.busy
            buckets.append(bucket)
        return buckets

    def _assigned(
        self, parameters: Sequence[ShardedParameter], bucket_bytes: int | None, groups: Mapping[ReplicaRole, Group]
    ) -> list[list[ShardedParameter]]:
        """The members of buckets whose parameters shards may split."""
        limits = {
            role: sys.maxsize if bucket_bytes is None else grown(bucket_bytes, group.size)
            for role, group in groups.items()
        }
        # gloo sums over more than two ranks in a ring, which takes milliseconds whatever the size.
        in_ring = self.options.stage == 0 and self._mesh.device.type == "cpu"
        least = {
            role: limits[role] // _SMALLEST_OF_RING for role, group in groups.items() if in_ring and group.size > 2
        }
        return assign_buckets(parameters, limits, self._separate, least=least)

    # ---- around the layers

    def run_layer(self, chunk: int, number: int, layer: nn.Module, x: Any) -> Any:
        """layer(x), with the layer's parameters present in forward and backward: stages 1 and 2 wait for the gather
        that began after the last step, stage 3 gathers here. `chunk`: number of the pipeline stage on this rank.
        `number`: of the layer in it. `x`: its input, a tensor or a tuple of tensors."""
        layers = self._chunks[chunk]
        here = layers[number]
        if self.options.stage < 3:
            for bucket in here.buckets:
                bucket.wait()
            return here.run(layer, x)
        here.acquire()
        if number + 1 < len(layers):
            layers[number + 1].prefetch()
        y = here.run(layer, _when_backward(x, here.release))
        here.release()
        return _when_backward(y, partial(self._before_backward, here, layers[number - 1] if number else None))

    @property
    def acts_on_layers(self) -> bool:
        """Whether `run_layer` does more than call the layer."""
        return self.options.stage > 0 or any(layer.again for layer in self.layers)

    def _before_backward(self, layer: Layer, before: Layer | None) -> None:
        """Stage 3: backward has reached the layer's output."""
        self._reductions.reached(layer)  # before the next gathering, on every rank
        layer.acquire()
        if before is not None:
            before.prefetch()

    @contextmanager
    def zeros_for_weights(self) -> Iterator[None]:
        """Stage 3: layers that run inside compute with zeros instead of their parameters, which are not gathered. The
        other replicas need not call this. For trials between steps that determine shapes."""
        held = [*self.buckets, *self.frozen_buckets]
        for bucket in held:
            bucket.gathers = False
        try:
            yield
        finally:
            for bucket in held:
                bucket.users.clear()  # a layer that raised has not released them
                bucket.release()
                bucket.gathers = True

    # ---- gradients of a step

    def begin_step(self, loss_scale: float, *, sums_gradients: bool = True, compresses: bool = True) -> None:
        """Drop the gradients of the last step. `loss_scale`: a factor of the next step's gradients. `sums_gradients`:
        whether replicas sum them; otherwise each rank keeps its own, on stage 0. `compresses`: whether `compression` of
        the options applies. Gradients of no step of the optimizer go without it, so that the errors of the compression
        stay as they are."""
        self._reductions.begin_step()
        for bucket in self.buckets:
            bucket.begin_step(loss_scale, sums_gradients=sums_gradients, compresses=compresses)

    def begin_backward(self, chunk: int, *, last: bool, all_weights: bool = False) -> None:
        """The backward of a microbatch through a chunk begins. `chunk`: number of the pipeline stage on this rank.
        `last`: whether this is the step's last backward of the chunk. `all_weights`: whether backward needs all
        parameters of the chunk at once, and computes their gradients in any order instead of layer by layer."""
        buckets = [b for b in self.buckets if (b.chunk == chunk or b.spans_chunks) and not b.in_place]
        for bucket in buckets:
            bucket.begin_backward()
        # The chunk's last backward may not be the last of another chunk that uses the bucket.
        due = [b for b in buckets if b.options.stage >= 2 or (last and not b.spans_chunks)]
        self._reductions.begin_backward(due, is_last=last, by_layer=not all_weights)
        if all_weights:
            self.gather_parameters(chunk)

    def end_backward(self, chunk: int) -> None:
        """A microbatch's backward through a chunk is done: begin reductions still due, and release the parameters."""
        self._reductions.end_backward()
        self.release_parameters(chunk)

    def gather_parameters(self, chunk: int) -> None:
        """Gather all parameters of a chunk, for a backward that needs them at once, or for a forward that does not go
        through `run_layer`."""
        for layer in self._chunks[chunk]:
            layer.acquire()

    def release_parameters(self, chunk: int) -> None:
        for layer in self._chunks[chunk] if self.options.stage == 3 else ():
            layer.release()

    @contextmanager
    def observed_by(self, observer: GradientObserver) -> Iterator[None]:
        """Show gradients computed inside to the observer; if it discards them, the step's stay as they are. Those that
        autograd adds up over several chunks of this rank are not shown."""
        kept = [parameter.grad for parameter in self.parameters]
        if observer.discards:
            for parameter in self.parameters:
                parameter.grad = None
        self._observer = observer
        # Nobody else asks when those arrive that stay where autograd puts them.
        hooks = [inlet.hook() for inlet in self._inlets if inlet.bucket.in_place and inlet.parameter.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._observer = None
            for inlet in self._inlets:
                inlet.dropped, inlet.is_seen = None, False
            if observer.discards:
                for parameter, gradient in zip(self.parameters, kept, strict=True):
                    parameter.grad = gradient

    def finish(self) -> None:
        """Finish the reductions of the step, so that this rank's shard of the gradients is complete."""
        for bucket in self.buckets:
            if bucket.spans_chunks and bucket.options.stage < 2:  # no single chunk's backward completes it
                bucket.reduce()
        for bucket in self.buckets:
            bucket.finish_reduction()
        # All sums over the other groups begin before the first is waited for: they run at the same time.
        for bucket in self.buckets:
            bucket.begin_sum_across()
            if self._streams is not None:  # no more than one is on the device
                bucket.finish_sum_across()
        for bucket in self.buckets:
            bucket.finish_sum_across()

    def begin_download(self) -> None:
        """With `offload`, begin to copy this rank's gradients to host memory, the buckets in the order of their use. An
        accelerator copies them in a separate stream, after what is queued now."""
        if self._downloads is not None:
            self._downloads.wait_stream(torch.accelerator.current_stream(self._downloads.device))
        with self._downloads or nullcontext():
            for bucket in self.in_order_of_use():
                bucket.begin_download()

    def convert_exact_sums(self) -> None:
        """Convert exact sums to fp32 gradients without the loss scale; sums in floating point stay as they are."""
        for bucket in self.buckets:
            bucket.convert_exact_sums()

    def drop_frozen_gradients(self) -> None:
        """The gradients of frozen parameters count as zero, in the norm too."""
        for run in self._frozen:
            if (gradient := run.gradient) is not None:
                run.bucket.write_gradient(run.shard_slice, gradient.zero_())

    def overflow(self) -> Tensor | float:
        """A scalar: 0 if this rank's terms of exact sums were finite, otherwise not finite."""
        found = [overflow for bucket in self.buckets if (overflow := bucket.overflow) is not None]
        return torch.stack(found).sum() if found else 0.0

    def weight_check(self, step: int) -> Tensor | float:
        """A scalar: 0 if a part of the parameters that this rank updates is finite, otherwise not finite. Each step
        checks another part, which costs next to nothing compared with the update; in `CHECKED_IN` steps that is
        all."""
        if not self.buckets:
            return 0.0
        parts = (bucket.part_of_parameters(step % CHECKED_IN, CHECKED_IN) for bucket in self.buckets)
        if self._streams is None:
            norms = list(torch._foreach_norm(list(parts), 2, torch.float32))
        else:  # no more than one is on the device
            norms = [torch.linalg.vector_norm(part, 2, dtype=torch.float32) for part in parts]
        return 0.0 * torch.stack(norms).sum()

    @property
    def padding(self) -> float:
        """Share of the flat buffers that is padding; large if there are few parameters that no shard may split."""
        size = sum(bucket.layout.size for bucket in self.buckets)
        return sum(bucket.layout.padding for bucket in self.buckets) / max(size, 1)

    def segments_of(self, name: str) -> list[LocalSegment]:
        return [local for local in self.segments if local.spec.name == name]

    # ---- weights

    def publish(self) -> None:
        """Make updated master weights the parameters' values, in the order in which layers use them."""
        for bucket in self.in_order_of_use():
            bucket.publish()

    def publish_parameter(self, name: str) -> None:
        """Make the updated master weights of one parameter's bucket the values of its parameters."""
        bucket = self._bucket_of(name)
        bucket.publish()
        if bucket.options.stage < 3:
            bucket.wait()

    def in_order_of_use(self) -> list[Bucket]:
        """The buckets, those that the first layers need first."""
        return _unique(bucket for layer in self.layers for bucket in layer.buckets)

    def ready(self) -> None:
        """Wait until all parameters are gathered, below stage 3."""
        for bucket in self.buckets:
            if bucket.options.stage < 3:
                bucket.wait()

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's master weights from complete local tensors, then publish them."""
        with torch.no_grad():
            for local in self.segments:
                segment = local.segment
                local.master.copy_(tensors[segment.name].reshape(-1)[segment.start : segment.stop])
        self.publish()

    def record_norms(self, names: Collection[str]) -> None:
        """Record whether this rank's gradients of these parameters are finite, before other ranks' are added."""
        for bucket in self.buckets if names else ():
            bucket.record_norms(names)

    def non_finite_gradient(self) -> NonFiniteGradient | None:
        """The parameter whose gradient was not finite on this rank before any reduction. Of several, the one that the
        forward uses last: backward computes its gradient first, and NaN spreads from there."""
        known = [pair for bucket in self.buckets for pair in bucket.finite_gradients()]
        finite = torch.stack([flag for _, flag in known]).tolist() if known else []  # one copy to the host
        bad = {name for (name, _), good in zip(known, finite, strict=True) if not good}
        positions = [number for number, parameter in enumerate(self.parameters) if parameter.spec.name in bad]
        if not positions:
            return None
        name = self.parameters[positions[-1]].spec.name
        return NonFiniteGradient(stage=self.place_of(name)[0], position=positions[-1], name=name)

    def place_of(self, name: str) -> tuple[int, int]:
        """Where the forward uses a parameter: the pipeline stage, and the place among the rank's parameters."""
        position = next(n for n, parameter in enumerate(self.parameters) if parameter.spec.name == name)
        return self._stages[self._bucket_of(name).chunk], position

    def _bucket_of(self, name: str) -> Bucket:
        return next(bucket for bucket in self.buckets if any(member.name == name for member in bucket.members))


class _Reductions:
    """Begins the reductions of a backward, in one order whatever gradients a rank has: ranks pair collectives by it, so
    a bucket that is complete early waits for those before. `sums_across`: whether complete sums over a group are summed
    over the other groups while backward still runs."""

    def __init__(self, *, sums_across: bool) -> None:
        self._sums_across = sums_across
        self._due: list[Bucket] = []  # in order, those whose reduction must begin in this backward
        self._is_last = False  # whether this backward is the step's last of its chunk
        self._by_layer = True  # whether it completes a layer before it reaches the one before
        # The bucket whose reduction began last, and whether all gradients of the step are in it.
        self._before: tuple[Bucket | None, bool] = None, False

    def begin_step(self) -> None:
        self._before = None, False

    def begin_backward(self, due: list[Bucket], *, is_last: bool, by_layer: bool) -> None:
        self._due, self._is_last, self._by_layer = due, is_last, by_layer

    def completed(self, bucket: Bucket) -> None:
        """All gradients of a bucket have arrived."""
        if bucket in self._due:
            self._begin(sys.maxsize)

    def reached(self, layer: Layer) -> None:
        """Backward has reached the output of a layer."""
        if self._by_layer:
            self._begin(layer.position)

    def end_backward(self) -> None:
        self._begin(-1)

    def _begin(self, reached: int) -> None:
        """Begin what is due, in order, up to the first bucket that still waits for a gradient. `reached`: backward has
        passed all layers after this one: a gradient that they have not computed is zero."""
        while self._due and (not self._due[0].awaits_gradients or self._due[0].first_layer > reached):
            self._reduce(self._due.pop(0))

    def _reduce(self, bucket: Bucket) -> None:
        """Begin a bucket's reduction. Where reductions take memory, first wait for the one before: then it is that of
        at most two buckets, the one being reduced and the one that backward fills meanwhile. Where other groups hold
        copies of its shard, wait too: their sum begins while backward runs."""
        before, is_complete = self._before
        sums_across = is_complete and self._sums_across
        if before is not None and (before.reduction_takes_memory or (sums_across and before.across.size > 1)):
            before.finish_reduction()
            if sums_across:
                before.begin_sum_across()
        bucket.reduce()
        self._before = bucket, self._is_last and not bucket.spans_chunks


@dataclass(eq=False)
class Layer:
    """A layer of this rank."""

    position: int  # among the rank's layers
    parameters: list[ShardedParameter]  # that learn, each once
    buckets: list[Bucket] = field(default_factory=list)  # of the parameters
    frozen: list[Bucket] = field(default_factory=list)  # buckets of those that do not learn
    # With exact sums, the parameters that an earlier layer uses too, by their name in the layer.
    again: dict[str, ShardedParameter] = field(default_factory=dict)

    def run(self, module: nn.Module, x: Any) -> Any:
        """module(x). The gradient of a parameter that an earlier layer uses too is captured separately, as if the two
        layers were on different stages: autograd would add the gradients in floating point."""
        if not self.again:
            return module(x)
        return functional_call(module, {name: separate_term(p) for name, p in self.again.items()}, (x,))

    def acquire(self) -> None:
        """Gather the parameters, and keep them until `release`."""
        for bucket in (*self.buckets, *self.frozen):
            bucket.users.add(self.position)
            bucket.wait()

    def prefetch(self) -> None:
        for bucket in (*self.buckets, *self.frozen):
            bucket.users.add(self.position)
            bucket.prefetch()

    def release(self) -> None:
        """The layer does not need its parameters any more."""
        for bucket in (*self.buckets, *self.frozen):
            bucket.users.discard(self.position)
            if not bucket.users:
                bucket.release()


class _Inlet:
    """Takes a parameter's gradients: from autograd, and as a `GradientAccumulator` from a product or look-up that adds
    them."""

    def __init__(self, data_parallel: DataParallel, bucket: Bucket, member: Member) -> None:
        self.bucket, self.parameter = bucket, member.parameter
        # Not its owner's owner: a model that is dropped frees its memory at once, not when cycles are collected.
        self._data_parallel: DataParallel = weakref.proxy(data_parallel)
        self._member = member
        self.dropped: Tensor | None = None  # the sum of products that an observer discards
        self.is_seen = False  # whether an observer has seen such a sum

    def connect(self, *, is_used_once: bool) -> None:
        """Let the parameter give its gradients here; autograd adds up those of a parameter with several uses."""
        bucket, parameter = self.bucket, self.parameter
        if not bucket.in_place:
            self.hook()
        if bucket.options.exact_terms:
            parameter.take_term = self._take_term
        if is_used_once and (bucket.takes_products or parameter.takes_rows):
            parameter.accumulator = self

    def hook(self) -> RemovableHandle:
        """Have autograd call `_take`, without a reference to its owner: the garbage collector cannot see a tensor's
        hooks."""
        reference = weakref.WeakMethod(self._take)

        def hook(parameter: Tensor) -> None:
            if (take := reference()) is not None:
                take()

        return self.parameter.register_post_accumulate_grad_hook(hook)

    def _take(self) -> None:
        """Move the gradient out of `.grad` into the bucket, unless it stays there."""
        gradient = self.parameter.grad
        # A product or a look-up may have added the gradient itself; whether torch then calls hooks depends on its
        # version. Added to the bucket, it is not in `.grad`; in place it is, and the observer has seen it.
        if gradient is None or (self.bucket.in_place and self.is_seen):
            return
        if self._is_discarded(gradient):
            self.parameter.grad = None
        elif not self.bucket.in_place:
            self.bucket.add(self._member, gradient)
            self.parameter.grad = gradient = None  # its memory is free before a reduction takes some
            self._arrived()

    def _take_term(self, parameter: ShardedParameter, gradient: Tensor) -> None:
        if not self._is_discarded(gradient):
            self.bucket.add(self._member, gradient)

    @property
    def discards(self) -> bool:
        observer = self._data_parallel._observer
        return observer is not None and observer.discards

    def buffer(self) -> tuple[Tensor, bool]:
        held = self.dropped is not None
        if not self.discards:
            return self.bucket.sum_of(self._member)
        if self.dropped is None:
            dtype = self.bucket.options.sum_dtype
            self.dropped = torch.empty(self.parameter.shape, dtype=dtype, device=self.parameter.device)
        return self.dropped, held

    def added(self) -> None:
        if self._data_parallel._observer is not None:
            gradient, self.dropped = self.buffer()[0], None
            self.is_seen = True
            if self._is_discarded(gradient):
                return
        self._arrived()

    def add_rows(self, rows: Tensor, terms: Tensor) -> None:
        total, has_terms = self.buffer()
        if not has_terms:
            total.zero_()
        if self.bucket.options.exact_terms:
            terms = self.bucket.multiples(self._member, terms)
        total.index_add_(0, rows, terms.to(total.dtype))
        self.added()

    def _is_discarded(self, gradient: Tensor) -> bool:
        """Show a gradient to the observer, if there is one; whether it is to be dropped."""
        observer = self._data_parallel._observer
        if observer is None:
            return False
        if not (self.bucket.spans_chunks and self.bucket.in_place):
            observer.see(self._member.name, gradient)
        return observer.discards

    def _arrived(self) -> None:
        if self.bucket.arrived(self._member):
            self._data_parallel._reductions.completed(self.bucket)


class _WhenBackward(torch.autograd.Function):
    """The identity of several tensors; calls a hook once when backward reaches them."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hook()
        return None, *grads


def _when_backward(value: Any, hook: Callable[[], None]) -> Any:
    """The tensor or tuple of tensors `value`; backward calls the hook when it reaches them, if they need gradients:
    then the gradients of all that follows them in the forward are computed."""
    if isinstance(value, Tensor):
        return _WhenBackward.apply(hook, value)[0] if value.requires_grad else value
    learning = [tensor for tensor in value if tensor.requires_grad]
    needing = iter(_WhenBackward.apply(hook, *learning) if learning else ())
    return tuple(next(needing) if tensor.requires_grad else tensor for tensor in value)


def _unique(buckets: Any) -> list[Bucket]:
    return list(dict.fromkeys(buckets))
