"""What all files here share: a small MLP, its data, training on one process, and the comparison with it.

Training in fp32 with Adam keeps 16 bytes per parameter from step to step: 4 of the weight, 4 of its gradient, and
2 x 4 of Adam's moments. Training in 16 bits keeps 16 bytes too: 2 + 2 of weight and gradient, and 12 of the fp32 weight
and the moments (Rajbhandari et al. 2020, "ZeRO", section 3.1). The rule decides which models fit into memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config import ParallelConfig
from megacore.errors import UserError
from megacore.parallel.collectives import all_gather_objects, all_reduce_, barrier
from megacore.parallel.mesh import ALONE, Group, join_job

INPUTS, HIDDEN, FEATURES, CLASSES = 32, 128, 32, 8
BATCH = 48  # of all ranks together
LR = 3e-3


@dataclass(frozen=True)
class Held:
    """Bytes that a rank keeps from step to step."""

    weights: float
    gradients: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.moments


@dataclass(frozen=True)
class Result:
    """What training gave on this rank.

    Attributes:
        losses: of every step, over the batch of all ranks.
        weights: of the whole model, in the order of `build_model().parameters()`.
        held: measured, by adding up the tensors.
        rule: the same by the 16-bytes rule.
    """

    losses: list[float]
    weights: list[Tensor]
    held: Held
    rule: Held


Train = Callable[[Group, int], Result]


def build_model() -> nn.Sequential:
    """The same weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)
        )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs [BATCH, INPUTS] and labels [BATCH]: which of the first inputs is the largest."""
    x = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(dim=1)


def batch_of_rank(step: int, group: Group) -> tuple[Tensor, Tensor]:
    """The rows of a batch that one data-parallel rank computes."""
    x, labels = batch(step)
    return x.chunk(group.size)[group.rank], labels.chunk(group.size)[group.rank]


def mean_over_ranks(loss: Tensor, group: Group) -> float:
    """The loss of the whole batch, from the mean losses of its parts."""
    return float(all_reduce_(loss.detach().clone(), group)) / group.size


def number_of_parameters() -> int:
    return sum(parameter.numel() for parameter in build_model().parameters())


def held_bytes(weights: Iterable[Tensor], gradients: Iterable[Tensor | None], optimizer: torch.optim.Adam) -> Held:
    """Add up what is really there."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return Held(_nbytes(weights), _nbytes(gradients), _nbytes(moments))


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def train_alone(steps: int) -> Result:
    """One process, the whole batch: what every layout must reproduce."""
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses = []
    for step in range(steps):
        x, labels = batch(step)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights, count = [parameter.detach() for parameter in model.parameters()], number_of_parameters()
    held = held_bytes(weights, [parameter.grad for parameter in model.parameters()], optimizer)
    return Result(losses, weights, held, Held(4 * count, 4 * count, 8 * count))


def result_of_stages(
    losses: list[float], parameters: Sequence[nn.Parameter], optimizer: torch.optim.Adam, group: Group
) -> Result:
    """The result of a model whose layers are on different ranks; the losses are those of the last rank.

    Args:
        losses: of this rank, every step.
        parameters: of this rank's layers, in their order.
        optimizer: of these parameters.
        group: the ranks, in the order of the layers.
    """
    weights, count = [parameter.detach() for parameter in parameters], sum(p.numel() for p in parameters)
    held = held_bytes(weights, [parameter.grad for parameter in parameters], optimizer)
    stages = all_gather_objects((losses, [weight.tolist() for weight in weights]), group)
    whole = [torch.tensor(weight) for _, weights in stages for weight in weights]
    return Result(stages[-1][0], whole, held, Held(4 * count, 4 * count, 8 * count))


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Between the weights of two models, in absolute value."""
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def main(train: Train, description: str | None, argv: Sequence[str] | None, *, ranks: int | None = None) -> int:
    """Train as the command line says, compare with one process, and print what a student wants to see.

    Args:
        train: one of the files here.
        description: its docstring.
        argv: the arguments; None takes them from the command line.
        ranks: how many the layout needs; None: any number that divides the batch and the layers.

    Returns:
        The exit status: 0, or 2 if the command line or the number of processes cannot be used.
    """

    def run(options: argparse.Namespace) -> None:
        _, group = join_job(ParallelConfig(device="cpu"))
        _check(group, ranks)
        result, alone = train(group, options.steps), train_alone(options.steps)
        if group.rank == 0:
            _print(result, alone, group.size)
        if group is not ALONE:
            barrier(group)
            dist.destroy_process_group()

    parser = ToolParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="of training (default 20)")
    return run_tool(parser, argv, run)


def _check(group: Group, ranks: int | None) -> None:
    if ranks is not None and group.size != ranks:
        raise UserError(f"{group.size} processes, but this layout needs {ranks}: torchrun --nproc-per-node {ranks}")
    if group.size < 2 or CLASSES % group.size or BATCH % group.size:
        fitting = [n for n in range(2, CLASSES + 1) if CLASSES % n == 0 and BATCH % n == 0]
        choices = ", ".join(map(str, fitting))
        raise UserError(f"{group.size} processes cannot divide the layers: use torchrun --nproc-per-node {choices}")


def _print(result: Result, alone: Result, ranks: int) -> None:
    print("step   loss  one process")
    for step in sorted({0, len(result.losses) // 2, len(result.losses) - 1}):
        print(f"{step + 1:4d} {result.losses[step]:.4f}       {alone.losses[step]:.4f}")
    difference = largest_difference(result.weights, alone.weights)
    print(f"largest difference of a weight after {len(result.losses)} steps: {difference:.1e}")
    print(f"bytes per parameter on one of {ranks} ranks: weight + gradient + Adam's moments = total")
    for name, held in (("measured", result.held), ("rule", result.rule), ("one process", alone.held)):
        each = [n / number_of_parameters() for n in (held.weights, held.gradients, held.moments, held.total)]
        print(f"{name:>12s}: {each[0]:5.2f} + {each[1]:5.2f} + {each[2]:5.2f} = {each[3]:5.2f}")
