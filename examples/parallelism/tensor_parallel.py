"""Tensor parallel: a pair of linear layers is split over the ranks, and all ranks compute the same batch.

    torchrun --nproc-per-node 4 examples/parallelism/tensor_parallel.py

The first layer is split by its outputs (rows of the weight), the second by its inputs (columns). ReLU works on single
features, so each rank computes its part of the hidden layer without the others, and one sum joins the pair's output
(Shoeybi et al. 2019, "Megatron-LM", section 3). The last layer is small and stays whole on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import problem
from megacore.parallel.collectives import all_gather, copy_to_group, reduce_from_group
from megacore.parallel.mesh import Group


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    up_weight, up_bias, down_weight, down_bias, *head = (
        parameter.detach() for parameter in problem.build_model().parameters()
    )
    parameters = [
        up_weight.chunk(group.size, dim=0)[group.rank].clone(),  # [HIDDEN/n, INPUTS]
        up_bias.chunk(group.size)[group.rank].clone(),  # [HIDDEN/n]
        down_weight.chunk(group.size, dim=1)[group.rank].clone(),  # [FEATURES, HIDDEN/n]
        down_bias,  # added once, to the sum
        *head,
    ]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.Adam(parameters, lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch(step)
        loss = F.cross_entropy(forward(x, parameters, group), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    held = problem.held_bytes(parameters, [parameter.grad for parameter in parameters], optimizer)
    pair = up_weight.numel() + up_bias.numel() + down_weight.numel()
    count = pair / group.size + problem.number_of_parameters() - pair
    return problem.Result(losses, whole_weights(parameters, group), held, problem.Held(4 * count, 4 * count, 8 * count))


def forward(x: Tensor, parameters: Sequence[Tensor], group: Group) -> Tensor:
    """[BATCH, INPUTS] -> [BATCH, CLASSES], the same on every rank.

    `copy_to_group` is the paper's f: nothing forward, a sum of gradients backward, because every rank's part of the
    hidden layer depends on all of x. `reduce_from_group` is its g: a sum forward, nothing backward.
    """
    up_weight, up_bias, down_weight, down_bias, head_weight, head_bias = parameters
    hidden = F.relu(F.linear(copy_to_group(x, group), up_weight, up_bias))  # [BATCH, HIDDEN/n]
    features = F.relu(reduce_from_group(F.linear(hidden, down_weight), group) + down_bias)  # [BATCH, FEATURES]
    return F.linear(features, head_weight, head_bias)


def whole_weights(parameters: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The weights of one process, put together from all ranks."""
    up_weight, up_bias, down_weight, *others = (parameter.detach() for parameter in parameters)
    return [
        all_gather(up_weight, group).flatten(0, 1),
        all_gather(up_bias, group).flatten(),
        torch.cat(all_gather(down_weight, group).unbind(), dim=1),
        *others,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
