"""Linear attention: a head keeps a matrix instead of the keys and values of all earlier positions (ops/delta_rule.py).
Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, section 3.4) is that of Qwen3-Next, and Mamba-2 (Dao
and Gu 2024, arXiv 2405.21060, section 7), whose C, B and x are queries, keys and values, that of Granite 4.

In both, queries, keys and values pass a short convolution and SiLU, several value heads share a query and a key, and
what heads read is normalised and multiplied by the SiLU of a gate. The fused projection is laid out by key head,
[group][q, k, v..., z...], so that a rank's groups are one slice of it. The rates, [group][b..., a...], of Mamba-2 only
[group][a...], are few: every rank projects all of them.

Ranks of context parallelism hold two chunks of the sequence each (parallel/context.py). They exchange what each chunk
makes of any state, and the end of its input, for the convolution of the next.

Shape legend: s sequence, b micro-batch, h hidden size, g groups, r value heads of a group, d_v size of a head's value,
f features of a group's q, k and v, t tensor-parallel ranks, p context-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.context import BuildContext
from megacore.layers.linear import ReplicatedLinear
from megacore.layers.norm import LayerNorm, NormOfEachHead, build_norm
from megacore.parallel.collectives import copy_to_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.recompute import recompute
from megacore.parallel.sequence import gather_sequence
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_EPSILON = 1e-6  # added to the square of a query's and a key's length


@dataclasses.dataclass
class Past:
    """What the positions so far leave to the next ones of a text that is read piece by piece; None before the first."""

    inputs: Tensor | None = None  # of the convolution, the last ones, [b, T - 1, g f / t]
    state: Tensor | None = None  # [b, g r / t, k, v]


class LinearAttention(ShardedModule):
    """What Gated DeltaNet and Mamba-2 share, heads split over the layer group, whose size divides the number of key
    heads. `config`: sizes of heads, and epsilon of the norm. `mixing`: of other attentions; there are neither windows
    nor positions."""

    corrects: ClassVar[bool]  # as for `ops.gated_delta_rule`
    of_heads: ClassVar[tuple[str, ...]] = ("conv", "log_decay", "decay_bias")
    """Parameters that ranks split, beside those of the projections."""

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str, **mixing: Any) -> None:
        super().__init__()
        h, heads, (keys, values) = config.hidden_size, config.linear_num_value_heads, config.linear_widths
        self.groups, self.key_size = config.linear_num_key_heads, config.linear_key_head_dim
        self.shared_by, self.value_size = heads // self.groups, config.linear_value_head_dim
        self.layer_group, self.sequence_parallel = context.layer_group, context.sequence_parallel
        self.sequence, self.streams, self.recomputes = context.attended, context.streams, context.recompute_attention
        self.qkvz = ColumnParallelLinear(h, 2 * (keys + values), bias=False, **context.linear_arguments)
        # Too few outputs for fp8, and not its products.
        self.rates = ReplicatedLinear(h, config.linear_rates, bias=False, blocks=context.blocks, device=context.device)
        split = partial(self._split, device=context.device)
        self.conv = split(2 * keys + values, 1, config.linear_conv_kernel_dim)  # of torch's shape
        self.log_decay, self.decay_bias = split(heads), split(heads)
        if not self.corrects:
            self.conv_bias, self.skip = split(2 * keys + values), split(heads)
        normed = dataclasses.replace(config, normalization="RMSNorm", norm_affine=True, layernorm_1p=False)
        # Ranks normalise different heads; sequence parallelism sums such gradients anyway.
        self.value_norm = self._norm(normed, context, ALONE if context.sequence_parallel else context.layer_group)
        self.out = RowParallelLinear(values, h, bias=False, **context.linear_arguments)
        self.uncompiled = ("mix",)  # a loop over chunks, and messages of other ranks

    def _norm(self, config: ResolvedModel, context: BuildContext, group: Group) -> LayerNorm | NormOfEachHead:
        """Of what heads read; `group` sums its gradients."""
        raise NotImplementedError

    def let_through(self, read: Tensor, gate: Tensor) -> Tensor:
        """What heads read, [b, s, g r / t, d_v], normalised and gated -> [b, s, g r d_v / t]"""
        raise NotImplementedError

    def _split(self, *shape: int, device: torch.device) -> ShardedParameter:
        """An uninitialised parameter whose rows the layer group splits."""
        held = split_evenly(shape[0], self.layer_group.rank, self.layer_group.size)
        spec = ShardSpec.split(shape, {0: held})
        return ShardedParameter(torch.empty(spec.local_shape, device=device), spec)

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Arguments and result as for `SelfAttention`; `positions` are not read."""
        projected, rates = self.qkvz(x), self._entered(self.rates(x))
        mix = partial(self.mix, documents=documents)
        if self.recomputes and torch.is_grad_enabled():
            return self.out(recompute(mix, projected, rates, streams=self.streams))
        return self.out(mix(projected, rates))

    def _entered(self, rates: Tensor) -> Tensor:
        """[b, s, rates] or, sequence parallel, [b, s/t, rates] -> this rank's, [b, s, rates / t]; gradients are summed
        over the ranks."""
        enter = gather_sequence if self.sequence_parallel else copy_to_group
        return enter(rates, self.layer_group).chunk(self.layer_group.size, -1)[self.layer_group.rank]

    def mix(self, projected: Tensor, rates: Tensor, documents: Tensor | None) -> Tensor:
        """What this rank's heads read and let through: [b, s, g (f + r d_v) / t] and [b, s, rates / t] -> [b, s, g r
        d_v / t]."""
        return self.after(None, projected, rates, documents)

    def after(self, past: Past | None, projected: Tensor, rates: Tensor, documents: Tensor | None = None) -> Tensor:
        """`mix` of positions that follow others, to whose `past` they are added."""
        parameters = [getattr(self, name) for name in self.of_heads]
        return self.gated(self.read(projected, rates, parameters, documents, past), projected)

    def gated(self, read: Tensor, projected: Tensor) -> Tensor:
        """`let_through` with the gate of what was projected."""
        return self.let_through(read, self._groups(projected)[1].flatten(2).contiguous())  # one group's would be a view

    def _groups(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """[b, s, g f / t], and z [b, s, g / t, r d_v]"""
        values = self.shared_by * self.value_size
        qkv, gate = projected.unflatten(-1, (-1, 2 * (self.key_size + values))).split(
            [2 * self.key_size + values, values], -1
        )
        return qkv.flatten(2), gate

    def read(
        self,
        projected: Tensor,
        rates: Tensor,
        parameters: Sequence[Tensor],
        documents: Tensor | None,
        past: Past | None = None,
    ) -> Tensor:
        """What some heads read, [b, s, heads, d_v]: of whole groups, whose `parameters` are those of `of_heads`.
        `past`: of the positions before these, which are added to it."""
        conv, log_decay, decay_bias, *own = parameters
        # Chunks of this rank are further samples.
        qkv, rates = self._chunks(self._groups(projected)[0]), self._chunks(rates)
        age = None if documents is None else self._chunks(self.sequence.take(_ages(documents), 1))
        tails = self._tails(qkv, conv.shape[-1] - 1, past)
        mixed = ops.causal_convolution(qkv, conv, before=tails, age=age)
        mixed = F.silu(mixed + own[0].float() if own else mixed)
        sizes = [self.key_size, self.key_size, self.shared_by * self.value_size]
        groups = mixed.unflatten(-1, (-1, sum(sizes))).transpose(1, 2).split(sizes, -1)  # [b, g/t, s, f]
        query, key = groups[:2]
        if self.corrects:  # they have length 1
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
        value = groups[2].unflatten(-1, (self.shared_by, -1)).transpose(2, 3).flatten(1, 2)
        of_rates = rates.float().unflatten(-1, (-1, 1 + self.corrects, self.shared_by))
        *rate, decay = of_rates.permute(3, 0, 2, 4, 1).flatten(2, 3)
        steps = F.softplus(decay + decay_bias.float().unsqueeze(-1))
        kept = None if past is None else past.state
        read, state = ops.gated_delta_rule(
            query / math.sqrt(self.key_size) if self.corrects else query,
            key,
            value,
            decay=-log_decay.float().exp().unsqueeze(-1) * steps,
            rate=rate[0].sigmoid() if self.corrects else steps,
            starts=None if age is None else age == 0,
            before=self._state_before if self.sequence.group.size > 1 else kept,
            corrects=self.corrects,
        )
        if past is not None:
            past.state = state
        if own:
            read = read + own[1].float()[:, None, None] * value
        read = read.to(projected.dtype).transpose(1, 2).contiguous()
        return read if self.sequence.group.size == 1 else torch.cat(read.chunk(2), 1)

    # ---- context parallelism: a rank's two chunks are samples, [2 b, s/2p, ...], the earlier ones first

    def _chunks(self, x: Tensor) -> Tensor:
        return x if self.sequence.group.size == 1 else torch.cat(x.chunk(2, 1))

    def _of_all(self, x: Tensor) -> Tensor:
        """[2 b, ...] -> those of all chunks in the order of the sequence, [2p, b, ...]"""
        ranks, flat = self.sequence.group.size, x.reshape(1, 2, -1)
        pieces = gather_sequence(flat, self.sequence.group).view(ranks, 2, -1)
        return self.sequence.put_together(pieces, 0).view(2 * ranks, -1, *x.shape[1:])

    def _tails(self, x: Tensor, length: int, past: Past | None) -> Tensor | None:
        """The last positions of the chunk before each of this rank's, or of the `past`, zeros before the first; None:
        it has all."""
        if past is not None:
            before = x.new_zeros(x.shape[0], length, x.shape[2]) if past.inputs is None else past.inputs
            past.inputs = torch.cat([before, x], 1)[:, x.shape[1] :]
            return before
        if self.sequence.group.size == 1 or length == 0:
            return None
        assert x.shape[1] >= length, "a chunk has fewer positions than the next one's convolution reads of it"
        tails = self._of_all(x[:, x.shape[1] - length :])
        earlier = torch.cat([torch.zeros_like(tails[:1]), tails[:-1]])
        return self.sequence.take(earlier, 0).flatten(0, 1)

    def _state_before(self, made: Tensor) -> Tensor:
        """The state before each of this rank's chunks, from what they make of any, as for `ops.gated_delta_rule`."""
        makes, passes = self._of_all(made).tensor_split([self.value_size], -1)
        states = [torch.zeros_like(makes[0])]
        for number in range(len(makes) - 1):
            states.append(makes[number] + ops.passed_on(passes[number], states[-1]))
        return self.sequence.take(torch.stack(states), 0).flatten(0, 1)


class GatedDeltaNet(LinearAttention):
    """Queries and keys have length 1; every head is normalised by itself, by the same weights, and then gated."""

    corrects = True

    def _norm(self, config: ResolvedModel, context: BuildContext, group: Group) -> LayerNorm:
        return build_norm(config, device=context.device, size=self.value_size, group=group)

    def let_through(self, read: Tensor, gate: Tensor) -> Tensor:
        normed: Tensor = self.value_norm(read)
        return normed.flatten(2) * F.silu(gate)


class Mamba2(LinearAttention):
    """A step is also the rate. The convolution has a bias, and a head adds its value, times a number, to what it reads.
    That is gated, and then normalised by group, in fp32."""

    corrects = False
    of_heads = (*LinearAttention.of_heads, "conv_bias", "skip")

    def _norm(self, config: ResolvedModel, context: BuildContext, group: Group) -> NormOfEachHead:
        wide = dataclasses.replace(config, kv_channels=self.shared_by * self.value_size, multi_latent_attention=False)
        return NormOfEachHead(wide, self.groups, ranks=context.layer_group, group=group, device=context.device)

    def let_through(self, read: Tensor, gate: Tensor) -> Tensor:
        gated = read.flatten(2).float() * F.silu(gate.float())
        normed: Tensor = self.value_norm(gated.unflatten(-1, (-1, self.shared_by * self.value_size)))
        return normed.flatten(2).to(read.dtype)


def _ages(documents: Tensor) -> Tensor:
    """How many earlier positions of its document each position has, [b, s]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.cat([torch.ones_like(documents[:, :1]), documents.diff(dim=1)], 1) != 0
    return places - torch.where(starts, places, 0).cummax(1).values
