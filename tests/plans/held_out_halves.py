"""How well --fit on half of the published rows predicts the other half: `python -m tests.plans.held_out_halves`.

Prints a table of medians over random halves of each set, with the largest median in brackets.
docs/reports/measured.md has the smallest and the largest median. Exit status 0.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.row_fit import MeasuredRow, fit_rows
from megacore.plan.step_time import step_seconds
from tests.plans.published import Run, megatron_runs, single_node_runs


def measured(runs: Sequence[Run]) -> list[MeasuredRow]:
    """The runs as rows of a file."""
    return [MeasuredRow(line=line, config=run.config, seconds=run.seconds or 0.0) for line, run in enumerate(runs)]


def median_error(cluster: Cluster, rows: Sequence[MeasuredRow]) -> float:
    """Of the predictions of a cluster."""
    seconds = [step_seconds(row.config, outline(row.config), cluster) for row in rows]
    return statistics.median(abs(one / row.seconds - 1) for one, row in zip(seconds, rows, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Half of each published set predicts the other half.")
    parser.add_argument("--halves", type=int, default=20, metavar="N", help="random halves of each set. Default: 20")
    args = parser.parse_args(argv)
    nodes, node = list(megatron_runs()), list(single_node_runs())
    sets = {
        "Megatron-LM 3.6B and 18.4B": nodes,
        "3.6B": [run for run in nodes if "3.6B" in run.model],
        "18.4B": [run for run in nodes if "18.4B" in run.model],
        "hidden 1024, one node": [run for run in node if "hidden 1024" in run.model],
        "hidden 2048, one node": [run for run in node if "hidden 2048" in run.model],
    }
    print("| set | rows | shipped | fitted | left out | held-out half |\n|---|---|---|---|---|---|")
    for name, runs in sets.items():
        base, rows = runs[0].computed_by, measured(runs)
        found: list[list[float]] = []
        for seed in range(args.halves):
            random.Random(seed).shuffle(rows)
            half, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            fit = fit_rows(half, base)
            found.append([median_error(fit.cluster, half), fit.median_left_out, median_error(fit.cluster, other)])
        cells = [f"{statistics.median(of):.1%} ({max(of):.1%})" for of in zip(*found, strict=True)]
        print(f"| {name} | {len(rows)} | {median_error(base, rows):.1%} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
