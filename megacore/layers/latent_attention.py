"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and values of all heads are
projections of one short vector for each token, and queries may be too.

A head's query and key have two parts. One is a projection of the short vectors, and has no position. The other, which
is rotated, is a projection of the hidden state for keys, and the same for all heads. Values may be narrower than keys.

The projections to the short vectors are small, and whole on every rank. With sequence parallelism a rank computes them
for its own positions, and what is gathered along the sequence are the short vectors. The projections from them are
split by heads.

Shape legend: s sequence, b micro-batch, h hidden size, n heads, t tensor-parallel ranks, q and c sizes of the short
vectors of queries and of keys and values, d_n, d_r and d_v sizes of a head's unrotated and rotated part and value.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.layers.attention import Attention
from megacore.layers.context import BuildContext
from megacore.layers.linear import ReplicatedLinear
from megacore.layers.norm import LayerNorm, build_norm
from megacore.layers.rotary import yarn_scale
from megacore.parallel.collectives import copy_to_group
from megacore.parallel.sequence import gather_sequence
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class LatentAttention(Attention):
    """Multi-head latent attention. `config`: sizes, norms of the short vectors, dropout; the group's size divides the
    number of heads. `mixing`: keyword arguments of `Attention`, with a rotation."""

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str, **mixing: Any) -> None:
        super().__init__(config, context, name, **mixing)
        h, n, size = config.hidden_size, config.num_attention_heads, config.head_size
        self.unrotated, self.rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_size, self.latent = config.v_head_dim, config.kv_lora_rank
        self.width = max(size, self.value_size)  # `ops.attention` has one for keys and values
        self.query_scale = _query_scale(config, self.width)
        self.sequence_parallel = context.sequence_parallel
        down = partial(
            ReplicatedLinear, h, bias=False, products=context.products, blocks=context.blocks, device=context.device
        )
        up = partial(ColumnParallelLinear, bias=False, **context.linear_arguments)
        self.query: ColumnParallelLinear | None = None
        self.query_norm: LayerNorm | None = None
        if config.q_lora_rank is None:
            self.query = up(h, n * size)
        else:
            self.query_down = down(config.q_lora_rank)
            self.query_norm = _norm(config, context, config.q_lora_rank)
            self.query_up = up(config.q_lora_rank, n * size)
        self.key_value_down = down(self.latent + self.rotated)
        self.key_value_norm = _norm(config, context, self.latent)
        self.key_value = up(self.latent, n * (self.unrotated + self.value_size))
        self.output = RowParallelLinear(n * self.value_size, h, bias=False, **context.linear_arguments)

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Attention over all positions; arguments and result as for `SelfAttention`."""
        assert self.rotary is not None, "the configuration requires a rotation"
        if self.query is not None:
            query = self.query(x)  # [b, s, n (d_n + d_r) / t]
        else:
            short = self.query_down(x)
            query = self.query_up(short if self.query_norm is None else self.query_norm(short))
        query = query.unflatten(-1, (-1, self.unrotated + self.rotated))
        latent, shared = self.key_value_down(x).split([self.latent, self.rotated], -1)
        if self.key_value_norm is not None:
            latent = self.key_value_norm(latent.contiguous())
        by_head = self.key_value(latent).unflatten(-1, (-1, self.unrotated + self.value_size))
        of_key, value = by_head.split([self.unrotated, self.value_size], -1)  # [b, s, n/t, d_n], [b, s, n/t, d_v]
        # All heads share the rotated part of keys, on all ranks.
        shared = self._entered(shared).unsqueeze(2)  # [b, s, 1, d_r]
        of_query, rotated = query.split([self.unrotated, self.rotated], -1)
        rotated, shared = self.rotary.rotate(rotated, shared, positions)
        query = torch.cat([of_query, rotated], -1)
        if self.query_scale != 1.0:
            query = query * self.query_scale
        key = torch.cat([of_key, self._for_heads(shared, of_key)], -1)
        query, key, value = (self._widened(part).transpose(1, 2) for part in (query, key, value))
        mixed = self._mixed(query, key, value, documents).transpose(1, 2)
        return self.output(mixed[..., : self.value_size].flatten(2))

    def _entered(self, shared: Tensor) -> Tensor:
        """[b, s, d_r] or, sequence parallel, [b, s/t, d_r] -> [b, s, d_r], with gradients summed over the ranks."""
        enter = gather_sequence if self.sequence_parallel else copy_to_group
        return enter(shared, self.layer_group)

    def _for_heads(self, shared: Tensor, of_key: Tensor) -> Tensor:
        """[b, s, 1, d_r] -> [b, s, n/t, d_r], like the heads' other part"""
        return shared.expand(-1, -1, of_key.shape[2], -1)

    def _widened(self, x: Tensor) -> Tensor:
        """With zeros after each head, up to the width that keys and values share."""
        return F.pad(x, (0, self.width - x.shape[-1])) if x.shape[-1] < self.width else x


def _norm(config: ResolvedModel, context: BuildContext, size: int) -> LayerNorm | None:
    """That of a short vector, which --qk-layernorm asks for."""
    if not config.qk_layernorm:
        return None
    return build_norm(config, device=context.device, size=size)


def _query_scale(config: ResolvedModel, width: int) -> float:
    """What queries are multiplied by, where scores divided by the root of `width` would be too small: --rope-scaling
    yarn enlarges the scores of all dimensions, and zeros that heads are widened with add nothing."""
    scale = math.sqrt(width / config.head_size)
    if config.rope_scaling == "yarn" and config.rope_mscale_all_dim is not None:
        scale *= yarn_scale(config.rope_scaling_factor, config.rope_mscale_all_dim) ** 2
    return scale
