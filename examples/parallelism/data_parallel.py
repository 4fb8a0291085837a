"""Data parallel by hand: every rank has all weights and a part of the batch; the gradients are averaged.

    torchrun --nproc-per-node 4 examples/parallelism/data_parallel.py

The mean loss of the batch is the mean of the ranks' mean losses, and so is its gradient. Each rank then takes the same
Adam step from the same weights, so the copies stay equal without ever being sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import problem
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Group


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    model = problem.build_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch_of_rank(step, group)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        (loss / group.size).backward()
        for parameter in parameters:
            assert parameter.grad is not None
            all_reduce_(parameter.grad, group)
        optimizer.step()
        losses.append(problem.mean_over_ranks(loss, group))
    weights, count = [parameter.detach() for parameter in parameters], problem.number_of_parameters()
    held = problem.held_bytes(weights, [parameter.grad for parameter in parameters], optimizer)
    return problem.Result(losses, weights, held, problem.Held(4 * count, 4 * count, 8 * count))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
