"""Any model as a list of layers: plain nn.Modules, of which a rank builds only those of its stages. Of the others it
knows shapes, from a build on torch's meta device. Initial values and dropout masks are functions of the seed and the
layer's name: the same bits on every layout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from megacore.config.messages import did_you_mean, one_of
from megacore.errors import ConfigError, UserError
from megacore.models.spec import LayerSpec
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams, normal_slice, seeded, stable_hash
from megacore.parallel.sharding import ShardedParameter, ShardSpec

_SEEDS = 2**63 - 1
_STD = 0.02  # of the matrices of megacore's layers


class Layer:
    """One layer of a model, described: `Layer("stem", nn.Conv2d, 3, 16, 3, padding=1)`. It takes what the one before
    returns as its only argument, and returns a tensor or a tuple of tensors.

    Args:
        name: global name, the prefix of its parameters' names (`stem.weight`).
        module: class, or any function that makes the module; its random values come from torch's generator.
        args, kwargs: what it is called with.
    """

    def __init__(self, name: str, module: Callable[..., nn.Module], /, *args: Any, **kwargs: Any) -> None:
        self.name = name
        self.ties: Mapping[str, str] | str = {}
        self._make: Callable[[], Any] = partial(module, *args, **kwargs)

    def tied(self, to: str | Mapping[str, str]) -> Layer:
        """The same layer with parameters that are those of an earlier one. `to`: local name of a parameter -> global
        name of the one that it is (`{"weight": "embed.weight"}`), or the name of a layer, all of whose parameters this
        one shares."""
        copy = Layer(self.name, self._make)
        copy.ties = to if isinstance(to, str) else dict(to)
        return copy

    @property
    def description(self) -> str:
        """What makes the module, and with what: `Linear(4, 5, bias=False)`; the same text in every process."""
        return describe_call(self._make)

    def build(self, seed: int) -> nn.Module:
        """The module on the CPU, with values that depend on the seed and the layer's name only. Raises UserError where
        what was made is no nn.Module."""
        # On the CPU, as each kind of accelerator draws other numbers from the same seed.
        with seeded(stable_hash(seed, self.name)), torch.device("cpu"):
            return self._checked(self._make())

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by local name, without values; nothing is allocated. Raises UserError where a
        parameter has no shape before the first input, or is not fp32."""
        named = self.without_values().named_parameters()
        learning = {name: parameter for name, parameter in named if parameter.requires_grad}
        for name, parameter in learning.items():
            full = f"{self.name}.{name}"
            if isinstance(parameter, UninitializedParameter):
                raise UserError(f"{full} gets its shape from its first input: use the layer's other form, with a size")
            if parameter.dtype != torch.float32:
                raise UserError(f"{full} is {parameter.dtype}: parameters must be torch.float32 when they are made")
        return learning

    def without_values(self) -> nn.Module:
        """The module, whose tensors have no values, if its constructor can do without them. Raises UserError where what
        was made is no nn.Module."""
        try:
            # Seeded, so that what the constructor draws does not move the program's own generator.
            with seeded(0), torch.device("meta"):
                return self._checked(self._make())
        except (NotImplementedError, RuntimeError):  # a constructor that looks at values, which meta tensors lack
            return self.build(0)

    def _checked(self, made: Any) -> nn.Module:
        if not isinstance(made, nn.Module):
            raise UserError(f"layer {self.name!r} makes a {type(made).__name__}: it must make a torch.nn.Module")
        return made


class BuiltLayer(Layer):
    """A layer that trains a copy of a module, from its values, which are the same on every rank; only ranks of its
    stage copy it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, copy.deepcopy, module)
        self.module = module

    def without_values(self) -> nn.Module:
        """The module itself, which is not changed."""
        return self.module


def as_layers(model: object) -> list[Layer]:
    """The layers of a model: one for each module of nn.Sequential and nn.ModuleList; with a forward of its own, a
    container is one layer. Parameters that several modules share are tied. Raises ConfigError where a module cannot be
    trained as it is."""
    named: Sequence[tuple[str, Any]] = [("module", model)]
    if not isinstance(model, nn.Module | Sequence):
        raise ConfigError(
            [f"layers is {_kind(model)}: give a list of Layers and torch.nn.Modules, or one torch.nn.Module"]
        )
    if not isinstance(model, nn.Module):
        named = [(str(number), one) for number, one in enumerate(model)]
    elif _computes_as(model, nn.Sequential, nn.ModuleList):
        named = list(model._modules.items())  # with those that are there twice
    first: dict[int, str] = {}
    layers, problems = list[Layer](), list[str]()
    for name, one in named:
        if _computes_as(one, nn.ModuleList, nn.ModuleDict):
            problems.append(f"layer {name} is a {type(one).__name__}, which computes nothing: use torch.nn.Sequential")
        elif isinstance(one, nn.Module):
            split = [
                type(of).__name__
                for of in one.modules()
                if any(isinstance(parameter, ShardedParameter) for parameter in of.parameters(recurse=False))
            ]
            problems += [
                f"module {name!r} has a {kind}, whose values megacore makes: describe the layer that makes it, as in "
                f'Layer("{name}", {kind}, ...)'
                for kind in split[:1]
            ]
            learning = {local: id(p) for local, p in one.named_parameters() if p.requires_grad}
            layer: Layer = BuiltLayer(name, one)
            layer.ties = {local: first[key] for local, key in learning.items() if key in first}
            first = {key: f"{name}.{local}" for local, key in learning.items()} | first
            layers.append(layer)
        elif isinstance(one, Layer):
            layers.append(one)
        else:
            problems.append(f"layer {name} is {_kind(one)}: give a Layer or a torch.nn.Module")
    if problems:
        raise ConfigError(problems)
    return layers


def _computes_as(model: object, *containers: type[nn.Module]) -> bool:
    """Whether it is one of torch's containers, without a forward of its own."""
    return any(isinstance(model, kind) and type(model).forward is kind.forward for kind in containers)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


