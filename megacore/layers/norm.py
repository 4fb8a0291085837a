"""Normalisation layers; every tensor-parallel rank holds them whole."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
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


def build_norm(
    config: ResolvedModel, *, device: torch.device | None, size: int | None = None, group: Group = ALONE
) -> LayerNorm | RMSNorm:
    """The norm that the configuration asks for.

    Args:
        config: which, and its epsilon.
        device: where its parameters live.
        size: of the last dimension. None: the hidden size.
        group: as for LayerNorm.
    """
    size = size or config.hidden_size
    if config.normalization == "RMSNorm":
        return RMSNorm(size, config.norm_epsilon, group=group, device=device)
    return LayerNorm(size, config.norm_epsilon, bias=config.norm_bias, group=group, device=device)
