"""The optimizers, over what this rank owns, and which parameters they decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config import OptimizerConfig
from megacore.zero.data_parallel import OwnedRun


def parameter_groups(runs: Sequence[OwnedRun], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors (biases, norm weights), which do not, judged by the global shape; those of
    every bucket apart where buckets are updated one by one."""
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: not run.is_matrix):
        bucket = id(run.bucket) if run.bucket.options.offload else 0
        empty: dict[str, Any] = {"params": [], "weight_decay": weight_decay if run.is_matrix else 0.0}
        groups.setdefault((bucket, run.is_matrix), empty)["params"].append(run.master)
    return list(groups.values())


def build_optimizer(runs: Sequence[OwnedRun], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) or SGD over this rank's fp32 master weights.

    Updates are elementwise, so that a part of a parameter is updated exactly as it would be within the whole.

    Returns:
        None where this rank owns nothing (fewer elements than data-parallel ranks).
    """
    groups = parameter_groups(runs, config.weight_decay)
    if not groups:
        return None
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def state_kinds(config: OptimizerConfig) -> tuple[str, ...]:
    """Names of the optimizer's per-element state, each of the weights' shape."""
    if config.optimizer == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def update(
    optimizer: torch.optim.Optimizer, runs: Sequence[OwnedRun], gradients: Sequence[Tensor | None], rate: float
) -> None:
    """One step of the master weights.

    Args:
        optimizer: made by `build_optimizer`.
        runs: what is updated: all that it was made for, or, with offload, all of a bucket.
        gradients: of each run, reduced, unscaled and clipped; None leaves it as it is.
        rate: the learning rate.
    """
    for run, gradient in zip(runs, gradients, strict=True):
        run.master.grad = None if gradient is None else gradient.float()
    masters, groups = {id(run.master) for run in runs}, optimizer.param_groups
    optimizer.param_groups = [group for group in groups if id(group["params"][0]) in masters]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.param_groups = groups
    for run in runs:
        run.master.grad = None