@torch.no_grad()
def take_values_of_first_rank(module: nn.Module, mesh: Mesh) -> None:
    """Give every rank the values that a module has on rank 0."""
    if mesh.world.size == 1:
        return
    for tensor in module.state_dict(keep_vars=True).values():
        if isinstance(tensor, Tensor):
            value = tensor.detach().to(mesh.device, copy=True)
            # A sum in which all ranks but one have zeros, in types that every backend adds.
            wide = value.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
            if not value.is_floating_point():
                wide = value.to(torch.int64)
            tensor.detach().copy_(all_reduce_(wide if mesh.world.is_first else torch.zeros_like(wide), mesh.world))


def describe_call(made: Any) -> str:
    """A function, a class or a `partial` of one with its arguments, in words that name no memory address."""
    if isinstance(made, partial):
        arguments = [*map(_describe, made.args), *(f"{k}={_describe(v)}" for k, v in made.keywords.items())]
        return f"{describe_call(made.func)}({', '.join(arguments)})"
    return str(getattr(made, "__qualname__", None) or type(made).__qualname__)


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_describe, value))})"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.Size):
        return repr(value)
    return describe_call(value)


def describe_layers(
    layers: Sequence[Layer],
    *,
    seed: int,
    device: torch.device,
    streams: RandomStreams,
    dtype: torch.dtype = torch.float32,
    shard: int = 0,
) -> list[LayerSpec]:
    """The layers as the rest of megacore knows them; nothing is allocated. `dtype`: of buffers that hold real numbers;
    parameters are fp32. `shard`: which part of each sequence this rank holds: ranks with other parts draw other masks.
    Raises ConfigError with everything that is wrong with names and ties."""
    problems = list(_wrong_names([layer.name for layer in layers]))
    if problems:
        raise ConfigError(problems)
    of_layer = {layer.name: layer.parameters() for layer in layers}
    everything = {f"{name}.{local}" for name, parameters in of_layer.items() for local in parameters}
    known: dict[str, tuple[int, ...]] = {}  # of all layers so far
    root: dict[str, str] = {}  # a tied parameter's name -> that of its first use
    specs = []
    for layer in layers:
        parameters = of_layer[layer.name]
        shapes = {local: tuple(parameter.shape) for local, parameter in parameters.items()}
        ties = {local: f"{layer.ties}.{local}" for local in shapes} if isinstance(layer.ties, str) else layer.ties
        problems += _wrong_ties(layer.name, ties, shapes, known, everything)
        tied = {local: root.get(name, name) for local, name in ties.items()}
        root |= {f"{layer.name}.{local}": name for local, name in tied.items()}
        known |= {f"{layer.name}.{local}": shape for local, shape in shapes.items()}
        specs.append(
            LayerSpec(
                name=layer.name,
                build=partial(_build, layer, seed=seed, device=device, dtype=dtype, streams=streams, shard=shard),
                parameters=sum(map(_global_size, parameters.values())),
                held=sum(map(math.prod, shapes.values())),
                is_block=True,
                tied=tied,
                shared=sum(math.prod(shapes[local]) for local in tied if local in shapes),
            )
        )
    if not known and not problems:
        problems.append("the model has no parameter that learns: give it one, or set requires_grad")
    if problems:
        raise ConfigError(problems)
    return specs


def _wrong_names(names: Sequence[str]) -> Iterator[str]:
    if not names:
        yield "the model has no layers: give one or more"
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{names.count(name)} layers are named {name!r}: names must be unique, as they name the parameters"
        if any(other.startswith(f"{name}.") for other in names):
            other = next(other for other in names if other.startswith(f"{name}."))
            yield f"layer name {other!r} begins with the layer name {name!r} and a dot: rename one of the two"


