"""What the watchdog costs a step: its marks, counted in a step and timed by themselves, beside the step's time.

    python benchmarks/watchdog.py --tp 2 --pp 2 --dp 2
    python benchmarks/watchdog.py --tp 2 --pp 2 --dp 2 --side-by-side 20

Steps differ from each other by far more than the watchdog takes, so that a comparison of whole runs would show nothing.

With --side-by-side all that is on by default and needs no step (the watchdog, slow ranks, the log, metrics.jsonl,
events.jsonl) is switched on in every second step of one run. CPU time is compared beside wall-clock time: where ranks
share cores it is what a step costs, and other programs change it less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.workload import add_sizes, configuration, megacore_step, megacore_trainer
from megacore.config import ParallelConfig
from megacore.parallel.collectives import barrier
from megacore.parallel.heartbeat import Current, Phase, phase, post
from megacore.parallel.mesh import build_mesh
from megacore.train.callbacks import Callbacks
from megacore.train.metrics import StepTimes
from megacore.watch.ledger import Identity, Ledger, Operation
from megacore.watch.start import begin_watch
from tests.distributed import run_distributed

_REPEATS = 20_000
_WARM_UP = 2  # pairs of steps


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
    parallel = ParallelConfig(tp=options.tp, pp=options.pp, dp=options.dp, device="cpu")
    config = configuration(options, directory, parallel=parallel, micro_batch=options.micro_batch)
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


def everything(rank: int, world_size: int, options: argparse.Namespace, directory: str) -> list[tuple[float, float]]:
    """On one rank: wall-clock and main thread CPU seconds of each step, with everything off and on in turn."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(tp=options.tp, pp=options.pp, dp=options.dp, device="cpu")
    config = configuration(options, directory, parallel=parallel, micro_batch=options.micro_batch)
    # Every second step is on: what runs once in N steps runs once in N of those.
    logging = replace(config.logging, log_interval=2 * config.logging.log_interval)
    watch = replace(config.watch, check_replicas_interval=2 * config.watch.check_replicas_interval)
    config = replace(config, logging=logging, watch=watch)
    begin_watch(config)
    mesh = build_mesh(config.parallel)
    trainer = megacore_trainer(config, mesh)
    ledger, callbacks, nothing = Current.heartbeat, trainer.callbacks, Callbacks(trainer, [])
    seconds = []
    for number in range(2 * (options.side_by_side + _WARM_UP)):
        is_on = number % 2 == 1
        Current.heartbeat, trainer.callbacks = (ledger, callbacks) if is_on else (None, nothing)
        barrier(mesh.world)
        wall, cpu = time.perf_counter(), time.thread_time()
        result = trainer.train_step(next(trainer.batches))
        if is_on and trainer.model.runtime.timer.enabled:  # a step that is logged
            trainer.log(result, StepTimes(trainer.clock.per_step(trainer.step), trainer.clock.data_share))
        seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return seconds[2 * _WARM_UP :]


def compare(ranks: list[list[tuple[float, float]]]) -> None:
    """Print what everything costs, from the steps of all ranks."""
    for name, place in (("wall-clock time", 0), ("CPU time of the ranks' main threads", 1)):
        steps = [sum(rank[number][place] for rank in ranks) for number in range(len(ranks[0]))]
        off, on = steps[::2], steps[1::2]
        extra = [with_it - without for without, with_it in zip(off, on, strict=True)]
        error = statistics.stdev(extra) / len(extra) ** 0.5 / statistics.mean(off) if len(extra) > 1 else float("nan")
        print(
            f"{name}: {sum(extra) / sum(off):+.2%} +- {error:.2%} of {statistics.mean(off) / len(ranks):.3f} s per step"
        )


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the rank with the largest share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, micro_batch=1, rounds=10, steps=1, threads=1)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=0, help="pairs of steps, with everything off and on")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        if options.side_by_side:
            compare(run_distributed(everything, options.tp * options.pp * options.dp, options, directory, timeout=1200))
            return 0
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
