"""Context parallelism: the ranks of a group divide the positions of each sequence, and exchange keys and values.

The sequence is cut into two chunks per rank, and rank r of p takes chunks r and 2p - 1 - r: with causal attention an
early chunk sees few keys and a late one many, so that every rank computes as many scores (the zigzag of Zhu 2024,
github.com/zhuzilin/ring-flash-attention, and of Llama team 2024, arXiv 2407.21783, section 3.3.2).

Every layer but attention works on positions one by one. Attention gets the keys and values of other ranks in one of
three ways. `allgather` gathers those of the whole sequence, and computes this rank's queries. Its backward gathers them
again, sums the gradients of keys and values over the ranks in fp32, and keeps those of this rank's positions: the
adjoint. Documents, windows and ALiBi go by positions in the whole sequence, so that every mask is possible. `ring` (Liu
et al. 2023, arXiv 2310.01889) passes keys and values from rank to rank, and computes with some while the next travel;
the parts are merged in fp32 by the logarithms of their sums. In backward other ranks' terms of their gradients travel
behind them, to their owner. `ulysses` (Jacobs et al. 2023, arXiv 2309.14509) exchanges positions for heads: each rank
attends over whole sequences with 1/p of the heads, as if there were no other rank, and the results are exchanged back.

Shape legend: b micro-batch, n heads, g key and value heads, s sequence, p ranks, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megacore.ops.attention import Alibi, attention
from megacore.ops.block_attention import NOTHING, attend, attend_backward, take_sinks_, with_sinks
from megacore.ops.causal_attention import merge_
from megacore.ops.dispatch import Node
from megacore.ops.visibility import Visibility
from megacore.parallel.collectives import PartsExchanged, ShardsGathered, Shift, SumScattered
from megacore.parallel.mesh import ALONE, Group

ContextComm = Literal["allgather", "ring", "ulysses"]


@dataclass(frozen=True)
class SequenceShards:
    """Which positions of a sequence each rank of a group holds."""

    group: Group = ALONE  # the ranks that divide each sequence
    comm: ContextComm = "allgather"  # how they exchange keys and values

    def ranges(self, length: int, rank: int | None = None) -> tuple[range, ...]:
        """A rank's positions in a sequence, ascending: two ranges of one size, or all of them where one rank has all.
        `length`: s, of the whole sequence; a multiple of 2p where p is above 1. `rank`: position in the group; None:
        this rank."""
        ranks = self.group.size
        if ranks == 1:
            return (range(length),)
        assert length % (2 * ranks) == 0, f"{length} positions cannot be cut into {2 * ranks} chunks"
        size, rank = length // (2 * ranks), self.group.rank if rank is None else rank
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ranks - 1 - rank))

    def order(self, length: int) -> list[int]:
        """The positions of a sequence as they lie one rank after the other."""
        return [position for rank in range(self.group.size) for of in self.ranges(length, rank) for position in of]

    def whole_length(self, local: int) -> int:
        """The length of a sequence of which this rank holds `local` positions."""
        return local * self.group.size

    def take(self, x: Tensor, dim: int, *, length: int | None = None) -> Tensor:
        """This rank's positions of a tensor that has those of the whole sequence along `dim`; x itself where one rank
        has all. `length`: of the sequence, where x has more positions than that; None: it has as many."""
        if self.group.size == 1:
            return x
        ranges = self.ranges(x.shape[dim] if length is None else length)
        return torch.cat([x.narrow(dim, of.start, len(of)) for of in ranges], dim)

    def put_together(self, pieces: Tensor, dim: int) -> Tensor:
        """The whole sequence, in order. `pieces`: [p, ...], by rank. `dim`: of a piece: its dimension of positions."""
        length, parts = self.whole_length(pieces.shape[1 + dim]), dict[int, Tensor]()
        for rank, piece in enumerate(pieces):
            ranges = self.ranges(length, rank)
            for of, part in zip(ranges, piece.split([len(of) for of in ranges], dim), strict=True):
                parts[of.start] = part
        return torch.cat([parts[start] for start in sorted(parts)], dim)

    def take_apart(self, *sequences: Tensor) -> Tensor:
        """[p, number of arguments, b, s/p, ...], by one copy: what each rank holds of `sequences`, [b, s, ...] each."""
        b, s, *others = sequences[0].shape
        ranks = range(self.group.size)
        parts = [
            sample[of.start : of.stop]
            for rank in ranks for x in sequences for sample in x for of in self.ranges(s, rank)
        ]  # fmt: skip
        return torch.cat(parts).view(len(ranks), len(sequences), b, s // len(ranks), *others)


WHOLE = SequenceShards()
"""Of one rank, which holds whole sequences."""


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: SequenceShards,
    *,
    view: Visibility,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of this rank's positions over those of all ranks. Returns [b, n, s/p, d], laid out as [b, s/p, n, d]; 0
    where the position is padding.

    Args:
        query: [b, n, s/p, d]; any strides, the last dimension contiguous.
        key: [b, g, s/p, d].
        value: [b, g, s/p, d].
        shards: which positions these are, and how the ranks exchange keys and values; of two ranks or more.
        view: who sees whom, with the documents of the whole sequence; in a ring causal.
        slopes: [n] fp32, of ALiBi.
        sinks: [n], as for `ops.attention`; their gradient is of this rank's positions.
    """
    if shards.comm == "ulysses":
        return _by_heads(query, key, value, shards, view=view, slopes=slopes, sinks=sinks, soft_cap=soft_cap)
    assert shards.comm != "ring" or view.causal, "a ring knows causal attention"
    kind = _RingAttention if shards.comm == "ring" else _GatheredAttention
    scores = _Scores(view, slopes, None if sinks is None else sinks.detach(), soft_cap)
    out, logarithm = kind.apply(query, key, value, shards, scores)
    mixed = with_sinks(out, logarithm, sinks)
    if view.documents is None or not view.padded:
        return mixed
    padding = shards.take(view.documents, 1) == 0
    return mixed.transpose(1, 2).masked_fill(padding[:, :, None, None], 0.0).transpose(1, 2)


