"""How many of many short launches end with status 0, and how long one takes.

    python benchmarks/launches.py --launches 50 --ranks 4

A run that has done its work must say so: a process that dies while it leaves (see `megacore.train.ending.exit_with`)
makes its launcher report a failure after the last step. The program under test is pretrain_gpt.py itself, on generated
data, under torchrun.

Measured on 2 cores that other work kept busy: 50 of 50 at 4 ranks, median 26.5 s each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ("--mock-data", "--preset", "gpt2-tiny", "--vocab-size", "512", "--train-iters", "3", "--eval-interval", "0")
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one launch ended.

    Attributes:
        status: the launcher's exit status; negative if a signal ended it, None if it hung.
        seconds: from its start to its end.
        text: what its processes wrote.
    """

    status: int | None
    seconds: float
    text: str


def layout(ranks: int) -> list[str]:
    """Flags of a layout that uses every kind of group as far as the ranks allow: tp, then pp, then dp."""
    tp = 2 if ranks % 2 == 0 else 1
    pp = 2 if ranks // tp % 2 == 0 else 1
    return ["--tp", str(tp), "--pp", str(pp), "--global-batch-size", str(2 * ranks // (tp * pp))]


def launch(ranks: int, output_dir: Path) -> Launch:
    """Start pretrain_gpt.py on `ranks` CPU processes and wait for its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "pretrain_gpt.py"), *RUN, *layout(ranks), "--device", "cpu", "--output-dir", str(output_dir)]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Launch(status=None, seconds=time.monotonic() - start, text="hung")
    return Launch(status=done.returncode, seconds=time.monotonic() - start, text=done.stdout + done.stderr)


def launch_often(launches: int, ranks: int) -> list[Launch]:
    """Launch one after the other; a line on stderr for each that fails."""
    done: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(launches):
            done.append(launch(ranks, Path(folder) / str(number)))
            if done[-1].status != 0:
                print(f"launch {number}: status {done[-1].status}\n{done[-1].text}", file=sys.stderr, flush=True)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, report, and return 0 if every launch ended with status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each (default 4)")
    arguments = parser.parse_args(argv)
    done = launch_often(arguments.launches, arguments.ranks)
    good = sum(one.status == 0 for one in done)
    seconds = statistics.median(one.seconds for one in done)
    print(f"{good} of {len(done)} launches at {arguments.ranks} ranks ended with status 0; median {seconds:.1f} s each")
    return 0 if good == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
