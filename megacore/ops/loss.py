"""Cross-entropy over a vocabulary that is split over ranks: two operators, and one exchange between them.

The first operator computes three floats per token: the largest logit m, the sum of exp(x - m), and the weighted sum of
x - m that is the linear part of the loss. They are exchanged once (by a function of the caller, as operators know
no groups) and merged by one operator, on every rank alike, so that every rank gets the same bits. The last operator
turns logits into their gradient in place. Each step is also a function, so that a caller may compute its logits a few
columns at a time. The method is that of Shoeybi et al. 2019 (arXiv 1909.08053, section 3) with the online sum of
Milakov and Gimelshein 2018 (arXiv 1805.02867); the z-loss is that of PaLM (arXiv 2204.02311, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.ops.dispatch import (
    custom_op,
    require,
    require_integers,
    require_rows,
    require_same_device,
    require_shape,
    require_whole,
    runs_triton,
)

_CACHED = 1 << 18  # elements that stay in a core's cache
_LOWEST = -1e30  # below any logit, and finite: its differences are never NaN


@dataclass(frozen=True, kw_only=True)
class CrossEntropyOptions:
    """What is computed per token."""

    label_smoothing: float = 0.0  # weight e in [0, 1) of the uniform distribution over the true vocabulary
    z_loss: float = 0.0  # weight of log(Z)^2, Z being the softmax denominator; 0 leaves it out
    ignore_index: int = -100  # targets of this value give loss 0 and gradient 0
    # Backward writes the gradient over the logits, which saves their size in memory. Whoever looks at the logits after
    # backward sees the gradient.
    in_place: bool = False

    def __post_init__(self) -> None:
        smoothing, z_loss = self.label_smoothing, self.z_loss
        require(0 <= smoothing < 1, f"label_smoothing is {smoothing}: it must be in [0, 1)")
        require(0 <= z_loss < math.inf, f"z_loss is {z_loss}: it must be finite and not negative")
        require_whole(ignore_index=self.ignore_index)

    def weights(self, vocab_size: int) -> tuple[float, float]:
        """What the target's logit, and what every logit, is multiplied by in the linear part of the loss."""
        return 1.0 - self.label_smoothing, self.label_smoothing / vocab_size


@dataclass(frozen=True)
class VocabularyShare:
    """Which columns each rank holds, and how ranks exchange what they know."""

    # [start, stop) of every rank's ids, in order; the last stop is the vocabulary's size.
    bounds: tuple[tuple[int, int], ...]
    rank: int = 0
    # A tensor -> the ranks' tensors, stacked along a new first dimension.
    exchange: Callable[[Tensor], Tensor] = lambda tensor: tensor.unsqueeze(0)

    def __post_init__(self) -> None:
        ranks = len(self.bounds)
        ends = [end for bound in self.bounds for end in bound]
        require(ranks > 0 and ends == sorted(ends), f"bounds is {self.bounds}: it must be every rank's ids, in order")
        require(0 <= self.rank < ranks, f"rank is {self.rank}: it must be in [0, {ranks}), one of bounds")

    @property
    def vocab_size(self) -> int:
        return self.bounds[-1][1]

    @property
    def start(self) -> int:
        return self.bounds[self.rank][0]

    @property
    def columns(self) -> int:
        return self.bounds[self.rank][1] - self.start


@dataclass(frozen=True)
class SoftmaxSums:
    """What backward needs of each token's softmax over the whole vocabulary."""

    targets: Tensor  # [tokens] int64
    peak: Tensor  # [tokens] fp32, the largest logit
    total: Tensor  # [tokens] fp32, the sum of exp(x - peak)
    log_z: Tensor  # [tokens] fp32, the logarithm of the softmax's denominator


@custom_op("megacore::cross_entropy_statistics", mutates_args=())
def _statistics(
    logits: Tensor, targets: Tensor, start: int, columns: int, ignore_index: int, target_weight: float, uniform: float
) -> Tensor:
    weights = (target_weight, uniform)
    if runs_triton(logits, "logits"):
        import megacore.kernels.cross_entropy as kernel

        return kernel.statistics(
            logits, targets, start=start, columns=columns, ignore_index=ignore_index, weights=weights
        )
    return statistics_reference(
        logits, targets, start=start, columns=columns, ignore_index=ignore_index, weights=weights
    )


@_statistics.register_fake
def _(
    logits: Tensor, targets: Tensor, start: int, columns: int, ignore_index: int, target_weight: float, uniform: float
) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)


