"""Linear layers too small to be worth a split over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.products import TORCH, Products
from megacore.parallel.sharding import ShardedModule, ShardedParameter, replicated


class ReplicatedLinear(ShardedModule):
    """y = x W^T + b, whole on every tensor-parallel rank. Sequence parallel, a rank applies it to its positions, and
    the weights' gradients are summed with those of the norms. `blocks`: where sums over positions are cut."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        products: Products = TORCH,
        blocks: Blocks = ONE_BLOCK,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.products, self.blocks = products, blocks
        self.weight = replicated(out_features, in_features, device=device)
        self.bias: ShardedParameter | None = replicated(out_features, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]"""
        return self.blocks.over_positions(self.products.linear, [x], [self.weight, self.bias])
