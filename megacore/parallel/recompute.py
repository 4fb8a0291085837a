"""Activation recomputation: keep a function's input instead of what it computes, and compute that again in backward.

(Chen et al. 2016, arXiv 1604.06174; selective: Korthikanti et al. 2022, arXiv 2205.05198, section 5.) Dropout masks are
functions of the microbatch's index, so that stating the index again is all it takes for the second pass to be bit
for bit the first; no generator state is saved.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.parallel.random import RandomStreams


def recompute(function: Callable[..., Tensor], *inputs: Tensor, streams: RandomStreams) -> Tensor:
    """function(*inputs), without keeping what it computes on the way.

    Args:
        function: deterministic but for masks drawn from `streams`.
        inputs: kept for backward.
        streams: the source of the function's dropout masks.
    """
    index = streams.index

    def again(*tensors: Tensor) -> Tensor:
        with streams.microbatch(index):
            return function(*tensors)

    output: Tensor = checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


class Recomputed(nn.Module):
    """A layer of which only the input is kept."""

    def __init__(self, layer: nn.Module, streams: RandomStreams) -> None:
        super().__init__()
        self.layer, self.streams = layer, streams

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives."""
        return recompute(self.layer, x, streams=self.streams)
