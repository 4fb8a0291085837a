"""The learning-rate range test (Smith 2017, arXiv 1506.01186): the loss over a rate that rises from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megacore.config import ResolvedConfig
from megacore.drawing.canvas import save
from megacore.drawing.curves import Curve, curves
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult

PICTURE, TABLE = "lr_range_test.svg", "lr_range_test.csv"
_SMOOTHING = 0.9
_DIVERGED = 4.0  # times the least smoothed loss
_FIRST = 5  # steps without a judgement: the mean of a few losses says little


def range_test(config: ResolvedConfig) -> list[Callback]:
    """What an entry point gives its trainer for --lr-range-test."""
    return [RangeTest()] if config.optimizer.lr_range_test else []


class RangeTest(Callback):
    """Records the loss of every step, ends the run once it diverges, and draws the curve at the end."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []

    def on_step_end(self, run: Run, result: StepResult) -> None:
        loss = float(result.loss)
        if math.isfinite(loss):
            self._points.append((result.lr, loss))
        losses = smoothed([loss for _, loss in self._points])
        # Further steps tell nothing about usable rates: the weights do not recover.
        if not math.isfinite(loss) or (len(losses) > _FIRST and losses[-1] > _DIVERGED * min(losses)):
            run.request_stop(f"the loss diverges at a learning rate of {result.lr:.3g} (--lr-range-test)")

    def on_stop(self, run: Run, reason: str | None) -> None:
        # A curve needs two points.
        if run.mesh.world.rank != 0 or len(self._points) < 2:
            return
        directory, rates = Path(run.config.training.output_dir), [rate for rate, _ in self._points]
        losses = smoothed([loss for _, loss in self._points])
        suggestion = suggested(rates, losses)
        lines = (f"{rate},{loss},{mean}" for (rate, loss), mean in zip(self._points, losses, strict=True))
        (directory / TABLE).write_text("\n".join(["lr,loss,smoothed_loss", *lines]) + "\n", encoding="utf-8")
        curve = Curve(title="loss, smoothed", points=list(zip(rates, losses, strict=True)), marked=suggestion)
        save(
            curves("Learning-rate range test", [curve], x_title="learning rate", logarithmic=True), directory / PICTURE
        )
        found = (
            "the loss does not fall: use smaller rates, or more steps"
            if suggestion is None
            else f"the loss falls fastest at a learning rate of {suggestion:.2g}: a first --lr"
        )
        print(f"range test: {found}; {directory / PICTURE}", flush=True)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential moving means, without the bias of the first ones towards zero."""
    mean, means = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**number))
    return means


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest over the logarithm of the rate, before its minimum; None: it never
    does."""
    end = losses.index(min(losses))
    slopes = [
        (losses[i + 1] - losses[i - 1]) / (math.log(rates[i + 1]) - math.log(rates[i - 1]))
        for i in range(1, min(end, len(rates) - 1))
    ]
    if not slopes or min(slopes) >= 0:
        return None
    return rates[1 + slopes.index(min(slopes))]
