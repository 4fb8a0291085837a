"""Many ranks on one machine: a whole job of gloo ranks trains a tiny GPT, its losses are compared with one process.

    python benchmarks/many_ranks.py --tp 4 --pp 12 --dp 8          384 ranks, as BLOOM-176B was trained on
    python benchmarks/many_ranks.py --tp 2 --pp 2 --dp 2 --tp 4 --pp 4 --dp 2 --tp 4 --pp 12 --dp 2      a table

Every rank is a process that runs pretrain_gpt.py, from its flags to its exit. The processes are forked from a server
that has torch and megacore loaded (tests/distributed.py), so that they share that memory. What a launch costs a rank is
measured inside: CPU seconds do not depend on how many other ranks wait for the same cores, as seconds on the clock do.
Flags that are not listed here go to pretrain_gpt.py. The exit status is 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from megacore.train import launch, step, trainer
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed

TOLERANCE = 1e-5  # relative, of a loss
_TCP_INFO_BYTES = 120  # where bytes acknowledged and bytes received follow each other in Linux's struct tcp_info


@dataclass
class RankCosts:
    """What a rank measured of itself.

    Attributes:
        seconds: on the clock, by part of the launch, and of the checkpoint at the end.
        steps: seconds of each step on the clock.
        cpu_seconds: of all threads, from its first line to the first step.
        store_bytes: to and from the job's store until then.
        groups: process groups that it is in, that of all ranks included.
        sockets: open after the last step.
        threads: likewise.
        memory: proportional set size after the last step, bytes: what is shared counts in parts.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    store_bytes: int = 0
    groups: int = 0
    sockets: int = 0
    threads: int = 0
    memory: int = 0


