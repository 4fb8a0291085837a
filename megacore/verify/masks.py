"""Dropout masks: recorded where they are drawn, and drawn in one process as the ranks of a layout draw them. A mask may
depend on the tensor-parallel rank that draws it (docs/explain/design.md, "Random numbers are functions of names"). A
one-process run has the masks of a layout only if it draws them shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megacore import ops
from megacore.layers.attention import Attention
from megacore.layers.lora import Adapted
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Group
from megacore.parallel.random import Dropout, RandomStreams
from megacore.parallel.tensor import RowParallelLinear

Note = Callable[[str, int], None]
"""Takes the name of a mask, with microbatch and shard, and 48 bits that identify it."""


@contextmanager
def masks_recorded(note: Note) -> Iterator[None]:
    """Report every mask that is drawn inside, by the key of its random stream, which decides all of its bits."""
    key_of = RandomStreams.key

    def key(streams: RandomStreams, site: str, shard: int) -> int:
        found = key_of(streams, site, shard)
        note(f"{site}, microbatch {streams.microbatch}, shard {shard}", found % 2**48)
        return found

    with patch.object(RandomStreams, "key", key):
        yield


@contextmanager
def masks_of_shards(tp: int, *, cp: int = 1, sequence_parallel: bool) -> Iterator[None]:
    """A model on one process draws the masks of `tp` x `cp` ranks; with sequence parallelism each holds a part of the
    positions."""
    attended, adapted = Attention._attended, Adapted.adapted
    adapters: dict[Dropout | None, bool] = {}  # whether ranks split the features of what an adapter reads
    positions = SequenceShards(Group(ranks=tuple(range(cp))))
    ranks = cp * (tp if sequence_parallel else 1)

    def of_parts(dropout: Dropout, x: Tensor) -> Tensor:
        order = torch.tensor(positions.order(x.shape[1]), device=x.device)
        rows, columns = (cp, tp) if adapters.get(dropout) else (ranks, 1)
        stride = cp * tp // rows if dropout in adapters else 1  # an adapter's masks have the numbers of all ranks
        masks = [
            torch.cat([dropout.drawn(part, row * stride + n) for n, part in enumerate(held.chunk(columns, -1))], -1)
            for row, held in enumerate(x.chunk(rows, 1))
        ]
        return torch.cat(masks, 1)[:, order.argsort()]

    def of_adapter(layer: Adapted, x: Tensor, y: Tensor, **choices: Any) -> Tensor:
        adapters[layer.lora_dropout] = isinstance(layer, RowParallelLinear)
        return adapted(layer, x, y, **choices)

    def of_heads(
        attention: Attention, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, *,
        alibi: ops.Alibi | None, sinks: Tensor | None, shard: int,
    ) -> Tensor:  # fmt: skip
        if not (attention.dropout and attention.training):
            return attended(attention, query, key, value, documents, alibi=alibi, sinks=sinks, shard=shard)
        held = min(tp, key.shape[1])  # parts of the keys: of fewer heads than ranks, several ranks read one
        mixed = []
        for rank, queries in enumerate(query.chunk(tp, 1)):
            keys, values = (x.chunk(held, 1)[rank * held // tp] for x in (key, value))
            bias = None if alibi is None else ops.Alibi(alibi.slopes.chunk(tp)[rank])
            sink = None if sinks is None else sinks.chunk(tp)[rank]
            mixed.append(attended(attention, queries, keys, values, documents, alibi=bias, sinks=sink, shard=rank))
        return torch.cat(mixed, 1)

    with (
        patch.object(Dropout, "mask", of_parts),
        patch.object(Adapted, "adapted", of_adapter),
        patch.object(Attention, "_attended", of_heads),
    ):
        yield
