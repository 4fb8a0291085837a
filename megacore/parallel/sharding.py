"""ShardSpec: the global tensor of a parameter, and the slice of it on this rank. Every parameter of a model is a
`ShardedParameter` whose `ShardSpec` states the global tensor's name and true shape, the slice of it on this rank,
[start, stop) in each dimension, and which ranks hold copies of that slice. Initialisation, checkpoints, norm counting
and the parity tests all read it, so that none of them needs to know how a layer is split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from megacore.parallel.mesh import Mesh, ReplicaRole

Slices = tuple[tuple[int, int], ...]  # [start, stop) of every dimension


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The part of a global tensor that one rank holds. Padding may follow it in the local tensor, in any dimension."""

    # Global name, the same on every layout (`blocks.17.attention.qkv.weight`); empty until the stage is assembled.
    name: str = ""
    shape: tuple[int, ...]  # true shape of the global tensor, without padding
    slices: Slices = ()  # [start, stop) of every dimension in global indices; by default the complete tensor
    # Every rank of the layer group holds this slice. One of them counts and saves it; with sequence parallelism each of
    # them sees other positions, and their gradients are summed.
    is_replicated: bool = True
    replica_role: ReplicaRole = "replicas"  # role of the group that holds copies of the slice and sums their gradients
    is_tied_copy: bool = False  # the parameter is tied to one on another stage, where it is counted and saved

    def __post_init__(self) -> None:
        slices = self.slices or tuple((0, size) for size in self.shape)
        assert len(slices) == len(self.shape), "a slice has a range for every dimension"
        object.__setattr__(self, "slices", slices)

    @classmethod
    def split(cls, shape: tuple[int, ...], ranges: Mapping[int, tuple[int, int]]) -> ShardSpec:
        """A tensor that the ranks of the layer group split. `shape`: of the global tensor. `ranges`: dimension ->
        [start, stop) of this rank; other dimensions are not split."""
        slices = tuple(ranges.get(dimension, (0, size)) for dimension, size in enumerate(shape))
        return cls(shape=shape, slices=slices, is_replicated=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slices)

    def take(self, tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(start, stop) for start, stop in self.slices)]

    def unpadded(self, local: Tensor) -> Tensor:
        """The part of the local tensor (a view) that exists globally: all but the padding."""
        return local[tuple(slice(size) for size in self.local_shape)]

    def is_counted_by(self, mesh: Mesh) -> bool:
        """Whether this rank, with the replicas of its slice, counts the slice in sums over the model and saves it. Of
        the ranks of a mesh that hold an element, the counting ones are exactly one replica group."""
        first = not self.is_replicated or mesh.layer.is_first
        return first and mesh.copies.is_first and not self.is_tied_copy


class GradientAccumulator(Protocol):
    """The sum of a weight's gradients over a step, to which a product or a look-up may add its result directly."""

    @property
    def discards(self) -> bool:
        """Whether gradients are dropped now, and not added."""

    def buffer(self) -> tuple[Tensor, bool]:
        """The sum, fp32, of the weight's shape, for a product; and whether it holds terms already."""

    def added(self) -> None:
        """The gradient of this backward is in the buffer."""

    def add_rows(self, rows: Tensor, terms: Tensor) -> None:
        """Add the gradient of this backward: [n, h] to some rows [n] of the weight's, of which none has two terms that
        are not 0."""


TakeTerm = Callable[["ShardedParameter", Tensor], None]
"""Takes one of several gradients of a parameter, or some of them, stacked, to be added to its others."""


