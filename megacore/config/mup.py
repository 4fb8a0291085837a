"""The section of the maximal update parametrization, muP (Yang et al. 2022, arXiv 2203.03466, table 8). Hyperparameters
that were tuned at one width apply at any other: with the width, the initial values and learning rates of hidden
matrices shrink, and so do logits and attention scores. At the base width the model is the usual one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from megacore.config.fields import Range, Section
from megacore.config.model import ModelConfig

MUP_OPTIMIZERS = ("adamw", "adam", "lion")
"""Those for whose learning rates it has rules."""


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
