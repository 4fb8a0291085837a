"""Signum (Bernstein et al. 2018, "signSGD", arXiv 1802.04434): steps of equal size along the sign of the momentum.

An optimizer consists of settings, which say what state it keeps, and of an update of flat runs of weights. ZeRO on
every stage, offload, memory checks and checkpoints follow from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from megacore.config.fields import Range
from megacore.config.optimizers import OptimizerSettings, StateKind
from megacore.optim.optimizer import Optimizer
from megacore.optim.optimizers import register_optimizer
from megacore.zero.local_segments import LocalRun


@dataclass(frozen=True, kw_only=True)
class SignumConfig(OptimizerSettings):
    """Settings of --optimizer signum."""

    signum_momentum: Annotated[float, Range(0, below=1)] = 0.9
    """Decay rate of Signum's momentum."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        """One number per weight."""
        return (StateKind(name="momentum"),)


class Signum(Optimizer[SignumConfig]):
    """The update, on this rank's part of the weights."""

    @property
    def usual_momentum(self) -> float:
        """1Cycle changes it."""
        return self.settings.signum_momentum

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        """Algorithm 2 of the paper, with decoupled weight decay."""
        for run, gradient, momentum in zip(runs, gradients, self.tensors("momentum", runs), strict=True):
            momentum.lerp_(gradient, 1 - self.momentum)
            run.master.mul_(1 - lr * weight_decay).sub_(momentum.sign(), alpha=lr)


def register() -> None:
    """Make it an optimizer like every other: for the engine, and with flags for the training programs."""
    register_optimizer("signum", SignumConfig, Signum)