@custom_op("megacore::cross_entropy_merged", mutates_args=())
def _merged(parts: Tensor, targets: Tensor, bounds: Sequence[int], target_weight: float, uniform: float) -> Tensor:
    if runs_triton(parts, "parts"):
        import megacore.kernels.cross_entropy as kernel

        return kernel.merged(parts, targets, bounds=tuple(bounds), weights=(target_weight, uniform))
    return merged_reference(parts, targets, bounds=tuple(bounds), weights=(target_weight, uniform))


@_merged.register_fake
def _(parts: Tensor, targets: Tensor, bounds: Sequence[int], target_weight: float, uniform: float) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@custom_op("megacore::cross_entropy_losses", mutates_args=())
def _losses(
    statistics: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    if runs_triton(statistics, "statistics"):
        import megacore.kernels.cross_entropy as kernel

        return kernel.losses(statistics, targets, vocab_size=vocab_size, ignore_index=ignore_index, z_loss=z_loss)
    return losses_reference(statistics, targets, vocab_size=vocab_size, ignore_index=ignore_index, z_loss=z_loss)


@_losses.register_fake
def _(statistics: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    return statistics.new_empty(targets.shape), statistics.new_empty(targets.shape)


@custom_op("megacore::cross_entropy_gradient_", mutates_args=("logits",))
def _gradient_(
    logits: Tensor,
    targets: Tensor,
    peak: Tensor,
    softmax_weight: Tensor,
    loss_weight: Tensor,
    start: int,
    columns: int,
    ignore_index: int,
    target_weight: float,
    uniform: float,
) -> None:
    choice = {"start": start, "columns": columns, "ignore_index": ignore_index}
    weights = (target_weight, uniform)
    if runs_triton(logits, "logits"):
        import megacore.kernels.cross_entropy as kernel

        kernel.gradient_(logits, targets, peak, softmax_weight, loss_weight, weights=weights, **choice)
    else:
        gradient_reference_(logits, targets, peak, softmax_weight, loss_weight, weights=weights, **choice)


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Rows, a cacheful at a time: each piece is read from memory once, however many passes are made over it."""
    tokens, width = logits.shape
    step = max(1, _CACHED // max(width, 1))
    return (slice(first, first + step) for first in range(0, tokens, step))


def _local(targets: Tensor, start: int, columns: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The targets' columns here (0 for those that are not), and where they are not."""
    local = targets - start
    elsewhere = (targets == ignore_index) | (local < 0) | (local >= columns)
    return local.masked_fill(elsewhere, 0), elsewhere


def statistics_reference(
    logits: Tensor, targets: Tensor, *, start: int, columns: int, ignore_index: int, weights: tuple[float, float]
) -> Tensor:
    """What the kernel computes, in plain torch; arguments and result as `megacore.kernels.cross_entropy.statistics`."""
    result = torch.zeros((3, logits.shape[0]), dtype=torch.float32, device=logits.device)
    result[0].fill_(_LOWEST)
    if columns == 0:
        return result
    peaks, totals, linear = result
    for rows in _pieces(logits):
        known = logits[rows, :columns].float()
        relative = torch.log_softmax(known, -1)  # whose largest is minus the logarithm of the sum
        torch.amax(known, -1, out=peaks[rows])
        torch.amax(relative, -1, out=totals[rows])
        if weights[1]:
            torch.sum(relative, -1, out=linear[rows])
    if weights[1]:
        linear.sub_(totals * columns).mul_(weights[1])
    totals.neg_().exp_().masked_fill_(peaks < _LOWEST, 0.0)
    peaks.clamp_(min=_LOWEST)
    local, elsewhere = _local(targets, start, columns, ignore_index)
    hit = logits.gather(-1, local[:, None])[:, 0].float().sub_(peaks).masked_fill_(elsewhere, 0.0)
    linear.add_(hit, alpha=weights[0])
    return result


def merged_reference(
    parts: Tensor, targets: Tensor, *, bounds: tuple[int, ...], weights: tuple[float, float]
) -> Tensor:
    """What the kernel computes, in plain torch; arguments and result as `megacore.kernels.cross_entropy.merged`."""
    peaks, totals, linears = parts.unbind(1)
    peak = peaks.amax(0)
    below = peaks - peak  # [parts, tokens]
    total = (totals * below.exp()).sum(0)
    # A part's linear part is relative to the largest logit of that part: move it, by the weight of what the part holds.
    moved = [
        linear + distance * (weights[0] * ((targets >= start) & (targets < stop)) + weights[1] * (stop - start))
        for linear, distance, start, stop in zip(linears, below, bounds[::2], bounds[1::2], strict=True)
    ]
    return torch.stack([peak, total, torch.stack(moved).sum(0)])


def losses_reference(
    statistics: Tensor, targets: Tensor, *, vocab_size: int, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in plain torch; arguments and results as `megacore.kernels.cross_entropy.losses`."""
    peak, total, linear = statistics
    ignored = targets == ignore_index
    log_total = total.log()
    loss = log_total - linear
    log_z = log_total + peak
    if z_loss:
        loss += z_loss * log_z.square()
    impossible = ~ignored & ((targets < 0) | (targets >= vocab_size))
    return loss.masked_fill_(ignored, 0.0).masked_fill_(impossible, torch.nan), log_z


def gradient_reference_(
    logits: Tensor, targets: Tensor, peak: Tensor, softmax_weight: Tensor, loss_weight: Tensor, *,
    start: int, columns: int, ignore_index: int, weights: tuple[float, float],
) -> None:  # fmt: skip
    """What the kernel does, in plain torch; arguments as `megacore.kernels.cross_entropy.gradient_`."""
    logits[:, columns:] = 0.0
    if columns == 0:
        return
    local, elsewhere = _local(targets, start, columns, ignore_index)
    ignored = targets == ignore_index
    hit = (loss_weight * -weights[0]).masked_fill_(elsewhere, 0.0)[:, None]
    softmax_weight = softmax_weight.masked_fill(ignored, 0.0)
    uniform = (loss_weight * weights[1]).masked_fill_(ignored, 0.0)
    for rows in _pieces(logits):
        columns_of_rows = logits[rows, :columns]
        # In fp32 this is the memory of the logits; 16-bit logits are converted first, and rounded once.
        grad = columns_of_rows.float().sub_(peak[rows, None]).exp_().mul_(softmax_weight[rows, None])
        if weights[1]:
            grad.sub_(uniform[rows, None])
        grad.scatter_add_(-1, local[rows, None], hit[rows])
        if grad.dtype != columns_of_rows.dtype:
            columns_of_rows.copy_(grad)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare, options: CrossEntropyOptions
    ) -> Tensor:
        rows, ids = logits.view(-1, logits.shape[-1]), targets.contiguous().view(-1)
        local = statistics(rows, ids, share=share, start=share.start, columns=share.columns, options=options)
        loss, sums = losses(local, ids, share=share, options=options)
        ctx.save_for_backward(logits, ids, sums.peak, sums.total, sums.log_z)
        ctx.share, ctx.options = share, options
        return loss.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, *sums = ctx.saved_tensors
        share, options = ctx.share, ctx.options
        grad = logits.detach() if options.in_place else logits.detach().clone()
        gradient_of = GradientOfLogits(grad_loss, SoftmaxSums(*sums), share=share, options=options)
        gradient_of.write_(grad.view(-1, grad.shape[-1]), start=share.start, columns=share.columns)
        if torch.is_grad_enabled():  # create_graph=True
            grad = _Once.apply(grad, logits)
        return grad, None, None, None


class _Once(torch.autograd.Function):
    """A gradient that autograd did not see being made. torch's `once_differentiable` checks only whether the incoming
    gradient could be differentiated again, and here the logits could."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, logits: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise RuntimeError("cross_entropy can be differentiated once: its gradient has none")


def statistics(
    logits: Tensor, targets: Tensor, *, share: VocabularyShare, start: int, columns: int, options: CrossEntropyOptions
) -> Tensor:
    """The part of each token's loss that some columns of the logits contribute. Returns [3, tokens] fp32: largest logit
    m; sum of exp(x - m); weighted sum of x - m.

    Args:
        logits: [tokens, width] contiguous; the columns followed by padding, which is not looked at.
        targets: [tokens] int64.
        share: of the whole vocabulary.
        start: the id of the first column.
        options: label smoothing and ignore index.
    """
    result: Tensor = _statistics(
        logits, targets, start, columns, options.ignore_index, *options.weights(share.vocab_size)
    )
    return result


def merged(
    parts: Tensor, targets: Tensor, *, bounds: Sequence[tuple[int, int]], vocab_size: int, options: CrossEntropyOptions
) -> Tensor:
    """The `statistics` of all columns, [3, tokens] fp32, from those of some: `parts`, [parts, 3, tokens] fp32.
    `targets`: [tokens] int64. `bounds`: [start, stop) of every part's ids. `vocab_size`: of the whole vocabulary."""
    if len(bounds) == 1:
        return parts[0]
    ends = [end for bound in bounds for end in bound]
    result: Tensor = _merged(parts, targets, ends, *options.weights(vocab_size))
    return result


def losses(
    local: Tensor, targets: Tensor, *, share: VocabularyShare, options: CrossEntropyOptions
) -> tuple[Tensor, SoftmaxSums]:
    """The loss of each token, from the `statistics` of this rank's columns; exchanges them. `local`: [3, tokens] fp32.
    `targets`: [tokens] int64. `options`: label smoothing, z-loss and ignore index. Returns [tokens] fp32, and what
    backward needs. Raises ValueError where the exchange gives the tensors of too few ranks, or of too many."""
    gathered = share.exchange(local)  # [ranks, 3, tokens]
    require(
        gathered.shape[0] == len(share.bounds),
        f"exchange gave the tensors of {gathered.shape[0]} ranks: it must give those of {len(share.bounds)}, like "
        "bounds",
    )
    whole = merged(gathered, targets, bounds=share.bounds, vocab_size=share.vocab_size, options=options)
    loss, log_z = _losses(whole, targets, share.vocab_size, options.ignore_index, options.z_loss)
    return loss, SoftmaxSums(targets, whole[0], whole[1], log_z)


class GradientOfLogits:
    """Turns logits into their gradient, a few columns at a time or all at once. `grad_loss`: [...], of each token's
    loss. `sums`: from `losses`, as whose arguments the others are."""

    def __init__(
        self, grad_loss: Tensor, sums: SoftmaxSums, *, share: VocabularyShare, options: CrossEntropyOptions
    ) -> None:
        ignored = sums.targets == options.ignore_index
        self._loss_weight = grad_loss.reshape(-1).float().masked_fill(ignored, 0.0)
        self._softmax_weight = self._loss_weight / sums.total
        if options.z_loss:
            self._softmax_weight *= 1.0 + 2.0 * options.z_loss * sums.log_z
        self._targets, self._peak = sums.targets, sums.peak
        self._options = (options.ignore_index, *options.weights(share.vocab_size))

    def write_(self, logits: Tensor, *, start: int, columns: int) -> None:
        """Replace logits [tokens, width], arguments as for `statistics`, by their gradient; that of padding is 0."""
        weights = (self._softmax_weight, self._loss_weight)
        _gradient_(logits, self._targets, self._peak, *weights, start, columns, *self._options)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    options: CrossEntropyOptions | None = None,
    share: VocabularyShare | None = None,
) -> Tensor:
    """Loss per token in fp32, from this rank's share of the logits. Returns [...] fp32; `F.cross_entropy(...,
    reduction="none")` of the whole logits. NaN for a target that no id is. Raises ValueError where an argument's
    device, dtype or shape does not fit.

    Args:
        logits: [..., width], the share's columns followed by padding, which is not looked at; fp32, fp16 or bf16.
        targets: [...] int64, ids of the whole vocabulary or `options.ignore_index`.
        options: label smoothing, z-loss, ignore index, in-place gradient.
        share: which columns these are. None: all.
    """
    require_rows(logits=logits)
    options = options or CrossEntropyOptions()
    share = share or VocabularyShare(((0, logits.shape[-1]),))
    floats = (torch.float32, torch.float16, torch.bfloat16)
    require(logits.dtype in floats, f"logits is {logits.dtype}: it must be float32, float16 or bfloat16")
    require_same_device(logits=logits, targets=targets)
    require_integers(targets=targets)
    require_shape(logits.shape[:-1], "like logits without its last dimension", targets=targets)
    require(
        logits.shape[-1] >= share.columns,
        f"logits has {logits.shape[-1]} columns: the share has {share.columns} of them",
    )
    logits = logits.contiguous()
    # Where nothing needs a gradient there is no backward that would write one.
    if options.in_place and logits.is_leaf and logits.requires_grad and torch.is_grad_enabled():
        raise ValueError("logits is a leaf, whose value must stay: use in_place only on the output of a layer")
    result: Tensor = _CrossEntropy.apply(logits, targets, share, options)
    return result


def summed_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    options: CrossEntropyOptions | None = None,
    share: VocabularyShare | None = None,
) -> Tensor:
    """`cross_entropy` times the mask [...] of the tokens that count, summed: a scalar in fp32."""
    return torch.sum(cross_entropy(logits, targets, options=options, share=share) * mask)
