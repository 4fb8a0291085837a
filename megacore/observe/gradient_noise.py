"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1): how large a batch is worth it.

Gradients of two batch sizes b < B estimate the squared norm of the true gradient, and the trace of the covariance of
the gradients of single samples; their ratio is the noise scale, in samples:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.train.step_hooks import StepHook

if TYPE_CHECKING:
    from megacore.optim.update import Outcome
    from megacore.train.step import TrainStep

_SERIES = "gradient_noise"
_DECAY = 0.95  # of both averages, per measurement


class GradientNoise(StepHook):
    """Measures every `--gradient-noise-interval` steps: the small batch is the first microbatch of all replicas, which
    is computed twice."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._interval, self._samples = config.logging.gradient_noise_interval, config.replica_batch_size
        self._signal, self._noise = 0.0, 0.0
        self._small: tuple[Tensor, int] | None = None  # the norm of the small batch, and how many the large one has

    def before_gradients(self, steps: TrainStep, microbatches: Sequence[Any]) -> None:
        step = steps.step + 1
        if step % self._interval or len(microbatches) == 1:
            return
        weight = steps.begin(steps.task.counts(microbatches[0]), updates=False)
        loss = steps.model.runtime.train_step(microbatches[:1], weight, steps.model.data_parallel)
        norm = steps.update.gradient_norm(loss, step=step, per_count=weight.per_count())
        self._small = norm, len(microbatches)

    def after_update(self, steps: TrainStep, outcome: Outcome) -> None:
        if self._small is not None:
            (norm, count), self._small = self._small, None
            samples = self._samples
            self.measure(float(norm), float(outcome.norm), small_batch=samples, large_batch=samples * count)

    def measure(self, small: float, large: float, *, small_batch: int, large_batch: int) -> None:
        """Take in the norms of the mean gradients of two batches; a measurement that is not finite is left out."""
        small, large = small * small, large * large
        signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        noise = (small - large) / (1 / small_batch - 1 / large_batch)
        if math.isfinite(signal) and math.isfinite(noise):
            # The averages begin at 0; what they lack at the beginning is the same factor of both.
            self._signal = _DECAY * self._signal + (1 - _DECAY) * signal
            self._noise = _DECAY * self._noise + (1 - _DECAY) * noise

    def figures(self) -> dict[str, float | None]:
        """The noise scale by its key of metrics.jsonl; None where the averages give no positive number."""
        is_known = self._signal > 0 and self._noise > 0
        return {"train/gradient_noise_scale": self._noise / self._signal if is_known else None}

    def series(self) -> dict[str, list[float]]:
        return {_SERIES: [self._signal, self._noise]}

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        if len(averages := series.get(_SERIES, ())) == 2:
            self._signal, self._noise = averages
