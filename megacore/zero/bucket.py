"""A bucket of parameters, and what a rank keeps of it: parameters, gradients, and a shard of each.

| kept per rank, of d ranks | stage 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| parameters | all | all | all | a shard; all while a layer uses them |
| gradients | all | all | a shard | a shard |
| master weights, moments (fp32) | all | a shard | a shard | a shard |

(ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054, section 5.) On stage 0 there is one shard, which every rank keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.parallel import host_copies
from megacore.parallel.collectives import (
    Pending,
    all_or_none,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import ShardedParameter
from megacore.zero.compressed import CompressedSum
from megacore.zero.exact_sums import UNIT, add_units, from_units, in_units
from megacore.zero.host_shard import HostShard, HostStreams
from megacore.zero.layout import FlatLayout, Segment, contiguous_slices
from megacore.zero.local_segments import LocalRun, LocalSegment, local_segments
from megacore.zero.options import ZeroOptions


@dataclass(eq=False)
class Member:
    """A parameter in its bucket."""

    parameter: ShardedParameter  # a view of the bucket's buffer
    number: int  # in the bucket
    elements: slice  # of the flat buffer
    has_terms: bool = False  # whether the sum of its gradients over the step has begun
    norm: Tensor | None = None  # of its gradients before a sum over ranks that are not replicas, where it was recorded

    @property
    def name(self) -> str:
        return self.parameter.spec.name


class _Reduction(NamedTuple):
    """A reduction under way. It keeps its source alive."""

    pending: Pending  # to wait for
    result: Tensor  # where the sum arrives
    source: Tensor  # the gradients that are summed


class Bucket:
    """Parameters in one flat buffer. `first_layer`: the layer whose backward completes their gradients. `master`: this
    rank's shard of the weights in fp32; in fp32 training it is the parameters themselves, unless it is in host memory.

    Args:
        parameters: fp32 and initialised; they become views of the bucket's buffer, in `options.compute_dtype`.
        group: the ranks that hold the same parameters, and shard their state.
        options: how state is sharded (`ZeroOptions.for_group`).
        across: ranks of other such groups that hold the same shard.
        streams: of copies; with `offload_params`.
        busy: the work of each rank of the group in buckets made before, see `FlatLayout`.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        group: Group,
        options: ZeroOptions,
        *,
        across: Group = ALONE,
        streams: HostStreams | None = None,
        busy: Sequence[float] = (),
    ) -> None:
        assert group.size > 1 or options.stage == 0 or options.offload_params
        assert across.size == 1 or options.stage > 0
        self.parameters, self.group, self.options, self.across = list(parameters), group, options, across
        self._device = self.parameters[0].device
        shards, rank = (group.size, group.rank) if options.stage else (1, 0)
        specs, optimizer = [parameter.spec for parameter in parameters], options.optimizer
        # Whether the parameters have gradients; of those that have none this is all that there is.
        self.learns = self.parameters[0].requires_grad
        unsplit = [s for s in specs if self.learns and optimizer.takes_whole(s.name, s.shape)]
        whole = {s.name: optimizer.work_of(s.shape) for s in unsplit}
        self.unsplit = set(whole)  # names of the parameters that no shard splits
        self.layout = FlatLayout(parameters, shards, whole, unit=options.shard_unit, busy=busy if shards > 1 else ())
        self._shard = slice(rank * self.layout.shard_size, (rank + 1) * self.layout.shard_size)
        self.members = [Member(p, i, self.layout.slice_of(p.spec.name)) for i, p in enumerate(self.parameters)]
        self.segments: list[Segment] = self.layout.segments(rank)  # the parts of parameters in this rank's shard
        by_name = {member.name: member for member in self.members}
        self._member_at = {segment.offset: by_name[segment.name] for segment in self.segments}
        self._move_parameters()
        self._host: HostShard | None = None
        if options.offload_params:
            assert streams is not None and options.stage == 3 and options.offload
            self._host = HostShard(self.shard_params, group, streams, sum_dtype=options.sum_dtype)

        # What the parameters are doing. Stages 1 and 2 gather them after a step, stage 3 for each layer.
        self._present = True  # False on stage 3 until they are gathered
        self._gathering: Pending | None = None  # under way; on stages 1 and 2 of the updated ones
        self.users: set[int] = set()  # layers that use them now, or soon; with none of them stage 3 may release
        self.gathers = True  # whether stage 3 gathers them for a layer, which otherwise computes with zeros

        # Where gradients are, from autograd to the sum that the optimizer reads: `full_gradients`, then `reducing`,
        # then `_shard_gradients`, to which stages 2 and 3 add every microbatch's, then `_summing`.
        #
        # Whether the memory of gradients is given back between steps: nothing is summed over ranks, nothing converted.
        self._drops_buffer = group.size == 1 and options.stage == 0 and options.compute_dtype == options.sum_dtype
        # Whether they also stay in `.grad`, where autograd puts them. A step in one pass reads one flat buffer instead.
        self.in_place = self._drops_buffer and not options.one_pass
        self.full_gradients: Tensor | None = None  # of all; kept on stages 0 and 1, on the others until reduced
        self._shard_gradients: Tensor | None = None  # this rank's shard of their sum
        self.reducing: _Reduction | None = None  # under way
        self._is_partial = False  # whether the shard's sum is of this group's ranks only
        self._summing: _Reduction | None = None  # the sum over `across`, under way
        self._awaited: set[Member] = set()  # those whose gradient of this backward has not arrived
        # A number for each of `_checked`: of exact terms the largest entry, otherwise finite where the gradient was.
        self._checks: Tensor | None = None
        self._checked = [s.name for s in self.segments] if self._keeps_others else [m.name for m in self.members]
        # Sums of gradients, or of the momentum, in a compressed format; None: there are none.
        self.compressed: CompressedSum | None = None
        if options.code is not None and group.size > 1:
            self.compressed = CompressedSum(
                self.layout.size, group, options.code, device=self._device, passes_on=options.stage == 0
            )
        self.sums_gradients = True  # whether the gradients of the step under way are summed over the group
        self._compresses = False  # gradients, in the step under way
        self._loss_scale = 1.0
        self._unit = UNIT  # of exact sums, in gradients that carry the loss scale
        downloads = options.offload and self._host is None and self.learns
        self._host_gradients = self._on_host(options.summed_dtype) if downloads else None
        self._download_event: torch.Event | None = None
        self._runs: list[weakref.ref[LocalRun]] = []
        self.chunk = self.first_layer = 0  # number of the pipeline stage on this rank that uses the parameters first
        self.spans_chunks = False  # whether several stages of this rank use a parameter
        self.release()

    @property
    def _keeps_others(self) -> bool:
        """Whether the reduction overwrites only this rank's shard of its gradients."""
        return self.options.stage == 1 and not self.options.exact_terms

    @property
    def reduction_takes_memory(self) -> bool:
        """Whether a reduction under way takes memory that is free afterwards: on stages 2 and 3 the unsharded
        gradients; on a CPU, where shards are summed from messages, also the other ranks' terms."""
        return self.options.stage >= 2 or (self.options.stage == 1 and self._device.type == "cpu")

    # ---- parameters

    def _move_parameters(self) -> None:
        """Move the parameters into a flat buffer: all of them, this rank's shard of them, and its master weights. One
        parameter moves at a time and gives its memory back, so that no second copy of the bucket is needed. On stage 3
        only the shard is kept, and the flat buffer is made only after the last has moved."""
        stage, dtype = self.options.stage, self.options.compute_dtype
        shapes = [parameter.shape for parameter in self.parameters]
        segment_of = {segment.name: segment for segment in self.segments}
        full = torch.zeros(0 if stage == 3 else self.layout.size, dtype=dtype, device=self._device)
        shard = full.new_zeros(self.layout.shard_size) if stage == 3 else full[self._shard]
        if self.options.offload_params:
            shard = self._on_host(dtype)
        master = shard
        if self.options.offload_params and dtype == torch.float32:
            pass  # in host memory already
        elif not self.learns:
            pass  # as layers compute with them
        elif self.options.offload:
            master = self._on_host(torch.float32)
        elif dtype != torch.float32:
            master = torch.zeros(self.layout.shard_size, device=self._device)
        for member in self.members:
            flat = member.parameter.detach().reshape(-1)
            if stage < 3:
                full[member.elements] = flat
            if (part := segment_of.get(member.name)) is not None:
                shard[part.shard_slice] = flat[part.start : part.stop]
                if master is not shard:
                    master[part.shard_slice] = flat[part.start : part.stop]
            del flat
            member.parameter.data = full.new_empty(0)
        if stage == 3:
            full = full.new_empty(self.layout.size)
        for member, shape in zip(self.members, shapes, strict=True):
            member.parameter.data = full[member.elements].view(shape)
        self.full_params, self.shard_params, self.master = full, shard, master

    def _on_host(self, dtype: torch.dtype) -> Tensor:
        """Zeros of a shard's size in host memory, from and to which the device can copy without the host."""
        return torch.zeros(self.layout.shard_size, dtype=dtype, pin_memory=self._device.type != "cpu")

    def prefetch(self) -> None:
        if not self._present and self._gathering is None:
            self.full_params.untyped_storage().resize_(self.full_params.numel() * self.full_params.element_size())
            # `.data` has a separate version counter: a refill is no change to what autograd has saved.
            if not self.gathers:
                self.full_params.data.zero_()
                self._present = True
                return
            if self._host is not None:
                self._gathering = self._host.start_gather(self.full_params.data)
            else:
                self._gathering = start_all_gather(self.full_params.data, self.shard_params, self.group)

    def wait(self) -> None:
        """Return once all parameters may be read."""
        if not self._present:
            self.prefetch()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self._present = True

    def release(self) -> None:
        """Stage 3: keep only this rank's shard."""
        if self.options.stage < 3:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.full_params.untyped_storage().resize_(0)
        self._present = False

    def shard_to_write(self) -> Tensor | None:
        """This rank's shard of the parameters in their 16-bit format, for an optimizer that writes it with the master
        weights; None if these are the parameters themselves."""
        self._end_gathering()
        return None if self.master is self.shard_params else self.shard_params

    def publish(self, *, written: bool = False) -> None:
        """Make updated master weights the parameters' values; on stages 1 and 2, begin to gather the other ranks'.
        `written`: whether the optimizer has written `shard_to_write` already."""
        self._end_gathering()
        if self._host is not None:
            self._host.wait_for_reads()
        if self.master is not self.shard_params and not written:
            if self.options.offload and self._host is None:
                host_copies.to_device_(self.shard_params, self._weights_to_copy(), "parameters")
            else:
                self.shard_params.copy_(self.master, non_blocking=True)
        if self.options.stage in (1, 2):
            self._gathering = start_all_gather(self.full_params.data, self.shard_params, self.group)
            if not self.options.overlap_param_gather:
                self.wait()

    def _end_gathering(self) -> None:
        if self.options.stage in (1, 2) and self._gathering is not None:
            self.wait()  # other ranks still read this shard

    def _weights_to_copy(self) -> Tensor:
        """The master weights, in host memory already in the device's format: a copy that converts would hold up the
        host until it is done. The gradients there have been used, and their memory is large enough."""
        host = self._host_gradients
        if host is None or self._device.type == "cpu" or self.shard_params.dtype == self.master.dtype:
            return self.master
        self._wait_for_download()  # of a step that was skipped
        return host.view(torch.uint8)[: self.shard_params.nbytes].view(self.shard_params.dtype).copy_(self.master)

    # ---- gradients

    def begin_step(self, loss_scale: float, *, sums_gradients: bool = True, compresses: bool = True) -> None:
        """Drop the gradients of the last step. `loss_scale`: a factor of the next step's gradients. `sums_gradients`:
        whether they are summed over the group; otherwise each rank keeps its own, of stage 0. `compresses`: whether
        they are sent as `options.compression` says; otherwise as they are."""
        assert sums_gradients or self.options.stage == 0 or self.group.size == 1
        self._compresses = compresses and self.options.compression != "none" and self.group.size > 1
        self.sums_gradients, self._loss_scale = sums_gradients or self.group.size == 1, loss_scale
        if self._download_event is not None:  # of a skipped step: gradients must not be overwritten yet
            self._download_event.wait()
        self.finish_reduction()  # of gradients that nobody took
        self.finish_sum_across()
        self._shard_gradients, self._checks, self._is_partial = None, None, False
        if self._host is not None:
            self._host.begin_step()
        if self._drops_buffer:
            self.full_gradients = None
        self._unit = UNIT * loss_scale
        for member in self.members:
            member.has_terms, member.norm, member.parameter.grad = False, None, None

    def begin_backward(self) -> None:
        self._awaited = set(self.members)

    def add(self, member: Member, gradient: Tensor) -> None:
        if self.options.exact_terms:
            # The largest entry too: the sum's integers cannot say that it was finite and small enough.
            self._check(member, add_units(self._sum_of(member), gradient, self._unit, has_terms=member.has_terms))
        else:
            view = self._sum_of(member).view(gradient.shape)
            view.add_(gradient) if member.has_terms else view.copy_(gradient)
        member.has_terms = True

    def arrived(self, member: Member) -> bool:
        """A parameter's gradient of this backward was added; True if it was the last."""
        member.has_terms = True
        self._awaited.discard(member)
        return not self._awaited

    @property
    def takes_products(self) -> bool:
        options = self.options
        sixteen = options.compute_dtype in (torch.bfloat16, torch.float16)
        return options.products_add and sixteen and options.sum_dtype == torch.float32

    def sum_of(self, member: Member) -> tuple[Tensor, bool]:
        """The sum of a parameter's gradients, of its shape, and whether it holds terms already."""
        parameter = member.parameter
        if self.in_place:
            held = parameter.grad
            parameter.grad = torch.empty_like(parameter) if held is None else held
            return parameter.grad, held is not None
        return self._sum_of(member).view(parameter.shape), member.has_terms

    def _sum_of(self, member: Member) -> Tensor:
        """Its elements of the buffer of all gradients, flat."""
        if self.full_gradients is None:
            self.full_gradients = torch.zeros(self.layout.size, dtype=self.options.sum_dtype, device=self._device)
        return self.full_gradients[member.elements]

    def multiples(self, member: Member, gradient: Tensor) -> Tensor:
        """Of the unit of exact sums, int64, to be added to a member's sum."""
        self._check(member, gradient.abs().amax())
        return in_units(gradient, self._unit).to(torch.int64)

    def _check(self, member: Member, largest: Tensor) -> None:
        if self._checks is None:
            self._checks = torch.zeros(len(self.members), device=self._device)
        check = self._checks[member.number]
        torch.maximum(check, largest.float(), out=check)

    def reduce(self) -> None:
        """Begin to sum the gradients over the group; those of parameters that the loss did not use count as zero."""
        self.finish_reduction()
        self._is_partial = self.across.size > 1
        self._awaited.clear()
        if self.in_place:
            return
        for member in self.members:
            if not member.has_terms:
                self._sum_of(member).zero_()
        gradients = self.full_gradients
        assert gradients is not None
        if (self.group.size > 1 or self._host is not None) and not self.options.exact_terms:
            self._record_local_norms(gradients)
        if not self.sums_gradients:
            self._shard_gradients = gradients
        elif self._compresses:
            self._reduce_compressed(gradients)
        elif self.options.stage == 0:
            self.reducing = _Reduction(start_all_reduce_(gradients, self.group), gradients, gradients)
        else:
            # On stage 1 the sum goes where this rank's share of the terms was: nothing more is kept.
            shard = gradients
            if self.group.size > 1:
                is_part = self.options.stage == 1
                shard = gradients[self._shard] if is_part else gradients.new_empty(self.layout.shard_size)
            self.reducing = _Reduction(start_reduce_scatter(shard, gradients, self.group), shard, gradients)
        if self.options.stage >= 2:
            self.full_gradients = None
            for member in self.members:
                member.has_terms = False
        if not self.options.overlap_grad_reduce or self.group.size == 1:
            self.finish_reduction()

    def _reduce_compressed(self, gradients: Tensor) -> None:
        """Begin to sum them; where this rank's part is sent on, that happens when the reduction is finished."""
        assert self.compressed is not None
        self.compressed.begin(gradients, self._loss_scale)
        shard = gradients
        if self.options.stage > 0:
            shard = gradients[self._shard] if self.options.stage == 1 else gradients.new_zeros(self.layout.shard_size)
        self.reducing = _Reduction(Pending(then=partial(self._take_sum, shard)), shard, shard)

    def _take_sum(self, shard: Tensor) -> None:
        """Keep a compressed sum; the padding stays 0, also where a block is not finite."""
        assert self.compressed is not None
        summed = self.compressed.whole_sum() if self.options.stage == 0 else self.compressed.part_of_sum().view(-1)
        summed *= self._loss_scale
        for segment in self.segments:
            shard[segment.shard_slice] = summed[segment.shard_slice]

    def finish_reduction(self) -> None:
        """Wait for the reduction, and keep this rank's shard of the sum."""
        if self.reducing is None:
            return
        pending, shard, _ = self.reducing
        pending.wait()
        self.reducing = None
        if self._host is not None:
            self._host.add(shard)
        elif self._shard_gradients is None:
            self._shard_gradients = shard
        else:
            self._shard_gradients += shard

    def begin_sum_across(self) -> None:
        """Begin to sum the shard over the groups that hold copies of it, once all terms of this group are added."""
        if self._is_partial:
            shard = self._shard_gradients if self._host is None else self._host.gradients(slice(None))
            assert shard is not None
            self._summing, self._is_partial = _Reduction(start_all_reduce_(shard, self.across), shard, shard), False

    def finish_sum_across(self) -> None:
        if self._summing is not None:
            self._summing.pending.wait()
            if self._host is not None:
                self._host.write(slice(None), self._summing.result)
            self._summing = None

    @property
    def awaits_gradients(self) -> bool:
        """Whether a parameter's gradient of this backward has not arrived."""
        return bool(self._awaited)

    def convert_exact_sums(self) -> None:
        """Convert exact sums to fp32 gradients without the loss scale, once all terms are added."""
        if self._host is not None:
            self._host.convert_exact_sums()
        elif self._shard_gradients is not None and self._shard_gradients.dtype == torch.int64:
            self._shard_gradients = from_units(self._shard_gradients, UNIT)
            self.full_gradients = None

    @property
    def overflow(self) -> Tensor | None:
        """A scalar: 0 if this rank's terms of exact sums were finite, otherwise not finite; None: it adds none."""
        if self._checks is None or not self.options.exact_terms:
            return None
        return torch.where(self._are_held(self._checks), 0.0, torch.inf).sum(dtype=torch.float64)

    def _are_held(self, checks: Tensor) -> Tensor:
        """Whether the gradients of the members that are checked were finite, and small enough for an exact sum."""
        if not self.options.exact_terms:
            return checks.isfinite()
        return checks <= self.options.largest_exact * self._loss_scale  # False for NaN

    def part_of_parameters(self, number: int, parts: int) -> Tensor:
        """Part `number` of `parts` of this rank's shard of the parameters, flat, on the device."""
        size = -(-self.layout.shard_size // parts)
        part = slice(number * size, (number + 1) * size)
        return self.shard_params[part] if self._host is None else self._host.on_device(part)

    @property
    def shard_gradients(self) -> Tensor | None:
        """With `one_pass`, this rank's shard of the reduced gradients, flat; None where no loss used the parameters."""
        assert not self.in_place
        return self._shard_gradients

    def has_gradient(self, elements: slice) -> bool:
        """Whether a segment or run has a reduced gradient; argument as for `gradient`."""
        return self._host.has_gradients if self._host is not None else self.gradient(elements) is not None

    def gradient(self, elements: slice) -> Tensor | None:
        """The reduced gradient of a segment or run, flat, on the device; None where no loss used the parameters. With
        `offload_params` it is a copy: `write_gradient` keeps what is changed of it."""
        if self._host is not None:
            return self._host.gradients(elements) if self._host.has_gradients else None
        if self.in_place:
            gradient = self._member_at[elements.start].parameter.grad
            return None if gradient is None else gradient.view(-1)
        return None if self._shard_gradients is None else self._shard_gradients[elements]

    def write_gradient(self, elements: slice, gradient: Tensor) -> None:
        """Keep a gradient that `gradient` gave, and that has been changed in place."""
        if self._host is not None:
            self._host.write(elements, gradient)

    def make_segments(self) -> list[LocalSegment]:
        """The segments that this rank updates, made once. Whoever holds them holds the bucket, which holds neither them
        nor their runs: a model that is dropped frees its memory at once, not when cycles are collected."""
        segments = list(local_segments(self))
        self._runs = [weakref.ref(run) for run in dict.fromkeys(local.run for local in segments)]
        return segments

    @property
    def runs(self) -> list[LocalRun]:
        return [run for reference in self._runs if (run := reference()) is not None]

    def gradients_of_runs(self) -> list[Tensor | None]:
        return [self.gradient(run.shard_slice) for run in self.runs]

    def gradients(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The reduced gradients of several segments in order; adjacent ones as one flat tensor, with the padding
        between."""
        slices = [segment.shard_slice for segment in segments] if self.in_place else contiguous_slices(segments)
        return [gradient for elements in slices if (gradient := self.gradient(elements)) is not None]

    def begin_download(self) -> None:
        """Begin to copy this rank's reduced gradients into host memory, unless they are there."""
        if self._host is not None:
            return
        host = self._host_gradients
        assert host is not None
        if self.in_place:
            for segment in self.segments:
                if (gradient := self.gradient(segment.shard_slice)) is not None:
                    host_copies.to_host_(host[segment.shard_slice], gradient, "gradients")
        elif self._shard_gradients is not None:
            host_copies.to_host_(host, self._shard_gradients, "gradients")
        if self._device.type != "cpu":
            self._download_event = torch.Event(self._device)
            self._download_event.record()

    def downloaded(self) -> Tensor:
        """The shard's gradients in host memory, flat and in fp32, once they have arrived. The caller may change them
        until the weights are published. Elements without a gradient have undefined values."""
        if self._host is not None:
            return self._host.downloaded().float()
        self._wait_for_download()
        assert self._host_gradients is not None
        return self._host_gradients.float()

    def _wait_for_download(self) -> None:
        if self._download_event is not None and not self._download_event.query():
            self._download_event.synchronize()
        self._download_event = None

    def record_norms(self, names: Collection[str]) -> None:
        """Record the norms of this rank's gradients of these parameters, before other ranks' are added in place; where
        gradients are reduced over replicas, `reduce` has recorded them."""
        if self.group.size > 1 or self.options.exact_terms:
            return
        unreduced = [(member, values) for member, values in self._unreduced() if member.name in names]
        norms = torch._foreach_norm([values for _, values in unreduced]) if unreduced else ()
        for (member, _), norm in zip(unreduced, norms, strict=True):
            member.norm = norm

    def finite_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whether this rank's gradients were finite before any reduction: parameters' names, each with a bool scalar on
        the device. A name may come several times, for several parts of the gradient."""
        if self._checks is not None:
            yield from zip(self._checked, self._are_held(self._checks).unbind(), strict=True)
        for member, values in self._unreduced():
            yield member.name, (values if member.norm is None else member.norm).isfinite().all()

    def _unreduced(self) -> Iterator[tuple[Member, Tensor]]:
        """This rank's gradients that no reduction over replicas has overwritten, flat."""
        if self.in_place:
            yield from ((m, m.parameter.grad.view(-1)) for m in self.members if m.parameter.grad is not None)
        elif self.full_gradients is not None and (self.group.size == 1 or self._keeps_others):
            reduced = self._shard if self.group.size > 1 else slice(0, 0)
            for member in self.members:
                start, stop = member.elements.start, member.elements.stop
                for part in slice(start, min(stop, reduced.start)), slice(max(start, reduced.stop), stop):
                    if part.start < part.stop:
                        yield member, self.full_gradients[part]

    def _record_local_norms(self, gradients: Tensor) -> None:
        """Record the norms of own gradients that the reduction overwrites: a sum that is not finite is traced to its
        source."""
        if self._keeps_others:
            parts = [gradients[self._shard][segment.shard_slice] for segment in self.segments]
        else:
            parts = [gradients[member.elements] for member in self.members]
        if parts:
            norms = torch.stack(torch._foreach_norm(parts))
            self._checks = norms if self._checks is None else self._checks + norms

    # ---- for reports and checkpoints

    def gather(self, shard: Tensor) -> dict[str, Tensor]:
        """Complete local tensors by name, gathered from every rank's `shard` (master weights or an optimizer's state).
        Raises PeerFailed where another rank has no memory for them."""
        if self.options.stage == 0:
            gathered = shard.to(self._device)
        else:
            with all_or_none(self.group, self._device):
                shard = shard.to(self._device).contiguous()
                gathered = shard.new_empty(self.layout.size)
            start_all_gather(gathered, shard, self.group).wait()
        return {m.name: gathered[m.elements].view(m.parameter.shape) for m in self.members}

    def storages(self) -> dict[str, list[Tensor]]:
        """The tensors that this rank holds now, by kind."""
        gradients = [self.full_gradients, self._shard_gradients, *(p.grad for p in self.parameters)]
        return {
            "params": [self.full_params, self.shard_params],
            "grads": [*(g for g in gradients if g is not None), *([] if self._host is None else self._host.storages)],
            "optimizer": [
                *([] if self.master is self.shard_params else [self.master]),
                *([] if self.compressed is None else self.compressed.storages),
            ],
            "buffers": [*(self.reducing or ())[1:], *([] if self._host_gradients is None else [self._host_gradients])],
        }