class _Scores(NamedTuple):
    """What decides how much a query takes of a value, beside the keys; none of it has a gradient here."""

    view: Visibility
    slopes: Tensor | None
    sinks: Tensor | None  # in forward only
    soft_cap: float | None

    def keep(self, ctx: Any, shards: SequenceShards, *tensors: Tensor) -> None:
        """Save for backward what it reads. `tensors`: the last one is the logarithms, which have no gradient."""
        ctx.save_for_backward(*tensors, self.view.documents, self.slopes)
        ctx.shards, ctx.causal, ctx.window, ctx.soft_cap = shards, self.view.causal, self.view.window, self.soft_cap
        ctx.mark_non_differentiable(tensors[-1])
        ctx.set_materialize_grads(False)  # no zeros as its gradient

    @classmethod
    def kept(cls, ctx: Any, documents: Tensor | None, slopes: Tensor | None) -> _Scores:
        view = Visibility(causal=ctx.causal, window=ctx.window, documents=documents)
        return cls(view, slopes, None, ctx.soft_cap)

    def of_part(self, offset: int) -> dict[str, Any]:
        """Keyword arguments of `attend` and `attend_backward`, without sinks."""
        return {"view": self.view, "slopes": self.slopes, "soft_cap": self.soft_cap, "offset": offset}


