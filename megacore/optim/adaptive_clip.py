"""Gradient clipping by z-score: ZClip (Kumar et al. 2025, arXiv 2504.02507).

With the exponential moving mean m and variance v of the global gradient norm g, whose z-score is z = (g - m) / sqrt(v):
where z is above its threshold T, gradients are clipped to the norm m + T^2 sqrt(v) / z, which falls from m + T sqrt(v)
towards m as the norm grows. Then m and v take in the norm after this clipping, so that a spike hardly moves them:
m = a m + (1 - a) g, and after that v = a v + (1 - a) (g - m)^2. As in the spike guard, the deviation sqrt(v) counts as
a tenth of m at least: with v = 0 no norm above m would ever pass, and m would stay where it is. During the warm-up
norms are only collected; their mean and variance are the first m and v. The fixed limit of --clip-grad holds too, in
the warm-up as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import OptimizerConfig

_EPSILON = 1e-6  # added to the standard deviation
_LEAST_DEVIATION = 0.1  # of the mean


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """Mean and variance of the gradient norm."""

    mean: float
    variance: float


class AdaptiveClip:
    """The limit of the gradient norm, by its past values; the same on every rank, because the norm is."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._threshold, self._decay = config.clip_grad_z_threshold, config.clip_grad_decay
        self._warmup = config.clip_grad_warmup_iters
        self._norms: list[float] = []  # of the warm-up
        self._moments: _Moments | None = None

    def limit(self, norm: Tensor) -> Tensor:
        """The largest norm that the gradients of this step may have; infinite where they are not clipped. `norm`: the
        global norm, an fp64 scalar, which may be on a device that is not waited for."""
        infinite = torch.full_like(norm, math.inf)
        if self._moments is None:
            return infinite
        mean = self._moments.mean
        deviation = max(math.sqrt(self._moments.variance), _LEAST_DEVIATION * mean)
        z = (norm - mean) / (deviation + _EPSILON)
        return torch.where(z > self._threshold, mean + self._threshold**2 * deviation / z, infinite)

    def observe(self, norm: Tensor) -> None:
        """Take in the norm of a step whose update was applied. `norm`: the same as for `limit`, in host memory."""
        if self._moments is None:
            self._norms.append(float(norm))
            if len(self._norms) == self._warmup:
                mean = math.fsum(self._norms) / self._warmup
                variance = math.fsum((value - mean) ** 2 for value in self._norms) / self._warmup
                self._moments, self._norms = _Moments(mean=mean, variance=variance), []
            return
        clipped, decay = min(float(norm), float(self.limit(norm))), self._decay
        mean = decay * self._moments.mean + (1 - decay) * clipped
        variance = decay * self._moments.variance + (1 - decay) * (clipped - mean) ** 2
        self._moments = _Moments(mean=mean, variance=variance)

    def series(self) -> dict[str, list[float]]:
        """The state of a resumed run: mean and variance, or the norms of the warm-up."""
        moments = [] if self._moments is None else [self._moments.mean, self._moments.variance]
        return {"clip_moments": moments, "clip_warmup_norms": self._norms}

    def load(self, moments: Sequence[float], warmup_norms: Sequence[float]) -> None:
        """Continue from a checkpoint's series; empty ones begin the warm-up anew."""
        self._moments = _Moments(mean=moments[0], variance=moments[1]) if len(moments) == 2 else None
        self._norms = list(warmup_norms)
