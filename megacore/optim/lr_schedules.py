"""The learning rate, the weight decay and the momentum of a step: pure functions of the step and the configuration. A
resumed run therefore continues its schedules exactly, also on another layout."""

from __future__ import annotations

import math

from megacore.config import OptimizerConfig
from megacore.config.lr_styles import LR_SHAPES


def learning_rate(step: float, config: OptimizerConfig, *, train_iters: int) -> float:
    """The rate of update `step`, counted from 1.

    The rate rises to `lr` over the warm-up, linearly or with the logarithm of the step; the last update of the warm-up
    uses `lr` itself. It reaches `end_lr` at update `lr_decay_iters`, after which it stays there. WSD (Hu et al. 2024,
    arXiv 2404.06395) holds `lr` until the last `lr_wsd_decay_iters` updates. Restarts: Loshchilov and Hutter 2017
    (arXiv 1608.03983). 1Cycle: Smith and Topin 2018 (arXiv 1708.07120), with half-cosines or lines as in torch's
    OneCycleLR. The range test: Smith 2017 (arXiv 1506.01186).

    `step`: number of the update, 1 for the first. Where batches are smaller than the full batch (a ramp), a fraction:
    the samples so far in full batches. `train_iters`: length of the run, where the decay ends unless `lr_decay_iters`
    says otherwise.
    """
    if config.lr_range_test:
        progress = (step - 1) / max(train_iters - 1, 1)
        return config.lr_range_test_start * (config.lr / config.lr_range_test_start) ** progress
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if step < warmup:
        return _rising(step, config)
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "inverse-square-root":
        return max(config.end_lr, config.lr * math.sqrt(max(warmup, 1) / step))
    if step >= end:
        return config.end_lr
    if config.lr_decay_style == "WSD":
        begin = end - (config.lr_wsd_decay_iters or 0)
        return config.end_lr + (config.lr - config.end_lr) * _remaining(config.lr_wsd_decay_style, step, begin, end)
    if config.lr_decay_style == "cosine-restarts":
        remaining = _remaining("cosine", *_cycle(step, config))
    elif config.lr_decay_style == "polynomial":
        remaining = _remaining("linear", step, warmup, end) ** config.lr_decay_power
    else:
        style = config.lr_cycle_style if config.lr_decay_style == "1cycle" else config.lr_decay_style
        remaining = _remaining(style, step, warmup, end)
    return config.end_lr + (config.lr - config.end_lr) * remaining


def weight_decay(step: float, config: OptimizerConfig, *, train_iters: int) -> float:
    """The weight decay of update `step`, counted from 1; it reaches its last value at update `train_iters`."""
    first, last = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style == "constant" or first is None or last is None:
        return config.weight_decay
    return last + (first - last) * _remaining(config.weight_decay_incr_style, step, 0, train_iters)


def momentum(step: float, config: OptimizerConfig, *, usual: float, train_iters: int) -> float:
    """The momentum of update `step`, counted from 1. `step`: number of the update, 1 for the first."""
    if config.lr_decay_style != "1cycle" or config.lr_range_test:
        return usual
    warmup, end, least = config.lr_warmup_iters, config.lr_decay_iters or train_iters, config.lr_cycle_momentum
    if step < warmup:
        return least + (usual - least) * _remaining(config.lr_cycle_style, step, 1, warmup)
    return usual + (least - usual) * _remaining(config.lr_cycle_style, step, warmup, end)


def _rising(step: float, config: OptimizerConfig) -> float:
    """The rate of an update before the end of the warm-up."""
    first, warmup = config.lr_warmup_init or 0.0, config.lr_warmup_iters
    if config.lr_decay_style == "1cycle":
        return config.lr + (config.first_cycle_lr - config.lr) * _remaining(config.lr_cycle_style, step, 1, warmup)
    if config.lr_warmup_style == "log":
        return first + (config.lr - first) * math.log(max(step, 1)) / math.log(warmup)
    return first + (config.lr - first) * step / warmup


def _cycle(step: float, config: OptimizerConfig) -> tuple[float, float, float]:
    """The step, and where its cycle of restarts begins and ends."""
    begin, length = float(config.lr_warmup_iters), float(config.lr_restart_iters or 1)
    if config.lr_restart_factor == 1.0:
        begin += (step - begin) // length * length
    while step >= begin + length:
        begin, length = begin + length, length * config.lr_restart_factor
    return step, begin, begin + length


def _remaining(style: str, step: float, begin: float, end: float) -> float:
    """Share of the way from lr to end_lr that is left: 1 at `begin`, 0 at `end`."""
    progress = min(max(step - begin, 0) / max(end - begin, 1), 1.0)
    return LR_SHAPES[style](progress)
