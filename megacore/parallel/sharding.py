"""Which slice of which global tensor a parameter is.

Every parameter of a model is a `ShardedParameter` whose `ShardSpec` states the global tensor's name and true shape
and the one contiguous slice held here. Initialisation, checkpoints, norm counting and the parity tests all read it,
so that none of them needs to know how a layer is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The part of a global tensor that one rank holds.

    Attributes:
        name: global name, the same on every layout (`blocks.17.attention.qkv.weight`); empty until the stage is
            assembled.
        shape: true shape of the global tensor, without padding.
        dim: the split dimension; None when every tensor-parallel rank holds the whole tensor.
        start: first global index held along `dim`.
        stop: one past the last global index held along `dim`.
    """

    name: str = ""
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of every dimension in global indices."""
        return tuple((self.start, self.stop) if d == self.dim else (0, n) for d, n in enumerate(self.shape))

    def take(self, full: Tensor) -> Tensor:
        """This rank's slice (a view) of the global tensor."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.stop - self.start)

    def own(self, local: Tensor) -> Tensor:
        """The rows of the local tensor (a view) that exist globally: all but the padding at the end of `dim`."""
        return local if self.dim is None else local.narrow(self.dim, 0, self.stop - self.start)


class ShardedParameter(nn.Parameter):
    """A parameter that knows which slice of which global tensor it is (`spec`)."""

    spec: ShardSpec

    def __new__(cls, data: Tensor, spec: ShardSpec, requires_grad: bool = True) -> ShardedParameter:
        parameter: ShardedParameter = super().__new__(cls, data, requires_grad)
        parameter.spec = spec
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            memo[id(self)] = ShardedParameter(self.detach().clone(), self.spec, self.requires_grad)
        copy: ShardedParameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ShardedParameter, (self.detach(), self.spec, self.requires_grad)

    def named(self, name: str) -> None:
        """Give the parameter its global name; a tied parameter keeps the first."""
        if not self.spec.name:
            self.spec = replace(self.spec, name=name)


class ShardedModule(nn.Module):
    """A module with `ShardedParameter`s of its own, which stay so when it moves.

    Where a tensor cannot take its parameter's place (`to_empty` of a module on the meta device, `to` another device),
    torch makes a plain parameter of it.
    """

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


def replicated(*shape: int, device: torch.device | None = None) -> ShardedParameter:
    """An uninitialised parameter that every tensor-parallel rank holds whole."""
    return ShardedParameter(torch.empty(shape, device=device), ShardSpec(shape=shape))


def split_evenly(size: int, rank: int, parts: int) -> tuple[int, int]:
    """[start, stop) of part `rank` when `size` items are split into `parts` as evenly as integers allow."""
    return size * rank // parts, size * (rank + 1) // parts


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """The module's parameters, each once, in the order in which the layers use them.

    Raises:
        TypeError: a parameter was made without a ShardSpec.
    """
    found = []
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, ShardedParameter):
            raise TypeError(f"parameter {name} has no ShardSpec: make it with ShardedParameter")
        found.append(parameter)
    return found
