"""How a model is described before any of it exists: a list of layers that can be built one by one, anywhere. A pipeline
stage builds only the layers that it holds, and knows from the description what they cost and which parameters are one
and the same although two layers use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from megacore.config import LoraConfig, ResolvedModel
from megacore.layers.context import BuildContext
from megacore.layers.lora import adapted
from megacore.models.outline import LayerOutline


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model: what to build, what it costs, what it shares."""

    name: str  # global name, the prefix of its parameters' names (`blocks.17`)
    build: Callable[[], nn.Module]  # makes the layer; its forward takes the previous layer's output
    parameters: int  # parameters of the whole layer, all tensor-parallel slices together
    flops: float = 0.0  # operations of its forward for one token, by which stages may be balanced
    is_block: bool = False  # one of the repeated layers; every stage holds at least one
    with_head: bool = False  # lies on the last stage, and is given `Task.last_inputs` too
    # Local parameter name -> global name of the earlier layer's parameter that it is.
    tied: Mapping[str, str] = field(default_factory=dict)
    held: int | None = None  # parameters that one tensor-parallel rank holds, padding included; None: `parameters`
    shared: int = 0  # how many of these are tied, and are held once where both layers lie on one rank
    # A transformer block's configuration, from which its activations follow; None for any other layer.
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
            with_head=outline.with_head,
            tied=outline.tied,
            held=outline.held,
            shared=outline.shared,
            block=outline.block,
        )


def with_adapters(
    layers: list[LayerSpec], lora: LoraConfig, model: ResolvedModel, context: BuildContext
) -> list[LayerSpec]:
    """Layers as --lora-rank trains them, where it is given: frozen, and those of blocks with adapters."""
    if lora.lora_rank is None:
        return layers
    return [replace(one, build=partial(adapted, one.build, one.name, lora, model, context)) for one in layers]


DescribesLayers = Callable[[ResolvedModel, BuildContext], list[LayerSpec]]
"""Describes a model: given its configuration, and groups, device and what else its layers are built with."""
