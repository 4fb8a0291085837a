"""Compares what several ranks hold alike, bit by bit: weights, master weights and the optimizer's state.

Replicas start equal and get the same updates. Where they differ, hardware or software has failed, and nothing else
shows it: the loss stays plausible (Ma et al. 2025, arXiv 2502.12340). A check hashes every such tensor on its device,
adds the hashes up for each group of ranks that must agree, and gathers these few numbers in one collective. Only if
they differ do the ranks exchange the hashes of all tensors, and name parameters and ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacore.checkpoint import Saved
from megacore.config.messages import counted, ranks_in_words
from megacore.errors import SilentCorruption
from megacore.observe.bit_hash import bit_hash
from megacore.optim.optimizer import Optimizer
from megacore.parallel.collectives import all_gather, all_gather_objects
from megacore.parallel.heartbeat import Phase, section
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import stable_hash
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.parallelize import ParallelModel
from megacore.train.step import StepResult
from megacore.zero.bucket import Bucket
from megacore.zero.local_segments import LocalSegment

_MOST = 5  # parameters, and groups of ranks, that a message names


class Sharers(NamedTuple):
    """Ranks that must agree on some tensors."""

    role: str  # why they hold the same: the role of their group, or the name of a tied parameter
    ranks: tuple[int, ...]  # global, in group order


class TensorKey(NamedTuple):
    """What a tensor is. Ranks that hold tensors of one key hold copies."""

    name: str  # of its parameter
    kind: str  # `weight`, `master weight`, or a kind of the optimizer's state
    slices: Slices  # of the global parameter that the local one holds
    start: int  # first element of the flattened local parameter
    stop: int  # one past the last


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """A tensor of this rank of which other ranks hold copies, and who they are."""

    key: TensorKey
    values: Tensor
    sharers: tuple[Sharers, ...]


class ReplicaChecks(Callback):
    """Compares replicas every `interval` steps, and before each save; all ranks call a method together. `loaded`: the
    checkpoint that the run continues from."""

    def __init__(
        self, model: ParallelModel, optimizer: Optimizer[Any], mesh: Mesh, *, interval: int, loaded: str | None = None
    ) -> None:
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._interval, self._last_saved = interval, loaded
        self._checked_step: int | None = None  # the last one after which replicas were found equal
        self._sharers: list[tuple[Sharers, ...]] | None = None  # of every rank
        self._mix: tuple[list[TensorKey], Tensor] | None = None  # see `_mixed`

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Check if the step is due. Raises SilentCorruption where replicas differ; on every rank, with the same
        text."""
        if result.step % self._interval == 0:
            self.check(result.step)

    def before_save(self, run: Run) -> None:
        """Check, also where this step has been checked: what is saved is what counts."""
        self.check(run.step)

    def on_save(self, run: Run, saved: Saved) -> None:
        self._last_saved = str(saved.path)

    def on_event(self, run: Run, event: Event) -> None:
        """An engine has loaded a checkpoint, to which it could go back."""
        if event.kind == "load":
            self._last_saved = str(event.values["path"])

    def figures(self, run: Run) -> Mapping[str, float]:
        """The last step after which all replicas were equal."""
        return {} if self._checked_step is None else {"watch/replicas_checked_step": self._checked_step}

    @section(Phase.CHECK)
    @torch.no_grad()
    def check(self, step: int) -> None:
        """Compare the replicas of all tensors. Raises SilentCorruption where replicas differ; on every rank, with the
        same text."""
        self._model.data_parallel.ready()
        shared = list(self._shared_tensors())
        if self._sharers is None:
            own = tuple(dict.fromkeys(sharers for tensor in shared for sharers in tensor.sharers))
            self._sharers = all_gather_objects(own, self._mesh.world)
        if any(self._sharers):
            hashes = self._hashes(shared)
            if not self._agree(self._mixed(shared, hashes)):
                raise SilentCorruption(self._differences(step, shared, hashes))
        self._checked_step = step

    # ---- what is compared

    def _shared_tensors(self) -> Iterator[SharedTensor]:
        """This rank's tensors of which others hold copies, in the order in which the forward uses their parameters."""
        data_parallel = self._model.data_parallel
        segments = {bucket: list(local) for bucket, local in groupby(data_parallel.segments, attrgetter("bucket"))}
        for bucket in data_parallel.in_order_of_use():
            is_whole, is_sharded = bucket.options.stage < 3, bucket.options.stage > 0
            copied = bucket.shard_to_write()  # weights apart from the master weights, in 16 bits or on another device
            if is_whole:
                for parameter in bucket.parameters:
                    yield from self._shared(parameter.spec, bucket, "weight", parameter)
            for local in segments.get(bucket, ()):
                shared = partial(self._shared, local.spec, bucket, start=local.segment.start, is_sharded=is_sharded)
                if copied is not None and not is_whole:
                    yield from shared("weight", copied[local.segment.shard_slice])
                if copied is not None or not is_whole:
                    yield from shared("weight" if copied is None else "master weight", local.master)
                for kind, state in self._state(local):
                    yield from shared(kind, state)

    def _state(self, local: LocalSegment) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state of a segment by kind; what a run has once, such as its count of updates, is its first
        segment's."""
        for kind, of_run in self._optimizer.state[local.run].items():
            if of_run.dim() == 0:
                if local.segment.offset == local.run.shard_slice.start:
                    yield kind, of_run
            elif (state := self._optimizer.values(local, kind)) is not None:
                yield kind, state

    def _shared(
        self,
        spec: ShardSpec,
        bucket: Bucket,
        kind: str,
        values: Tensor,
        *,
        start: int = 0,
        is_sharded: bool = False,
    ) -> Iterator[SharedTensor]:
        """The tensor with those who share it; nothing if nobody does."""
        mesh, sharers = self._mesh, list[Sharers]()
        # Copies are held by the replicas of what ZeRO does not shard, the tensor-parallel ranks of what is not split
        # (norms, biases of row-parallel layers), and the holders of a tied parameter.
        replicas = bucket.across if is_sharded else mesh.replica_group(spec.replica_role)
        if replicas.size > 1:
            sharers.append(Sharers(spec.replica_role, replicas.ranks))
        if spec.is_replicated and mesh.layer.size > 1:
            sharers.append(Sharers("layer", mesh.layer.ranks))
        if mesh.copies.size > 1:
            sharers.append(Sharers("copies", mesh.copies.ranks))
        if spec.name in self._model.shared:
            sharers.append(Sharers(spec.name, self._model.shared[spec.name].ranks))
        if sharers:
            key = TensorKey(spec.name, kind, spec.slices, start, start + values.numel())
            yield SharedTensor(key=key, values=values, sharers=tuple(sharers))

    # ---- the comparison

    def _hashes(self, shared: Sequence[SharedTensor]) -> Tensor:
        device = self._mesh.device
        # On the device: one number of a tensor is copied, and nothing waits.
        hashes = [bit_hash(tensor.values).to(device, non_blocking=True) for tensor in shared]
        return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)

    def _mixed(self, shared: Sequence[SharedTensor], hashes: Tensor) -> Tensor:
        """One number over all tensors of each group of ranks that must agree; int64 [groups of the rank with most]. A
        tensor's hash has an odd factor that depends on what the tensor is: no two of them are confused."""
        assert self._sharers is not None
        keys = [tensor.key for tensor in shared]
        if self._mix is None or self._mix[0] != keys:
            own = self._sharers[self._mesh.world.rank]
            factors = torch.zeros(max(map(len, self._sharers)), len(shared), dtype=torch.int64)
            for number, tensor in enumerate(shared):
                # Odd, so that multiplying modulo 2^64 loses no bit of a hash.
                factor = stable_hash(*map(str, tensor.key)) | 1
                for sharers in tensor.sharers:
                    factors[own.index(sharers), number] = factor - (1 << 64) if factor >= 1 << 63 else factor
            self._mix = keys, factors.to(self._mesh.device)
        return (self._mix[1] * hashes).sum(1)

    def _agree(self, mixed: Tensor) -> bool:
        """Whether every group agrees; the same answer on every rank."""
        assert self._sharers is not None
        rows = all_gather(mixed, self._mesh.world).tolist()
        values_of: dict[Sharers, set[int]] = {}
        for row, sharers_of_rank in zip(rows, self._sharers, strict=True):
            for value, sharers in zip(row, sharers_of_rank, strict=False):
                values_of.setdefault(sharers, set()).add(value)
        return all(len(values) == 1 for values in values_of.values())

    # ---- the report

    def _differences(self, step: int, shared: Sequence[SharedTensor], hashes: Tensor) -> str:
        own = dict(zip((tensor.key for tensor in shared), hashes.tolist(), strict=True))
        everyone = all_gather_objects((socket.gethostname(), own), self._mesh.world)
        hosts = [host for host, _ in everyone]
        lines = [
            f"  {self._who(odd, hosts)} {how} in {_parameters(tensors)}"
            for (odd, how), tensors in _by_ranks([hashes_of_rank for _, hashes_of_rank in everyone]).items()
        ]
        more = [f"  and {counted(len(lines) - _MOST, 'more difference')}"] if len(lines) > _MOST else []
        kept, way = "there is none to go back to", "start again"
        if self._last_saved is not None:
            kept, way = f"the last good one is {self._last_saved}", "continue with --load auto"
        return "\n".join(
            [
                f"replicas differ after step {step}: ranks that must hold the same bits do not",
                *lines[:_MOST],
                *more,
                f"no checkpoint is written of this step; {kept}. Memory or a processor may be faulty: {way}, "
                "and without that machine if it happens again (docs/guides/watching.md)",
            ]
        )

    def _who(self, ranks: tuple[int, ...], hosts: Sequence[str]) -> str:
        """Ranks with coordinates and hosts; of many, the ranks of each host."""
        if len(ranks) == 1:
            return f"rank {ranks[0]} ({self._mesh.describe(ranks[0])}, on {hosts[ranks[0]]})"
        if len(ranks) <= _MOST:
            each = [f"rank {rank}: {self._mesh.describe(rank)}, on {hosts[rank]}" for rank in ranks]
        else:
            of_host: dict[str, list[int]] = {}
            for rank in ranks:
                of_host.setdefault(hosts[rank], []).append(rank)
            each = [f"{ranks_in_words(there)} on {host}" for host, there in of_host.items()]
        return f"{ranks_in_words(ranks)} ({'; '.join(each)})"


