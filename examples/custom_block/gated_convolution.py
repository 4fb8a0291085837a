"""A block of one's own: causal convolution under a gate, split over tensor-parallel ranks.

    y = x + W_down (conv(W_value n) * sigmoid(W_gate n)),   n = LayerNorm(x)

after Dauphin et al. 2017 ("Language Modeling with Gated Convolutional Networks"), with a convolution of each channel by
itself. Every operation between the matrices works on single channels. So the channels can be split as Megatron-LM
splits the hidden layer of an MLP: `W_value` and `W_gate` by their outputs, the convolution by its channels, `W_down` by
its inputs, and one sum joins the ranks.

Shape legend: b samples, s positions, h features, c channels, t tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import Group
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, columns_parallel


class CausalConvolution(ShardedModule):
    """A convolution over earlier positions, each channel by itself, with the channels split over a group.

    `ShardSpec` says which slice of which whole tensor this rank holds. That is all that initialisation, ZeRO and
    checkpoints need to know: weights start with the same bits for every t, and are saved as one whole tensor.

    Args:
        channels: c, of all ranks together.
        reach: how many positions it sees, the present one included.
        group: the tensor-parallel group.
    """

    def __init__(self, channels: int, reach: int, group: Group) -> None:
        super().__init__()
        self.reach = reach
        start, stop = split_evenly(channels, group.rank, group.size)
        spec = ShardSpec.split((channels, reach), {0: (start, stop)})
        self.weight = ShardedParameter(torch.empty(stop - start, reach), spec)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, c/t] -> [b, s, c/t]; the present position counts at least as it is, so that a new layer passes it
        on."""
        padded = F.pad(x.transpose(1, 2), (self.reach - 1, 0))  # [b, c/t, reach - 1 + s]
        mixed = F.conv1d(padded, self.weight.unsqueeze(1), groups=len(self.weight))
        return x + mixed.transpose(1, 2)


class GatedConvolution(nn.Module):
    """The block.

    Args:
        features: h.
        channels: c.
        reach: of the convolution.
        group: the tensor-parallel group.
    """

    def __init__(self, features: int, channels: int, reach: int, *, group: Group) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.value = ColumnParallelLinear(features, channels, group=group)
        self.gate = ColumnParallelLinear(features, channels, group=group)
        self.convolution = CausalConvolution(channels, reach, group)
        self.down = RowParallelLinear(channels, features, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h], the same on every rank of the group."""
        value, gate = columns_parallel(self.norm(x), (self.value, self.gate))  # [b, s, c/t] each
        y: Tensor = x + self.down(self.convolution(value) * torch.sigmoid(gate))
        return y
