"""The global gradient norm, the same number on every layout, and clipping by it.

A norm is a sum over parameters, and a parallel layout holds some parameters more than once: those that every
tensor-parallel rank holds whole are counted on the first of them, and a tied one on the stage of its first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megacore.optim.data_parallel import OwnedSegment
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh

_ROW = 4096


@torch.no_grad()
def gradient_norm(
    segments: Iterable[OwnedSegment],
    mesh: Mesh,
    *,
    sharded: bool,
    tied_copies: Iterable[str] = (),
    poison: Tensor | None = None,
) -> Tensor:
    """The 2-norm of the whole model's gradient; equal on every rank, and not finite if any gradient is not.

    Args:
        segments: what this rank owns of its stage, gradients already summed over data-parallel ranks.
        mesh: whose tp and pp groups together hold the model.
        sharded: whether data-parallel ranks own different segments.
        tied_copies: global names of parameters that are counted on another stage.
        poison: a number of this rank's that makes the norm not finite if it is not itself (the loss).

    Returns:
        A scalar in fp64.
    """
    elsewhere = frozenset(tied_copies)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if poison is not None:
        total += 0.0 * poison
    for owned in segments if sharded or mesh.dp.is_first else ():
        counted_here = owned.spec.dim is not None or mesh.tp.is_first
        if counted_here and owned.spec.name not in elsewhere and (gradient := owned.gradient) is not None:
            total += square_sum(gradient)
    for group in (mesh.dp, mesh.tp, mesh.pp):
        all_reduce_(total, group)
    return total.sqrt()


def square_sum(tensor: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar, at the speed of fp32: short rows in fp32, their sum in fp64.

    A single fp32 reduction over a large tensor is off by up to a thousandth on a CPU (20 million elements, torch 2.13);
    this one by about 1e-8, so that neither size nor order of summation shows.
    """
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return rows.double().square().sum() + flat[whole:].double().square().sum()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `limit` (Pascanu et al. 2013, arXiv 1211.5063).

    Args:
        norm: the global norm.
        limit: largest norm to let through; 0 lets everything through.
    """
    return torch.ones_like(norm) if limit == 0.0 else (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; a factor of exactly 1 costs nothing more than the look at it on a CPU."""
    if gradients and not (factor.device.type == "cpu" and factor.item() == 1.0):
        torch._foreach_mul_(list(gradients), factor.to(gradients[0].dtype))
