"""How much faster steps on a CPU are with long turns on a core (`take_long_turns`) than without; the two alternate.

    python -m benchmarks.turns --ranks 4 --modes dp,tp,pp-default

The model, its batch and the layouts are those of compare.py. Prints the median of the rounds and their range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.comparison.inputs import write_inputs
from benchmarks.comparison.job import KINDS, Job, Layout, Sizes, layouts
from benchmarks.comparison.launcher import Side
from benchmarks.comparison.stages import cut
from megacore.commands.tool import positive, whole


def measure(layout: Layout, directory: Path, *, rounds: int, steps: int) -> list[float]:
    """How many times as fast a step is with long turns, for each round."""
    sizes, python = Sizes(), Path(sys.executable)
    tokens, weights = write_inputs(sizes, directory)
    stages, log = cut(sizes, layout), directory / "ranks.log"
    jobs = [
        Job(side=side, sizes=sizes, layout=layout, stages=stages, tokens=tokens, weights=weights, directory=directory)
        for side in ("megacore", "default-turns")
    ]
    with Side(jobs[0], python, log) as long, Side(jobs[1], python, log) as default:
        ratios = []
        for number in range(rounds + 1):  # the first one warms up
            seconds = {side: side.run(steps).seconds for side in ([long, default] if number % 2 else [default, long])}
            ratios.append(seconds[default] / seconds[long])
    return ratios[1:]


def _modes(text: str) -> list[str]:
    """For argparse: names of KINDS, separated by commas."""
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: use some of {', '.join(KINDS)}")
    return kinds


def main(argv: list[str] | None = None) -> int:
    """Measure and print the median and the range of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole(2), default=2, help="processes; default 2")
    parser.add_argument(
        "--modes", type=_modes, default="dp,zero1,zero3,tp,tp-sp,pp-default", help=f"from {','.join(KINDS)}"
    )
    parser.add_argument("--rounds", type=positive, default=8, help="default 8")
    parser.add_argument("--steps", type=positive, default=3, help="of a round; default 3")
    options = parser.parse_args(argv)
    for layout in layouts(options.modes, options.ranks):
        with tempfile.TemporaryDirectory() as directory:
            ratios = measure(layout, Path(directory), rounds=options.rounds, steps=options.steps)
        print(f"{layout.name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
