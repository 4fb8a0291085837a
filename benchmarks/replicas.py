"""What checking the replicas costs: steps with and without a check, in turn, and the share of a run at an interval.

    python -m benchmarks.replicas --tp 2 --pp 2 --dp 2 --interval 100

A step with a check is compared with the step before it, so that a machine that others use slows both. A replay costs
about one microbatch (`--replay`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time

import torch

from benchmarks.workload import add_sizes, configuration, megacore_step, megacore_trainer
from megacore.config import ParallelConfig, WatchConfig
from megacore.parallel.collectives import barrier
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed


def measure(rank: int, world_size: int, options: argparse.Namespace, directory: str) -> list[tuple[float, float]]:
    """Seconds of a step without a check, and of the next one with it, for each round."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(tp=options.tp, pp=options.pp, dp=options.dp, zero_stage=options.zero_stage, device="cpu")
    config = configuration(options, directory, parallel=parallel, micro_batch=options.micro_batch)
    watch = WatchConfig(replay_interval=2) if options.replay else WatchConfig(check_replicas_interval=2)
    watch = dataclasses.replace(watch, check_replicas_interval=0) if options.replay else watch
    mesh = build_mesh(config.parallel)
    step = megacore_step(megacore_trainer(dataclasses.replace(config, watch=watch), mesh))
    seconds = []
    for _ in range(2 * (options.rounds + 1)):
        barrier(mesh.world)
        start = time.perf_counter()
        step()
        barrier(mesh.world)
        seconds.append(time.perf_counter() - start)
    return list(zip(seconds[2::2], seconds[3::2], strict=True))


def main(argv: list[str] | None = None) -> int:
    """Measure and print the medians over rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, micro_batch=1, rounds=15, interval=100, zero_stage=0)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--replay", action="store_true", help="measure replays instead of checks")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_distributed(measure, options.tp * options.pp * options.dp, options, directory, timeout=600)
    plain = statistics.median(without for without, _ in ranks[0])
    extra = statistics.median(with_check / without - 1 for without, with_check in ranks[0])
    what = "a replay" if options.replay else "a check"
    print(
        f"a step takes {plain * 1e3:.1f} ms, {what} {extra:+.2%} of it: {extra / options.interval:.4%} of a run with "
        f"one every {options.interval} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
