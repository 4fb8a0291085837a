"""What the planner predicts of published runs, and the tables of it in docs/: benchmarks/planner.py prints all.

An error is predicted / measured - 1, of seconds or, in the table of memory, of bytes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS, Cluster, fields_of
from megacore.plan.memory import GIB
from megacore.plan.row_fit import MeasuredRow
from megacore.plan.step_time import step_seconds
from tests.plans.published import Run, memory_runs, own_runs


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


def measured_rows(runs: Sequence[Run]) -> list[MeasuredRow]:
    """The runs as rows of a file."""
    return [MeasuredRow(line=line, config=run.config, seconds=run.seconds or 0.0) for line, run in enumerate(runs)]


def error_with(cluster: Cluster, rows: Sequence[MeasuredRow]) -> float:
    """The median size of the errors of rows on a cluster."""
    seconds = [step_seconds(row.config, outline(row.config), cluster) for row in rows]
    return statistics.median(abs(one / row.seconds - 1) for one, row in zip(seconds, rows, strict=True))


def memory_lines() -> Iterator[str]:
    """The runs with a memory as a Markdown table."""
    yield "| trainer | model | parameters | GPUs | micro-batch | GiB of | measured | planned | difference |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for counts, runs in {"device": memory_runs(), "tensors": own_runs()}.items():
        for run in runs:
            plan = run.plan()
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