class _GatheredAttention(Node):
    """It keeps this rank's keys and values, not those of the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards, scores: _Scores
    ) -> tuple[Tensor, Tensor]:
        keys, values = _gathered(key, value, shards)
        parts = [attend(part, keys, values, **scores._asdict(), offset=of.start) for of, part in _parts(query, shards)]
        out, logarithm = _joined([part for part, _ in parts]), torch.cat([sums for _, sums in parts], 2)
        scores.keep(ctx, shards, query, key, value, out, logarithm)
        return out, logarithm

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithm, *of_scores = ctx.saved_tensors
        shards, scores = ctx.shards, _Scores.kept(ctx, *of_scores)
        keys, values = _gathered(key, value, shards)
        d_query, sums = [], list[Tensor]()
        for (of, part), (_, d_of), (_, out_of), (_, sums_of) in zip(
            *(_parts(x, shards) for x in (query, d_out, out, logarithm)), strict=True
        ):
            operands = part, keys, values
            d_part, *terms = attend_backward(d_of, out_of, sums_of, operands, **scores.of_part(of.start))
            d_query.append(d_part.to(query.dtype))
            sums = [total.add_(term) for total, term in zip(sums, terms, strict=True)] if sums else terms
            del operands, d_part, terms
        del keys, values
        d_key, d_value = _summed(sums, shards).unbind(0)
        return _joined(d_query), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _parts(x: Tensor, shards: SequenceShards) -> Iterator[tuple[range, Tensor]]:
    """Each range of this rank's positions with its part of [b, heads, s/p, ...]."""
    ranges = shards.ranges(shards.whole_length(x.shape[2]))
    return zip(ranges, x.split([len(of) for of in ranges], 2), strict=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Along positions, laid out as the projections around attention read and write it: [b, s/p, heads, d]."""
    return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _gathered(key: Tensor, value: Tensor, shards: SequenceShards) -> Tensor:
    """The keys and values of all ranks in the order of the sequence, [2, b, g, s, d]."""
    local = torch.stack((key.transpose(1, 2), value.transpose(1, 2)))  # [2, b, s/p, g, d]
    return shards.put_together(ShardsGathered(local, shards.group).wait(), 2).transpose(2, 3)


def _summed(gradients: Sequence[Tensor], shards: SequenceShards) -> Tensor:
    """Gradients of keys and values [b, g, s, d] in fp32, summed over ranks; of this rank's positions, [2, b, g, s/p,
    d]."""
    pieces = shards.take_apart(*(x.transpose(1, 2) for x in gradients))
    return SumScattered(pieces, shards.group).wait().transpose(2, 3)


class _RingAttention(Node):
    """Causal attention. It keeps this rank's keys and values, and the merged result."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards, scores: _Scores
    ) -> tuple[Tensor, Tensor]:
        out, logarithm = query.new_empty(0), query.new_empty(0)
        for source, keys, values in _travelling(key, value, shards):
            for pair in _pairs(source, query.shape[2], shards, scores):
                part, sums = attend(*pair.operands(query, keys, values), in_fp32=True, **pair.where(scores))
                if not out.numel() and part.shape == query.shape:
                    out, logarithm = part, sums
                    continue
                if not out.numel():
                    out = _zeros_like(query)
                    logarithm = out.new_full(query.shape[:-1], NOTHING)
                merge_(out[:, :, pair.rows], logarithm[:, :, pair.rows], part, sums)
        if scores.sinks is not None:  # once, after all keys
            take_sinks_(out, logarithm, scores.sinks)
        out = out.to(query.dtype)
        scores.keep(ctx, shards, query, key, value, out, logarithm)
        return out, logarithm

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithm, *of_scores = ctx.saved_tensors
        shards, scores = ctx.shards, _Scores.kept(ctx, *of_scores)
        d_query, d_local, shape = list[Tensor](), list[Tensor](), (2, *key.transpose(1, 2).shape)
        arriving: Shift | None = None
        for source, keys, values in _travelling(key, value, shards):
            d_pairs = list[tuple[slice, list[Tensor]]]()
            for pair in _pairs(source, query.shape[2], shards, scores):
                d_rows, out_rows, sums = (x[:, :, pair.rows] for x in (d_out, out, logarithm))
                operands = pair.operands(query, keys, values)
                d_part, *terms = attend_backward(d_rows, out_rows, sums, operands, **pair.where(scores))
                d_query = _added(d_query, pair.rows, [d_part], query)
                d_pairs.append((pair.columns, terms))
                del d_part, terms
            if source == shards.group.rank:  # these stay: only the terms of other ranks have to travel
                while d_pairs:
                    d_local = _added(d_local, *d_pairs.pop(0), key)
                continue
            d_keys = key.new_zeros(shape, dtype=torch.float32) if arriving is None else arriving.wait()
            while d_pairs:
                _added(list(d_keys.transpose(2, 3)), *d_pairs.pop(0), key)
            arriving = Shift(d_keys, shards.group)
            del d_keys
        del keys, values
        assert arriving is not None
        d_key, d_value = (
            term.add_(others).to(key.dtype)
            for term, others in zip(d_local, arriving.wait().transpose(2, 3), strict=True)
        )
        return d_query[0].to(query.dtype), d_key, d_value, None, None


