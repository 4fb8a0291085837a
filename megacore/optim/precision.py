"""Number formats of training, and the loss scale that keeps fp16 gradients in range.

Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740): parameters, activations and their gradients in 16 bits;
master weights, moments, accumulated and reduced gradients in fp32; norms, softmax and cross-entropy reduce in fp32.
"""

from __future__ import annotations

import torch

from megacore.config import PrecisionConfig
from megacore.errors import TrainingStopped

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Backward begins with the scale in fp32; 1e38 is the largest that can be configured, and its double is finite.
_LARGEST = 2.0**127


class LossScaler:
    """The factor by which the loss is multiplied before backward, and gradients are divided after.

    A dynamic scale doubles after `loss_scale_window` good steps in a row, and halves once `hysteresis` steps have
    overflowed without it having doubled in between; each further overflow then halves it again, until it has doubled.
    Outside fp16, and where `loss_scale` is given, the scale is
    fixed.

    Args:
        config: precision and the scale's rules, resolved.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self.dynamic = config.precision == "fp16" and config.loss_scale is None
        self.scale = config.loss_scale if config.loss_scale is not None else 1.0
        if self.dynamic:
            assert config.initial_loss_scale is not None, "resolve() fills it in"
            self.scale = config.initial_loss_scale
        self._good_steps, self._allowance = 0, config.hysteresis

    def good_step(self) -> None:
        """All gradients were finite."""
        if not self.dynamic:
            return
        self._good_steps += 1
        if self._good_steps % self._config.loss_scale_window == 0:
            self.scale = min(self.scale * 2.0, _LARGEST)
            self._allowance = self._config.hysteresis

    def overflow(self, where: str = "a gradient") -> None:
        """A gradient was not finite, though the loss was finite.

        Args:
            where: which gradient, for the message.

        Raises:
            TrainingStopped: the scale is at its minimum already.
        """
        if not self.dynamic:
            return
        self._good_steps = 0
        self._allowance -= 1
        if self._allowance > 0:
            return
        if self.scale <= self._config.min_loss_scale:
            raise TrainingStopped(
                f"{where} overflowed fp16 even at the smallest loss scale, --min-loss-scale "
                f"{self._config.min_loss_scale:g}: the run diverges. Use --precision bf16, a smaller --lr or a longer "
                "warm-up"
            )
        self.scale = max(self.scale / 2.0, self._config.min_loss_scale)

    def state(self) -> dict[str, float]:
        """What a resumed run needs; nothing where the scale is fixed."""
        if not self.dynamic:
            return {}
        return {"scale": self.scale, "good_steps": self._good_steps, "allowance": self._allowance}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from the state of a run with a dynamic scale; otherwise everything stays as configured."""
        if self.dynamic:
            self.scale = state.get("scale", self.scale)
            self._good_steps = int(state.get("good_steps", self._good_steps))
            self._allowance = int(state.get("allowance", self._allowance))
