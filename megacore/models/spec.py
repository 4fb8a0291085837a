"""How a model is described before any of it exists: a list of layers that can be built one by one, anywhere.

A pipeline stage builds only the layers that it holds, and knows from the description what they cost and which
parameters are one and the same although two layers use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacore.config import ResolvedModel
from megacore.plan.outline import LayerOutline


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
        held: parameters that one tensor-parallel rank holds, padding included; None: `parameters`.
        shared: how many of these are tied, and are held once where both layers lie on one rank.
        block: a transformer block's configuration, from which its activations follow; None for any other layer.
    """

    name: str
    build: Callable[[], nn.Module]
    parameters: int
    flops: float = 0.0
    is_block: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)
    held: int | None = None
    shared: int = 0
    block: ResolvedModel | None = None

    @classmethod
    def of(cls, outline: LayerOutline, build: Callable[[], nn.Module]) -> LayerSpec:
        """A layer whose sizes are known already."""
        return cls(
            name=outline.name,
            build=build,
            parameters=outline.parameters,
            flops=outline.flops,
            is_block=outline.is_block,
            tied=outline.tied,
            held=outline.held,
            shared=outline.shared,
            block=outline.block,
        )


class TokenBatch(Protocol):
    """What a language-model loss reads from a microbatch; b sequences of s tokens."""

    @property
    def tokens(self) -> Tensor: ...  # [b, s] int64
    @property
    def labels(self) -> Tensor: ...  # [b, s] int64
    @property
    def loss_mask(self) -> Tensor: ...  # [b, s] fp32


def counted_tokens(batch: TokenBatch) -> Tensor:
    """How many tokens of a microbatch a loss is summed over; an fp64 scalar."""
    return batch.loss_mask.sum(dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a loss or an evaluation returns of a microbatch: sums, each of which has a count of its own.

    A sum is divided by its count over the whole global batch, wherever its microbatches are computed. What is trained
    is the sum of the means: a mean over masked tokens plus one over sentence pairs, however the two are spread over
    microbatches and ranks.

    Attributes:
        names: of the sums, under which their means are reported; none where there is one sum, a scalar.
        counts: microbatch -> how many of what every sum is over, fp64, of the sums' shape.
    """

    names: tuple[str, ...] = ()
    counts: Callable[[Any], Tensor] = counted_tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sums and of the counts."""
        return (len(self.names),) if self.names else ()

    def figures(self, means: Tensor, counts: Tensor, *, losses: int | None = None) -> dict[str, float | None]:
        """What is reported of a global batch: `loss`, and every mean by its name; None where nothing was counted.

        Args:
            means: of the sums, 0 where there is nothing to count.
            counts: of the whole global batch.
            losses: how many of the means, from the first, add up to the loss; None: all.
        """
        pairs = zip(means.reshape(-1).tolist(), counts.reshape(-1).tolist(), strict=True)
        found = [mean if count else None for mean, count in pairs]
        counted = [mean for mean in found[:losses] if mean is not None]
        return {"loss": sum(counted) if counted else None, **dict(zip(self.names, found, strict=False))}
