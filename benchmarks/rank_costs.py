"""What a rank of benchmarks/many_ranks.py runs and measures: pretrain_gpt.py, from its flags to its exit."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from megacore.train.trainer import Trainer

_TCP_INFO_BYTES = 120  # where bytes acknowledged and bytes received follow each other in Linux's struct tcp_info


@dataclass
class RankCosts:
    """What a rank measured of itself.

    Attributes:
        launch: seconds on the clock, until the first step.
        steps: seconds of each step on the clock.
        cpu_seconds: of all threads, from its first line to the first step.
        store_bytes: to and from the job's store until then.
        groups: process groups that it is in, that of all ranks included.
        sockets: open after the last step.
    """

    launch: float = 0.0
    steps: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    store_bytes: int = 0
    groups: int = 0
    sockets: int = 0


def train(rank: int, world_size: int, argv: Sequence[str]) -> RankCosts:
    """Run pretrain_gpt.py on this rank, and measure it."""
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # which the harness sets: a run decides by itself
    costs, start, cpu = RankCosts(), time.perf_counter(), time.process_time()

    def run(self: Trainer) -> None:
        costs.launch = time.perf_counter() - start
        costs.cpu_seconds = time.process_time() - cpu
        costs.store_bytes, costs.groups = _store_bytes(), len(dist.distributed_c10d._world.pg_map)
        Trainer_run(self)
        costs.sockets = len(list(_sockets()))

    def train_step(self: Trainer, microbatches: Sequence[Any]) -> Any:
        begin = time.perf_counter()
        result = Trainer_step(self, microbatches)
        costs.steps.append(time.perf_counter() - begin)
        return result

    Trainer_run, Trainer_step = Trainer.run, Trainer.train_step
    with (
        open(os.devnull, "w") as nowhere,
        mock.patch.object(Trainer, "run", run),
        mock.patch.object(Trainer, "train_step", train_step),
        mock.patch.object(sys, "stdout", nowhere),
    ):
        if status := importlib.import_module("pretrain_gpt").main(list(argv)):
            raise RuntimeError(f"rank {rank} ended with status {status}")
    return costs


def _sockets() -> Iterator[int]:
    """This process's open sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:  # that of the listing itself
            continue


def _store_bytes() -> int:
    """Bytes that the kernel has counted on this process's connections with the job's store."""
    total = 0
    for descriptor in _sockets():
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                is_store = connection.getpeername()[1] == int(os.environ.get("MASTER_PORT", "0"))
            except (OSError, IndexError):  # it listens, or is no connection of TCP
                continue
            if is_store:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES + 16)
                total += sum(struct.unpack_from("QQ", info, _TCP_INFO_BYTES))
    return total
