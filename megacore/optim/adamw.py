"""AdamW: decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim.adamw import adamw

from megacore.config.optimizers import AdamWConfig
from megacore.optim.optimizer import Optimizer
from megacore.zero.data_parallel import LocalRun


class AdamW(Optimizer[AdamWConfig]):
    """PyTorch's fused operator. Elementwise: a shard is updated as it would be within the whole parameter."""

    counts_updates: ClassVar[bool] = True

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        adamw(
            [run.master for run in runs],
            list(gradients),
            self.tensors("exp_avg", runs),
            self.tensors("exp_avg_sq", runs),
            [],
            self.steps(runs),
            fused=True,
            amsgrad=False,
            beta1=self.settings.adam_beta1,
            beta2=self.settings.adam_beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.settings.adam_eps,
            maximize=False,
        )
