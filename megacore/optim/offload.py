"""The optimizer's step in host memory (ZeRO-Offload: Ren et al. 2021, arXiv 2101.06840, section 4).

Master weights and moments never lie on the device. Each bucket's own gradients travel to the host while the buckets
before it are updated there, and its updated weights travel back while those after it are, both in the formats that the
device keeps. The update runs on all threads of the rank's share of the host. Where the device is the CPU itself the
copies are plain ones: the same path, and the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megacore.optim.optimizer import Optimizer
from megacore.parallel.processors import cores_of_rank
from megacore.zero.data_parallel import DataParallel


@torch.no_grad()
def step_on_host(data_parallel: DataParallel, optimizer: Optimizer[Any], *, factor: Tensor, lr: float) -> None:
    """Update the master weights bucket by bucket, and publish each as soon as it is done.

    Args:
        data_parallel: made with `offload`; its gradients are reduced.
        optimizer: over its runs.
        factor: what gradients are multiplied by first (clipping, loss scale).
        lr: the learning rate.
    """
    factor = factor.cpu()  # before the downloads are queued: it would wait for all of them
    buckets = data_parallel.in_order_of_use()
    runs = {bucket: list(members) for bucket, members in groupby(data_parallel.runs, key=lambda run: run.bucket)}
    for bucket in buckets:
        bucket.begin_download()
    with _all_threads():
        for bucket in buckets:
            own, downloaded = runs.get(bucket, []), bucket.downloaded()
            gradients = [None if run.gradient is None else downloaded[run.place] for run in own]
            optimizer.step(own, gradients, lr=lr, factor=factor)
            bucket.publish()


@contextmanager
def _all_threads() -> Iterator[None]:
    """Operators on host memory use this rank's share of the cores inside; elementwise ones give the same bits on any
    number of threads.

    Launchers allow each of several ranks one thread (OMP_NUM_THREADS=1), as if the device did all the work. A rank by
    itself has the threads that its user wants.
    """
    before = torch.get_num_threads()
    by_itself = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    torch.set_num_threads(before if by_itself and "OMP_NUM_THREADS" in os.environ else max(before, cores_of_rank()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
