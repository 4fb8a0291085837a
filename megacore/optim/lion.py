"""Lion: steps of equal size along the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megacore.config.optimizers import LionConfig
from megacore.optim.optimizer import Optimizer
from megacore.zero.local_segments import LocalRun


class Lion(Optimizer[LionConfig]):
    """Algorithm 2 of the paper. Elementwise: a shard is updated as it would be within the whole parameter."""

    @property
    def usual_momentum(self) -> float:
        return self.settings.lion_beta1

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        for run, gradient, momentum in zip(runs, gradients, self.tensors("exp_avg", runs), strict=True):
            direction = momentum.lerp(gradient, 1 - self.momentum).sign_()
            run.master.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
            momentum.lerp_(gradient, 1 - self.settings.lion_beta2)