class _Sliced:
    """A parameter with its `spec`: the global tensor, and the slice of it on this rank."""

    spec: ShardSpec  # the global tensor, and this rank's slice of it
    accumulator: GradientAccumulator | None = None  # where layers add the gradient; None: they give it to autograd
    # The gradient is of a few rows, those that `products.looked_up` has read, and is added to the sum wherever there is
    # one; products add theirs only where the device adds them in fp32.
    takes_rows: bool = False
    take_term: TakeTerm | None = None  # takes gradients that autograd must not add up itself; None: it may
    used_again: bool = False  # its layer uses it several times, so that no single gradient is the last
    # Keep this parameter and the layer's next one in the same bucket, adjacent in memory, so that one product can read
    # both.
    adjacent_to_next: bool = False

    def named(self, name: str) -> None:
        """Give the parameter its global name; a tied parameter keeps the first."""
        if not self.spec.name:
            self.spec = replace(self.spec, name=name)

    def tied_to(self, name: str) -> None:
        """Make the parameter a copy of one on another stage, with that one's global name."""
        self.spec = replace(self.spec, name=name, is_tied_copy=True)


class _ShardedParameterType(type(nn.Parameter)):  # type: ignore[misc]
    """torch makes the parameter of a fake tensor a fake tensor, whatever class it is asked for."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Sliced) or super().__instancecheck__(instance)


class ShardedParameter(_Sliced, nn.Parameter, metaclass=_ShardedParameterType):
    """A parameter with its `spec`: the global tensor, and the slice of it on this rank."""

    def __new__(cls, data: Tensor, spec: ShardSpec, requires_grad: bool = True) -> ShardedParameter:
        made: Any = super().__new__(cls, data, requires_grad)
        if not isinstance(made, _Sliced):
            kind: Any = type(made)
            made.__class__ = _sliced(kind)
        made.spec = spec
        parameter: ShardedParameter = made
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            memo[id(self)] = ShardedParameter(self.detach().clone(), self.spec, self.requires_grad)
        copy: ShardedParameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ShardedParameter, (self.detach(), self.spec, self.requires_grad)


@functools.cache
def _sliced(kind: type) -> Any:
    """A class of tensors, such as fake ones, with a `spec`."""
    return type(f"Sharded{kind.__name__}", (_Sliced, kind), {})


class ShardedModule(nn.Module):
    """A module that holds `ShardedParameter`s, which stay so when it moves. Where a tensor cannot replace the data
    of its parameter (`to_empty` of a module on the meta device, `to` another device), torch makes a plain parameter
    of it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._parameters[name]
            if isinstance(old, ShardedParameter) and new is not None and new is not old:
                sharded = ShardedParameter(new.detach(), old.spec, new.requires_grad)
                sharded.grad = new.grad
                self._parameters[name] = sharded
        return self


class _SeparateTerm(torch.autograd.Function):
    """The identity; backward gives the gradient to `take`, and nothing to autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter, take: TakeTerm) -> Tensor:
        ctx.parameter, ctx.take = parameter, take
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.take(ctx.parameter, grad)
        return None, None


def separate_term(parameter: ShardedParameter) -> Tensor:
    """The parameter for a further use, whose gradient is added like that of another microbatch; the parameter itself
    where autograd may add up the gradients of its uses."""
    if parameter.take_term is None or not torch.is_grad_enabled():
        return parameter
    term: Tensor = _SeparateTerm.apply(parameter, parameter.take_term)
    return term


def replicated(*shape: int, device: torch.device | None = None) -> ShardedParameter:
    """An uninitialised parameter that is not split: every rank of the layer group holds it."""
    return ShardedParameter(torch.empty(shape, device=device), ShardSpec(shape=shape))


def split_evenly(size: int, rank: int, parts: int) -> tuple[int, int]:
    """[start, stop) of part `rank` when `size` items are split into `parts` as evenly as integers allow."""
    return size * rank // parts, size * (rank + 1) // parts


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """The module's parameters, each once, in the order of use. Raises TypeError for one without a ShardSpec."""
    parameters = []
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, ShardedParameter):
            raise TypeError(f"parameter {name} has no ShardSpec: make it with ShardedParameter")
        parameters.append(parameter)
    return parameters
