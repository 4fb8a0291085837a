"""The optimizer's step in host memory (ZeRO-Offload: Ren et al. 2021, arXiv 2101.06840, section 4).

Master weights and moments never lie on the device. Each bucket's own gradients travel to the host while the buckets
before it are updated there, and its updated weights travel back while those after it are. Where the device is the CPU
itself the copies are plain ones: the same path, and the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.optim.clip import scale_gradients
from megacore.optim.optimizers import update
from megacore.zero.data_parallel import DataParallel


@torch.no_grad()
def step_on_host(
    data_parallel: DataParallel, optimizer: torch.optim.Optimizer | None, *, factor: Tensor, rate: float
) -> None:
    """Update the master weights bucket by bucket, and publish each as soon as it is done.

    Args:
        data_parallel: made with `offload`; its gradients are reduced.
        optimizer: over its segments; None where this rank owns nothing.
        factor: what gradients are multiplied by first (clipping, loss scale).
        rate: the learning rate.
    """
    factor = factor.cpu()  # before the downloads are queued: it would wait for all of them
    buckets = data_parallel.in_order_of_use()
    for bucket in buckets:
        bucket.begin_download()
    for bucket in buckets:
        downloaded = bucket.downloaded()
        segments = [owned for owned in data_parallel.segments if owned.bucket is bucket]
        gradients = [downloaded[name].float() if (name := o.segment.name) in downloaded else None for o in segments]
        scale_gradients([gradient for gradient in gradients if gradient is not None], factor)
        if optimizer is not None:
            update(optimizer, segments, gradients, rate)
        bucket.publish()
