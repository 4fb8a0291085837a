"""The optimizer's step in host memory (ZeRO-Offload: Ren et al. 2021, arXiv 2101.06840, section 4).

Master weights and moments never lie on the device. The rank's gradients of all buckets travel to the host in a separate
stream, queued behind the numbers that decide whether there is an update. Each bucket travels while the buckets
before it are updated, and its updated weights travel back while those after it are, both in the formats that the device
keeps. The host waits for a bucket only where it has not arrived. The update runs on all threads of the rank's share of
the host. Where the device is the CPU itself the copies are plain ones: the same path, and the same numbers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megacore.optim.optimizer import Optimizer
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group
from megacore.parallel.processors import cores_of_process, share_of_cores
from megacore.zero.data_parallel import DataParallel


@torch.no_grad()
def step_on_host(
    data_parallel: DataParallel, optimizer: Optimizer[Any], *, factor: Tensor, lr: float, cores: int
) -> None:
    """Update the master weights bucket by bucket, and publish each as soon as it is done. `data_parallel`: made with
    `offload`; its gradients are reduced, and their download has begun. `factor`: what gradients are multiplied by first
    (clipping, loss scale); a scalar in host memory. `cores`: this rank's share of its node's (`host_cores`)."""
    with all_threads(cores):
        for bucket in data_parallel.in_order_of_use():
            members, downloaded = bucket.runs, bucket.downloaded()
            gradients = [downloaded[run.shard_slice] if run.has_gradient else None for run in members]
            optimizer.step(members, gradients, lr=lr, factor=factor)
            if not optimizer.defers:
                bucket.publish()
        if optimizer.defers:
            optimizer.finish()
            data_parallel.publish()


def host_cores(world: Group) -> int:
    """This rank's share of the cores of its node; all ranks call this together."""
    name, cores = socket.gethostname(), cores_of_process()
    everyone = all_gather_objects((name, cores), world)
    return share_of_cores(cores, [others for host, others in everyone if host == name])


@contextmanager
def all_threads(cores: int) -> Iterator[None]:
    """Operators on host memory use this rank's share of the cores inside; elementwise ones give the same bits on any
    number of threads. Launchers allow each of several ranks one thread (OMP_NUM_THREADS=1), as if the device did all
    the work. A rank by itself has the threads that its user wants."""
    before = torch.get_num_threads()
    by_itself = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    torch.set_num_threads(before if by_itself and "OMP_NUM_THREADS" in os.environ else max(before, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
