"""What long turns on a core change on a CPU (`take_long_turns`): megacore's steps with them and without, in turn.

    python -m benchmarks.turns --ranks 4 --modes dp,tp,pp-default

The model, its batch and the layouts are those of compare.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.comparison.inputs import write_inputs
from benchmarks.comparison.job import KINDS, Job, Layout, Sizes
from benchmarks.comparison.launcher import Side
from benchmarks.comparison.stages import cut

_SIDES = ("megacore", "default-turns")


def measure(layout: Layout, directory: Path, *, rounds: int, steps: int) -> list[float]:
    """How many times as fast a step is with long turns, for each round."""
    sizes, python = Sizes(), Path(sys.executable)
    tokens, weights = write_inputs(sizes, directory)

    def job(side: str) -> Job:
        stages = cut(sizes, layout)
        return Job(
            side=side, sizes=sizes, layout=layout, stages=stages, tokens=tokens, weights=weights, directory=directory
        )

    log = directory / "ranks.log"
    with Side(job(_SIDES[0]), python, log) as long, Side(job(_SIDES[1]), python, log) as default:
        ratios = []
        for number in range(rounds + 1):
            seconds = {side: side.run(steps).seconds for side in ([long, default] if number % 2 else [default, long])}
            ratios.append(seconds[default] / seconds[long])
    return ratios[1:]


def main(argv: list[str] | None = None) -> int:
    """Measure and print the median and the range of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes; default 2")
    parser.add_argument("--modes", default="dp,zero1,zero3,tp,tp-sp,pp-default", help="layouts of compare.py")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of a round; default 3")
    options = parser.parse_args(argv)
    for kind in options.modes.split(","):
        with tempfile.TemporaryDirectory() as directory:
            layout = KINDS[kind](options.ranks)
            ratios = measure(layout, Path(directory), rounds=options.rounds, steps=options.steps)
        print(f"{layout.name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
