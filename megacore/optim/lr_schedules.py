"""The learning rate of a step: warm-up, then a decay; pure functions of the step and the configuration."""

from __future__ import annotations

import math

from megacore.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, *, train_iters: int) -> float:
    """The rate of update `step`, counted from 1.

    The rate rises to `lr` over the warm-up, linearly or with the logarithm of the step; the last update of the warm-up
    uses `lr` itself. It reaches `end_lr` at update `lr_decay_iters`, after which it stays there. WSD (Hu et al. 2024,
    arXiv 2404.06395) holds `lr` until the last `lr_wsd_decay_iters` updates.

    Args:
        step: number of the update, 1 for the first.
        config: shape of the schedule.
        train_iters: length of the run, where the decay ends unless `lr_decay_iters` says otherwise.
    """
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if step < warmup:
        if config.lr_warmup_style == "log":
            return config.lr * math.log(max(step, 1)) / math.log(warmup)
        return config.lr * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "inverse-square-root":
        return max(config.end_lr, config.lr * math.sqrt(max(warmup, 1) / step))
    if step >= end:
        return config.end_lr
    if config.lr_decay_style == "WSD":
        begin = max(warmup, end - config.final_decay_iters)
        return config.end_lr + (config.lr - config.end_lr) * _remaining(config.lr_wsd_decay_style, step, begin, end)
    return config.end_lr + (config.lr - config.end_lr) * _remaining(config.lr_decay_style, step, warmup, end)


def _remaining(style: str, step: int, begin: int, end: int) -> float:
    """Share of the way from lr to end_lr that is left: 1 at `begin`, 0 at `end`."""
    progress = min(max(step - begin, 0) / max(end - begin, 1), 1.0)
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if style == "exponential":
        return 2.0 * 0.5**progress - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(progress)
