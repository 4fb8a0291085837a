"""The section of the maximal update parametrization, muP (Yang et al. 2022, arXiv 2203.03466, table 8).

Hyperparameters that were tuned at one width apply at any other: with the width, the initial values and learning rates
of hidden matrices shrink, and so do logits and attention scores. At the base width the model is the usual one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from megacore.config.fields import Range, Section, field_infos
from megacore.config.messages import number, one_of
from megacore.config.model import ModelConfig
from megacore.config.spelling import flag_and_value

_OPTIMIZERS = ("adamw", "adam", "lion")


@dataclass(frozen=True, kw_only=True)
class MupConfig(Section):
    """muP: hyperparameters that fit models of any width."""

    mup_base_width: Annotated[int | None, Range(1)] = None
    """Applies muP (docs/reference/optimizers.md): --lr, --init-method-std and --weight-decay are those of a model with
    this --hidden-size. Default: no muP."""
    mup_base_head_size: Annotated[int | None, Range(1)] = None
    """Head size of the model of --mup-base-width, if it differs. Default: that of this model."""

    def ratio(self, hidden_size: int) -> float:
        """How many times as wide as the base a model is; 1 without muP."""
        return 1.0 if self.mup_base_width is None else hidden_size / self.mup_base_width

    def multipliers(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of a model that follow its width."""
        if self.mup_base_width is None:
            return {}
        base, size = self.mup_base_head_size, model.head_size
        scores = {} if base in (None, size) else {"attention_multiplier": math.sqrt(base or size) / size}
        return {"logits_divisor": self.ratio(model.hidden_size), **scores}

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.mup_base_width is None and "mup_base_width" not in wrong:
            yield from self.without_effect(("mup_base_head_size",), wrong, "no --mup-base-width", "--mup-base-width")


def mup_problems(mup: MupConfig, model: ModelConfig, optimizer: str, *, has_experts: bool) -> Iterator[str]:
    """What muP does not go together with.

    Args:
        mup: valid by itself.
        model: likewise.
        optimizer: its name.
        has_experts: whether the model has experts.
    """
    if mup.mup_base_width is None:
        return
    given = f"--mup-base-width {mup.mup_base_width}"
    if optimizer not in _OPTIMIZERS:
        yield (
            f"{given} has no rule for the learning rates of --optimizer {optimizer}: use --optimizer "
            f"{one_of(_OPTIMIZERS)}, or leave it out"
        )
    if has_experts:
        yield f"{given} has no rule for routers: leave it out, or --num-experts"
    if model.multi_latent_attention:
        yield f"{given} has no rule for --multi-latent-attention: leave one of them out"
    for name, value in mup.multipliers(model).items():
        found = getattr(model, name)
        if found not in (field_infos(ModelConfig)[name].default, value):
            yield f"{given} sets {flag_and_value(name, value)} and not {number(found)}: leave one of the flags out"
