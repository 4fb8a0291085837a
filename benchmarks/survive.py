"""What `--survive` costs per step: launches with and without it, in turn.

    python -m benchmarks.survive                       # 8 ranks on a CPU, 3 rounds
    python -m benchmarks.survive --nproc 4 --rounds 5 --words "--tp 2 --dp 2"

A step's time is the median of a launch, without its first quarter, as metrics.jsonl has it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.in_turn import ratio, take_turns
from megacore.plan.measured_run import read_run

_WORDS = (
    "--tp 2 --pp 2 --dp 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --clip-grad 0 "
    "--global-batch-size 8 --micro-batch-size 1"
)


def seconds(nproc: int, words: Sequence[str], steps: int) -> float:
    """Of a step of one launch."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        ours = f"pretrain_gpt.py --mock-data --train-iters {steps} --log-interval 1 --eval-interval 0 --output-dir"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, *ours.split(), directory, *words], env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return read_run(Path(directory)).steps.median


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--words", default=_WORDS, help="of the run")
    options = parser.parse_args(argv)
    words = shlex.split(options.words)
    runs = {
        name: partial(seconds, options.nproc, [*words, *more], options.steps)
        for name, more in (("with", ["--survive"]), ("without", []))
    }
    found = take_turns(runs, options.rounds, warm_up=0)
    print({name: [f"{one:.4g} s" for one in taken] for name, taken in found.items()})
    times = ratio(found["with"], found["without"])
    print(f"a step with --survive beside one without, median (lowest to highest): {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
