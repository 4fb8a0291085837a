"""Pipeline of two stages: rank 0 has the first layer, rank 1 the others; microbatches keep both busy.

    torchrun --nproc-per-node 2 examples/parallelism/pipeline.py

The order of computations and messages is 1F1B (Narayanan et al. 2021, section 2.2): one forward, one backward, so that
a stage never holds the activations of many microbatches. megacore writes such orders as lists of actions;
here is all that it takes to carry one out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import problem
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group
from megacore.pipeline.schedule import Op, build_schedule

MICROBATCHES = 4
SCHEDULE = build_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)


class Stage:
    """One half of the model, and the microbatches that are on their way through it."""

    def __init__(self, group: Group) -> None:
        model = problem.build_model()
        self.group, self.layers = group, model[:2] if group.is_first else model[2:]
        self._peer = group.ranks[1 - group.rank]
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}  # of the outputs

    def train_batch(self, step: int) -> float:
        """Add up the gradients of all microbatches; the loss of the batch on the last stage."""
        x, labels = (tensor.chunk(MICROBATCHES) for tensor in problem.batch(step))
        loss = 0.0
        for action in SCHEDULE.actions[self.group.rank]:
            i = action.microbatch
            if action.op is Op.RECV_INPUT:
                received = torch.empty(len(x[i]), problem.HIDDEN)
                dist.recv(received, self._peer, group=self.group.handle)
                self._inputs[i] = received.requires_grad_()
            elif action.op is Op.FORWARD:
                self._outputs[i] = self.layers(x[i] if self.group.is_first else self._inputs[i])
                if self.group.is_last:
                    self._outputs[i] = F.cross_entropy(self._outputs[i], labels[i]) / MICROBATCHES
                    loss += self._outputs[i].item()
            elif action.op is Op.SEND_OUTPUT:
                dist.send(self._outputs[i].detach(), self._peer, group=self.group.handle)
            elif action.op is Op.RECV_GRAD:
                self._gradients[i] = torch.empty_like(self._outputs[i])
                dist.recv(self._gradients[i], self._peer, group=self.group.handle)
            elif action.op is Op.BACKWARD:
                self._outputs.pop(i).backward(self._gradients.pop(i, None))
            elif action.op is Op.SEND_GRAD:
                gradient = self._inputs.pop(i).grad
                assert gradient is not None
                dist.send(gradient, self._peer, group=self.group.handle)
        return loss


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    stage = Stage(group)
    parameters = list(stage.layers.parameters())
    optimizer = torch.optim.Adam(parameters, lr=problem.LR)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(stage.train_batch(step))
        optimizer.step()
    weights = [parameter.detach() for parameter in parameters]
    held = problem.held_bytes(weights, [parameter.grad for parameter in parameters], optimizer)
    count = sum(parameter.numel() for parameter in parameters)
    stages = all_gather_objects((losses, [weight.tolist() for weight in weights]), group)
    whole = [torch.tensor(weight) for _, weights in stages for weight in weights]
    return problem.Result(stages[-1][0], whole, held, problem.Held(4 * count, 4 * count, 8 * count))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv, ranks=2)


if __name__ == "__main__":
    sys.exit(main())
