"""Errors of the planner on published runs, as tables. Exit status 0.

    python -m benchmarks.planner table [--rows]   # of each model, of memory, and the clusters; --rows: of each run
    python -m benchmarks.planner halves           # --fit on half of the rows predicts the other half
    python -m benchmarks.planner left-out         # constants that are fitted to all models but one predict this one

An error is predicted / measured - 1, of seconds or, in one table, of memory. The regret is what the layout that is
predicted fastest costs more than the measured best, where three or more layouts of one model, batch and number of ranks
were measured. A run is in the range where its measured time is between the predicted fast and slow cases.

`left-out` fits on a grid, each model with the same weight, in three parts, each with the runs that tell most about its
constants:

- the share of the peak that products reach, the share of a link's bandwidth that collectives reach, and the time of
  Megatron-LM's program for a pass through a block: two sweeps on many nodes and eight small models;
- how much this time differs between the ranks of a layer group: the eight small models;
- how much the speeds of nodes differ: every run of timed_runs(). The runs of held_out_runs() are then predicted.

What follows for the ranges of plans: megacore/plan/checked.py.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Range
from megacore.plan.row_fit import fit_rows
from megacore.plan.software import MEGATRON_LM
from megacore.plan.step_time import step_time
from tests.plans import published, table
from tests.plans.published import A100, Run, megatron_runs, single_node_runs
from tests.plans.table import Checked, by_model, checked, median_error

HALVES = 20  # random ones of each set

# ---- of each model ---------------------------------------------------------------------------------------------------


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


# ---- --fit -----------------------------------------------------------------------------------------------------------


def print_halves() -> None:
    """Medians over random halves of each set, with the largest median in brackets."""
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
        base, rows = runs[0].computed_by, table.measured_rows(runs)
        found: list[list[float]] = []
        for seed in range(HALVES):
            random.Random(seed).shuffle(rows)
            half, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            fit = fit_rows(half, base)
            errors = [table.error_with(fit.cluster, one) for one in (half, other)]
            found.append([errors[0], fit.median_left_out, errors[1]])
        cells = [f"{statistics.median(of):.1%} ({max(of):.1%})" for of in zip(*found, strict=True)]
        print(f"| {name} | {len(rows)} | {table.error_with(base, rows):.1%} | {' | '.join(cells)} |", flush=True)


# ---- constants without a model ---------------------------------------------------------------------------------------

Constants = tuple[float, ...]
Errors = dict[str, dict[Constants, float]]  # median by model and constants

PRODUCTS = (0.79, 0.83, 0.87)
LINKS = (0.55, 0.65, 0.75, 0.85)
BLOCK_SECONDS = (0.9e-3, 1.1e-3, 1.3e-3)
SPEEDS: tuple[Constants, ...] = tuple(itertools.product(PRODUCTS, LINKS, BLOCK_SECONDS))
HOST_SPREADS: tuple[Constants, ...] = ((0.0,), (0.04,), (0.08,), (0.12,), (0.16,))
NODE_SPREADS: tuple[Constants, ...] = ((0.0,), (0.01,), (0.015,), (0.02,), (0.025,), (0.03,))
_CHOSEN = (A100.device.product_efficiency, A100.device.link_efficiency, MEGATRON_LM.block_seconds)
CHOSEN_SPEEDS: Constants = tuple(constant.expected for constant in _CHOSEN)
CHOSEN_HOSTS: Constants = (MEGATRON_LM.host_spread,)
CHOSEN_NODES: Constants = (A100.device.node_spread.expected,)


@dataclass(frozen=True)
class Left:
    """A model that was left out.

    Attributes:
        fitted: to the other models.
        error: median, relative, with these.
        chosen_error: with the constants that the planner has.
    """

    fitted: Constants
    error: float
    chosen_error: float


def with_speeds(cluster: Cluster, constants: Constants) -> Cluster:
    """A cluster that reaches these shares, with software that takes this time."""
    products, links, block = (Range(value, value, value) for value in constants)
    device = replace(cluster.device, product_efficiency=products, link_efficiency=links, network_efficiency=links)
    return replace(cluster, device=device, software=replace(cluster.software, block_seconds=block))


def with_host_spread(cluster: Cluster, constants: Constants) -> Cluster:
    """A cluster whose hosts differ so much."""
    return replace(cluster, software=replace(cluster.software, host_spread=constants[0]))


def with_node_spread(cluster: Cluster, constants: Constants) -> Cluster:
    """A cluster whose nodes differ so much."""
    spread = Range(*constants * 3)
    return replace(cluster, device=replace(cluster.device, node_spread=spread))


def errors(runs: Iterable[Run], grid: Sequence[Constants], changed: Callable[[Cluster, Constants], Cluster]) -> Errors:
    """The median error of each model with each choice of constants."""
    found: dict[str, dict[Constants, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        config, seconds = run.config, run.seconds
        assert seconds is not None
        layers = outline(config)
        for constants in grid:
            predicted = step_time(config, layers, changed(run.computed_by, constants)).seconds
            found[run.model][constants].append(abs(predicted / seconds - 1))
    return {model: {c: statistics.median(sizes) for c, sizes in of.items()} for model, of in found.items()}


def leave_one_out(medians: Errors, grid: Sequence[Constants], chosen: Constants) -> dict[str, Left]:
    """Every model, predicted from the others."""
    left = {}
    for model, own in medians.items():
        others = [of for name, of in medians.items() if name != model]
        fitted = min(grid, key=lambda constants: statistics.fmean(of[constants] for of in others))
        left[model] = Left(fitted, own[fitted], own[chosen])
    return left


def _table(left: dict[str, Left], text: Callable[[Constants], str], without: Errors | None = None) -> Iterator[str]:
    """Rows of a table; `without`: with a column of the errors without what is fitted."""
    plain = {} if without is None else {model: of[0.0,] for model, of in without.items()}
    if without is not None:
        plain["mean"] = statistics.fmean(plain.values())
    pairs = ((one.error, one.chosen_error) for one in left.values())
    mean = Left((), *map(statistics.fmean, zip(*pairs, strict=True)))
    for model, one in {**left, "mean": mean}.items():
        fitted = f"{text(one.fitted)} " if one.fitted else ""
        last = f" {plain[model]:.1%} |" if plain else ""
        yield f"| {model} | {fitted}| {one.error:.1%} | {one.chosen_error:.1%} |{last}"


def print_left_out() -> None:
    """Each model with the constants that the others are fitted to."""
    small = list(single_node_runs(every=12))
    print("| model | products, links, block | error, left out | error, as planned |\n|---|---|---|---|")
    found = errors([*megatron_runs(), *small], (*SPEEDS, CHOSEN_SPEEDS), with_speeds)
    left = leave_one_out(found, SPEEDS, CHOSEN_SPEEDS)
    print("\n".join(_table(left, lambda c: f"{c[0]:.0%}, {c[1]:.0%}, {c[2] * 1e3:.1f} ms")))
    heads = "| error, left out | error, as planned | error without |\n|---|---|---|---|---|"
    for name, runs, grid, chosen, changed in (
        ("spread of hosts", small, HOST_SPREADS, CHOSEN_HOSTS, with_host_spread),
        ("spread of nodes", published.timed_runs(), NODE_SPREADS, CHOSEN_NODES, with_node_spread),
    ):
        print(f"\n| model | {name} {heads}")
        found = errors(runs, grid, changed)
        print("\n".join(_table(leave_one_out(found, grid, chosen), lambda c: f"{c[0]:.1%}", found)))
    print("\n| held out | error, as planned | error without |\n|---|---|---|")
    for model, of in errors(published.held_out_runs(), NODE_SPREADS, with_node_spread).items():
        print(f"| {model} | {of[CHOSEN_NODES]:.1%} | {of[0.0,]:.1%} |")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Errors of the planner on published runs, as Markdown tables.")
    parser.add_argument("of", choices=("table", "halves", "left-out"), help="what is printed")
    parser.add_argument("--rows", action="store_true", help="of the table: print each run")
    args = parser.parse_args(argv)
    {"table": lambda: print_table(every_run=args.rows), "halves": print_halves, "left-out": print_left_out}[args.of]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