def _wrong_ties(
    layer: str,
    ties: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    known: Mapping[str, tuple[int, ...]],
    everything: set[str],
) -> Iterator[str]:
    for local, name in ties.items():
        if local not in shapes:
            has = f"it has {one_of(list(shapes))}" if shapes else "it has none that learns"
            yield f"layer {layer!r} ties its parameter {local!r}, but {has}"
        elif name in known and known[name] != shapes[local]:
            yield (
                f"layer {layer!r} ties {local!r} of shape {list(shapes[local])} to {name!r} of shape "
                f"{list(known[name])}: tied parameters must have the same shape"
            )
        elif name not in known and name in everything:
            yield f"layer {layer!r} ties {local!r} to {name!r}, which comes later: tie the later one to the earlier"
        elif name not in known:
            yield (
                f"layer {layer!r} ties {local!r} to {name!r}, which does not exist{did_you_mean(name, known)}: "
                "give the name of an earlier layer's parameter"
            )


def is_split(layers: Sequence[Layer]) -> bool:
    """Whether a layer has a parameter that the tensor-parallel ranks split."""
    return any(
        parameter.numel() != _global_size(parameter) for layer in layers for parameter in layer.parameters().values()
    )


def undivided(layers: Sequence[Layer], ranks: int) -> Iterator[str]:
    """What is wrong with layers whose sequences several ranks divide: those that compute with whole sequences, by
    name."""
    for layer in layers:
        for module in layer.without_values().modules():
            kind, rotary = type(module).__name__, getattr(module, "rotary", None)
            whole = [_holds_whole(one, ranks) for one in (module, rotary)]
            if whole[0]:
                yield (
                    f"layer {layer.name!r} has a {kind} of whole sequences, which cp {ranks} divides: build it with "
                    "BuildContext(sequence=SequenceShards(mesh.sequence), ...)"
                )
            elif whole[1]:
                yield (
                    f"layer {layer.name!r} has a Rotary of whole sequences, which cp {ranks} divides: build it with "
                    "Rotary.of(config, SequenceShards(mesh.sequence))"
                )
            elif isinstance(module, _MIXES_POSITIONS):
                yield (
                    f"layer {layer.name!r} has a {kind}, which would see only its rank's positions with cp {ranks}: "
                    "use megacore's SelfAttention or TransformerBlock for attention, or cp 1"
                )


def _holds_whole(module: Any, ranks: int) -> bool:
    """Whether a layer or Rotary of megacore is built for sequences that are not divided over so many ranks."""
    shards = getattr(module, "sequence", None)
    return isinstance(shards, SequenceShards) and shards.group.size != ranks


# Of torch's layers those that may mix positions, as far as their class tells.
_MIXES_POSITIONS = (
    nn.EmbeddingBag,
    nn.Flatten,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Unfold,
    nn.Upsample,
    nn.modules.batchnorm._NormBase,
    nn.modules.conv._ConvNd,
    nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


def _global_size(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, of all tensor-parallel ranks together, without padding."""
    return math.prod(parameter.spec.shape) if isinstance(parameter, ShardedParameter) else parameter.numel()


def _build(
    layer: Layer, *, seed: int, device: torch.device, dtype: torch.dtype, streams: RandomStreams, shard: int
) -> nn.Module:
    """The layer as megacore trains it, on its device."""
    module = layer.build(seed)
    for owner in module.modules():
        if getattr(owner, "inplace", False) is True:  # the input of a stage may not be written into
            owner.inplace = False  # type: ignore[assignment]
    _initialize_sharded(module, layer.name, seed)
    module.to(device)
    _declare_parameters(module)
    for owner in module.modules():
        for local, buffer in owner.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(owner, local, buffer.to(dtype))
    _draw_from(streams, module, layer.name, device, shard)
    return module


@torch.no_grad()
def _initialize_sharded(module: nn.Module, name: str, seed: int) -> None:
    """Initialise the parameters of megacore's layers, which are built without values: N(0, 0.02) for matrices, 0 for
    biases, 1 for the other vectors; functions of the seed and the global name, on every layout alike."""
    for local, parameter in module.named_parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.named(f"{name}.{local}")
            parameter.fill_(0.0 if local.endswith("bias") or parameter.dim() > 1 else 1.0)
            if parameter.dim() > 1:
                normal_slice(parameter.spec, seed=seed, std=_STD, out=parameter.spec.unpadded(parameter))


def _declare_parameters(module: nn.Module) -> None:
    """Mark each parameter of torch's layers as a whole tensor; one that does not learn becomes a buffer."""
    made: dict[int, ShardedParameter] = {}
    for owner in list(module.modules()):
        for local, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, ShardedParameter):
                continue
            if parameter.requires_grad:
                spec = ShardSpec(shape=tuple(parameter.shape))
                setattr(owner, local, made.setdefault(id(parameter), ShardedParameter(parameter.detach(), spec)))
            else:
                delattr(owner, local)
                owner.register_buffer(local, parameter.detach())


def _draw_from(streams: RandomStreams, module: nn.Module, name: str, device: torch.device, shard: int) -> None:
    """Let what the module draws in training (dropout) depend on its name, the microbatch and the shard only."""
    open_scopes: list[AbstractContextManager[None]] = []

    def before(layer: nn.Module, _: Any) -> None:
        if layer.training:
            open_scopes.append(seeded(streams.key(name, shard) & _SEEDS, device))
            open_scopes[-1].__enter__()

    def after(layer: nn.Module, *_: Any) -> None:
        if open_scopes:
            open_scopes.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