def _by_ranks(everyone: Sequence[Mapping[TensorKey, int]]) -> dict[tuple[tuple[int, ...], str], list[TensorKey]]:
    """The tensors on which ranks differ, by the ranks that differ from most of the others, and how in words.
    `everyone`: the hashes of every rank's tensors."""
    ranks_of: dict[TensorKey, dict[int, list[int]]] = {}
    for rank, of_rank in enumerate(everyone):
        for key, value in of_rank.items():
            ranks_of.setdefault(key, {}).setdefault(value, []).append(rank)
    result: dict[tuple[tuple[int, ...], str], list[TensorKey]] = {}
    for key, by_value in ranks_of.items():
        if len(by_value) == 1:
            continue
        first, second, *_ = sorted(by_value.values(), key=len, reverse=True)
        everybody = sorted(rank for ranks in by_value.values() for rank in ranks)
        if len(first) > len(second):
            odd, how = [rank for rank in everybody if rank not in first], f"differs from {ranks_in_words(first)}"
        else:
            odd, how = everybody, "hold different copies, and no majority tells which are right,"
        how = how.replace("differs", "differ") if len(odd) > 1 else how
        result.setdefault((tuple(odd), how), []).append(key)
    return result


def _parameters(tensors: Sequence[TensorKey]) -> str:
    """`blocks.0.norm.weight (weight, exp_avg), ... and 3 more parameters`."""
    kinds: dict[str, dict[str, None]] = {}
    for key in tensors:
        kinds.setdefault(key.name, {})[key.kind] = None
    named = [f"{name} ({', '.join(of_name)})" for name, of_name in list(kinds.items())[:_MOST]]
    more = f" and {counted(len(kinds) - _MOST, 'more parameter')}" if len(kinds) > _MOST else ""
    return ", ".join(named) + more
