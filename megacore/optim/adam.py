"""Adam with L2 regularization: the weight decay is added to the gradient (Kingma and Ba 2015, arXiv 1412.6980)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.adam import adam

from megacore.config.optimizers import AdamConfig
from megacore.optim.adamw import fused_
from megacore.optim.optimizer import AdamLike
from megacore.zero.local_segments import LocalRun


class Adam(AdamLike[AdamConfig]):
    """PyTorch's fused operator. Elementwise: a shard is updated as it would be within the whole parameter."""

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        tensors = self.adam_tensors(runs, gradients)
        fused_(adam, tensors, beta1=self.momentum, settings=self.adam, lr=lr, weight_decay=weight_decay)
