"""Normalisation layers; every tensor-parallel rank holds them whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.collectives import copy_to_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.sharding import ShardedModule, ShardedParameter, replicated


class LayerNorm(ShardedModule):
    """LayerNorm over the last dimension.

    Args:
        hidden_size: h.
        epsilon: added to the variance.
        bias: whether there is one.
        group: ranks that normalise different vectors, such as heads: parameters' gradients are summed over it.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float,
        *,
        bias: bool = True,
        group: Group = ALONE,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.epsilon, self.group = epsilon, group
        self.weight = replicated(hidden_size, device=device)
        self.bias: ShardedParameter | None = replicated(hidden_size, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]"""
        return ops.layer_norm(x, *self._parameters_of_group(), self.epsilon)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives, and x for its other readers, whose gradients are added in the norm's backward."""
        return ops.layer_norm_with_input(x, *self._parameters_of_group(), self.epsilon)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of two tensors [..., h], and the sum."""
        return ops.add_layer_norm(x, residual, *self._parameters_of_group(), self.epsilon)

    def _parameters_of_group(self) -> tuple[Tensor, Tensor | None]:
        if self.group.size == 1:
            return self.weight, self.bias
        bias = None if self.bias is None else copy_to_group(self.bias, self.group)
        return copy_to_group(self.weight, self.group), bias


class RMSNorm(ShardedModule):
    """RMSNorm over the last dimension.

    Args:
        hidden_size: h.
        epsilon: added to the mean square.
        group: as for LayerNorm.
    """

    def __init__(
        self, hidden_size: int, epsilon: float, *, group: Group = ALONE, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.epsilon, self.group = epsilon, group
        self.weight = replicated(hidden_size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]"""
        return ops.rms_norm(x, copy_to_group(self.weight, self.group), self.epsilon)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` gives, and x for its other readers, whose gradients are added in the norm's backward."""
        return ops.rms_norm_with_input(x, copy_to_group(self.weight, self.group), self.epsilon)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of two tensors [..., h], and the sum."""
        return ops.add_rms_norm(x, residual, copy_to_group(self.weight, self.group), self.epsilon)


class _OfBlocks:
    """A norm that is computed a block at a time, so that no layout changes a bit of its parameters' gradients.

    Attributes:
        blocks: of positions, or of heads.
        of_heads: the vectors are those of this rank's heads, [b, s, heads, d].
    """

    blocks: Blocks
    of_heads: bool

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, epsilon = self.weight, getattr(self, "bias", None), self.epsilon  # type: ignore[attr-defined]
        if isinstance(self, RMSNorm):
            return self._over([x], [weight], partial(ops.rms_norm, epsilon=epsilon))
        return self._over([x], [weight, bias], partial(ops.layer_norm, epsilon=epsilon))

    def _over(
        self, tensors: list[Tensor], parameters: list[ShardedParameter | None], function: Callable[..., Tensor]
    ) -> Tensor:
        over = self.blocks.over_heads if self.of_heads else self.blocks.over_positions
        return over(function, tensors, parameters)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(x), x

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.forward(total), total


class LayerNormOfBlocks(_OfBlocks, LayerNorm):
    """LayerNorm for --reproducible."""


class RMSNormOfBlocks(_OfBlocks, RMSNorm):
    """RMSNorm for --reproducible."""


def build_norm(
    config: ResolvedModel,
    *,
    device: torch.device | None,
    size: int | None = None,
    group: Group = ALONE,
    blocks: Blocks = ONE_BLOCK,
) -> LayerNorm | RMSNorm:
    """The norm that the configuration asks for.

    Args:
        config: which, and its epsilon.
        device: where its parameters live.
        size: of the last dimension. None: the hidden size.
        group: as for LayerNorm.
        blocks: where sums over positions, or, with a size, over heads, are cut.
    """
    length = size or config.hidden_size
    norm: LayerNorm | RMSNorm
    if config.normalization == "RMSNorm":
        norm = (RMSNormOfBlocks if blocks else RMSNorm)(length, config.norm_epsilon, group=group, device=device)
    else:
        kind = LayerNormOfBlocks if blocks else LayerNorm
        norm = kind(length, config.norm_epsilon, bias=config.norm_bias, group=group, device=device)
    if isinstance(norm, _OfBlocks):
        norm.blocks, norm.of_heads = blocks, size is not None
    return norm
