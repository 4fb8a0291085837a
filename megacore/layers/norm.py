"""Normalisation layers; every tensor-parallel rank holds them whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.parallel.sharding import replicated


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias over the last dimension.

    Args:
        hidden_size: h.
        epsilon: added to the variance.
    """

    def __init__(self, hidden_size: int, epsilon: float, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = replicated(hidden_size, device=device)
        self.bias = replicated(hidden_size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]"""
        return ops.layer_norm(x, self.weight, self.bias, self.epsilon)
