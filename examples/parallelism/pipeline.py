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
from megacore.parallel.mesh import Group
from megacore.pipeline.schedule import Op, build_schedule

MICROBATCHES = 4
ACTIONS = build_schedule("1f1b", ranks=2, microbatches=MICROBATCHES).actions  # of each rank


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
        for op, i in ((action.op, action.microbatch) for action in ACTIONS[self.group.rank]):
            match op:
                case Op.RECV_INPUT:
                    self._inputs[i] = self._receive(torch.empty(len(x[i]), problem.HIDDEN)).requires_grad_()
                case Op.FORWARD:
                    self._outputs[i] = self.layers(x[i] if self.group.is_first else self._inputs[i])
                    if self.group.is_last:
                        self._outputs[i] = F.cross_entropy(self._outputs[i], labels[i]) / MICROBATCHES
                        loss += self._outputs[i].item()
                case Op.SEND_OUTPUT:
                    self._send(self._outputs[i].detach())
                case Op.RECV_GRAD:
                    self._gradients[i] = self._receive(torch.empty_like(self._outputs[i]))
                case Op.BACKWARD:
                    self._outputs.pop(i).backward(self._gradients.pop(i, None))
                case Op.SEND_GRAD:
                    self._send(self._inputs.pop(i).grad)
        return loss

    def _send(self, tensor: Tensor | None) -> None:
        """To the other stage."""
        assert tensor is not None
        dist.send(tensor, self._peer, group=self.group.handle)

    def _receive(self, buffer: Tensor) -> Tensor:
        """Fill a buffer with what the other stage sends."""
        dist.recv(buffer, self._peer, group=self.group.handle)
        return buffer


def train(group: Group, steps: int) -> problem.Result:
    """Train on this rank of the group."""
    stage = Stage(group)
    optimizer = torch.optim.Adam(stage.layers.parameters(), lr=problem.LR)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(stage.train_batch(step))
        optimizer.step()
    return problem.result_of_stages(losses, list(stage.layers.parameters()), optimizer, group)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return problem.main(train, __doc__, argv, ranks=2)


if __name__ == "__main__":
    sys.exit(main())
