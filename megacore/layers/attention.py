"""Multi-head self-attention, its heads split over the layer group.

The fused projection is laid out by group of heads that share a key and a value, [group][q..., k, v][d], so that a
rank's groups are one contiguous slice of it. With more ranks than groups a slice holds less than a group: ranks then
exchange what they have projected, and each takes its share of the query heads and the key and value they read.
Nothing is held twice, so that gradients, checkpoints and the norm need to know nothing of it.

Shape legend: s sequence, b micro-batch, h hidden size, n heads, g groups, q = n / g, d head size, t tensor-parallel
ranks.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.config.constraints import undivided_heads
from megacore.errors import ConfigError
from megacore.layers.context import BuildContext
from megacore.layers.norm import HeadNorm, JointHeadNorm, NormOfEachHead, build_norm
from megacore.layers.rotary import Rotary
from megacore.ops.visibility import Visibility
from megacore.parallel.context import context_attention
from megacore.parallel.mesh import ALONE
from megacore.parallel.random import seeded
from megacore.parallel.recompute import recompute
from megacore.parallel.sequence import gather_sequence
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, columns_parallel


class Mixing(TypedDict, total=False):
    """Which positions a block's attention sees, and how it knows them; see `Attention`."""

    causal: bool
    window: int | None
    rotary: Rotary | None
    alibi: ops.Alibi | None


class Attention(ShardedModule):
    """What all kinds of attention do with queries, keys and values once they are projected. Raises ConfigError where
    the ranks of a sequence exchange heads, which they cannot divide.

    Args:
        config: dropout on the attention weights, soft cap of the scores, sinks of softmax.
        causal: no position sees a later one.
        window: as for `ops.attention`.
        rotary: turns queries and keys by their positions; None: nothing does.
        alibi: of this rank's heads; see `alibi_of_rank`.
    """

    def __init__(
        self,
        config: ResolvedModel,
        context: BuildContext,
        name: str,
        *,
        causal: bool = True,
        window: int | None = None,
        rotary: Rotary | None = None,
        alibi: ops.Alibi | None = None,
    ) -> None:
        super().__init__()
        heads, ranks = config.num_attention_heads, context.attended.group.size
        if context.attended.comm == "ulysses":
            refused = undivided_heads(heads, config.query_groups, tp=context.layer_group.size, cp=ranks)
            if problems := list(refused):
                raise ConfigError(problems)
        self.view = Visibility(causal=causal, window=window, padded=context.padded_documents)
        self.rotary, self.alibi = rotary, alibi
        self.dropout, self.streams, self.sequence = config.attention_dropout, context.streams, context.attended
        self.site, self.layer_group = name, context.layer_group
        self.soft_cap = config.attn_logit_softcapping
        self.sinks: Tensor | None  # [n/t], what joins the sum of each head's softmax as exp(sink)
        if config.softmax_type == "learnable":
            held = split_evenly(heads, context.layer_group.rank, context.layer_group.size)
            spec = ShardSpec.split((heads,), {0: held})
            self.sinks = ShardedParameter(torch.empty(spec.local_shape, device=context.device), spec)
        elif config.softmax_type == "off-by-one":
            zeros = torch.zeros(heads // context.layer_group.size, device=context.device)
            self.register_buffer("sinks", zeros, persistent=False)
        else:
            self.sinks = None
        self.recomputes, self.implementation = context.recompute_attention, context.attention
        self.split_by = context.layer_group.size if context.sequence_parallel else 1
        # torch's fused operator draws from the device's generator: compiled code ends where it does, and where keys and
        # values of other ranks come in.
        self.uncompiled = ("_mixed",) if self.dropout or self.sequence.group.size > 1 else ()

    def prepare(self, x: Tensor) -> None:
        """Make the tables of the rotation, which compiled code reads, for hidden states of x's shape."""
        if self.rotary is not None:
            self.rotary.tables(self.sequence.whole_length(x.shape[1] * self.split_by), x.device)

    def shared_tensors(self) -> tuple[Tensor, ...]:
        """What the attention of other layers reads too, on the device: tables of the rotation, slopes of ALiBi."""
        tables = () if self.rotary is None else self.rotary.made
        return tables if self.alibi is None else (*tables, self.alibi.slopes)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """[b, n/t, s, d] and [b, g/t, s, d] twice -> [b, n/t, s, d]"""
        if self.recomputes and torch.is_grad_enabled():
            return recompute(partial(self.mix, documents=documents), query, key, value, streams=self.streams)
        return self.mix(query, key, value, documents)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """Attention of this rank's heads over what they see; arguments and result as for `_mixed`."""
        if self.sequence.group.size > 1:
            assert not (self.training and self.dropout), "the configuration refuses it"
            view = self.view.of(documents)
            slopes = None if self.alibi is None else self.alibi.slopes
            cap, sinks = self.soft_cap, self.sinks
            return context_attention(
                query, key, value, self.sequence, view=view, slopes=slopes, sinks=sinks, soft_cap=cap
            )
        rank = self.layer_group.rank
        return self._attended(query, key, value, documents, alibi=self.alibi, sinks=self.sinks, shard=rank)

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        *,
        alibi: ops.Alibi | None,
        sinks: Tensor | None,
        shard: int,
    ) -> Tensor:
        """Attention of some heads; `shard` decides what dropout draws."""
        dropout = self.dropout if self.training else 0.0
        draws = seeded(self.streams.key(self.site, shard), query.device) if dropout else nullcontext()
        with draws:  # torch's fused operator draws from the default generator only
            return ops.attention(
                query,
                key,
                value,
                view=self.view if documents is None else self.view.of(documents),
                alibi=alibi,
                sinks=sinks,
                soft_cap=self.soft_cap,
                dropout=dropout,
                implementation=self.implementation,
            )


