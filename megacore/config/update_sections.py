"""The sections of the configuration that say how weights are updated: number formats, the optimizer and its schedule.

As in sections.py, which has the others: a field's name is its flag, its annotation what is allowed, its docstring the
help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.messages import number

# Backward begins with the scale in fp32, where it must be neither 0 nor infinite.
_LOSS_SCALES = Range(1e-37, 1e38)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Number formats, and the loss scale of fp16."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Format of parameters and activations. Master weights and moments are fp32 in any case, and accumulated gradients
    unless --grad-reduce-dtype says otherwise."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated and reduced."""
    loss_scale: Annotated[float | None, _LOSS_SCALES, Flag()] = None
    """Fixed loss scale of --precision fp16. None: dynamic."""
    initial_loss_scale: Annotated[float, _LOSS_SCALES] = 65536.0
    """Loss scale that --precision fp16 begins with."""
    min_loss_scale: Annotated[float, _LOSS_SCALES] = 1.0
    """Smallest loss scale; an overflow that would halve it further stops the run."""
    loss_scale_window: Annotated[int, Range(1)] = 1000
    """Steps in a row without overflow after which the loss scale doubles."""
    hysteresis: Annotated[int, Range(1)] = 2
    """Overflows after which the loss scale halves; further ones halve it each, until it has doubled again."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if "precision" in wrong:
            return
        if self.precision != "fp16":
            scale = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
            yield from self.without_effect(scale, wrong, f"--precision {self.precision}", "--precision fp16")
        elif self.loss_scale is not None and "loss_scale" not in wrong:
            dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
            fixed = f"--loss-scale {number(self.loss_scale)}, which is fixed"
            yield from self.without_effect(dynamic, wrong, fixed, "a dynamic scale, without --loss-scale")
            return
        if self.initial_loss_scale < self.min_loss_scale:
            yield (
                f"--initial-loss-scale {number(self.initial_loss_scale)} must be at least --min-loss-scale "
                f"{number(self.min_loss_scale)}: use --initial-loss-scale {number(self.min_loss_scale)} or more"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw: decoupled weight decay. sgd: with --sgd-momentum."""
    lr: Annotated[float, Range(above=0)] = 3e-4
    """Highest learning rate, reached after the warm-up."""
    min_lr: Annotated[float, Range(0)] = 0.0
    """Learning rate at the end of the decay; at most --lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """How the learning rate falls from --lr to --min-lr after the warm-up. WSD: constant, then a decay over the last
    --lr-wsd-decay-iters."""
    lr_decay_iters: Annotated[int | None, Range(1)] = None
    """Step at which the decay ends, warm-up included. None: --train-iters."""
    lr_warmup_iters: Annotated[int, Range(0)] = 0
    """Steps over which the learning rate rises linearly from 0 to --lr. 0: no warm-up."""
    lr_wsd_decay_iters: Annotated[int | None, Range(1)] = None
    """Steps of the final decay of --lr-decay-style WSD, which needs it."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the final decay of --lr-decay-style WSD."""
    weight_decay: Annotated[float, Range(0)] = 0.01
    """Weight decay of matrices; biases and norms have none. 0: off."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Largest global gradient norm (2-norm); larger gradients are scaled down to it. 0: no clipping."""
    adam_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay of AdamW's running mean of gradients."""
    adam_beta2: Annotated[float, Range(0, below=1)] = 0.999
    """Decay of AdamW's running mean of squared gradients."""
    adam_eps: Annotated[float, Range(above=0)] = 1e-8
    """Added to AdamW's denominator."""
    sgd_momentum: Annotated[float, Range(0, below=1)] = 0.9
    """Momentum of --optimizer sgd. 0: plain SGD."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        lr, min_lr = number(self.lr), number(self.min_lr)
        if not wrong & {"lr", "min_lr"} and self.min_lr > self.lr:
            yield f"--min-lr {min_lr} must be at most --lr {lr}: use --min-lr {lr} or less, or a larger --lr"
        if self.optimizer != "sgd" and "optimizer" not in wrong:
            yield from self.without_effect(("sgd_momentum",), wrong, f"--optimizer {self.optimizer}", "--optimizer sgd")
        if wrong & {"lr_decay_style", "lr_wsd_decay_iters"}:
            return
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            yield (
                "--lr-decay-style WSD needs the length of its final decay: "
                "give --lr-wsd-decay-iters, for example a tenth of --train-iters"
            )
        if self.lr_decay_style != "WSD" and self.lr_wsd_decay_iters is not None:
            yield (
                f"--lr-wsd-decay-iters {self.lr_wsd_decay_iters} has no effect with --lr-decay-style "
                f"{self.lr_decay_style}: leave it out, or use --lr-decay-style WSD"
            )
