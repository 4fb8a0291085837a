"""How a model is described before any of it exists: a list of layers that can be built one by one, anywhere.

A pipeline stage builds only the layers that it holds, and knows from the description what they cost and which
parameters are one and the same although two layers use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model: what to build, what it costs, what it shares.

    Attributes:
        name: global name, the prefix of its parameters' names (`blocks.17`).
        build: makes the layer; its forward takes the previous layer's output.
        parameters: parameters of the whole layer, all tensor-parallel slices together.
        flops: operations of its forward for one token, by which stages may be balanced.
        is_block: one of the repeated layers, of which every stage holds at least one.
        tied: local parameter name -> global name of the earlier layer's parameter that it is.
    """

    name: str
    build: Callable[[], nn.Module]
    parameters: int
    flops: float = 0.0
    is_block: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)


class TokenBatch(Protocol):
    """What a language-model loss reads from a microbatch; b sequences of s tokens."""

    @property
    def tokens(self) -> Tensor: ...  # [b, s] int64
    @property
    def labels(self) -> Tensor: ...  # [b, s] int64
    @property
    def loss_mask(self) -> Tensor: ...  # [b, s] fp32