class SelfAttention(Attention):
    """Attention as in Vaswani et al. 2017 (arXiv 1706.03762, section 3.2), with dropout on the attention weights.
    `config`: sizes, biases, norms of queries and keys, dropout; the group's size divides the number of heads, and
    divides or is a multiple of the number of key and value heads. `mixing`: keyword arguments of `Attention`."""

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str, **mixing: Any) -> None:
        super().__init__(config, context, name, **mixing)
        h, n, d = config.hidden_size, config.num_attention_heads, config.head_size
        self.head_size, self.groups, self.shared_by = d, config.query_groups, n // config.query_groups
        self.head_ranks, self.head_rank = context.layer_group.size, context.layer_group.rank
        rows = (n + 2 * self.groups) * d
        self.qkv = ColumnParallelLinear(h, rows, bias=config.qkv_bias, **context.linear_arguments)
        self.query_norm: HeadNorm | None = None
        self.key_norm: HeadNorm | None = None
        # Ranks normalise different heads; sequence parallelism sums such gradients anyway.
        group = ALONE if context.sequence_parallel else context.layer_group
        if config.qk_layernorm_all_heads or config.qk_layernorm_per_head:
            kind = JointHeadNorm if config.qk_layernorm_all_heads else NormOfEachHead
            norm = partial(kind, config, ranks=context.layer_group, group=group, device=context.device)
            self.query_norm, self.key_norm = norm(n), norm(self.groups)
        elif config.qk_layernorm:
            self.query_norm, self.key_norm = (
                build_norm(config, device=context.device, size=d, group=group) for _ in range(2)
            )
        self.gate: ColumnParallelLinear | None = None
        if config.attention_output_gate:
            self.gate = ColumnParallelLinear(h, n * d, bias=config.qkv_bias, **context.linear_arguments)
        self.output = RowParallelLinear(n * d, h, bias=config.attention_output_bias, **context.linear_arguments)
        self.has_whole_groups = context.layer_group.size <= self.groups
        self.limit = config.clip_qkv
        self.query_factor: float | None = None  # what queries are multiplied by, beside the 1 / sqrt(d) of scores
        if config.attention_multiplier is not None:
            self.query_factor = config.attention_multiplier * math.sqrt(d)

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Attention over all positions. `x`: [b, s, h], or, sequence parallel, [b, s/t, h]; with context parallelism s
        is this rank's positions here, and the whole sequence below. `documents`: [b, s] whole on every rank, as for
        `ops.attention`. `positions`: [b, s] whole on every rank, for the rotation. None: 0 to s - 1. Returns like x."""
        return self.output(self.attended(x, documents, positions))

    def attended(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """What the heads of this rank find, before the output projection: [b, s, n d / t]; arguments as for `forward`.
        It always has the whole positions of x: ranks of sequence parallelism have gathered them."""
        projected, *gate = columns_parallel(x, [self.qkv, self.gate]) if self.gate else [self.qkv(x)]
        if self.limit is not None and self.query_norm is None:
            projected = projected.clamp(-self.limit, self.limit)
        if self.rotary is not None and self.query_norm is None and self.has_whole_groups:
            packed = projected.unflatten(-1, (-1, self.head_size))
            groups = self.groups // self.layer_group.size
            query, key, value = self.rotary.split(packed, groups=groups, positions=positions)
        else:
            query, key, value = self._heads(projected)
            if self.rotary is not None:
                query, key = self.rotary.rotate(query, key, positions)
                value = value.contiguous()  # copied, so that the projection that it is a view of can be freed
        if self.query_factor is not None:
            query = query * self.query_factor
        mixed = self._mixed(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), documents)
        mixed = mixed.transpose(1, 2).flatten(2)
        return mixed * torch.sigmoid(gate[0]) if gate else mixed

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, s, (n + 2 g) d / t] -> queries [b, s, n/t, d], keys and values [b, s, g/t or 1, d], queries and keys
        normalised if configured; otherwise views where they can be."""
        if not self.has_whole_groups:
            return self._heads_of_shared_groups(projected)
        groups = projected.unflatten(-1, (-1, self.shared_by + 2, self.head_size))  # [b, s, g/t, q + 2, d]
        query, key, value = groups.split([self.shared_by, 1, 1], dim=3)
        return self._normalized(query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3))

    def _heads_of_shared_groups(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_heads`, where ranks share a group: each takes what it needs of the whole projection."""
        whole = gather_sequence(projected.transpose(1, 2), self.layer_group).transpose(1, 2)
        groups = whole.unflatten(-1, (self.groups, -1, self.head_size))
        is_joint = isinstance(self.query_norm, JointHeadNorm)
        if is_joint:
            queries, keys, values = groups.split([self.shared_by, 1, 1], dim=3)
            normed = self._normalized(queries.flatten(2, 3), keys.flatten(2, 3), values)
            groups = torch.cat([one.view_as(of) for one, of in zip(normed, (queries, keys, values), strict=True)], 3)
        # What was gathered lies position by position, and attention reads the dimensions of a head side by side.
        query, key, value = (part.contiguous() for part in self._share_of_group(groups))
        return (query, key, value) if is_joint else self._normalized(query, key, value)

    def _share_of_group(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All groups [b, s, g, q + 2, d] -> this rank's queries, and the key and value they read."""
        ranks = self.head_ranks // self.groups  # per query group
        queries, key, value = groups[:, :, self.head_rank // ranks].split([self.shared_by, 1, 1], dim=2)
        return queries.chunk(ranks, dim=2)[self.head_rank % ranks], key, value

    def _normalized(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised if configured, and then all three clipped as the others were before. The values
        are then copied, so that the projection that they are views of can be freed."""
        if self.query_norm is None or self.key_norm is None:
            return query, key, value
        query, key = self.query_norm(query.contiguous()), self.key_norm(key.contiguous())
        if self.limit is None:
            return query, key, value.contiguous()
        query, key, value = (one.clamp(-self.limit, self.limit) for one in (query, key, value.contiguous()))
        return query, key, value


def refuse_unsupported(attention: nn.Module, config: ResolvedModel, context: BuildContext, mixing: Mixing) -> None:
    """Refuse what a run asks of an attention that is none of megacore's, and that does not say that it has it.
    `attention`: its `supports` lists flags, such as `("--cp", "--window-size")`; none where it has no such attribute.
    `config, context, mixing`: what it is built from. Raises ConfigError with each flag by name."""
    if isinstance(attention, Attention):
        return
    heads, dropout, multiplier = config.num_attention_heads, config.attention_dropout, f"{config.attention_multiplier}"
    rope = mixing["rotary"] is not None
    asked = {
        "--cp": (context.sequence.group.size > 1, f"{context.sequence.group.size}", "use --cp 1"),
        "--reproducible": (context.blocks.divide, "", "leave it out"),
        "--recompute": (context.recompute_attention, "selective", "use --recompute full"),
        "--window-size": (mixing["window"] is not None, f"{mixing['window']}", "leave it out"),
        "--position-embedding-type": (rope, "rope", "use --position-embedding-type learned"),
        "--position-embedding-type alibi": (
            mixing["alibi"] is not None,
            "",
            "use --position-embedding-type learned",
        ),
        "--num-query-groups": (config.query_groups != heads, f"{config.query_groups}", f"use {heads}, or leave it out"),
        "--qk-layernorm": (config.qk_layernorm, "", "leave it out"),
        "--clip-qkv": (config.clip_qkv is not None, f"{config.clip_qkv}", "leave it out"),
        "--attention-dropout": (dropout > 0, f"{dropout:g}", "use 0"),
        "--attention-output-gate": (config.attention_output_gate, "", "leave it out"),
        "--softmax-type": (config.softmax_type != "vanilla", config.softmax_type, "leave it out"),
        "--attn-logit-softcapping": (config.attn_logit_softcapping is not None, "", "leave it out"),
        "--attention-multiplier": (config.attention_multiplier is not None, multiplier, "leave it out"),
        "--multi-latent-attention": (config.multi_latent_attention, "", "leave it out"),
    }
    kind, supported = type(attention).__name__, getattr(attention, "supports", ())
    if problems := [
        f"{flag}{value and ' ' + value}: {kind} does not have it: {way}, or write it, and add {flag!r} to `supports`"
        for flag, (is_asked, value, way) in asked.items()
        if is_asked and flag not in supported
    ]:
        raise ConfigError(problems)


def alibi_of_rank(config: ResolvedModel, context: BuildContext) -> ops.Alibi | None:
    """The bias by distance of this rank's heads, for all layers of a model, where the configuration asks for it."""
    if config.position_embedding_type != "alibi":
        return None
    ranks, rank = context.layer_group.size, context.layer_group.rank
    if context.blocks.divide:
        ranks, rank = context.blocks.ranks, context.blocks.rank
    start, stop = split_evenly(config.num_attention_heads, rank, ranks)
    slopes = ops.alibi_slopes(config.num_attention_heads)[start:stop]
    return ops.Alibi(torch.tensor(slopes, dtype=torch.float32, device=context.device))