def train(rank: int, world_size: int, argv: Sequence[str]) -> RankCosts:
    """Run pretrain_gpt.py on this rank, and measure it."""
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)  # which the harness sets: a run decides by itself
    costs, start, cpu = RankCosts(), time.perf_counter(), time.process_time()

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        costs.seconds[part] = costs.seconds.get(part, 0.0) + time.perf_counter() - begin

    def measured(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with timed(part):
                return function(*args, **kwargs)

        return call

    def run(self: Trainer) -> None:
        costs.seconds["launch"] = time.perf_counter() - start
        costs.cpu_seconds = time.process_time() - cpu
        costs.store_bytes, costs.groups = _store_bytes(), len(dist.distributed_c10d._world.pg_map)
        Trainer_run(self)
        costs.sockets, costs.threads, costs.memory = len(list(_sockets())), _threads(), _proportional_memory()

    def train_step(self: Trainer, microbatches: Sequence[Any]) -> Any:
        begin = time.perf_counter()
        result = Trainer_step(self, microbatches)
        costs.steps.append(time.perf_counter() - begin)
        return result

    Trainer_run, Trainer_step = Trainer.run, Trainer.train_step
    parts = {
        "join": (launch, "join_job"),
        "compare flags": (launch, "refuse_different_ranks"),
        "groups": (launch, "build_mesh"),
        "watch peers": (launch, "PeerWatch"),
        "memory check": (trainer, "check_memory_of_ranks"),
        "model": (step, "parallelize"),
        "save": (Trainer, "save"),
    }
    with ExitStack() as patches, open(os.devnull, "w") as nowhere:
        patches.enter_context(mock.patch.object(Trainer, "run", run))
        patches.enter_context(mock.patch.object(Trainer, "train_step", train_step))
        patches.enter_context(mock.patch.object(sys, "stdout", nowhere))
        for part, (module, name) in parts.items():
            patches.enter_context(mock.patch.object(module, name, measured(part, getattr(module, name))))
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


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _proportional_memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that ran.

    Attributes:
        ranks: what each measured.
        losses: of each step.
        seconds: on the clock, from the first fork to the last exit.
    """

    ranks: list[RankCosts]
    losses: list[float]
    seconds: float


def run_job(degrees: tuple[int, int, int], flags: Sequence[str], *, timeout: float) -> Job:
    """Run pretrain_gpt.py on tp x pp x dp ranks.

    Args:
        degrees: tp, pp and dp.
        flags: further ones.
        timeout: seconds.
    """
    tp, pp, dp = map(str, degrees)
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as directory:
        argv = ["--tp", tp, "--pp", pp, "--dp", dp, *flags, "--output-dir", directory]
        start = time.perf_counter()
        ranks = run_distributed(train, math.prod(degrees), argv, timeout=timeout, init=False)
        seconds = time.perf_counter() - start
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    losses = [record["train/loss"] for line in lines if "train/loss" in (record := json.loads(line))]
    return Job(ranks=ranks, losses=losses, seconds=seconds)


def tiny_model(layouts: Sequence[tuple[int, int, int]], options: argparse.Namespace) -> list[str]:
    """Flags of a GPT with a block or more for every stage, and of batches for every replica."""
    tp, pp, dp = (math.lcm(*degrees) for degrees in zip(*layouts, strict=True))
    heads = max(tp, 4)
    sizes = {
        "num-layers": max(pp, 12),
        "hidden-size": 8 * heads,
        "num-attention-heads": heads,
        "seq-length": 16,
        "vocab-size": 128,
        "micro-batch-size": 1,
        "global-batch-size": dp * options.microbatches,
        "train-iters": options.steps,
        "log-interval": 1,
        "eval-interval": 0,
        "lr": 0.01,
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--hidden-dropout", "0", "--attention-dropout", "0"]  # masks depend on tp
    # Every rank would count the memory that it shares with the others as its own.
    return ["--mock-data", "--device", "cpu", *words, "--no-memory-check", *options.flags]


def rows(degrees: tuple[int, int, int], job: Job, worst: float) -> dict[str, str]:
    """The columns of a job's row in the table."""
    ranks, count = job.ranks, len(job.ranks)

    def slowest(part: str) -> str:
        return f"{max(rank.seconds.get(part, 0.0) for rank in ranks):.1f}"

    parts = ("join", "compare flags", "groups", "watch peers", "model")
    first, *others = (max(seconds) for seconds in zip(*(rank.steps for rank in ranks), strict=True))
    return {
        "ranks": f"{count} ({' x '.join(map(str, degrees))})",
        "CPU s/rank": f"{sum(rank.cpu_seconds for rank in ranks) / count:.2f}",
        "launch, s": slowest("launch"),
        **{part: slowest(part) for part in parts},
        "store, KB/rank": f"{sum(rank.store_bytes for rank in ranks) / count / 1e3:.1f}",
        "groups/rank": str(max(rank.groups for rank in ranks)),
        "sockets/rank": str(max(rank.sockets for rank in ranks)),
        "threads/rank": str(max(rank.threads for rank in ranks)),
        "first step, s": f"{first:.1f}",
        "later steps, s": f"{statistics.median(others):.1f}" if others else "",
        "save, s": slowest("save"),
        "memory, MB (all)": f"{sum(rank.memory for rank in ranks) / 1e6:,.0f}",
        "total, s": f"{job.seconds:.0f}",
        "loss differs by": f"{worst:.1e}",
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of this benchmark; `layouts` has tp, pp and dp of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, action="append", default=[], help="once for each layout")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=2, help="of each replica and step")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a job, on a quiet machine")
    options, flags = parser.parse_known_args(argv)
    if not len(options.tp) == len(options.pp) == len(options.dp) > 0:
        parser.error("every layout needs --tp, --pp and --dp")
    options.layouts, options.flags = list(zip(options.tp, options.pp, options.dp, strict=True)), flags
    return options


def main(argv: Sequence[str]) -> int:
    """Run the layouts and one process, print the table, and return the exit status."""
    options = parse(argv)
    flags = tiny_model(options.layouts, options)
    expected = run_job((1, 1, 1), flags, timeout=options.timeout).losses
    status = 0
    for number, degrees in enumerate(options.layouts):
        job = run_job(degrees, flags, timeout=options.timeout)
        worst = max(abs(a - b) / abs(b) for a, b in zip(job.losses, expected, strict=True))
        status |= not worst <= TOLERANCE
        row = rows(degrees, job, worst)
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(row.values())} |", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
