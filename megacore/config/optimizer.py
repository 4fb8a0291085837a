"""The section of the optimizer: which one, its learning-rate schedule, weight decay, clipping and parameter groups. The
settings of each optimizer are in optimizers.py; the schedules are computed in megacore/optim/lr_schedules.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.fields import Choices, Flag, Range, Section
from megacore.config.lr_styles import LR_DECAY_STYLES
from megacore.config.messages import number
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings
from megacore.config.parameter_groups import ParameterGroups, parse_rules
from megacore.config.presets import RECIPES
from megacore.config.rules import AtMost, Needs, Rule, Settings, rows


def _parameter_groups(c: Settings) -> Iterator[str]:
    for text in c.param_group:
        try:
            parse_rules([text])
        except ValueError as error:
            yield str(error)


def _decoupled(c: Settings) -> Iterator[str]:
    """That the rate of the embedding and the output layer falls."""
    peak, least = c.decoupled_lr, c.decoupled_min_lr
    if peak is not None and (end := c.end_lr if least is None else least) > peak:
        follows = "" if least is not None else ", which is that of --min-lr,"
        yield (
            f"--decoupled-lr min={number(end)}{follows} must be at most --decoupled-lr {number(peak)}: use "
            f"--decoupled-lr min={number(peak)} or less, or a larger --decoupled-lr"
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its schedules and clipping."""

    rules: ClassVar[Sequence[Rule]] = (
        _parameter_groups,
        AtMost("min_lr", "lr"),
        _decoupled,
        AtMost("lr_warmup_init", "decoupled_lr", when=("lr_range_test=False",)),
        AtMost("lr_range_test_start", "decoupled_lr", when=("lr_range_test",)),
        AtMost("lr_warmup_init", "lr"),
        AtMost("lr_range_test_start", "lr", strict=True, why=", the last rate of the test", when=("lr_range_test",)),
        *rows("optimizer"),
    )
    former_defaults: ClassVar[Mapping[str, Any]] = {"lr_warmup_init": 0.0}

    optimizer: Annotated[str, Choices(OPTIMIZERS)] = "adamw"
    """Optimizer. adamw: Adam with decoupled weight decay. adam: with weight decay in the gradient. sgd: with momentum.
    lion: Lion. lamb: LAMB. onebitadam: 1-bit Adam. onebitlamb: 1-bit LAMB. muon: Muon for the matrices of blocks, AdamW
    for the rest. adafactor: Adafactor. Its settings are parameters, which the section of its name lists
    (docs/reference/optimizers.md)."""
    recipe: Annotated[str | None, Choices(RECIPES)] = None
    """Sets optimizer, rates and initial values for a model of any shape. fast: Muon, a linear decay and muP
    (docs/reference/optimizers.md). Default: none."""
    lr: Annotated[float, Range(above=0)] = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: Annotated[float | None, Range(0)] = None
    """Learning rate at the end of the decay. At most --lr. Default: a tenth of --lr."""
    decoupled_lr: Annotated[float | None, Range(above=0), Flag(example=1e-3)] = None
    """Peak learning rate of the token embedding and of the output layer, with the same schedule. Default: --lr."""
    decoupled_min_lr: Annotated[float | None, Range(0)] = None
    """Their learning rate at the end of the decay. At most --decoupled-lr. Default: --min-lr."""
    lr_decay_style: Annotated[str, Choices(LR_DECAY_STYLES)] = "cosine"
    """Decay of the learning rate from --lr to --min-lr. WSD: constant, then a decay over the last wsd-decay-iters
    steps. polynomial: with power. cosine-restarts: back to --lr after every restart-iters steps. 1cycle: up and down,
    while the momentum goes down and up."""
    lr_decay_iters: Annotated[int | None, Range(1)] = None
    """Step at which the decay ends, counted from the start of the warm-up. Default: --train-iters."""
    lr_warmup_iters: Annotated[int, Range(0)] = 0
    """Steps of the warm-up, in which the learning rate rises to --lr."""
    lr_warmup_style: Annotated[Literal["linear", "log"], Needs(lr_warmup_iters=range(2, 4))] = "linear"
    """Shape of the warm-up. log: --lr x log(step) / log(--lr-warmup-iters)."""
    lr_warmup_init: Annotated[float | None, Range(0), Needs(lr_warmup_iters=range(1, 3))] = None
    """Learning rate at the start of the warm-up. At most --lr. Default: 0; a 25th of --lr with 1cycle."""
    lr_wsd_decay_iters: Annotated[int | None, Range(1), Needs(lr_decay_style="WSD")] = None
    """Steps of the final decay of WSD. Default: none; WSD requires it."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""
    lr_decay_power: Annotated[float, Range(above=0), Needs(lr_decay_style="polynomial")] = 2.0
    """Power of polynomial. 1: linear."""
    lr_restart_iters: Annotated[int | None, Range(1), Needs(lr_decay_style="cosine-restarts")] = None
    """Steps of the first cycle of cosine-restarts, after the warm-up. Default: none; that style requires it."""
    lr_restart_factor: Annotated[float, Range(1), Needs(lr_decay_style="cosine-restarts")] = 1.0
    """Length of each cycle of cosine-restarts / length of the one before."""
    lr_cycle_momentum: Annotated[float, Range(0, below=1), Needs(lr_decay_style="1cycle")] = 0.85
    """Momentum (Adam's beta1) at the peak of 1cycle. Not for plain SGD and Adafactor, which have none."""
    lr_cycle_style: Annotated[Literal["cosine", "linear"], Needs(lr_decay_style="1cycle")] = "cosine"
    """Shape of the rise and the fall of 1cycle."""
    lr_range_test: bool = False
    """Range test instead of training: the rate rises exponentially from start to --lr, and
    OUTPUT_DIR/lr_range_test.svg shows the losses (docs/reference/optimizers.md)."""
    lr_range_test_start: Annotated[float, Range(above=0)] = 1e-7
    """First learning rate of --lr-range-test. Below --lr."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of matrices. Biases and norm weights have none, unless --param-group says so."""
    start_weight_decay: Annotated[float | None, Range(0), Needs(weight_decay_incr_style=("linear", "cosine"))] = None
    """Weight decay at the first step, with style=linear or cosine. Default: none."""
    end_weight_decay: Annotated[float | None, Range(0), Needs(weight_decay_incr_style=("linear", "cosine"))] = None
    """Weight decay at --train-iters, with style=linear or cosine. Default: none."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the weight decay. constant: --weight-decay. linear and cosine: from start to end."""
    param_group: Annotated[tuple[str, ...], Flag(metavar="PATTERN:SETTINGS")] = ()
    """Other rates for parameters whose global names match PATTERN: lr=FACTOR, weight-decay=FACTOR and
    vector-decay=FACTOR, separated by commas, or freeze. The first match applies (docs/reference/optimizers.md)."""
    lr_layer_decay: Annotated[float, Range(above=0, high=1)] = 1.0
    """Each block learns at this times the rate of the next block. 1: off."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Scales gradients down so that their global 2-norm is at most this. 0: off."""
    clip_grad_adaptive: bool = False
    """Also clips gradients whose norm is far above its moving mean (ZClip, docs/guides/spikes.md)."""
    clip_grad_z_threshold: Annotated[float, Range(above=0)] = 2.5
    """Z-score of the norm above which --clip-grad-adaptive clips."""
    clip_grad_decay: Annotated[float, Range(0, below=1)] = 0.97
    """Decay rate of the moving mean and variance of --clip-grad-adaptive."""
    clip_grad_warmup_iters: Annotated[int, Range(2, 1_000_000)] = 25
    """Steps that give --clip-grad-adaptive its first mean and variance, and in which only --clip-grad clips."""

    @property
    def first_cycle_lr(self) -> float:
        """Learning rate from which that of 1cycle rises."""
        return self.lr / 25 if self.lr_warmup_init is None else self.lr_warmup_init

    @property
    def end_lr(self) -> float:
        """Learning rate at the end of the decay."""
        # Rounded as people write it: 3e-4 / 10 is 2.9999999999999997e-05.
        return float(f"{self.lr / 10:.12g}") if self.min_lr is None else self.min_lr

    @property
    def decoupled(self) -> OptimizerConfig | None:
        """This section with the learning rates of the embedding and the output layer; None: they have no others."""
        if self.decoupled_lr is None:
            return None
        end = self.end_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=end, decoupled_lr=None, decoupled_min_lr=None)

    def parameter_groups(self, num_layers: int, *, width_ratio: float, settings: OptimizerSettings) -> ParameterGroups:
        return ParameterGroups(
            rules=parse_rules(self.param_group),
            layer_decay=self.lr_layer_decay,
            num_layers=num_layers,
            decoupled=self.decoupled_lr is not None,
            width_ratio=width_ratio,
            settings=settings,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer(OptimizerConfig):
    """The optimizer section of a run whose length is known."""

    min_lr: float = field()
    lr_decay_iters: int = field()
