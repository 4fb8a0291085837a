"""Many ranks on one machine: a whole job of gloo ranks trains a tiny GPT, its losses are compared with one process.

    python benchmarks/many_ranks.py --tp 4 --pp 12 --dp 8          384 ranks, as BLOOM-176B was trained on
    python benchmarks/many_ranks.py --tp 2 --pp 2 --dp 2 --tp 4 --pp 4 --dp 2 --tp 4 --pp 12 --dp 2      a table

Every rank is a process that runs pretrain_gpt.py, from its flags to its exit. The processes are forked from a server
that has torch and megacore loaded (tests/distributed.py), so that they share that memory. What a launch costs a rank is
measured inside (rank_costs.py): CPU seconds do not depend on how many other ranks wait for the same cores, as seconds
on the clock do. Flags that are not listed here go to pretrain_gpt.py. The exit status is 1 where a loss differs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.commands.tool import ToolParser, positive, run_tool
from megacore.config.messages import counted

if TYPE_CHECKING:
    from benchmarks.rank_costs import RankCosts

TOLERANCE = 1e-5  # relative, of a loss


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
    # Here, so that a wrong flag is refused before torch is loaded.
    from benchmarks.rank_costs import train
    from tests.distributed import run_distributed

    tp, pp, dp = map(str, degrees)
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as directory:
        argv = ["--tp", tp, "--pp", pp, "--dp", dp, *flags, "--output-dir", directory]
        start = time.perf_counter()
        ranks = run_distributed(train, math.prod(degrees), argv, timeout=timeout, init=False)
        seconds = time.perf_counter() - start
        lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    losses = [record["train/loss"] for line in lines if "train/loss" in (record := json.loads(line))]
    return Job(ranks=ranks, losses=losses, seconds=seconds)


def tiny_model(layouts: Sequence[tuple[int, int, int]], options: Namespace) -> list[str]:
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


def parse(argv: Sequence[str]) -> Namespace:
    """The flags of this benchmark; `layouts` has tp, pp and dp of each, `flags` are those of pretrain_gpt.py."""
    return _parser().parse_args(argv)


class _Parser(ToolParser):
    """Leaves the flags that it does not know to pretrain_gpt.py."""

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        options, options.flags = self.parse_known_args(argv, namespace)
        counts = {name: len(getattr(options, name)) for name in ("tp", "pp", "dp")}
        if not min(counts.values()) == max(counts.values()) > 0:
            given = ", ".join(f"--{name} {counted(count, 'time')}" for name, count in counts.items())
            self.error(f"every layout needs --tp, --pp and --dp, and given are {given}: give each once per layout")
        options.layouts = list(zip(options.tp, options.pp, options.dp, strict=True))
        return options


def _parser() -> ToolParser:
    parser = _Parser(prog="many_ranks.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=positive, action="append", default=[], help="once for each layout")
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--microbatches", type=positive, default=2, help="of each replica and step")
    parser.add_argument("--timeout", type=_seconds, default=900.0, help="seconds for a job, on a quiet machine")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return value


def main(argv: Sequence[str]) -> int:
    """Run the layouts and one process, print the table, and return the exit status."""
    worst: list[float] = []
    return run_tool(_parser(), argv, lambda options: worst.extend(_differences(options))) or int(
        not all(difference <= TOLERANCE for difference in worst)
    )


def _differences(options: Namespace) -> Iterator[float]:
    """Of the losses of each layout from those of one process, relative; prints the table."""
    flags = tiny_model(options.layouts, options)
    expected = run_job((1, 1, 1), flags, timeout=options.timeout).losses
    for number, degrees in enumerate(options.layouts):
        job = run_job(degrees, flags, timeout=options.timeout)
        worst = max(abs(a - b) / abs(b) for a, b in zip(job.losses, expected, strict=True))
        row = rows(degrees, job, worst)
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        print(f"| {' | '.join(row.values())} |", flush=True)
        yield worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
