"""The errors of compressed sums in a checkpoint (zero/compressed.py): what messages left out, and the next will add.

A worker error is of one replica, so its tensor has a further first dimension: the replicas. A server error is of a sum.
As many replicas continue bit for bit. On another number each gets an equal share of all worker errors: their sum, which
is what the next sum lacks, stays. Where sums are not sent on (ZeRO stage 1 and above), server errors join them. One
replica alone sends nothing, and drops the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megacore.parallel.collectives import all_or_none
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.zero.bucket import Bucket

ERROR_KINDS = tuple(f"{summed}_{side}_error" for summed in ("gradient", "momentum") for side in ("worker", "server"))
Errors = Mapping[str, Mapping[str, int]]
"""The errors that there are: kind -> global name -> size of the first dimension."""
NO_ERRORS: Errors = MappingProxyType({})
Read = Callable[[str, str, Slices, Tensor | None], Tensor]
"""Of a kind and a global name: which part of it, and where to."""


class Entry(NamedTuple):
    """One tensor of a checkpoint, as far as this rank holds it."""

    kind: str  # weights, buffers, errors, or the name of a kind of optimizer state
    spec: ShardSpec  # the global tensor, and this rank's slice of it
    tensor: Tensor  # the slice, without padding
    is_own: bool = False  # each replica has a tensor of its own, which is its slice of the global one


def errors_of(bucket: Bucket) -> Iterator[Entry]:
    """The errors of a bucket's parameters; the ranks of its group iterate together. Raises PeerFailed where another
    rank has no memory for what is gathered."""
    if (compressed := bucket.compressed) is None:
        return
    kind, worker = f"{bucket.options.summed}_worker_error", compressed.worker_error.view(-1)
    for parameter in bucket.parameters:
        spec, rank = parameter.spec, bucket.group.rank
        local = worker[bucket.layout.slice_of(spec.name)].view(parameter.shape)
        of_replicas = _of_replica(spec, rank, bucket.group.size)
        yield Entry(kind, of_replicas, spec.unpadded(local).unsqueeze(0), is_own=True)
    if compressed.server_error is None:
        return
    with all_or_none(bucket.group, compressed.server_error.device):
        whole = torch.empty_like(worker)
    whole = compressed.gathered_server_error(whole)
    for parameter in bucket.parameters:
        local = whole[bucket.layout.slice_of(parameter.spec.name)].view(parameter.shape)
        kind = f"{bucket.options.summed}_server_error"
        yield Entry(kind, parameter.spec, parameter.spec.unpadded(local))


def _of_replica(spec: ShardSpec, rank: int, replicas: int) -> ShardSpec:
    """The spec of what replica number `rank` has of a tensor that all of them have."""
    return replace(spec, shape=(replicas, *spec.shape), slices=((rank, rank + 1), *spec.slices))


@torch.no_grad()
def fill_errors(bucket: Bucket, read: Read, errors: Errors) -> None:
    """Set the errors of a bucket's parameters to those of a checkpoint, or to 0 where it has none."""
    if (compressed := bucket.compressed) is None:
        return
    worker, server, replicas = compressed.worker_error.view(-1), compressed.server_error, bucket.group.size
    worker.zero_()
    if server is not None:
        server.zero_()
    names = [f"{bucket.options.summed}_{side}_error" for side in ("worker", "server")]
    for parameter in bucket.parameters:
        spec, elements = parameter.spec, bucket.layout.slice_of(parameter.spec.name)
        local = worker[elements].view(parameter.shape)
        saved = errors.get(names[0], {}).get(spec.name, 0)
        is_own = saved == replicas
        for rank in [bucket.group.rank] if is_own else range(saved):
            values = read(names[0], spec.name, _of_replica(spec, rank, saved).slices, None)
            _add(spec.unpadded(local), values.squeeze(0), is_own, replicas)
        if spec.name in errors.get(names[1], {}):
            values = read(names[1], spec.name, spec.slices, None)
            if server is None:
                _add(spec.unpadded(local), values, False, replicas)
                continue
            whole = torch.zeros_like(local)
            spec.unpadded(whole).copy_(values)
            first, last = max(elements.start, compressed.part.start), min(elements.stop, compressed.part.stop)
            if first < last:
                here = slice(first - compressed.part.start, last - compressed.part.start)
                server.view(-1)[here] = whole.view(-1)[first - elements.start : last - elements.start]


def _add(local: Tensor, values: Tensor, is_own: bool, replicas: int) -> None:
    """Add errors, or this rank's equal share of them."""
    values = values.to(local.device)
    local.add_(values if is_own else values / replicas)
