"""Errors of the planner on published runs, as tables. Exit status 0.

    python -m benchmarks.planner table [--rows]   # of each model, of memory, and the clusters; --rows: of each run

An error is predicted / measured - 1, of seconds or, in one table, of memory. The regret is what the layout that is
predicted fastest costs more than the measured best, where three or more layouts of one model, batch and number of ranks
were measured. A run is in the range where its measured time is between the predicted fast and slow cases.

What follows for the ranges of plans: megacore/plan/checked.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tests.plans import published, table
from tests.plans.published import megatron_runs, single_node_runs
from tests.plans.table import Checked, by_model, checked, median_error


def regrets(rows: Iterable[Checked]) -> list[float]:
    """Of each set of three or more layouts that compete: one model, batch and number of ranks."""
    competing: dict[tuple[object, ...], list[Checked]] = defaultdict(list)
    for row in rows:
        config = row.run.config
        key = row.run.model, config.parallel.ranks, config.training.global_batch_size, config.data.seq_length
        competing[key].append(row)
    return [table.regret(own) for own in competing.values() if len(own) >= 3]


def lines(title: str, rows: Sequence[Checked]) -> Iterator[str]:
    """The table of a set of runs: a row for each model."""
    within = sum(row.is_in_range for row in rows)
    yield f"\n{title}: {len(rows)} rows, median error {median_error(rows):.1%}, in the range {within}\n"
    yield "| model | rows | median error | errors | in the range | mean regret |\n|---|---|---|---|---|---|"
    for model, own in by_model(rows).items():
        errors = sorted(row.error for row in own)
        ends = f"{errors[0]:+.0%} to {errors[-1]:+.0%}"
        spread = ends if len(own) > 6 else ", ".join(f"{error:+.1%}" for error in errors)
        inside, costs = sum(row.is_in_range for row in own), regrets(own)
        cost = f"{statistics.fmean(costs):.1%} of {len(costs)}, largest {max(costs):.1%}" if costs else ""
        yield f"| {model} | {len(own)} | {median_error(own):.1%} | {spread} | {inside} | {cost} |"


def print_table(*, every_run: bool) -> None:
    """What is predicted of each model."""
    for title, runs in {
        "Sweeps of many nodes": megatron_runs(),
        "Layouts of one node": single_node_runs(),
        "Other runs": (run for run in published.timed_runs() if not run.model.startswith("megatron-")),
        "Blackwell": published.blackwell_runs(),
        "Held out": published.held_out_runs(),
    }.items():
        rows = list(checked(runs))
        print("\n".join(lines(title, rows)))
        for row in rows if every_run else []:
            print(f"{row.run.model}: {row.error:+.1%} of {row.measured:.4g} s ({row.low:.4g} to {row.high:.4g})")
            print(f"    {row.run.flags}")
    print("\n".join(["\nMemory\n", *table.memory_lines(), "\nClusters\n", *table.cluster_lines()]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Errors of the planner on published runs, as Markdown tables.")
    parser.add_argument("of", choices=("table",), help="what is printed")
    parser.add_argument("--rows", action="store_true", help="print each run")
    print_table(every_run=parser.parse_args(argv).rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
