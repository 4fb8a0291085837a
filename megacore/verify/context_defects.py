"""Defects of context parallelism, for the list in defects.py: each one has been in a release of some trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megacore.parallel import context
from megacore.parallel.collectives import Pending, start_all_reduce_
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Group
from megacore.train.step import TrainStep
from megacore.verify.masks import replaced
from megacore.zero import bucket as buckets


def gradients_without_sequence_sum(steps: TrainStep, stack: ExitStack) -> None:
    """Gradients are summed over ranks with other samples only."""
    batch = steps.mesh.batch

    def summed(gradients: Tensor) -> None:
        if batch.size > 1:
            start_all_reduce_(gradients, batch).wait()

    def all_reduced(gradients: Tensor, group: Group) -> Pending:
        summed(gradients)
        return Pending()

    def scattered(shard: Tensor, whole: Tensor, group: Group) -> Pending:
        summed(whole)
        if (part := whole.view(group.size, -1)[group.rank]).data_ptr() != shard.data_ptr():
            shard.copy_(part)
        return Pending()

    stack.enter_context(replaced(buckets, "start_all_reduce_", all_reduced))
    stack.enter_context(replaced(buckets, "start_reduce_scatter", scattered))


def loss_times_ranks(steps: TrainStep, stack: ExitStack) -> None:
    """Each rank counts its part of the sequence as often as there are ranks."""
    loss, ranks = steps.task.loss, steps.mesh.sequence.size
    stack.enter_context(replaced(steps.task, "loss", lambda output, microbatch: ranks * loss(output, microbatch)))


def rank_order(steps: TrainStep, stack: ExitStack) -> None:
    """What ranks hold is put together in the order of the ranks."""

    def put_together(self: SequenceShards, pieces: Tensor, dim: int) -> Tensor:
        return torch.cat(list(pieces), dim)

    stack.enter_context(replaced(SequenceShards, "put_together", put_together))


def first_keys_again(steps: TrainStep, stack: ExitStack) -> None:
    """Each step of a ring computes with this rank's keys and values."""
    travelling = context._travelling

    def own(key: Tensor, value: Tensor, shards: SequenceShards) -> Iterator[tuple[int, Tensor, Tensor]]:
        for source, _, _ in travelling(key, value, shards):
            yield source, key, value

    stack.enter_context(replaced(context, "_travelling", own))


def skipped_keys(steps: TrainStep, stack: ExitStack) -> None:
    """A ring computes nothing with the keys and values that it gets last."""
    pairs = context._pairs

    def but_the_last(source: int, local: int, shards: SequenceShards, *how: Any) -> Iterator[Any]:
        is_last = (source - 1) % shards.group.size == shards.group.rank
        return iter(()) if is_last else pairs(source, local, shards, *how)

    stack.enter_context(replaced(context, "_pairs", but_the_last))


def leaked_keys(steps: TrainStep, stack: ExitStack) -> None:
    """Queries see all keys of other ranks in a ring, and else the key after their own."""
    pairs, parts = context._pairs, context._parts

    def all_of_others(source: int, local: int, shards: SequenceShards, *how: Any) -> Iterator[Any]:
        for pair in pairs(source, local, shards, *how):
            whole = slice(local)
            yield pair if source == shards.group.rank else context._Pair(whole, whole, local, slice(0))

    def one_further(x: Tensor, shards: SequenceShards) -> Iterator[tuple[range, Tensor]]:
        return ((range(of.start + 1, of.stop + 1), part) for of, part in parts(x, shards))

    stack.enter_context(replaced(context, "_pairs", all_of_others))
    stack.enter_context(replaced(context, "_parts", one_further))
