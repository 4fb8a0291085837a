"""What a step's ranks must agree on, in one look: the global gradient norm, the loss, and what ranks vote on; and
clipping by the norm.

All are sums over ranks, and a parallel layout holds some elements more than once. Each is counted once: a parameter
says whether this rank is among those that count it (`ShardSpec.is_counted_by`), and replicas divide the counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import Mesh
from megacore.zero.data_parallel import OwnedSegment
from megacore.zero.exact_sums import square_sum_from_units, square_sum_units

_ROW = 4096


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Numbers that are equal on every rank, in fp64.

    Attributes:
        norm: the 2-norm of the whole model's gradient; not finite if any gradient, or the loss, is not.
        loss: the loss summed over the global batch, of the shape that was given.
        votes: for each question the sum of what all ranks gave, [questions].
    """

    norm: Tensor
    loss: Tensor
    votes: Tensor

    def to_host(self, queue_more: Callable[[], None] | None = None) -> Totals:
        """The same numbers in host memory, by one copy: here the program waits for the accelerator.

        Args:
            queue_more: queues work that follows the copy; called before the wait.
        """
        numbers, copied = torch.cat([self.norm.view(1), self.loss.reshape(-1), self.votes]), None
        if numbers.device.type != "cpu":
            source, numbers = numbers, torch.empty_like(numbers, device="cpu", pin_memory=True)
            numbers.copy_(source, non_blocking=True)
            copied = torch.Event(source.device)
            copied.record()
        if queue_more is not None:
            queue_more()
        if copied is not None:
            copied.synchronize()
        norm, loss, votes = numbers.split([1, self.loss.numel(), self.votes.numel()])
        return Totals(norm=norm[0], loss=loss.view_as(self.loss), votes=votes)


@torch.no_grad()
def totals(
    segments: Iterable[OwnedSegment],
    mesh: Mesh,
    *,
    loss: Tensor | float = 0.0,
    overflow: Tensor | float = 0.0,
    votes: Sequence[int] = (),
    exact: bool = False,
) -> Totals:
    """Sum what the ranks hold.

    Args:
        segments: what this rank updates, gradients already summed over replicas.
        mesh: this rank's groups.
        loss: this rank's share of the summed loss, or of several sums, the same on the ranks of its layer group.
        overflow: not finite if this rank knows of a gradient that is not.
        votes: this rank's answers to questions that all ranks decide together; as many on every rank.
        exact: sum so that the bits depend neither on the order nor on the layout.
    """
    gradients = _counted_gradients(segments, mesh)
    shares = torch.as_tensor(loss, dtype=torch.float64, device=mesh.device)
    sums = torch.zeros(2 + shares.numel() + len(votes), dtype=torch.float64, device=mesh.device)
    squares, overflows, losses, ballot = sums.split([1, 1, shares.numel(), len(votes)])
    overflows += overflow  # 0, or not finite
    if mesh.layer.is_first and mesh.copies.is_first:
        losses.copy_(shares.flatten())
    for number, vote in enumerate(votes):
        if vote:  # `ballot[number] = vote` would copy from the host, for which an accelerator is waited for
            ballot[number].fill_(vote)
    if exact:
        units = torch.stack([square_sum_units(gradient) for gradient in (*gradients, sums.new_zeros(0))]).sum(0)
        _sum_over_all(units, mesh)
    else:
        for gradient in gradients:
            squares += square_sum(gradient)
    _sum_over_all(sums, mesh)
    square = square_sum_from_units(units) if exact else squares[0]
    poison = 0.0 * sums[1 : 2 + shares.numel()].sum()  # of a loss or an overflow that is not finite: NaN
    return Totals(norm=square.sqrt() + poison, loss=losses.view_as(shares), votes=ballot)


def _counted_gradients(segments: Iterable[OwnedSegment], mesh: Mesh) -> Iterator[Tensor]:
    """The gradients whose squares this rank adds up, flat; those of all ranks are the model's, each entry once."""
    counted = (owned for owned in segments if owned.spec.is_counted_by(mesh))
    for bucket, members in groupby(counted, key=lambda owned: owned.bucket):
        gradients = bucket.gradients([owned.segment for owned in members])
        if bucket.options.stage == 0:  # every replica has all of them: each adds up its part
            gradients = [gradient.tensor_split(bucket.group.size)[bucket.group.rank] for gradient in gradients]
        yield from gradients


def _sum_over_all(sums: Tensor, mesh: Mesh) -> None:
    for group in (mesh.replicas, *mesh.model, mesh.copies):
        all_reduce_(sums, group)


def square_sum(tensor: Tensor) -> Tensor:
    """Sum of squares as an fp64 scalar, at the speed of fp32: short rows in fp32, their sum in fp64.

    A single fp32 reduction over a large tensor is off by up to a thousandth on a CPU (20 million elements, torch 2.13);
    this one by about 1e-8, so that neither size nor order of summation shows.
    """
    flat = tensor.reshape(-1).float()
    full = flat.numel() // _ROW * _ROW  # elements of complete rows
    rows = torch.linalg.vector_norm(flat[:full].view(-1, _ROW), dim=1)
    return rows.double().square().sum() + flat[full:].double().square().sum()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `limit` (Pascanu et al. 2013, arXiv 1211.5063).

    Args:
        norm: the global norm.
        limit: largest norm to let through; 0 lets everything through.
    """
    return torch.ones_like(norm) if limit == 0.0 else (limit / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply fp32 gradients in place by a scalar in host memory; a factor of exactly 1 costs nothing."""
    if gradients and (number := factor.item()) != 1.0:
        torch._foreach_mul_(list(gradients), number)
