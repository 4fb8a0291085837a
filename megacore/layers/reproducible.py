"""The norms and attentions of --reproducible, which `parallelize()` puts in the place of the plain ones, as
parallel/reproducible.py does with parallel layers. Each computes in canonical blocks (parallel/canonical.py)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.layers.attention import Attention, SelfAttention
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.linear_attention import GatedDeltaNet, LinearAttention, Mamba2
from megacore.layers.norm import (
    JointHeadNorm,
    LayerNorm,
    NormOfEachHead,
    RMSNorm,
    of_group,
    scaled_and_shifted,
    weight_of_group,
)
from megacore.parallel import reproducible
from megacore.parallel.canonical import Blocks, heads_are_aligned, joined_blocks
from megacore.parallel.random import Dropout


class LayerNormOfBlocks(LayerNorm):
    """Positions, or heads, a block at a time, so that no layout changes a bit of the parameters' gradients."""

    blocks: Blocks
    of_heads = False  # whether the vectors are those of this rank's heads, [b, s, heads, d]

    def forward(self, x: Tensor) -> Tensor:
        over = self.blocks.over_heads if self.of_heads else self.blocks.over_positions
        return over(self._normed, [x], [self.weight, self.bias])

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        weight = weight + 1.0 if weight is not None and self.plus_one else weight
        return ops.rms_norm(x, weight, self.epsilon) if self.rms else ops.layer_norm(x, weight, bias, self.epsilon)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(x), x

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.with_input(x + residual)


class RMSNormOfBlocks(LayerNormOfBlocks, RMSNorm):
    """The same of RMSNorm."""


class JointHeadNormOfBlocks(JointHeadNorm):
    """Means over all heads are sums over the blocks of all ranks."""

    blocks: Blocks

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = weight_of_group(self), of_group(self.bias, self.group)
        parts = [part.float().flatten(2) for part in self.blocks.split(x, 2)]
        if not self.is_rms:
            parts = [part - mean for part, mean in zip(parts, self._means(parts), strict=True)]
        normed = []
        squares = self._means([part.square() for part in parts])
        for part, square, (start, stop) in zip(parts, squares, self.blocks.bounds(self.size), strict=True):
            of_part = (None if one is None else one[start:stop] for one in (weight, bias))
            normed.append(scaled_and_shifted(part * torch.rsqrt(square + self.epsilon), *of_part))
        return joined_blocks(normed, 2).to(x.dtype).view(x.shape)

    def _means(self, parts: list[Tensor]) -> list[Tensor]:
        """Over the features of all blocks, [b, s, 1], for each of this rank's blocks."""
        return [total / self.size for total in self.blocks.totals([part.sum(-1, keepdim=True) for part in parts])]


class NormOfEachHeadOfBlocks(NormOfEachHead):
    """Every block of heads uses the weights by itself."""

    blocks: Blocks

    def forward(self, x: Tensor) -> Tensor:
        held, summed_later = self.blocks.held, self.blocks.sequence_parallel
        weights = self.blocks.terms(self.weight, len(held), gathered=not summed_later)
        parts = zip(self.blocks.split(x, 2), weights, held, strict=True)
        return joined_blocks([self.normed(part, weight, one, self.blocks.count) for part, weight, one in parts], 2)


class DropoutOfBlocks(Dropout):
    """Every block of positions has the mask of its number, whoever holds it."""

    blocks: Blocks

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        dropped: Tensor = self(x)
        return residual + dropped

    def mask(self, x: Tensor) -> Tensor:
        parts = zip(x.split(self.blocks.sizes_of_positions(x.shape[1]), 1), self.blocks.held_positions, strict=True)
        return torch.cat([self.drawn(part, number) for part, number in parts], 1)


