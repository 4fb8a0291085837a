"""Dropout masks: recorded where they are used, and drawn in one process as the ranks of a layout draw them.

A mask may depend on the tensor-parallel rank that draws it (docs/explain/design.md, "Random numbers are functions of
names"). A one-process run has the masks of a layout only if it draws them shard by shard. Both jobs replace two
functions of the product while a context is open: `Dropout.forward` and `Attention._mix`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megacore import ops
from megacore.layers import attention
from megacore.layers.attention import Attention
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Group
from megacore.parallel.random import Dropout, seeded

Note = Callable[[str, int], None]
"""Takes the name of a mask, with microbatch and shard, and 48 bits that identify it."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside."""
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def masks_recorded(note: Note) -> Iterator[None]:
    """Report every mask that is drawn inside: the bits of hidden dropout, the generator's state of attention's."""
    forward, attended = Dropout.forward, Attention._attended

    def noted_forward(self: Dropout, x: Tensor) -> Tensor:
        y = forward(self, x)
        if not self.drops or torch.compiler.is_compiling():
            return y
        shards, sizes = [self.shard], [x.shape[1]]
        if self.blocks is not None:
            shards, sizes = [*self.blocks.held_positions], self.blocks.sizes_of_positions(x.shape[1])
        for shard, before, after in zip(shards, x.split(sizes, 1), y.split(sizes, 1), strict=True):
            note(_name(self.site, self.streams.microbatch, shard), _bits(before, after))
        return y

    def noted_attended(self: Attention, *operands: Any, shard: int) -> Tensor:
        if not (self.dropout and self.training) or torch.compiler.is_compiling():
            return attended(self, *operands, shard=shard)
        name = _name(self.site, self.streams.microbatch, shard)
        with replaced(attention, "seeded", _noting_seed(note, name)):
            return attended(self, *operands, shard=shard)

    with replaced(Dropout, "forward", noted_forward), replaced(Attention, "_attended", noted_attended):
        yield


@contextmanager
def masks_of_shards(tp: int, *, cp: int = 1, sequence_parallel: bool, note: Note) -> Iterator[None]:
    """A model on one process draws the masks of `tp` x `cp` ranks, and reports them.

    Args:
        tp: ranks that would split the model.
        cp: ranks that would divide each sequence.
        sequence_parallel: each of them would hold a part of the positions.
        note: called for every mask.
    """
    mix, divided = Attention._mix, SequenceShards(Group(ranks=tuple(range(cp))))

    def forward(self: Dropout, x: Tensor) -> Tensor:
        if not self.drops:
            return x
        parts = cp * (tp if sequence_parallel else 1)
        outputs = []
        if cp > 1:
            order = torch.tensor(divided.order(x.shape[1]), device=x.device)
            x = x[:, order]
        for shard, part in enumerate(x.chunk(parts, dim=1)):
            mask = torch.empty(part.shape, dtype=torch.bool, device=x.device)
            mask.bernoulli_(1.0 - self.probability, generator=self.streams.generator(self.site, shard))
            y = (part * self._scale).mul_(mask)
            note(_name(self.site, self.streams.microbatch, shard), _bits(part, y))
            outputs.append(y)
        y = torch.cat(outputs, dim=1) if parts > 1 else outputs[0]
        return y[:, order.argsort()] if cp > 1 else y

    def mixed(self: Attention, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        if not (self.dropout and self.training):
            return mix(self, query, key, value, documents)
        groups = key.shape[1]
        ranks_per_group = max(1, tp // groups)
        outputs = []
        for shard, queries in enumerate(query.chunk(tp, dim=1)):
            held = (
                slice(shard // ranks_per_group, shard // ranks_per_group + 1)
                if ranks_per_group > 1
                else slice(shard * groups // tp, (shard + 1) * groups // tp)
            )
            heads = slice(shard * query.shape[1] // tp, (shard + 1) * query.shape[1] // tp)
            draw = _noting_seed(note, _name(self.site, self.streams.microbatch, shard))
            with draw(self.streams.key(self.site, shard), query.device):
                outputs.append(
                    ops.attention(
                        queries,
                        key[:, held],
                        value[:, held],
                        causal=self.causal,
                        window=self.window,
                        documents=documents,
                        alibi=None if self.alibi is None else ops.Alibi(self.alibi.slopes[heads]),
                        soft_cap=self.soft_cap,
                        dropout=self.dropout,
                        implementation=self.implementation,
                    )
                )
        return torch.cat(outputs, dim=1)

    with replaced(Dropout, "forward", forward), replaced(Attention, "_mix", mixed):
        yield


def _name(site: str, microbatch: int, shard: int) -> str:
    return f"{site}, microbatch {microbatch}, shard {shard}"


def _bits(x: Tensor, y: Tensor) -> int:
    """Which elements were kept, in 48 bits; what was zero before counts as kept."""
    kept = torch.logical_or(y.detach() != 0, x.detach() == 0).to("cpu", torch.uint8).contiguous()
    return _digest(kept.numpy().tobytes())


def _noting_seed(note: Note, name: str) -> Callable[..., Any]:
    """`seeded`, which also reports the state of the generator that attention draws from."""

    @contextmanager
    def draws(seed: int, device: torch.device | None = None) -> Iterator[None]:
        with seeded(seed, device):
            on_cpu = device is None or device.type == "cpu"
            state = torch.get_rng_state() if on_cpu else torch.get_device_module(device).get_rng_state()
            note(name, _digest(state.numpy().tobytes()))
            yield

    return draws


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")
