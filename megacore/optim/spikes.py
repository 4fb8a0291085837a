"""The spike guard's rule: which losses and gradient norms are too large to be noise.

A value is a spike if it is above median + k x robust deviation of the last accepted values of its kind. The robust
deviation is 1.4826 x the median absolute deviation: for normally distributed values their standard deviation, and
almost half of the values may be outliers without effect on it. A spike is not accepted, so that it does not widen the
limit of the next steps. The rule sees only numbers that are reduced over all ranks, so every rank decides alike. Limits
are known before a step, so that a device can apply them without the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megacore.config.watch import SpikeConfig

_NORMAL = 1.4826  # standard deviation of a normal distribution, in median absolute deviations
# Least deviation, of the median: values that hardly vary make no spike of a small change. Norms have longer tails.
_LEAST_OF_LOSS, _LEAST_OF_NORM = 0.01, 0.1


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest value that is no spike."""

    value: float = math.inf  # infinite where the guard is not active
    median: float = math.nan  # of the accepted values
    deviation: float = math.nan  # their robust deviation


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a step."""

    loss: Limit = Limit()
    norm: Limit = Limit()

    def are_exceeded(self, loss: Tensor, norm: Tensor) -> Tensor:
        """What `exceeded` tells the host later, on the device."""
        return (loss > self.loss.value) | (norm > self.norm.value)

    def exceeded(self, loss: float, norm: float) -> str | None:
        """In words; None if neither is."""
        pairs = (("loss", loss, self.loss), ("gradient norm", norm, self.norm))
        exceeded = [
            f"the {name} {value:.4g} is above {limit.value:.4g} (median {limit.median:.4g}, robust deviation "
            f"{limit.deviation:.3g})"
            for name, value, limit in pairs
            if value > limit.value
        ]
        return " and ".join(exceeded) or None


_NO_LIMITS = Limits()


class SpikeGuard:
    """Judges the loss and the gradient norm of every step by those before. `warmup_steps`: steps of the learning rate's
    warm-up, in which nothing is judged. `in_a_row`: spikes since the last accepted step."""

    def __init__(self, config: SpikeConfig, *, warmup_steps: int) -> None:
        self._config, self._warmup_steps = config, warmup_steps
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self.total = self.in_a_row = 0  # spikes so far, and since the last accepted step

    @property
    def prevents_update(self) -> bool:
        """Whether the step of a spike leaves the weights as they are."""
        return self._config.on_spike in ("skip", "rollback")

    def limits(self, step: int) -> Limits:
        is_on = self._config.on_spike != "none" and step > self._warmup_steps
        if not is_on or len(self._losses) < self._least:
            return _NO_LIMITS
        return Limits(loss=self._limit(self._losses, _LEAST_OF_LOSS), norm=self._limit(self._norms, _LEAST_OF_NORM))

    def accept(self, loss: float, norm: float) -> None:
        """Take the values of a step that is no spike. A step without a gradient says nothing."""
        self.in_a_row = 0
        if norm > 0.0 and self._config.on_spike != "none":
            self._losses.append(loss)
            self._norms.append(norm)

    def reject(self) -> None:
        """Count a spike. As many applied in a row as make the guard active are the new level: the window begins
        anew."""
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if not self.prevents_update and self.in_a_row >= self._least:
            self._losses.clear()
            self._norms.clear()
            self.in_a_row = 0

    def counters(self) -> dict[str, float]:
        return {"spikes": self.total, "spikes_in_a_row": self.in_a_row}

    def series(self) -> dict[str, list[float]]:
        return {"accepted_losses": list(self._losses), "accepted_norms": list(self._norms)}

    def load(self, counters: Mapping[str, float], series: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint. One without these numbers, or with another window, is continued too."""
        self.total = int(counters.get("spikes", 0))
        self.in_a_row = int(counters.get("spikes_in_a_row", 0))
        self._losses = deque(series.get("accepted_losses", ()), maxlen=self._config.spike_window)
        self._norms = deque(series.get("accepted_norms", ()), maxlen=self._config.spike_window)

    @property
    def _least(self) -> int:
        """Number of accepted values from which on the guard is active."""
        return self._config.spike_window // 2

    def _limit(self, values: Sequence[float], least: float) -> Limit:
        ordered = sorted(values)
        middle = _median(ordered)
        spread = _NORMAL * _median(sorted([abs(value - middle) for value in ordered]))
        deviation = max(spread, least * abs(middle))
        return Limit(value=middle + self._config.spike_threshold * deviation, median=middle, deviation=deviation)


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
