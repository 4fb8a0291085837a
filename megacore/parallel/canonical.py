"""Canonical blocks: sums whose bits do not depend on how many ranks divide a layer, for --reproducible.

Floating-point addition rounds, and tensor parallelism decides where the sums inside matrix products are cut. Here every
layout cuts them at the same points. Features, heads, the vocabulary and, for gradients of parameters that every rank
holds, positions are divided into B blocks. Each block is computed by the same operators on operands of the same shape,
and the results are added in one binary tree. A rank of t holds B/t neighbouring blocks: a subtree. The upper levels of
the tree add the ranks' results, which each rank gets by an all-to-all. Partial sums are fp32 in every precision.

Context parallelism divides positions between the layers, and blocks within them: p ranks that hold the same weights
gather the input of a layer, and each computes B/(t p) of the blocks for all positions. So every product, and attention,
has the operands that it has in one process. A gradient is zero in the rows of a weight that other ranks compute.

Why the pieces are the same bits: a product of equal operands with equal shapes and strides, at aligned addresses, is
the same instructions. Operators on single elements give the same bits wherever the element lies, as long as no tensor
ends within a vector register; the configuration refuses sizes where one would.

Shape legend: B blocks, t tensor-parallel ranks, p context-parallel ranks, s sequence, b micro-batch, i input features,
o output features; s' positions that a rank holds between the layers, which is s/p or, sequence parallel, s/(p t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import Node
from megacore.parallel.collectives import PartsExchanged, ShardsGathered, all_gather, all_reduced
from megacore.parallel.context import WHOLE, SequenceShards
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import Parameters, Products, looked_up, with_gradient
from megacore.parallel.sharding import ShardedParameter, split_evenly

_ALIGNMENT = 64  # bytes; matrix products may round differently at other addresses


@dataclass(frozen=True)
class Blocks:
    """The blocks that a layout-independent sum consists of, and those of them that this rank holds."""

    count: int = 1  # B, a power of two that the group's size divides; 1: sums are cut where the layout cuts them
    group: Group = ALONE  # the tensor-parallel group
    # Between the layers the tensor-parallel ranks divide the positions of a sequence shard, otherwise each holds all of
    # them.
    sequence_parallel: bool = False
    # Which positions the ranks of context parallelism hold; they divide the blocks of a tensor-parallel rank.
    sequence: SequenceShards = WHOLE
    # Every rank holds all rows of inputs and outputs, such as those of experts, instead of positions.
    everywhere: bool = False
    divide: bool = field(init=False)  # whether sums are divided at all

    def __post_init__(self) -> None:
        object.__setattr__(self, "divide", self.count > 1)  # every layer asks in every call

    @property
    def ranks(self) -> int:
        """The number of ranks that divide the blocks."""
        return self.group.size * self.sequence.group.size

    @property
    def rank(self) -> int:
        """This rank's number in the order of the ranks' blocks."""
        return self.group.rank * self.sequence.group.size + self.sequence.group.rank

    @property
    def held(self) -> range:
        """The numbers of this rank's blocks."""
        share = self.count // self.ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def held_positions(self) -> Sequence[int]:
        """The numbers of the blocks of positions that this rank holds between the layers."""
        numbers = [number for of in self.sequence.ranges(self.count) for number in of]
        if not self.sequence_parallel:
            return numbers
        share = len(numbers) // self.group.size
        return numbers[self.group.rank * share : (self.group.rank + 1) * share]

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """[start, stop) of this rank's blocks of a dimension of `size` entries over all ranks."""
        return [split_evenly(size, number, self.count) for number in self.held]

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """This rank's blocks of a dimension that the ranks divide evenly: contiguous, at aligned addresses."""
        return split_blocks(x, dim, [x.shape[dim] // len(self.held)] * len(self.held))

    def sizes_of_positions(self, local: int) -> list[int]:
        """Of each block of positions that this rank holds, of `local` positions in all."""
        held = self.held_positions
        whole = local * self.count // len(held)
        bounds = [split_evenly(whole, number, self.count) for number in held]
        return [stop - start for start, stop in bounds]

    def over_positions(
        self,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[ShardedParameter | None],
    ) -> Tensor:
        """A function of single positions, a block of positions at a time, so that gradients of parameters that every
        rank holds are sums over canonical blocks. `function`: of blocks of `tensors`, [b, s', ...], then of
        `parameters`, of which None is passed on. Returns the results, joined along positions."""
        if not self.divide:
            return function(*tensors, *parameters)
        number = len(self.held_positions)
        views = [[None] * number if p is None else self.terms(p, number) for p in parameters]
        blocks = [split_blocks(x, 1, self.sizes_of_positions(x.shape[1])) for x in tensors]
        return joined_blocks([function(*operands) for operands in zip(*blocks, *views, strict=True)], 1)

    def of_features(self, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """A function of single elements of tensors [n, o/(t p)], computed a block of features at a time."""
        if not self.divide:
            return function(*tensors)
        blocks = zip(*(self.split(x, -1) for x in tensors), strict=True)
        return joined_blocks([function(*block) for block in blocks], -1)

    def over_heads(
        self,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        parameters: Sequence[ShardedParameter | None],
    ) -> Tensor:
        """The same of heads: tensors [b, s, heads of this rank, d], of which each block has one or more."""
        number = len(self.held)
        gathered = not self.sequence_parallel  # then the ranks' sums are not added later
        views = [[None] * number if p is None else self.terms(p, number, gathered=gathered) for p in parameters]
        blocks = [self.split(x, 2) for x in tensors]
        return joined_blocks([function(*operands) for operands in zip(*blocks, *views, strict=True)], 2)

    def terms(self, parameter: ShardedParameter, number: int, *, gathered: bool = False) -> list[Tensor]:
        """Views of a parameter whose gradients are terms of an exact sum. `gathered`: every rank gets the terms of all
        ranks; otherwise the ranks' sums are added later."""
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return [parameter] * number
        views: tuple[Tensor, ...] = _Terms.apply(parameter, number, self.group if gathered else ALONE)
        return list(views)

    def columns(self, x: Tensor, parameters: Parameters, products: Products) -> tuple[Tensor, ...]:
        """Column-parallel layers that share an input. `x`: [b, s', i]; or rows [n, i]. `parameters`: weight [o/t, i],
        bias [o/t] or None, weight, ...; or stacked weights [E, o/t, i]. Returns [b, s, o/(t p)] of each layer."""
        weights = [None if p is None else self.of_rank(p, -2) for p in parameters[::2]]
        biases = [None if p is None else self.of_rank(p, -1) for p in parameters[1::2]]
        pairs = list(zip(weights, biases, strict=True))
        whole = self.gathered_positions(x.detach())
        fixed = [None if p is None else p.detach() for pair in pairs for p in pair]
        outputs: tuple[Tensor, ...] = _ColumnOutputs.apply(self, products, x, whole, *fixed)
        return tuple(
            self._with_weights(y, x.detach() if self._gathers_again else whole, weight, bias, dim=-2, products=products)
            for y, (weight, bias) in zip(outputs, pairs, strict=True)
        )

    def row(self, x: Tensor, weight: Tensor, bias: ShardedParameter | None, products: Products) -> Tensor:
        """A row-parallel layer. `x`: [b, s, i/(t p)]. `weight`: [o, i/t], or stacked [E, o, i/t]. `bias`: [o], which
        every rank holds, or None. Returns [b, s', o]."""
        weight = self.of_rank(weight, -1)
        partial: Tensor = _RowOutput.apply(self, products, x, weight.detach())
        partial = self._with_weights(partial, x.detach(), weight, None, dim=-1, products=products)
        y: Tensor = _RankSum.apply(partial, self, x.dtype)
        return y if bias is None else self.over_positions(torch.add, [y], [bias])

    def copies(self, x: Tensor, number: int, dtype: torch.dtype, *, heads: int | None = None) -> Tensor:
        """Copies of every head, next to it, whose gradients are added in the tree. `x`: [b, s, heads, d] fp32.
        `number`: of blocks that a copy is for; a power of two. `heads`: of the only head, which all ranks have, the
        copies for this rank's blocks together, whose gradients are added in each block first, and last over the ranks;
        None: `number`. Returns [b, s, heads x number, d], or [b, s, heads, d] of the copies of one head."""
        if number == 1 and heads is None:
            return x.to(dtype)
        copied: Tensor = _Copies.apply(x, number, heads, dtype, self)
        return copied

    def gathered_features(self, x: Tensor) -> Tensor:
        """[b, s, o/(t p)] fp32 -> those of all ranks, [b, s, o]; gradients are added in the tree."""
        gathered: Tensor = _GatheredFeatures.apply(x, self)
        return gathered

    def looked_up(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of an embedding's weight, [b, s/p] int64 -> [b, s/p, h]. A row's gradient is summed over all positions,
        in their order, by the first of the ranks that divide them."""
        if self.sequence.group.size == 1:
            return looked_up(tokens, weight)
        rows: Tensor = _Rows.apply(tokens, weight, self)
        return rows

    def entered(self, x: Tensor) -> Tensor:
        """[b, s', h] -> all positions, [b, s, h] fp32; gradients are added in the tree. On one rank x itself."""
        if self.ranks == 1:
            return x
        whole: Tensor = _Entered.apply(x, self)
        return whole

    def gathered_positions(self, x: Tensor) -> Tensor:
        """[b, s', ...] -> [b, s, ...], without a gradient."""
        if self.sequence_parallel and self.group.size > 1:
            x = ShardsGathered(x, self.group).wait().transpose(0, 1).flatten(1, 2)
        return self.gathered_sequence(x)

    def own_positions(self, x: Tensor) -> Tensor:
        """[b, s, ...] -> [b, s', ...], without a gradient."""
        x = self.sequence.take(x, 1)
        return x.chunk(self.group.size, 1)[self.group.rank].contiguous() if self.sequence_parallel else x

    def shared(self, x: Tensor) -> Tensor:
        """[b, s', ...] -> [b, s, ...] for what every rank computes alike, and with it the whole gradient."""
        whole: Tensor = x if self.ranks == 1 else _Shared.apply(x, self, True)
        return whole

    def parted(self, x: Tensor) -> Tensor:
        """[b, s, ...], which every rank has computed alike -> [b, s', ...]"""
        part: Tensor = x if self.ranks == 1 else _Shared.apply(x, self, False)
        return part

    def gathered_sequence(self, x: Tensor) -> Tensor:
        """[b, s/p, ...] -> [b, s, ...], without a gradient."""
        if self.sequence.group.size > 1 and not self.everywhere:
            x = self.sequence.put_together(ShardsGathered(x, self.sequence.group).wait(), 1)
        return x.contiguous()

    def totals(self, terms: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sum of fp32 tensors of all blocks, once for each of this rank's blocks, whose gradients are added too."""
        totals: tuple[Tensor, ...] = _Totals.apply(self, *terms)
        return totals

    def of_all_blocks(self, x: Tensor) -> Tensor:
        """What every rank has of each of its blocks, [held blocks, ...] -> of all blocks in their order, [B, ...]."""
        return all_gather(all_gather(x, self.sequence.group).flatten(0, 1), self.group).flatten(0, 1)

    def scattered_sum(self, x: Tensor) -> Tensor:
        """This rank's positions of the sum of the ranks' tensors [b, s, h], fp32, in the order of the tree."""
        ranks = self.group.size
        b, s, h = x.shape
        pieces = x.view(b, ranks, s // ranks, h).transpose(0, 1).contiguous()
        return tree_sum(PartsExchanged(pieces, self.group).wait().unbind(0))

    @property
    def _gathers_again(self) -> bool:
        """Whether backward gathers the input of a layer again, so that a rank keeps its positions only."""
        return self.sequence.group.size > 1 and not self.everywhere

    def of_rank(self, weight: Tensor, dim: int) -> Tensor:
        """The part of a tensor-parallel rank's weight or bias that this rank computes with."""
        ranks, rank = self.sequence.group.size, self.sequence.group.rank
        if ranks == 1:
            return weight
        share = weight.shape[dim] // ranks
        return weight.narrow(dim, rank * share, share)

    def _with_weights(
        self, y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, dim: int, products: Products
    ) -> Tensor:
        """y, whose backward computes the gradients of weight and bias too; `dim` of the weight is divided."""
        if not torch.is_grad_enabled() or weight is None or not weight.requires_grad:
            return y
        return with_gradient(y, _WeightGradients.apply(self, products, y.detach(), x, dim, weight, bias))

    def _sum_everywhere(self, x: Tensor) -> Tensor:
        return _sum_of_ranks(_sum_of_ranks(x, self.sequence.group), self.group)

    def _leave(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """A rank's part of a sum [b, s, h] fp32 -> this rank's positions of the sum, [b, s', h]. Blocks of the ranks of
        context parallelism are the lower levels of the tree."""
        if self.everywhere:
            return self._sum_everywhere(partial).to(dtype)
        if self.sequence.group.size > 1:
            pieces = self.sequence.take_apart(partial)[:, 0]
            partial = tree_sum(PartsExchanged(pieces, self.sequence.group).wait().unbind(0))
        scatters = self.sequence_parallel and self.group.size > 1
        return (self.scattered_sum(partial) if scatters else _sum_of_ranks(partial, self.group)).to(dtype)


ONE_BLOCK = Blocks()
"""Sums are cut where the layout cuts them."""


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of 2^k tensors: neighbours are added first, then neighbouring pairs, and so on."""
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _sum_of_ranks(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, fp32, in the order of the tree; the same bits on every rank."""
    ranks = group.size
    if ranks == 1 or not x.numel():
        return x
    if ranks == 2:  # two terms have one order
        return all_reduced(x, group)
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -flat.numel() % ranks))
    mine = tree_sum(PartsExchanged(padded.view(ranks, -1), group).wait().unbind(0))
    return ShardsGathered(mine, group).wait().view(-1)[: flat.numel()].view(x.shape)


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at an aligned address."""
    x = x.contiguous()
    return x if x.storage_offset() * x.element_size() % _ALIGNMENT == 0 else x.clone()


def heads_are_aligned(x: Tensor) -> bool:
    """Whether products of each head of [..., d] round alike, however many heads lie in memory before it."""
    return x.shape[-1] * x.element_size() % _ALIGNMENT == 0


def split_blocks(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Blocks along a dimension: contiguous, at aligned addresses; what `joined_blocks` joins."""
    if torch.is_grad_enabled() and x.requires_grad:
        blocks: tuple[Tensor, ...] = _Split.apply(x, dim, sizes)
        return list(blocks)
    if len(set(sizes)) > 1:
        return [aligned(part) for part in x.split(sizes, dim)]
    # One copy of all, where they are not contiguous.
    stacked = x.unflatten(dim, (len(sizes), -1)).movedim(dim % x.dim(), 0).contiguous()
    return [aligned(part) for part in stacked.unbind()]


class _Split(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(split_blocks(x, dim, sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(grads, ctx.dim), None, None


def joined_blocks(blocks: Sequence[Tensor], dim: int) -> Tensor:
    """The blocks, joined; their gradients are contiguous, however many there are."""
    joined: Tensor = _Joined.apply(dim, *blocks)
    return joined


class _Joined(Node):
    """torch.cat gives strided gradients, and one block's gradient as it comes: sums over them round differently."""

    @staticmethod
    def forward(ctx: Any, dim: int, *blocks: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [block.shape[dim] for block in blocks]
        return torch.cat(blocks, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *split_blocks(grad, ctx.dim, ctx.sizes)


class _ColumnOutputs(Node):
    """Outputs; backward gives the gradient of the input only."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, products: Products, x: Tensor, whole: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.blocks, ctx.products, ctx.weights, ctx.dtype = blocks, products, weights, x.dtype
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            assert weight is not None
            shifts = [None] * len(blocks.held) if bias is None else blocks.split(bias, 0)
            parts = zip(blocks.split(weight, -2), shifts, strict=True)
            outputs.append(torch.cat([products.output(whole, w, shift) for w, shift in parts], -1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        nothing = (None,) * (2 * len(grads))
        if not ctx.needs_input_grad[2]:
            return None, None, None, None, *nothing
        of_layers = [
            [ctx.products.input_gradient(grad, weight).float() for grad, weight in parts]
            for parts in (
                zip(blocks.split(grad, -1), blocks.split(weight, -2), strict=True)
                for grad, weight in zip(grads, ctx.weights, strict=True)
            )
        ]
        partial = tree_sum([sum(terms[1:], terms[0]) for terms in zip(*of_layers, strict=True)])
        return None, None, blocks._leave(partial, ctx.dtype), None, *nothing


class _WeightGradients(Node):
    """Forward gives zeros of the output's shape, one number in memory; backward the gradients of weight and bias.
    Schedules that split backward ask autograd for one or the other: the input's gradient is in another node."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, products: Products, y: Tensor, x: Tensor, dim: int, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x)
        ctx.blocks, ctx.products, ctx.dim, ctx.has_bias = blocks, products, dim, bias is not None
        return y.new_zeros(()).expand(y.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        blocks, weight_gradient = ctx.blocks, ctx.products.weight_gradient
        if ctx.dim == -2 and blocks._gathers_again:
            x = blocks.gathered_positions(x)
        rows, inputs = grad.to(x.dtype).flatten(0, -2), x.flatten(0, -2)
        if ctx.dim == -1:
            d_weight = torch.cat([weight_gradient(rows, part) for part in blocks.split(inputs, 1)], -1)
            return *(None,) * 5, d_weight, None
        parts = blocks.split(rows, 1)
        d_weight = torch.cat([weight_gradient(part, inputs) for part in parts], -2)
        return *(None,) * 5, d_weight, torch.cat([part.sum(0) for part in parts]) if ctx.has_bias else None


class _RowOutput(Node):
    """This rank's part of the output, in fp32; backward gives the gradient of the input only."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, products: Products, x: Tensor, weight: Tensor) -> Tensor:
        ctx.blocks, ctx.products, ctx.weight, ctx.dtype = blocks, products, weight, x.dtype
        parts = zip(blocks.split(x, -1), blocks.split(weight, -1), strict=True)
        return tree_sum([products.output(part, w, None).float() for part, w in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        grad = grad.to(ctx.dtype)
        parts = [ctx.products.input_gradient(grad, w) for w in ctx.blocks.split(ctx.weight, -1)]
        return None, None, torch.cat(parts, -1), None


class _RankSum(Node):
    """The sum of the ranks' parts; backward hands every rank the gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
        ctx.blocks = blocks
        return blocks._leave(partial, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.blocks.gathered_positions(grad).float(), None, None


class _Entered(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks, ctx.dtype = blocks, x.dtype
        return blocks.gathered_positions(x.view_as(x)).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.blocks._leave(grad, ctx.dtype), None


class _Shared(Node):
    """Positions of all ranks, gathered, or those of this rank, taken: each the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks, gathers: bool) -> Tensor:
        ctx.blocks, ctx.gathers = blocks, gathers
        return blocks.gathered_positions(x.view_as(x)) if gathers else blocks.own_positions(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        blocks: Blocks = ctx.blocks
        return blocks.own_positions(grad) if ctx.gathers else blocks.gathered_positions(grad), None, None


class _Rows(Node):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, blocks: Blocks) -> Tensor:
        ctx.tokens, ctx.rows, ctx.blocks = tokens, len(weight), blocks
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        tokens, whole = (ctx.blocks.gathered_sequence(x) for x in (ctx.tokens, grad))
        if not ctx.blocks.sequence.group.is_first:
            return None, grad.new_zeros(ctx.rows, grad.shape[-1]), None
        return None, torch.ops.aten.embedding_dense_backward(whole, tokens, ctx.rows, -1, False), None


class _GatheredFeatures(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks = blocks
        for group in (blocks.sequence.group, blocks.group):
            x = torch.cat(all_gather(x, group).unbind(), -1)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        across, along = ctx.blocks.group, ctx.blocks.sequence.group
        pieces = torch.stack(grad.chunk(across.size * along.size, -1)).unflatten(0, (across.size, along.size))
        if along.size > 1:
            pieces = tree_sum(PartsExchanged(pieces.transpose(0, 1).contiguous(), along).wait().unbind(0)).unsqueeze(1)
        pieces = pieces[:, 0]
        if across.size == 1:
            return pieces[0], None
        return tree_sum(PartsExchanged(pieces.contiguous(), across).wait().unbind(0)), None


class _Totals(Node):
    """Sums of blocks, and of their gradients: each is its own backward."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, *terms: Tensor) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        total = blocks._sum_everywhere(tree_sum(terms))
        return tuple(total.clone() for _ in terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.blocks._sum_everywhere(tree_sum(grads))
        return None, *(total for _ in grads)


class _Copies(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, heads: int | None, dtype: torch.dtype, blocks: Blocks) -> Tensor:
        ctx.number, ctx.copies = number, number if heads is None else heads
        ctx.blocks = None if heads is None else blocks
        return x.to(dtype).repeat_interleave(ctx.copies, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        copies = grad.float().unflatten(2, (-1, ctx.copies)).unbind(3)
        each = ctx.copies // ctx.number
        terms = [sum(copies[start + 1 : start + each], copies[start]) for start in range(0, ctx.copies, each)]
        total = tree_sum(terms)
        return (total if ctx.blocks is None else ctx.blocks._sum_everywhere(total)), None, None, None, None


class _Terms(Node):
    """Views of a parameter, whose gradients every rank gets from all ranks of a group. Backward gives all but the last,
    stacked, to `take_term` of the parameter, and the last to autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter, number: int, group: Group) -> tuple[Tensor, ...]:
        ctx.parameter, ctx.group = parameter, group
        return tuple(parameter.view_as(parameter) for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        terms = all_gather(torch.stack(grads), ctx.group).flatten(0, 1)
        if (take := ctx.parameter.take_term) is None:
            return tree_sum(terms.unbind()), None, None
        if len(terms) > 1:
            take(ctx.parameter, terms[:-1])
        return terms[-1], None, None
