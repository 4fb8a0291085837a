"""Stochastic gradient descent, with momentum, Nesterov's too (Sutskever et al. 2013), or without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megacore.config.optimizers import SGDConfig
from megacore.optim.optimizer import Optimizer
from megacore.zero.local_segments import LocalRun


class SGD(Optimizer[SGDConfig]):
    """PyTorch's operator. Elementwise: a shard is updated as it would be within the whole parameter."""

    @property
    def usual_momentum(self) -> float | None:
        return self.settings.sgd_momentum or None  # without one there is no state for a schedule's

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        momentum = self.momentum
        masters: list[Tensor] = [run.master for run in runs]
        buffers = [self.state[run].get("momentum_buffer") for run in runs]
        if weight_decay:  # in place: PyTorch's operator would copy all gradients
            torch._foreach_add_(list(gradients), masters, alpha=weight_decay)
        sgd(
            masters,
            list(gradients),
            buffers,
            foreach=True,  # in place, with Nesterov's momentum too
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.settings.sgd_nesterov,
            maximize=False,
        )
        for run, buffer in zip(runs, buffers, strict=True):  # the first update makes them: the gradient itself
            if buffer is not None:
                self.state[run]["momentum_buffer"] = buffer
