"""What a checkpoint holds of a rank: tensors by (kind, global name), each with the slice of the global tensor that it
is. Kinds are `model` for the fp32 weights and the optimizer's (`exp_avg`). What ZeRO divides over replicas is gathered,
and padding is left out, so that nothing written depends on the layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.compression_state import NO_ERRORS, Entry, Errors, Read, errors_of, fill_errors
from megacore.config.optimizers import StateKind
from megacore.optim.optimizer import Optimizer
from megacore.parallel.collectives import all_or_none
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.zero.bucket import Bucket
from megacore.zero.data_parallel import DataParallel
from megacore.zero.local_segments import LocalSegment

MODEL = "model"
BUFFERS = "buffers"  # what belongs to a layer and is no weight: BatchNorm's running averages, frozen parameters
WEIGHTS = StateKind(name=MODEL)


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """A rank's view of the run."""

    step: int
    consumed_samples: int  # the data loader's whole state
    data_parallel: DataParallel  # holds the weights
    optimizer: Optimizer[Any]  # holds the state of what this rank updates
    # Further numbers, the same on every rank (updates done, loss scale).
    counters: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)  # lists of numbers, likewise
    # By global name; replicas may have different ones, and one replica's are kept.
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def entries(self) -> Iterator[Entry]:
        """The tensors of this rank's stages; the ranks of a replica group iterate together. A tensor may be the live
        one: copy it to keep it. Raises PeerFailed where another rank of the group could not prepare what is gathered
        next."""
        for bucket in self.data_parallel.buckets:
            specs = {parameter.spec.name: parameter.spec for parameter in bucket.parameters}
            for kind in (WEIGHTS, *self.optimizer.kinds):
                if bucket.options.stage == 0:  # this rank has all of every parameter
                    tensors = self._live(bucket, kind)
                else:
                    # A rank without memory for the shard must say so before the others wait for it in the gather.
                    with all_or_none(bucket.group, bucket.parameters[0].device):
                        shard = bucket.master if kind is WEIGHTS else self._optimizer_shard(bucket, kind)
                    tensors = bucket.gather(shard)
                for name, tensor in tensors.items():
                    if kind.exists(whole=name in bucket.unsplit):
                        spec = spec_of_state(kind, specs[name])
                        if kind.per != "element":  # the tensor begins with it
                            tensor = tensor.reshape(-1)[: math.prod(spec.shape)].view(spec.shape)
                        yield Entry(kind.name, spec, spec.unpadded(tensor))
            yield from errors_of(bucket)
        for name, buffer in self.buffers.items():
            yield Entry(BUFFERS, ShardSpec(name=name, shape=tuple(buffer.shape)), buffer)

    def fill(self, read: Read, kinds: Sequence[StateKind], updates: int, errors: Errors = NO_ERRORS) -> None:
        """Set everything that this rank updates, and publish the weights. `read` gives a part of a global tensor, in
        the given tensor or a new one; `kinds` are the optimizer state that there is to read, after so many `updates`,
        which bias correction counts; `errors` are those of compressed sums."""
        for bucket in self.data_parallel.buckets:
            fill_errors(bucket, read, errors)
        scratch = torch.empty(0)  # memory that every piece passes through: to ask for it anew takes longer than reading
        for parameter in self.data_parallel.parameters:
            for local in self.data_parallel.segments_of(parameter.spec.name):
                width = math.prod(parameter.shape[1:])  # elements of a row of the local tensor
                rows = range(local.segment.start // width, -(-local.segment.stop // width))
                shape = (len(rows), *parameter.shape[1:]) if parameter.dim() else ()
                # Only the rows that this rank updates are in memory, one piece of one tensor at a time.
                if math.prod(shape) > scratch.numel():
                    scratch = torch.empty(math.prod(shape))
                part = scratch[: math.prod(shape)].view(shape)
                wanted = _wanted(parameter.spec, rows)
                first = local.segment.start - rows.start * width
                for kind in (WEIGHTS, *kinds):
                    if not kind.exists(whole=local.run.shape is not None):
                        continue
                    if kind.per == "element":
                        _read_part(part, read, kind.name, parameter.spec.name, wanted)
                        values = part.view(-1)[first : first + local.segment.stop - local.segment.start]
                    else:
                        spec = spec_of_state(kind, parameter.spec)
                        values = read(kind.name, spec.name, spec.slices, None).view(-1)
                    self._fill_segment(local, kind, values)
        for kind in self.optimizer.kinds:
            if kind.first == "weights" and kind not in kinds:  # begins anew, with the weights that were read
                for state in self.optimizer.state.values():
                    state.pop(kind.name, None)
        if kinds:
            self.optimizer.resume(updates)
        self.data_parallel.publish()
        for name, buffer in self.buffers.items():
            if buffer.numel():  # nothing is stored of an empty one
                buffer.copy_(read(BUFFERS, name, tuple((0, size) for size in buffer.shape), None))

    @torch.no_grad()
    def _fill_segment(self, local: LocalSegment, kind: StateKind, values: Tensor) -> None:
        if kind is WEIGHTS:
            local.master.copy_(values)
            return
        self.optimizer.set_values(local, kind, values)

    def _live(self, bucket: Bucket, kind: StateKind) -> dict[str, Tensor]:
        """Whole local tensors by name, where this rank owns all of every parameter."""
        shapes = {parameter.spec.name: parameter.shape for parameter in bucket.parameters}
        live = {}
        for local in self.data_parallel.segments:
            if local.bucket is bucket:
                flat = local.master if kind is WEIGHTS else self.optimizer.values(local, kind.name)
                if flat is None and kind.first == "weights":
                    flat = local.master
                elif flat is None:
                    flat = torch.zeros_like(local.master, dtype=getattr(torch, kind.dtype))
                live[local.spec.name] = flat.view(shapes[local.spec.name]) if kind.per == "element" else flat
        return live

    def _optimizer_shard(self, bucket: Bucket, kind: StateKind) -> Tensor:
        """One kind of state of the shard, where the weights lie; what has fewer numbers, where its parameter begins."""
        shard = torch.zeros_like(bucket.master, dtype=getattr(torch, kind.dtype))
        for local in self.data_parallel.segments:
            if local.bucket is bucket:
                state = self.optimizer.values(local, kind.name)
                if state is None and kind.first == "weights":
                    state = local.master
                if state is not None:
                    shard[local.segment.offset : local.segment.offset + state.numel()] = state
        return shard


def spec_of_state(kind: StateKind, spec: ShardSpec) -> ShardSpec:
    """The spec of a parameter's state: its global tensor, and this rank's slice."""
    if kind.per == "element":
        return spec
    return ShardSpec(name=spec.name, shape=kind.shape(spec.shape), is_tied_copy=spec.is_tied_copy)


def _read_part(part: Tensor, read: Read, kind: str, name: str, wanted: Slices | None) -> None:
    """Fill a part of a local tensor: with what there is of the global one, and zeros where it is padding."""
    sizes = tuple(stop - start for start, stop in wanted or ())
    if wanted is not None and sizes == part.shape:
        read(kind, name, wanted, part)
        return
    part.zero_()
    if wanted is not None:
        part[tuple(map(slice, sizes))] = read(kind, name, wanted, None)


def _wanted(spec: ShardSpec, rows: range) -> Slices | None:
    """The slice of the global tensor that some rows of the local one hold; None where they hold only padding."""
    slices = list(spec.slices)
    if slices:
        first, last = slices[0]
        slices[0] = (first + rows.start, min(first + rows.stop, last))
    return None if any(start >= stop for start, stop in slices) else tuple(slices)