def _added(totals: list[Tensor], where: slice, terms: list[Tensor], like: Tensor) -> list[Tensor]:
    """Add terms at some positions of sums in fp32, [b, heads, s/p, d] each, in place, and return the sums. `totals`:
    none: the sums begin here. `terms`: one for each sum, which may become the sum. `like`: of the shape of a sum."""
    if not totals and terms[0].shape == like.shape:
        return terms
    totals = totals or [_zeros_like(like) for _ in terms]
    for total, term in zip(totals, terms, strict=True):
        total[:, :, where] += term
    return totals


class _Pair(NamedTuple):
    """Queries and keys of one chunk each, of which each query sees a key."""

    rows: slice  # of this rank's positions, which are the queries
    columns: slice  # of the other rank's positions, which are the keys
    offset: int  # how many positions after the first key the first query is
    positions: slice  # in the whole sequence, from that of the first key to that of the last query

    def operands(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of a rank's queries, and of a rank's keys and values."""
        return query[:, :, self.rows], keys[:, :, self.columns], values[:, :, self.columns]

    def where(self, scores: _Scores) -> dict[str, Any]:
        """Keyword arguments of `attend`, for which positions count from the first key."""
        documents = None if scores.view.documents is None else scores.view.documents[:, self.positions]
        return scores._replace(view=replace(scores.view, documents=documents)).of_part(self.offset)


def _travelling(key: Tensor, value: Tensor, shards: SequenceShards) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys and values of this rank, then of the one before it, and so on around the ring: with the rank that they
    belong to. The next travel while the caller computes."""
    held, group = torch.stack((key.transpose(1, 2), value.transpose(1, 2))), shards.group  # [2, b, s/p, g, d]
    for step in range(group.size):
        following = Shift(held, group) if step < group.size - 1 else None
        yield (group.rank - step) % group.size, held[0].transpose(1, 2), held[1].transpose(1, 2)
        if following is not None:
            held = following.wait()


def _pairs(source: int, local: int, shards: SequenceShards, scores: _Scores) -> Iterator[_Pair]:
    """What this rank's queries see of rank `source`'s keys, without queries or keys that see or are seen by none. The
    view is causal; its documents are not looked at, which on a device the host would have to wait for."""
    length, rank, view = shards.whole_length(local), shards.group.rank, scores.view
    if scores.slopes is None and view.documents is None and view.reach is None:
        # Only the order counts: the own chunks see each other as one; of an earlier rank all queries see the first
        # chunk, and of a later one the queries of the second chunk see both.
        rows = slice(local // 2 if source > rank else 0, local)
        columns = slice(0, local // 2 if source < rank else local)
        yield _Pair(rows, columns, 0 if source == rank else columns.stop, slice(0))
        return
    reach = length if view.reach is None else view.reach
    first_row = 0
    for queries in shards.ranges(length):
        first_column = 0
        for keys in shards.ranges(length, source):
            start, stop = max(queries.start, keys.start), min(queries.stop, keys.stop - 1 + reach)
            if start < stop:
                begin, end = max(keys.start, start - reach + 1), min(keys.stop, stop)
                row, column = first_row - queries.start, first_column - keys.start
                yield _Pair(
                    rows=slice(start + row, stop + row),
                    columns=slice(begin + column, end + column),
                    offset=start - begin,
                    positions=slice(begin, stop),
                )
            first_column += len(keys)
        first_row += len(queries)


def _zeros_like(x: Tensor) -> Tensor:
    """fp32 zeros, laid out as the projections around attention read and write it: [b, s/p, heads, d]."""
    return torch.zeros_like(x.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format).transpose(
        1, 2
    )


def _by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: SequenceShards,
    *,
    view: Visibility,
    slopes: Tensor | None,
    sinks: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    """As `context_attention`, over whole sequences of 1/p of the heads; where key heads are fewer, ranks get copies."""
    ranks, rank = shards.group.size, shards.group.rank
    slopes, sinks = (None if of_heads is None else of_heads.chunk(ranks)[rank] for of_heads in (slopes, sinks))
    if key.shape[1] < ranks:
        scores = _Scores(view, slopes, None if sinks is None else sinks.detach(), soft_cap)
        out, logarithm = _CopiedKeysAttention.apply(query, key, value, shards, scores)
        mixed = with_sinks(out, logarithm, sinks)
        if view.documents is not None and view.padded:
            mixed = mixed.masked_fill((view.documents == 0)[:, None, :, None], 0.0)
    else:
        joined, sizes = _joined_heads((query, key, value), ranks)
        whole: Tensor = _Exchange.apply(joined, shards, True)  # [b, s, (n + 2 g) / p, d]
        mixed = attention(
            *(x.transpose(1, 2) for x in whole.split(sizes, 2)),
            view=view,
            alibi=None if slopes is None else Alibi(slopes),
            sinks=sinks,
            soft_cap=soft_cap,
        )
    back: Tensor = _Exchange.apply(mixed.transpose(1, 2), shards, False)  # [b, s/p, p, n/p, d]
    return back.flatten(2, 3).contiguous().transpose(1, 2)


def _joined_heads(tensors: Sequence[Tensor], ranks: int) -> tuple[Tensor, list[int]]:
    """What each rank computes with of this rank's positions, [b, s/p, p, (n + 2 g) / p, d]; and how many heads of
    queries, keys and values these are."""
    joined = torch.cat([x.transpose(1, 2).unflatten(2, (ranks, -1)) for x in tensors], 3)
    return joined, [x.shape[1] // ranks for x in tensors]


class _CopiedKeysAttention(Node):
    """Attention over whole sequences with this rank's query heads, [b, n/p, s, d], and a copy of the key head that they
    read. The gradients of the copies travel in fp32 to the ranks of the positions, which sum them: of terms that are
    rounded to 16 bits one by one the sum is less exact than the gradient that one process computes."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shards: SequenceShards, scores: _Scores
    ) -> tuple[Tensor, Tensor]:
        ranks = shards.group.size
        copies = (x.repeat_interleave(ranks // key.shape[1], 1) for x in (key, value))
        joined, sizes = _joined_heads((query, *copies), ranks)
        operands = [x.transpose(1, 2) for x in _positions_to_heads(joined, shards).split(sizes, 2)]
        out, logarithm = attend(*operands, **scores._asdict(), offset=0)
        scores.keep(ctx, shards, *operands, out, logarithm)
        ctx.key_heads = key.shape[1]
        return out, logarithm

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *operands, out, logarithm, documents, slopes = ctx.saved_tensors
        where = _Scores.kept(ctx, documents, slopes).of_part(0)
        d_whole = attend_backward(d_out, out, logarithm, tuple(operands), **where)
        d_query, d_key, d_value = (x.transpose(1, 2) for x in d_whole)  # [b, s, n/p or 1, d] fp32
        queries = _heads_to_positions(d_query.to(out.dtype), ctx.shards)  # [b, s/p, p, n/p, d]
        copies = _heads_to_positions(torch.cat((d_key, d_value), 2), ctx.shards)  # [b, s/p, p, 2, d]
        sums = copies.unflatten(2, (ctx.key_heads, -1)).sum(3).to(out.dtype)  # [b, s/p, g, 2, d]
        return queries.flatten(2, 3).transpose(1, 2), *(x.transpose(1, 2) for x in sums.unbind(3)), None, None


class _Exchange(Node):
    """This rank's positions of all heads, [b, s/p, p, m, d], for all of its heads, [b, s, m, d], or back: adjoint
    maps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: SequenceShards, to_heads: bool) -> Tensor:
        ctx.shards, ctx.to_heads = shards, to_heads
        return _positions_to_heads(x, shards) if to_heads else _heads_to_positions(x, shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = _heads_to_positions if ctx.to_heads else _positions_to_heads
        return back(grad, ctx.shards), None, None


def _positions_to_heads(x: Tensor, shards: SequenceShards) -> Tensor:
    pieces = PartsExchanged(x.movedim(2, 0).contiguous(), shards.group).wait()  # [p, b, s/p, m, d]
    return shards.put_together(pieces, 1)


def _heads_to_positions(x: Tensor, shards: SequenceShards) -> Tensor:
    return PartsExchanged(shards.take_apart(x)[:, 0], shards.group).wait().movedim(0, 2)
