"""A pipeline stage: consecutive layers on one rank, with every parameter under its global name; and the specs of the
tensors that stages exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.models.spec import LayerSpec
from megacore.parallel.sharding import ShardedParameter, sharded_parameters


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, known before it is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of this shape travels back: real and complex numbers have one, integers do not."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


class LayerRunner(Protocol):
    """Calls the layers of a stage: data parallelism, which gathers their parameters first."""

    def run_layer(self, chunk: int, index: int, layer: nn.Module, x: Any, /) -> Any:
        """layer(x), where `layer` is number `index` of the rank's stage number `chunk`."""


class Stage(nn.Module):
    """Consecutive layers of a model; the others exist on other ranks.

    A tied parameter that is first used on this stage is one parameter. If it is first used on another stage, this stage
    holds a copy under the same global name: the copies start equal, and stay equal because their gradients are summed.

    `earlier`: parameters of earlier stages on this rank, by global name, with which layers may be tied. `number`: of
    this stage among those of its rank. `build`: build all layers at once; otherwise `build_layers` builds them one by
    one.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        earlier: Mapping[str, ShardedParameter] | None = None,
        *,
        number: int = 0,
        build: bool = True,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        # `specs`: descriptions of the layers, which are built or to be built.
        self.specs, self._earlier = list(layers), {} if earlier is None else earlier
        self.names = [spec.name for spec in layers]  # the layers' names, which messages show
        self.number = number  # number of this stage among those of its rank
        self.runner: LayerRunner | None = None  # applies the layers; None: they are called
        # Graph edges of the output of the first layer that has gradients, in the last forward.
        self.first_outputs: tuple[GradientEdge, ...] = ()
        # Parameters that are first used on another stage, by global name.
        self.tied_copies: dict[str, ShardedParameter] = {}
        for _ in self.build_layers() if build else ():
            pass

    def build_layers(self) -> Iterator[nn.Module]:
        """Build one layer at a time; when it is yielded it is in `layers`, and its parameters have their names. The
        caller may replace the layer in `layers`, or move its parameters, before the next is built."""
        for spec in self.specs:
            layer = spec.build()
            if spec.tied:
                self._tie(layer, spec, {**self._earlier, **self.by_name()})
            for local_name, parameter in layer.named_parameters():
                assert isinstance(parameter, ShardedParameter), f"{spec.name}.{local_name} has no ShardSpec"
                parameter.named(f"{spec.name}.{local_name}")
            self.layers.append(layer)
            yield layer

    def forward(self, x: Any, last_inputs: Callable[[], tuple[Tensor, ...]] = tuple) -> Any:
        """The output of the last layer for the input of the first: each a tensor or a tuple of tensors. `last_inputs`:
        what the last layer, and those that lie with it, get besides their input, nothing by default; called before
        them."""
        self.first_outputs = ()
        first_last = len(self.layers) - 1 - sum(spec.with_head for spec in self.specs)
        for index in range(len(self.layers)):
            if index == first_last and (more := last_inputs()):
                x = (*tensors_of(x), *more)
            x = self.run_layer(index, x)
            if not self.first_outputs and torch.is_grad_enabled():
                self.first_outputs = tuple(
                    get_gradient_edge(tensor) for tensor in tensors_of(x) if tensor.requires_grad
                )
        return x

    def run_layer(self, index: int, x: Any) -> Any:
        layer = self.layers[index]
        return layer(x) if self.runner is None else self.runner.run_layer(self.number, index, layer, x)

    def by_name(self) -> dict[str, ShardedParameter]:
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
    """The tensors that pass between layers, as a tuple. Raises TypeError for anything but tensors."""
    tensors = (value,) if isinstance(value, Tensor) else value
    if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"a layer must return a tensor or a tuple of tensors, not {type(value).__name__}")
    return tensors
