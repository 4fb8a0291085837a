"""Data parallel by torch's DistributedDataParallel: what data_parallel.py does, with less waiting.

    torchrun --nproc-per-node 4 examples/parallelism/ddp.py

DDP hooks into backward: as soon as the gradients of a bucket of layers are there, their all-reduce begins, while the
layers before them still compute (Li et al. 2020, "PyTorch Distributed", section 3.2). The training loop is that of one
process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import problem
from megacore.parallel.mesh import Group


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    model = DistributedDataParallel(problem.build_model(), process_group=group.handle, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch_of_rank(step, group)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()  # DDP divides by the number of ranks
        optimizer.step()
        losses.append(problem.mean_over_ranks(loss, group))
    weights, count = [parameter.detach() for parameter in model.parameters()], problem.number_of_parameters()
    held = problem.held_bytes(weights, [parameter.grad for parameter in model.parameters()], optimizer)
    return problem.Result(losses, weights, held, problem.Held(4 * count, 4 * count, 8 * count))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
