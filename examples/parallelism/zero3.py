"""ZeRO stage 3: each rank keeps its part of weights, gradients and moments, and no more.

    torchrun --nproc-per-node 4 examples/parallelism/zero3.py

A layer's weights are gathered when the layer computes, in forward and again in backward, and freed at once
(Rajbhandari et al. 2020, "ZeRO", section 5.3). Communication grows by half, from 2 to 3 times the weights per step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import problem
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.mesh import Group


class GatheredLinear(torch.autograd.Function):
    """A linear layer of whose weight and bias this rank keeps one part each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
        """[b, i] -> [b, o]; weight: [o i / n], bias: [o / n]"""
        ctx.save_for_backward(x, weight)  # the part, not the whole
        ctx.group = group
        return F.linear(x, gathered(weight, group).view(-1, x.shape[1]), gathered(bias, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of the input and of this rank's parts."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        grad_x = grad @ gathered(weight, ctx.group).view(-1, x.shape[1])
        return grad_x, own_sum(grad.T @ x, ctx.group), own_sum(grad.sum(0), ctx.group), None


def gathered(shard: Tensor, group: Group) -> Tensor:
    """All ranks' parts, one after the other."""
    whole = shard.new_empty(group.size * shard.numel())
    start_all_gather(whole, shard.detach(), group).wait()
    return whole


def own_sum(gradient: Tensor, group: Group) -> Tensor:
    """This rank's part of the sum of a gradient over all ranks."""
    shard = gradient.new_empty(gradient.numel() // group.size)
    start_reduce_scatter(shard, gradient.reshape(-1), group).wait()
    return shard


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    whole = list(problem.build_model().parameters())
    shapes = [parameter.shape for parameter in whole]
    shards = [parameter.detach().view(-1).chunk(group.size)[group.rank].clone() for parameter in whole]
    del whole
    for shard in shards:
        shard.requires_grad_()
    optimizer = torch.optim.Adam(shards, lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch_of_rank(step, group)
        for weight, bias in zip(shards[::2], shards[1::2], strict=True):
            x = GatheredLinear.apply(x if weight is shards[0] else F.relu(x), weight, bias, group)
        loss = F.cross_entropy(x, labels)
        optimizer.zero_grad()
        (loss / group.size).backward()
        optimizer.step()
        losses.append(problem.mean_over_ranks(loss, group))
    held = problem.held_bytes(shards, [shard.grad for shard in shards], optimizer)
    weights = [gathered(shard, group).view(shape) for shard, shape in zip(shards, shapes, strict=True)]
    share = problem.number_of_parameters() / group.size
    return problem.Result(losses, weights, held, problem.Held(4 * share, 4 * share, 8 * share))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
