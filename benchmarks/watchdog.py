"""What the watchdog costs a step: its marks, counted in a step and timed by themselves, beside the step's time.

    python benchmarks/watchdog.py --tp 2 --pp 2 --dp 2

Steps differ from each other by far more than the watchdog takes, so that a comparison of whole runs would show nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.comparison.configuration import resolved_configuration
from benchmarks.workload import add_sizes, megacore_step, megacore_trainer
from megacore.parallel.heartbeat import Current, Phase, phase, post
from megacore.parallel.mesh import build_mesh
from megacore.watch.ledger import Identity, Ledger, Operation
from tests.distributed import run_distributed

_REPEATS = 20_000


class Counted(Ledger):
    """A ledger that counts its marks."""

    entered = posted = 0

    def enter(self, code: int) -> None:
        self.entered += 1
        super().enter(code)

    def post(self, phase: Phase, ranks: tuple[int, ...], nbytes: int) -> Operation:
        self.posted += 1
        return super().post(phase, ranks, nbytes)


def seconds_of_marks(directory: Path, identity: Identity) -> tuple[float, float]:
    """Seconds of a phase that begins and ends, and of posting an operation, on a ledger in the middle of a step."""
    ranks = tuple(range(8))
    Current.heartbeat = ledger = Ledger(directory, identity)
    ledger.begin_step(1)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        with phase(Phase.FORWARD, stage=1, microbatch=3):
            pass
    middle = time.perf_counter()
    for _ in range(_REPEATS):
        post(Phase.ALL_REDUCE, ranks, 4096)
    return (middle - start) / _REPEATS, (time.perf_counter() - middle) / _REPEATS


def measure(rank: int, world_size: int, options: argparse.Namespace, directory: str) -> tuple[float, ...]:
    """On one rank: seconds of a step, phases and operations in it, and the seconds of one of each."""
    torch.set_num_threads(1)
    degrees = {"pp": options.pp, "dp": options.dp, "tp": options.tp}
    identity = Identity(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        host="",
        pid=os.getpid(),
        born=0,
        degrees=degrees,
        output_dir=directory,
        hang_timeout=300.0,
        collective_timeout=600.0,
    )
    config = resolved_configuration(
        options, directory, micro_batch=options.micro_batch, ranks=world_size, device="cpu", **degrees
    )
    step = megacore_step(megacore_trainer(config, build_mesh(config.parallel)))
    step()
    Current.heartbeat = counted = Counted(Path(directory), identity)
    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    entered, posted = (count / options.rounds for count in (counted.entered, counted.posted))
    marks = seconds_of_marks(Path(directory), identity)
    return statistics.median(seconds), entered, posted, *marks


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the rank with the largest share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, micro_batch=1, rounds=10, tp=1, pp=1, dp=1)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_distributed(measure, options.tp * options.pp * options.dp, options, directory, timeout=600)
    costs = [(entered * mark + posted * post) / step for step, entered, posted, mark, post in ranks]
    worst = costs.index(max(costs))
    step, entered, posted, mark, posting = ranks[worst]
    print(f"rank {worst}: a step of {step * 1e3:.1f} ms has {entered:.0f} phases and {posted:.0f} operations")
    print(
        f"a phase takes {mark * 1e6:.2f} us, an operation {posting * 1e6:.2f} us more: {costs[worst]:.3%} of the step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