class AttentionOfBlocks(Attention):
    """Every block of heads is computed by itself, where products of a head could round otherwise among others."""

    blocks: Blocks

    def adopt(self) -> None:
        self.split_by *= self.blocks.sequence.group.size

    def mix(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        by_block = (self.training and self.dropout > 0.0) or self.sinks is not None
        if not by_block and all(map(heads_are_aligned, (query, key, value))):
            rank = self.layer_group.rank
            return self._attended(query, key, value, documents, alibi=self.alibi, sinks=None, shard=rank)
        parts = self.blocks.held
        biases, sinks = [self.alibi] * len(parts), [self.sinks] * len(parts)
        if self.alibi is not None:
            biases = [ops.Alibi(slopes) for slopes in self.alibi.slopes.chunk(len(parts))]
        if self.sinks is not None:
            sinks = list(self.blocks.of_rank(self.sinks, 0).chunk(len(parts)))
        heads = [self.blocks.split(x.transpose(1, 2), 2) for x in (query, key, value)]
        mixed = []
        for q, k, v, bias, sink, part in zip(*heads, biases, sinks, parts, strict=True):
            block = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            mixed.append(self._attended(*block, documents, alibi=bias, sinks=sink, shard=part).transpose(1, 2))
        return joined_blocks(mixed, 2).transpose(1, 2)


class SelfAttentionOfBlocks(AttentionOfBlocks, SelfAttention):
    """With a copy of key and value for each block of query heads: the copies' gradients are added in the order of
    blocks."""

    def adopt(self) -> None:
        super().adopt()
        self.head_ranks, self.head_rank, self.has_whole_groups = self.blocks.ranks, self.blocks.rank, False
        for norm in (self.query_norm, self.key_norm):
            if isinstance(norm, LayerNormOfBlocks):
                norm.of_heads = True

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype, wide, shares = projected.dtype, projected.float(), self.head_ranks > self.groups
        groups = (self.blocks.gathered_features(wide) if shares else wide).unflatten(
            -1, (-1, self.shared_by + 2, self.head_size)
        )
        if shares:
            query, key, value = self._share_of_group(groups)
        else:
            query, key, value = (part.flatten(2, 3) for part in groups.split([self.shared_by, 1, 1], dim=3))
        copies = max(1, len(self.blocks.held) // key.shape[2])
        key, value = (self.blocks.copies(part, copies, dtype) for part in (key, value))
        return self._normalized(query.to(dtype), key, value)


class LatentAttentionOfBlocks(AttentionOfBlocks, LatentAttention):
    """The part of keys that all heads share is fp32 until it is rotated, as its gradients are added in the tree."""

    def _entered(self, shared: Tensor) -> Tensor:
        return self.blocks.shared(shared.contiguous()).float()

    def _for_heads(self, shared: Tensor, of_key: Tensor) -> Tensor:
        return self.blocks.copies(shared, len(self.blocks.held), of_key.dtype, heads=of_key.shape[2])


class LinearAttentionOfBlocks(LinearAttention):
    """Every block of heads by itself, with a copy of the rates, whose gradients are added over the blocks."""

    blocks: Blocks

    def adopt(self) -> None:
        if isinstance(self.value_norm, LayerNormOfBlocks):
            self.value_norm.of_heads = True

    def _entered(self, rates: Tensor) -> Tensor:
        return self.blocks.shared(rates.contiguous()).float()

    def mix(self, projected: Tensor, rates: Tensor, documents: Tensor | None) -> Tensor:
        held, dtype = self.blocks.held, projected.dtype
        copies = self.blocks.copies(rates.unsqueeze(2), len(held), dtype, heads=len(held)).unbind(2)
        of_blocks = [copy.chunk(self.blocks.count, -1)[number] for copy, number in zip(copies, held, strict=True)]
        parameters = [self.blocks.of_rank(getattr(self, name), 0).chunk(len(held)) for name in self.of_heads]
        parts = zip(self.blocks.split(projected, -1), of_blocks, zip(*parameters, strict=True), strict=True)
        read = joined_blocks([self.read(*part, documents) for part in parts], 2)
        return self.gated(read, projected)


class GatedDeltaNetOfBlocks(LinearAttentionOfBlocks, GatedDeltaNet):
    """The same of Gated DeltaNet."""


class Mamba2OfBlocks(LinearAttentionOfBlocks, Mamba2):
    """The same of Mamba-2."""


_OF_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    LayerNorm: LayerNormOfBlocks,
    RMSNorm: RMSNormOfBlocks,
    JointHeadNorm: JointHeadNormOfBlocks,
    NormOfEachHead: NormOfEachHeadOfBlocks,
    Dropout: DropoutOfBlocks,
    SelfAttention: SelfAttentionOfBlocks,
    LatentAttention: LatentAttentionOfBlocks,
    GatedDeltaNet: GatedDeltaNetOfBlocks,
    Mamba2: Mamba2OfBlocks,
}


def make_reproducible(layer: nn.Module, blocks: Blocks) -> None:
    """Let everything inside a layer compute in `blocks`, if they divide sums. Its parameters stay."""
    if not blocks.divide:
        return
    reproducible.exchange(layer, blocks, reproducible.OF_BLOCKS | _OF_BLOCKS)
    for module in layer.modules():
        if isinstance(module, AttentionOfBlocks | LinearAttentionOfBlocks):
            module.adopt()
