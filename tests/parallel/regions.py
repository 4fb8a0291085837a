"""Slices along the last dimension gathered and taken, with gradients: what stands around a layer that is under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather
from megacore.parallel.mesh import Group


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return torch.cat(tuple(all_gather(x, group)), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank * ctx.width, ctx.width).contiguous(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size, dim=-1)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat(tuple(all_gather(grad, ctx.group)), dim=-1), None


def gather_from_group(x: Tensor, group: Group) -> Tensor:
    """Concatenate the ranks' slices along the last dimension; backward takes this rank's slice."""
    return x if group.size == 1 else _Gather.apply(x, group)


def scatter_to_group(x: Tensor, group: Group) -> Tensor:
    """Take this rank's slice of the last dimension; backward concatenates the ranks' gradients.

    Raises:
        ValueError: the last dimension does not divide by the group's size.
    """
    if x.shape[-1] % group.size:
        raise ValueError(f"last dimension {x.shape[-1]} does not divide over {group.size} ranks")
    return x if group.size == 1 else _Scatter.apply(x, group)
