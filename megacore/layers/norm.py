"""Normalisation layers; every tensor-parallel rank holds them whole."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
from megacore.parallel.collectives import copy_to_group, reduce_from_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import ShardedModule, ShardedParameter, replicated


class LayerNorm(ShardedModule):
    """LayerNorm over the last dimension.

    Args:
        hidden_size: h.
        epsilon: added to the variance, or to the mean square.
        affine: whether there is a weight.
        bias: whether there is one beside the weight.
        plus_one: whether the factor is 1 + weight.
        group: ranks that normalise different vectors, such as heads: parameters' gradients are summed over it.
    """

    rms: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        epsilon: float,
        *,
        affine: bool = True,
        bias: bool = True,
        plus_one: bool = False,
        group: Group = ALONE,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.group, self.plus_one = epsilon, group, plus_one
        self.is_plain = group.size == 1 and not plus_one  # then operators get the parameters as they are
        self.weight: ShardedParameter | None = replicated(hidden_size, device=device) if affine else None
        self.bias: ShardedParameter | None = None
        if affine and bias and not self.rms:
            self.bias = replicated(hidden_size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self.weight, self.bias) if self.is_plain else _parameters_of(self)
        return ops.rms_norm(x, weight, self.epsilon) if self.rms else ops.layer_norm(x, weight, bias, self.epsilon)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives, and x for its other readers, whose gradients are added in the norm's backward."""
        weight, bias = (self.weight, self.bias) if self.is_plain else _parameters_of(self)
        return ops.norm_and_sum(x, None, weight, bias, self.epsilon, rms=self.rms)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of two tensors [..., h], and the sum."""
        weight, bias = (self.weight, self.bias) if self.is_plain else _parameters_of(self)
        return ops.norm_and_sum(x, residual, weight, bias, self.epsilon, rms=self.rms)


class RMSNorm(LayerNorm):
    """RMSNorm over the last dimension, which has no bias."""

    rms = True


class JointHeadNorm(ShardedModule):
    """A norm over the queries, or the keys, of all heads together, as in OLMoE (Muennighoff et al. 2024, arXiv
    2409.02060, section 2). Where ranks have different heads, they sum their squares, and the gradients of the sums.
    `config`: which norm, and its epsilon. `ranks`: of the layer group, which have different heads. `group`: ranks over
    which the parameters' gradients are summed here."""

    def __init__(
        self,
        config: ResolvedModel,
        heads: int,
        *,
        ranks: Group,
        group: Group,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.group, self.size = ranks, group, heads * config.head_size
        self.epsilon, self.is_rms = config.norm_epsilon, config.normalization == "RMSNorm"
        self.plus_one = config.layernorm_1p
        has_bias = not self.is_rms and config.norm_affine and config.norm_bias
        self.weight = replicated(self.size, device=device) if config.norm_affine else None
        self.bias: ShardedParameter | None = replicated(self.size, device=device) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, n, d] or, of this rank's heads, [b, s, n/t, d] -> the same"""
        weight = weight_of_group(self)
        bias = of_group(self.bias, self.group)
        vectors = x.flatten(2).contiguous()
        if vectors.shape[-1] < self.size:
            here = slice(self.ranks.rank * vectors.shape[-1], (self.ranks.rank + 1) * vectors.shape[-1])
            normed = self._of_ranks(vectors, *(None if one is None else one[here] for one in (weight, bias)))
        elif self.is_rms:
            normed = ops.rms_norm(vectors, weight, self.epsilon)
        else:
            normed = ops.layer_norm(vectors, weight, bias, self.epsilon)
        return normed.view(x.shape)

    def _of_ranks(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """[b, s, n d/t] -> the same, by means over all ranks"""
        wide = x.float()
        if not self.is_rms:
            wide = wide - self._mean(wide)
        normed = wide * torch.rsqrt(self._mean(wide.square()) + self.epsilon)
        return scaled_and_shifted(normed, weight, bias).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Over the last dimension on all ranks, [..., 1], for other heads on each: so gradients are summed over ranks
        too."""
        return copy_to_group(reduce_from_group(x.sum(-1, keepdim=True), self.ranks), self.ranks) / self.size


class NormOfEachHead(ShardedModule):
    """A norm of the queries, or the keys, of each head, with weights of its own, as in StableLM 2 12B. Every rank holds
    all weights, and uses those of its own heads. `ranks`: of the layer group, which have different heads, or the same
    key where they are more than the keys. `group`: ranks over which the parameters' gradients are summed here."""

    def __init__(
        self,
        config: ResolvedModel,
        heads: int,
        *,
        ranks: Group,
        group: Group,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.ranks, self.group = heads, ranks, group
        self.epsilon, self.is_rms = config.norm_epsilon, config.normalization == "RMSNorm"
        self.plus_one = config.layernorm_1p
        self.weight = replicated(heads * config.head_size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, heads of this rank, d]"""
        return self.normed(x, copy_to_group(self.weight, self.group), self.ranks.rank, self.ranks.size)

    def normed(self, x: Tensor, weight: Tensor, part: int, parts: int) -> Tensor:
        """Of part `part` of the heads, [b, s, heads of the part, d]; parts may have the same head."""
        of_heads = (weight + 1.0 if self.plus_one else weight).view(self.heads, -1)
        of_heads = of_heads.narrow(0, self.heads * part // parts, x.shape[2])
        ones = x.new_ones(x.shape[-1])
        plain = ops.rms_norm(x, ones, self.epsilon) if self.is_rms else ops.layer_norm(x, ones, None, self.epsilon)
        return (plain * of_heads).to(x.dtype)


HeadNorm = LayerNorm | JointHeadNorm | NormOfEachHead


def weight_of_group(norm: LayerNorm | JointHeadNorm) -> Tensor | None:
    """What a norm multiplies by, if it has a weight, whose gradient is summed over its group."""
    weight = of_group(norm.weight, norm.group)
    return weight + 1.0 if weight is not None and norm.plus_one else weight


def _parameters_of(norm: LayerNorm) -> tuple[Tensor | None, Tensor | None]:
    return weight_of_group(norm), of_group(norm.bias, norm.group)


def of_group(parameter: Tensor | None, group: Group) -> Tensor | None:
    """A parameter of a norm, whose gradient is summed over the group."""
    return parameter if parameter is None or group.size == 1 else copy_to_group(parameter, group)


def scaled_and_shifted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x in fp32 times the weight, plus the bias, as far as there are any."""
    scaled = x if weight is None else x * weight.float()
    return scaled if bias is None else scaled + bias.float()


def build_norm(
    config: ResolvedModel,
    *,
    device: torch.device | None,
    size: int | None = None,
    group: Group = ALONE,
) -> LayerNorm:
    """The norm that the configuration asks for. `size`: of the last dimension. None: the hidden size."""
    kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    return kind(
        size or config.hidden_size,
        config.norm_epsilon,
        affine=config.norm_affine,
        bias=config.norm_bias,
        plus_one=config.layernorm_1p,
        group=group,
        device=device,
    )
