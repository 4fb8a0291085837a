"""A pipeline stage: the layers that one rank holds, with every parameter under its global name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.models.spec import LayerSpec
from megacore.parallel.sharding import ShardedParameter, sharded_parameters

RunLayer = Callable[[int, nn.Module, Any], Any]


class Stage(nn.Module):
    """Consecutive layers of a model; the others exist on other ranks.

    A tied parameter whose first use lies on this stage too is that very parameter. Where its first use lies on
    another stage, this stage holds a copy under the same global name: the copies start equal, their gradients are
    summed, they stay equal.

    Args:
        layers: the layers to build, in order.
        earlier: parameters of earlier stages on this rank, by global name: a tied one is one of them.
        build: whether to build all layers at once; otherwise `build_layers` builds them one by one.

    Attributes:
        specs: of the layers, built or to be built.
        names: of the layers, for messages.
        run_layer: how layer number i is applied to its input; data parallelism puts itself in here.
        first_outputs: where the output of the first layer with something to learn enters the graph of the last forward.
        tied_copies: parameters whose first use lies on another stage, by global name.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        earlier: Mapping[str, ShardedParameter] | None = None,
        *,
        build: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.specs, self._earlier = list(layers), {} if earlier is None else earlier
        self.names = [spec.name for spec in layers]
        self.run_layer: RunLayer = _run_plainly
        self.first_outputs: tuple[GradientEdge, ...] = ()
        self.tied_copies: dict[str, ShardedParameter] = {}
        for _ in self.build_layers() if build else ():
            pass

    def build_layers(self) -> Iterator[nn.Module]:
        """Build one layer at a time; each is in place, and its parameters have their names, when it is yielded.

        Who iterates may replace the layer in `layers`, or move its parameters, before the next is built.
        """
        for spec in self.specs:
            layer = spec.build()
            if spec.tied:
                self._tie(layer, spec, {**self._earlier, **self.by_name()})
            for local_name, parameter in layer.named_parameters():
                assert isinstance(parameter, ShardedParameter), f"{spec.name}.{local_name} has no ShardSpec"
                parameter.named(f"{spec.name}.{local_name}")
            self.layers.append(layer)
            yield layer

    def forward(self, x: Any) -> Any:
        """The output of the last layer for the input of the first; a tensor or a tuple of tensors each."""
        self.first_outputs = ()
        for index, layer in enumerate(self.layers):
            x = self.run_layer(index, layer, x)
            if not self.first_outputs and torch.is_grad_enabled():
                self.first_outputs = tuple(
                    get_gradient_edge(tensor) for tensor in tensors_of(x) if tensor.requires_grad
                )
        return x

    def by_name(self) -> dict[str, ShardedParameter]:
        """Every parameter of the stage once, by global name."""
        return {parameter.spec.name: parameter for parameter in sharded_parameters(self)}

    def _tie(self, layer: nn.Module, spec: LayerSpec, here: Mapping[str, ShardedParameter]) -> None:
        for local_name, global_name in spec.tied.items():
            owner, _, attribute = local_name.rpartition(".")
            if global_name in here:
                setattr(layer.get_submodule(owner), attribute, here[global_name])
            else:
                copy = layer.get_parameter(local_name)
                assert isinstance(copy, ShardedParameter)
                copy.tied_to(global_name)
                self.tied_copies[global_name] = copy


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """What passes between layers, as a tuple.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors.
    """
    found = (value,) if isinstance(value, Tensor) else value
    if not isinstance(found, tuple) or not all(isinstance(tensor, Tensor) for tensor in found):
        raise TypeError(f"a layer must return a tensor or a tuple of tensors, not {type(value).__name__}")
    return found


def _run_plainly(index: int, layer: nn.Module, x: Any) -> Any:
    return layer(x)
