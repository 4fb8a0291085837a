"""ZeRO stage 1: data parallel, but each rank keeps Adam's moments of its part of every parameter only.

    torchrun --nproc-per-node 4 examples/parallelism/zero1.py

A rank updates its part and gathers the others' (Rajbhandari et al. 2020, "ZeRO", section 5.1). A reduce-scatter of the
gradients and an all-gather of the weights move the same bytes as the all-reduce of data_parallel.py, which consists of
these two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import problem
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.mesh import Group


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    model = problem.build_model()
    parameters = list(model.parameters())
    shards = [parameter.detach().view(-1).chunk(group.size)[group.rank] for parameter in parameters]  # views
    optimizer = torch.optim.Adam(shards, lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch_of_rank(step, group)
        loss = F.cross_entropy(model(x), labels)
        model.zero_grad()
        (loss / group.size).backward()
        for parameter, shard in zip(parameters, shards, strict=True):
            assert parameter.grad is not None
            shard.grad = parameter.grad.view(-1).chunk(group.size)[group.rank]  # a view too
            start_reduce_scatter(shard.grad, parameter.grad.view(-1), group).wait()
        optimizer.step()
        for parameter, shard in zip(parameters, shards, strict=True):
            start_all_gather(parameter.detach().view(-1), shard, group).wait()
        losses.append(problem.mean_over_ranks(loss, group))
    weights, count = [parameter.detach() for parameter in parameters], problem.number_of_parameters()
    held = problem.held_bytes(weights, [parameter.grad for parameter in parameters], optimizer)
    return problem.Result(losses, weights, held, problem.Held(4 * count, 4 * count, 8 * count / group.size))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
