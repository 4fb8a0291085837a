"""The section of the optimizer: which one, its learning-rate schedule, weight decay, clipping and parameter groups.

The settings of each optimizer are in optimizers.py; the schedules are computed in megacore/optim/lr_schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from megacore.config.fields import Choices, Flag, Range, Section
from megacore.config.messages import number
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.parameter_groups import ParameterGroups, parse_rules


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its learning-rate schedule, weight decay and clipping."""

    optimizer: Annotated[str, Choices(OPTIMIZERS)] = "adamw"
    """Optimizer. adamw: Adam with decoupled weight decay. adam: Adam whose weight decay is added to the gradient. sgd:
    stochastic gradient descent with --sgd-momentum. lion: Lion, steps along the sign of a momentum. lamb: LAMB, Adam
    whose step has the norm of the matrix that it changes. The section of the same name has its settings
    (docs/optimizers.md)."""
    lr: Annotated[float, Range(above=0)] = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: Annotated[float | None, Range(0)] = None
    """Learning rate at the end of the decay. At most --lr. Default: a tenth of --lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the learning rate's decay from --lr to --min-lr. WSD: constant, then a decay over the last
    --lr-wsd-decay-iters steps."""
    lr_decay_iters: Annotated[int | None, Range(1)] = None
    """Step at which the decay ends, counted from the start of the warm-up. Default: --train-iters."""
    lr_warmup_iters: Annotated[int, Range(0)] = 0
    """Number of steps over which the learning rate rises linearly from 0 to --lr. 0: no warm-up."""
    lr_wsd_decay_iters: Annotated[int | None, Range(1)] = None
    """Number of steps of the final decay of --lr-decay-style WSD. Default: none; WSD requires it."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the final decay of --lr-decay-style WSD."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of matrices. Biases and norm weights are not decayed. 0: off."""
    param_group: Annotated[tuple[str, ...], Flag(metavar="PATTERN:SETTINGS")] = ()
    """Parameters with other rates (docs/optimizers.md). PATTERN is of global names, such as blocks.*.bias; SETTINGS are
    lr=FACTOR, weight-decay=FACTOR, both with a comma between, or freeze. The first match counts. Default: none."""
    lr_layer_decay: Annotated[float, Range(above=0, high=1)] = 1.0
    """Layer-wise decay of the learning rate: each block learns at this times the rate of the block after it, and the
    embedding at this times the rate of the first block. 1: off."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Gradient clipping: gradients are scaled down so that their global 2-norm is at most this. 0: no clipping."""
    clip_grad_adaptive: bool = False
    """Also clips gradients whose norm is far above its moving mean (ZClip, docs/spikes.md): where its z-score z exceeds
    --clip-grad-z-threshold T, to mean + T^2 x deviation / z."""
    clip_grad_z_threshold: Annotated[float, Range(above=0)] = 2.5
    """Z-score of the gradient norm above which --clip-grad-adaptive clips."""
    clip_grad_decay: Annotated[float, Range(0, below=1)] = 0.97
    """Decay rate of the moving mean and variance of --clip-grad-adaptive."""
    clip_grad_warmup_iters: Annotated[int, Range(2, 1_000_000)] = 25
    """Number of steps that give --clip-grad-adaptive its first mean and variance. In these only --clip-grad clips."""

    @property
    def final_decay_iters(self) -> int:
        """Length of the final decay of --lr-decay-style WSD, in steps; 0 with other styles."""
        return self.lr_wsd_decay_iters or 0

    @property
    def end_lr(self) -> float:
        """Learning rate at the end of the decay."""
        # Rounded as people write it: 3e-4 / 10 is 2.9999999999999997e-05.
        return float(f"{self.lr / 10:.12g}") if self.min_lr is None else self.min_lr

    def parameter_groups(self, num_layers: int) -> ParameterGroups:
        """The scale of every parameter.

        Args:
            num_layers: blocks of the model.
        """
        rules = parse_rules(self.param_group)
        return ParameterGroups(rules=rules, layer_decay=self.lr_layer_decay, num_layers=num_layers)

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        for text in self.param_group if "param_group" not in wrong else ():
            try:
                parse_rules([text])
            except ValueError as error:
                yield str(error)
        if not self.clip_grad_adaptive and "clip_grad_adaptive" not in wrong:
            names = ("clip_grad_z_threshold", "clip_grad_decay", "clip_grad_warmup_iters")
            yield from self.without_effect(names, wrong, "--no-clip-grad-adaptive", "--clip-grad-adaptive")
        if self.min_lr is not None and not wrong & {"lr", "min_lr"} and self.min_lr > self.lr:
            lr, min_lr = number(self.lr), number(self.min_lr)
            yield f"--min-lr {min_lr} must be at most --lr {lr}: use --min-lr {lr} or less, or a larger --lr"
        if wrong & {"lr_decay_style", "lr_wsd_decay_iters"}:
            return
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            yield (
                "--lr-decay-style WSD needs the length of its final decay: "
                "use --lr-wsd-decay-iters, for example with a tenth of --train-iters"
            )
        if self.lr_decay_style != "WSD" and self.lr_wsd_decay_iters is not None:
            yield (
                f"--lr-wsd-decay-iters {self.lr_wsd_decay_iters} has no effect with --lr-decay-style "
                f"{self.lr_decay_style}: leave it out, or use --lr-decay-style WSD"
            )


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer(OptimizerConfig):
    """The optimizer section of a run whose length is known."""

    min_lr: float = field()
    lr_decay_iters: int = field()
