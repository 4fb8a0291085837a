"""PyTorch's fused operators of Adam and AdamW, with what stays the same for every optimizer that uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megacore.config.optimizers import AdamWConfig


def fused_(
    operator: Callable[..., None],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    beta1: float,
    settings: AdamWConfig,
    lr: float,
    weight_decay: float,
) -> None:
    """Update weights and fp32 moments in place, and count the steps.

    Args:
        operator: `adam` or `adamw` of torch.optim.
        weights: fp32, of any shapes.
        gradients: of these shapes.
        means: first moments, of these shapes.
        squares: second moments, of these shapes.
        steps: updates so far, an fp32 scalar for each.
        beta1: of the first moments.
        settings: beta2 and epsilon.
        lr: learning rate.
        weight_decay: in units of the learning rate.
    """
    operator(
        list(weights),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(steps),
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=settings.adam_beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=settings.adam_eps,
        maximize=False,
    )
