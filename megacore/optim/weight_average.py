"""An exponential moving average of the weights, as `torch.optim.swa_utils.AveragedModel` has it. Averages of iterates:
Polyak and Juditsky 1992, Acceleration of stochastic approximation by averaging.

It is one more kind of state beside the optimizer's: fp32, of what this rank updates, in host memory where the master
weights are. So it is sharded, saved and resharded as that is. It begins with the weights before the first update of the
run, or before the first one after a checkpoint that has no average. A skipped step leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megacore.config.optimizers import EMA
from megacore.optim.optimizer import Optimizer
from megacore.zero.data_parallel import DataParallel

_ELEMENTS = 1 << 20  # that are exchanged at a time


class WeightAverage:
    """average = decay x average + (1 - decay) x weights, after every update. `optimizer`: over its runs; it holds the
    average. `decay`: above 0 and below 1; 1 / (1 - decay) updates are about what it averages over."""

    def __init__(self, data_parallel: DataParallel, optimizer: Optimizer[Any], *, decay: float) -> None:
        self._data_parallel, self._optimizer, self._decay = data_parallel, optimizer, decay
        optimizer.keep(EMA)

    def begin(self) -> None:
        """Begin with the weights as they are, where there is no average yet."""
        for run in self._data_parallel.runs:
            self._optimizer.tensor(run, EMA)

    @torch.no_grad()
    def update(self) -> None:
        runs = self._data_parallel.runs
        if runs:
            averages = [self._optimizer.tensor(run, EMA).view(-1) for run in runs]
            torch._foreach_lerp_(averages, [run.master.detach() for run in runs], 1.0 - self._decay)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """The model computes with the average inside; all ranks enter and leave together. Weights and average change
        places, so that this takes next to no memory. Afterwards both have the bits that they had before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for run in self._data_parallel.runs:
            average = self._optimizer.tensor(run, EMA).view(-1)
            for weights, other in zip(run.master.detach().split(_ELEMENTS), average.split(_ELEMENTS), strict=True):
                kept = weights.clone()
                weights.copy_(other)
                other.copy_(kept)
        self._data_parallel.publish()
