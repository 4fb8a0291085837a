"""The price of --reproducible: the time of a training step beside the ordinary mode, and beside one block.

    python -m benchmarks.reproducible --rounds 7

All ways take the same samples, in turn, in one group of processes for each layout.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.workload import add_sizes, configuration, megacore_step, megacore_trainer
from megacore.config import ParallelConfig
from megacore.parallel.collectives import barrier
from megacore.parallel.mesh import build_mesh
from megacore.train.launch import compute_reproducibly
from tests.distributed import run_distributed

LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "tp 2": {"tp": 2}, "dp 2": {"dp": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "one block": {"reproducible": True, "reproducible_blocks": 1},
    "blocks": {"reproducible": True},
}


def train(rank: int, world_size: int, layout: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the steps of each way, by round."""
    compute_reproducibly()
    steps: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(None):
        for name, changes in WAYS.items():
            config = configuration(
                options, f"{directory}/{name}", parallel=ParallelConfig(device="cpu", **layout), micro_batch=2
            )
            config = replace(config, training=replace(config.training, **changes))
            mesh = build_mesh(config.parallel)
            steps[name] = megacore_step(megacore_trainer(config, mesh))
            steps[name]()
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            for name, step in steps.items():
                barrier(mesh.world)
                start = time.perf_counter()
                step()
                barrier(mesh.world)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, rounds=5, heads=8)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("| | way | median, ms | times the ordinary step, median of rounds (lowest to highest) |\n|---|---|---|---|")
    for layout, degrees in LAYOUTS.items():
        ranks = max(degrees.values(), default=1)
        seconds = run_distributed(train, ranks, degrees, options, timeout=600)[0]
        for name, values in seconds.items():
            ratios = sorted(own / base for own, base in zip(values, seconds["ordinary"], strict=True))
            middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {layout} | {name} | {statistics.median(values) * 1e3:.0f} | {middle} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
