"""The planner's predictions of published runs as tables: `python -m tests.plans.table`.

    python -m tests.plans.table                         # memory and clusters as in docs/
    python -m tests.plans.table --software megacore     # all runs as if megacore ran them
    python -m tests.plans.table --rows --every 12       # each run; of the runs of one node a twelfth

An error is predicted / measured - 1, of seconds or, in the last table, of memory. The regret is what the layout that is
predicted fastest costs more than the measured best, where three or more layouts of one model, batch and number of ranks
were measured. A run is in the range where its measured time is between the predicted fast and slow cases. Exit status
0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.plan.cluster import CLUSTERS, fields_of
from megacore.plan.memory import GIB
from megacore.plan.software import SOFTWARE, software_named
from tests.plans.published import (
    Run,
    blackwell_runs,
    held_out_runs,
    megatron_runs,
    memory_runs,
    own_runs,
    single_node_runs,
    timed_runs,
)


@dataclass(frozen=True)
class Checked:
    """A run and what is predicted of it.

    Attributes:
        run: measured.
        seconds: predicted.
        low: in the fast case.
        high: in the slow case.
    """

    run: Run
    seconds: float
    low: float
    high: float

    @property
    def measured(self) -> float:
        assert self.run.seconds is not None
        return self.run.seconds

    @property
    def error(self) -> float:
        return self.seconds / self.measured - 1

    @property
    def is_in_range(self) -> bool:
        return self.low <= self.measured <= self.high


def checked(runs: Iterable[Run]) -> Iterator[Checked]:
    """Each run with its prediction."""
    for run in runs:
        plan = run.plan()
        figure = plan.timed(plan.time.seconds, "s")
        yield Checked(run, figure.value, figure.low, figure.high)


def median_error(rows: Iterable[Checked]) -> float:
    """Of the sizes of the errors."""
    return statistics.median(abs(row.error) for row in rows)


def regrets(rows: Iterable[Checked]) -> list[float]:
    """Of each set of three or more layouts that compete: one model, batch and number of ranks."""
    competing: dict[tuple[object, ...], list[Checked]] = defaultdict(list)
    for row in rows:
        config = row.run.config
        key = row.run.model, config.parallel.ranks, config.training.global_batch_size, config.data.seq_length
        competing[key].append(row)
    return [regret(own) for own in competing.values() if len(own) >= 3]


def regret(rows: Sequence[Checked]) -> float:
    """What the layout that is predicted fastest costs more than the measured best."""
    chosen = min(rows, key=lambda row: row.seconds)
    return chosen.measured / min(row.measured for row in rows) - 1


def by_model(rows: Iterable[Checked]) -> dict[str, list[Checked]]:
    """The rows of each model."""
    found: dict[str, list[Checked]] = defaultdict(list)
    for row in rows:
        found[row.run.model].append(row)
    return dict(found)


def _lines(title: str, rows: Sequence[Checked]) -> Iterator[str]:
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


def memory_lines(software: str | None = None) -> Iterator[str]:
    """The runs with a memory as a Markdown table.

    Args:
        software: of all runs; None: each run's own.
    """
    yield "| trainer | model | parameters | GPUs | micro-batch | GiB of | measured | planned | difference |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for counts, runs in {"device": memory_runs(), "tensors": own_runs()}.items():
        for run in runs:
            plan = (run if software is None else replace(run, software=software_named(software))).plan()
            fullest, config = plan.fullest, plan.config
            planned = (fullest.expected_tensors if counts == "tensors" else fullest.expected) / GIB
            assert run.gib is not None
            difference = f"{planned / run.gib - 1:+.1%}".replace("%", " %")
            sizes = f"{plan.parameters / 1e9:.2f}B | {config.parallel.ranks} | {config.training.micro_batch_size}"
            what = f"{plan.cluster.software.name} | {config.model.preset} | {sizes} | {counts}"
            yield f"| {what} | {run.gib:.1f} | {planned:.1f} | {difference} |"


def cluster_lines() -> Iterator[str]:
    """The clusters with devices as a Markdown table."""
    columns = "devices per node | GB | memory, GB/s | TFLOP/s bf16, fp8, fp32 | link in a node, GB/s | NICs of a node"
    yield f"| name | {columns} |"
    yield "|---|---|---|---|---|---|---|"
    for name, cluster in CLUSTERS.items():
        device, fields = cluster.device, fields_of(cluster)
        peaks = [cluster.peak(form) for form in ("bf16", "fp8", "fp32")]
        speeds = ", ".join("-" if peak is None else f"{peak / 1e12:,.5g}".replace(",", "") for peak in peaks)
        sizes = f"{device.memory_bytes / 1e9:.1f} | {fields['memory_bandwidth_gb_s']:g}"
        link = f"{fields['node_bandwidth_gb_s']:g}" + (f" ({device.node_ranks - 1} links)" if device.node_mesh else "")
        cards = f"{device.node_nics} of {fields['nic_bandwidth_gb_s']:g} GB/s"
        if not cluster.on_cpu:
            yield f"| `{name}` | {device.node_ranks} | {sizes} | {speeds} | {link} | {cards} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predictions of published runs as Markdown tables.")
    parser.add_argument("--software", choices=SOFTWARE, help="of all runs. Default: each run's own")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take one of N runs of one node. Default: 1")
    parser.add_argument("--rows", action="store_true", help="print each run")
    args = parser.parse_args(argv)
    others = [run for run in timed_runs() if not run.model.startswith("megatron-")]
    sets = {
        "Sweeps of many nodes": list(megatron_runs()),
        "Layouts of one node": list(single_node_runs(args.every)),
        "Other runs": others,
        "Blackwell": list(blackwell_runs()),
        "Held out": list(held_out_runs()),
    }
    for title, runs in sets.items():
        if args.software is not None:
            runs = [replace(run, software=software_named(args.software)) for run in runs]
        rows = list(checked(runs))
        print("\n".join(_lines(title, rows)))
        if args.rows:
            print()
            for row in rows:
                print(f"{row.run.model}: {row.error:+.1%} of {row.measured:.4g} s ({row.low:.4g} to {row.high:.4g})")
                print(f"    {row.run.flags}")
    print("\nMemory\n")
    print("\n".join(memory_lines(args.software)))
    print("\nClusters\n")
    print("\n".join(cluster_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
