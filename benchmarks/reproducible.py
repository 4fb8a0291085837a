"""The price of --reproducible: time, memory and communication of a training step beside the ordinary mode.

    python -m benchmarks.reproducible --rounds 7

All ways take the same samples, in turn, in one group of processes for each layout. Time is measured, beside one block
too. Memory and communication are counted: the most bytes that tensors of rank 0 take in a step above what it holds
between steps, and the bytes that it sends, as tools/plan.py counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import add_sizes, configuration, megacore_step, megacore_trainer
from megacore.config import ParallelConfig
from megacore.models.outline import outline
from megacore.parallel.collectives import barrier
from megacore.parallel.mesh import build_mesh
from megacore.plan.traffic import rank_traffic
from megacore.train.launch import compute_reproducibly
from tests.distributed import run_distributed

LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "tp 2": {"tp": 2}, "dp 2": {"dp": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "one block": {"reproducible": True, "reproducible_blocks": 1},
    "blocks": {"reproducible": True},
}


@dataclass(frozen=True)
class Price:
    """Of the steps of one way on rank 0.

    Attributes:
        seconds: by round.
        held: most bytes of tensors in a step, above those between steps.
        sent: bytes in a step.
    """

    seconds: list[float]
    held: int
    sent: float


def held_in(step: Callable[[], Any]) -> int:
    """Most bytes of tensors that the step allocates at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes, initial=0))


def train(rank: int, world_size: int, layout: dict[str, Any], options: argparse.Namespace) -> dict[str, Price]:
    """The price of each way."""
    compute_reproducibly()
    steps, sent = dict[str, Callable[[], Any]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        for name, changes in WAYS.items():
            config = configuration(
                options, f"{directory}/{name}", parallel=ParallelConfig(device="cpu", **layout), micro_batch=2
            )
            config = replace(config, training=replace(config.training, **changes))
            mesh = build_mesh(config.parallel)
            steps[name] = megacore_step(megacore_trainer(config, mesh))
            sent[name] = sum(transfer.sent_bytes for transfer in rank_traffic(config, outline(config), 0))
            steps[name]()
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, step in steps.items():
                barrier(mesh.world)
                start = time.perf_counter()
                step()
                barrier(mesh.world)
                seconds[name].append(time.perf_counter() - start)
        return {name: Price(seconds[name], held_in(step), sent[name]) for name, step in steps.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, rounds=5, heads=8)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| | way | median, ms | times the ordinary step, median (lowest to highest) | MiB held | MiB sent |")
    print("|---|---|---|---|---|---|")
    for layout, degrees in LAYOUTS.items():
        ranks = max(degrees.values(), default=1)
        prices: dict[str, Price] = run_distributed(train, ranks, degrees, options, timeout=600)[0]
        for name, price in prices.items():
            pairs = zip(price.seconds, prices["ordinary"].seconds, strict=True)
            ratios = sorted(own / base for own, base in pairs)
            middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            counted = f"{price.held / 2**20:.1f} | {price.sent / 2**20:.1f}"
            milliseconds = statistics.median(price.seconds) * 1e3
            print(f"| {layout} | {name} | {milliseconds:.0f} | {middle} | {counted} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
