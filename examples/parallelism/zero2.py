"""ZeRO stage 2: as stage 1, and each rank keeps its part of the gradients only.

    torchrun --nproc-per-node 4 examples/parallelism/zero2.py

As soon as backward has computed the gradient of a parameter, it is reduced. Each rank keeps the sum of its part, and
frees the whole gradient before backward reaches the layer before (Rajbhandari et al. 2020, "ZeRO", section 5.2).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import problem
from megacore.parallel.collectives import start_all_gather, start_reduce_scatter
from megacore.parallel.mesh import Group


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    model = problem.build_model()
    parameters = list(model.parameters())
    shards = [parameter.detach().view(-1).chunk(group.size)[group.rank] for parameter in parameters]  # views
    for parameter, shard in zip(parameters, shards, strict=True):

        def keep_own_part(whole: Tensor, shard: Tensor = shard) -> None:
            assert whole.grad is not None
            shard.grad = torch.empty_like(shard)
            start_reduce_scatter(shard.grad, whole.grad.view(-1), group).wait()
            whole.grad = None

        parameter.register_post_accumulate_grad_hook(keep_own_part)
    optimizer = torch.optim.Adam(shards, lr=problem.LR)
    losses = []
    for step in range(steps):
        x, labels = problem.batch_of_rank(step, group)
        loss = F.cross_entropy(model(x), labels)
        (loss / group.size).backward()
        optimizer.step()
        for parameter, shard in zip(parameters, shards, strict=True):
            start_all_gather(parameter.detach().view(-1), shard, group).wait()
        losses.append(problem.mean_over_ranks(loss, group))
    weights, count = [parameter.detach() for parameter in parameters], problem.number_of_parameters()
    gradients = [tensor.grad for tensor in (*parameters, *shards)]
    held = problem.held_bytes(weights, gradients, optimizer)
    share = count / group.size
    return problem.Result(losses, weights, held, problem.Held(4 * count, 4 * share, 8 * share))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
