"""The optimizers, over the segments that this rank owns, and which parameters they decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config import OptimizerConfig
from megacore.zero.data_parallel import OwnedSegment


def parameter_groups(segments: Sequence[OwnedSegment], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors (biases, norm weights), which do not, judged by the global shape."""
    matrices = [owned.master for owned in segments if len(owned.spec.shape) >= 2]
    vectors = [owned.master for owned in segments if len(owned.spec.shape) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(segments: Sequence[OwnedSegment], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) or SGD over this rank's fp32 master weights.

    Updates are elementwise, so that a segment is updated exactly as it would be within the whole parameter.

    Returns:
        None where this rank owns nothing (fewer elements than data-parallel ranks).
    """
    groups = parameter_groups(segments, config.weight_decay)
    if not groups:
        return None
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def state_kinds(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the optimizer's per-element state, each of a segment's shape."""
    if config.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def update(
    optimizer: torch.optim.Optimizer, segments: Sequence[OwnedSegment], gradients: Sequence[Tensor | None], rate: float
) -> None:
    """One step of the master weights.

    Args:
        optimizer: made by `build_optimizer` for these segments.
        segments: what this rank owns.
        gradients: of each segment, reduced, unscaled and clipped; None leaves a segment as it is.
        rate: the learning rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    for owned, gradient in zip(segments, gradients, strict=True):
        owned.master.grad = None if gradient is None else gradient.float()
    optimizer.step()
    for owned in segments:
        owned.master.grad = None
