"""Cross-entropy on a rank's share of the vocabulary: one pass over the logits forward, one in place backward.

Forward leaves three floats a token, which ranks exchange: the largest logit, the sum of exponentials relative to it,
and the part of the loss that is linear in the logits, relative to it too, so that large logits cost no precision. One
kernel merges those of all ranks, one makes losses of them. Backward writes the gradient over the logits. Forward does
not read a token whose target is ignored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacore.kernels.launch import block_of, blocks_of, launchable, warps_of

_CHUNK = 8192
TOKENS = 256  # of a program that merges statistics
_LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below any logit, and finite: its differences are never NaN


@launchable
@triton.jit
def _forward(
    logits_ptr, targets_ptr, statistics_ptr, tokens, width, columns, start, ignore_index, target_weight, uniform_weight,
    SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    target = tl.load(targets_ptr + token)
    logits_ptr += token.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    peak = _LOWEST
    total = 0.0
    uniform = 0.0
    # Two stages: the next columns are on their way to shared memory while these are summed.
    for begin in tl.range(0, tl.where(target == ignore_index, 0, columns), BLOCK, num_stages=2):
        column = begin + lanes
        # Padding is loaded and then hidden: a mask at the exact edge would make every load a scalar one.
        x = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
        x = tl.where(column < columns, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        if SMOOTHING:
            uniform += begin * (peak - higher) + tl.sum(tl.where(column < columns, x - higher, 0.0), 0)
        peak = higher
    local = target - start
    here = (target != ignore_index) & (local >= 0) & (local < columns)
    hit = tl.load(logits_ptr + tl.where(here, local, 0), mask=here, other=0.0).to(tl.float32)
    linear = tl.where(here, target_weight * (hit - peak), 0.0)
    if SMOOTHING:
        linear += uniform_weight * uniform
    tl.store(statistics_ptr + token, peak)
    tl.store(statistics_ptr + tokens + token, total)
    tl.store(statistics_ptr + 2 * tokens + token, linear)


@launchable
@triton.jit
def _merge(
    parts_ptr, targets_ptr, merged_ptr, tokens, target_weight, uniform_weight,
    BOUNDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    target = tl.load(targets_ptr + token, mask=mask, other=-1)
    peak = tl.full((BLOCK,), _LOWEST, tl.float32)
    for part in tl.static_range(PARTS):
        peak = tl.maximum(peak, tl.load(parts_ptr + 3 * part * tokens + token, mask=mask, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    linear = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = parts_ptr + 3 * part * tokens + token
        distance = tl.load(at, mask=mask, other=0.0) - peak
        total += tl.load(at + tokens, mask=mask, other=0.0) * tl.exp(distance)
        here = (target >= BOUNDS[2 * part]) & (target < BOUNDS[2 * part + 1])
        weight = tl.where(here, target_weight, 0.0) + uniform_weight * (BOUNDS[2 * part + 1] - BOUNDS[2 * part])
        linear += tl.load(at + 2 * tokens, mask=mask, other=0.0) + distance * weight
    tl.store(merged_ptr + token, peak, mask=mask)
    tl.store(merged_ptr + tokens + token, total, mask=mask)
    tl.store(merged_ptr + 2 * tokens + token, linear, mask=mask)


@launchable
@triton.jit
def _loss(
    statistics_ptr, targets_ptr, loss_ptr, log_z_ptr, tokens, vocab_size, ignore_index, z_loss, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    target = tl.load(targets_ptr + token, mask=mask, other=0)
    peak = tl.load(statistics_ptr + token, mask=mask, other=0.0)
    log_total = tl.log(tl.load(statistics_ptr + tokens + token, mask=mask, other=1.0))
    log_z = log_total + peak
    loss = log_total - tl.load(statistics_ptr + 2 * tokens + token, mask=mask, other=0.0) + z_loss * log_z * log_z
    loss = tl.where((target < 0) | (target >= vocab_size), float("nan"), loss)
    loss = tl.where(target == ignore_index, 0.0, loss)
    tl.store(loss_ptr + token, loss, mask=mask)
    tl.store(log_z_ptr + token, log_z, mask=mask)


@launchable
@triton.jit
def _backward(
    logits_ptr, targets_ptr, peak_ptr, softmax_weight_ptr, loss_weight_ptr, width, columns, start, ignore_index,
    target_weight, uniform_weight, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + token)
    peak = tl.load(peak_ptr + token)
    weight = tl.load(loss_weight_ptr + token)
    logits_ptr += token.to(tl.int64) * width
    x = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
    grad = tl.exp(x - peak) * tl.load(softmax_weight_ptr + token) - weight * uniform_weight
    grad -= tl.where(column == target - start, weight * target_weight, 0.0)
    grad = tl.where((column < columns) & (target != ignore_index), grad, 0.0)
    tl.store(logits_ptr + column, grad.to(logits_ptr.dtype.element_ty), mask=column < width)


def statistics(
    logits: Tensor, targets: Tensor, *, start: int, columns: int, ignore_index: int, weights: tuple[float, float]
) -> Tensor:
    """What a rank knows of each token's loss. Returns [3, tokens] fp32: largest logit m; sum of exp(x - m); weighted
    sum of x - m.

    Args:
        logits: [tokens, width] contiguous; columns from `columns` on are padding.
        targets: [tokens] int64 contiguous.
        start: the id of the first column.
        ignore_index: the target of tokens that do not count.
        weights: of the target's logit in the loss, and of every logit (label smoothing; 0 for none).
    """
    assert logits.is_contiguous() and targets.is_contiguous()
    tokens, width = logits.shape
    found = torch.empty((3, tokens), dtype=torch.float32, device=logits.device)
    if tokens:
        block = min(_CHUNK, block_of(width))
        _forward[(tokens,)](
            logits, targets, found, tokens, width, columns, start, ignore_index, *weights,
            SMOOTHING=weights[1] != 0.0, BLOCK=block, num_warps=warps_of(block, 512),
        )  # fmt: skip
    return found


def merged(parts: Tensor, targets: Tensor, *, bounds: tuple[int, ...], weights: tuple[float, float]) -> Tensor:
    """The statistics of all columns, [3, tokens] fp32, from `parts`, [parts, 3, tokens] fp32 contiguous, as
    `statistics` gives them. `targets`: [tokens] int64. `bounds`: start and stop of each part's ids. `weights`: as in
    `statistics`."""
    assert parts.is_contiguous() and targets.is_contiguous()
    tokens = targets.shape[0]
    found = torch.empty((3, tokens), dtype=torch.float32, device=parts.device)
    if tokens:
        _merge[(blocks_of(tokens, TOKENS),)](
            parts, targets, found, tokens, *weights, BOUNDS=bounds, PARTS=len(bounds) // 2, BLOCK=TOKENS,
            num_warps=warps_of(TOKENS, 64),
        )  # fmt: skip
    return found


def losses(
    statistics: Tensor, targets: Tensor, *, vocab_size: int, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The loss of each token from the statistics of all columns. Returns the losses, and log(Z), [tokens] fp32 each.

    Args:
        statistics: [3, tokens] fp32 contiguous.
        targets: [tokens] int64; the loss of an ignored one is 0, and of one outside the vocabulary NaN.
        vocab_size: of the whole vocabulary.
        z_loss: weight of log(Z)^2.
    """
    assert statistics.is_contiguous() and targets.is_contiguous()
    tokens = targets.shape[0]
    loss, log_z = (torch.empty(tokens, dtype=torch.float32, device=targets.device) for _ in range(2))
    if tokens:
        _loss[(blocks_of(tokens, TOKENS),)](
            statistics, targets, loss, log_z, tokens, vocab_size, ignore_index, z_loss, BLOCK=TOKENS,
            num_warps=warps_of(TOKENS, 64),
        )  # fmt: skip
    return loss, log_z


def gradient_(
    logits: Tensor, targets: Tensor, peak: Tensor, softmax_weight: Tensor, loss_weight: Tensor, *,
    start: int, columns: int, ignore_index: int, weights: tuple[float, float],
) -> None:  # fmt: skip
    """Replace the logits by their gradient.

    Args:
        logits: as in `statistics`; padding and ignored tokens become 0.
        targets: as in `statistics`.
        peak: [tokens] fp32, largest logit over all ranks.
        softmax_weight: [tokens] fp32, what exp(x - peak) is multiplied by.
        loss_weight: [tokens] fp32, the gradient of the token's loss.
        start: as in `statistics`, and so are the others.
    """
    assert all(x.is_contiguous() for x in (logits, targets, peak, softmax_weight, loss_weight))
    tokens, width = logits.shape
    if tokens and width:
        block = min(_CHUNK, block_of(width))
        _backward[(tokens, blocks_of(width, block))](
            logits, targets, peak, softmax_weight, loss_weight, width, columns, start, ignore_index, *weights,
            BLOCK=block, num_warps=warps_of(block, 512),
        )  # fmt: skip
