"""How well the planner predicts models that its constants were not fitted to: `python -m tests.plans.leave_one_out`.

Constants are fitted to all models but one, each model with the same weight, on a grid, and the model is predicted with
them. In three parts, each with the runs that tell most about its constants:

- the share of the peak that products reach, the share of a link's bandwidth that collectives reach, and the time of
  Megatron-LM's program for a pass through a block: two sweeps on many nodes and eight small models;
- how much this time differs between the ranks of a layer group: the eight small models;
- how much the speeds of nodes differ: every run of timed_runs(). The runs of held_out_runs() are then predicted.

Prints tables; exit status 0. What follows for the ranges of plans: megacore/plan/checked.py.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Range
from megacore.plan.software import MEGATRON_LM
from megacore.plan.step_time import step_time
from tests.plans.published import A100, Run, held_out_runs, megatron_runs, single_node_runs, timed_runs

Constants = tuple[float, ...]
Errors = dict[str, dict[Constants, float]]  # median by model and constants

PRODUCTS = (0.79, 0.83, 0.87)
LINKS = (0.55, 0.65, 0.75, 0.85)
BLOCK_SECONDS = (0.9e-3, 1.1e-3, 1.3e-3)
SPEEDS: tuple[Constants, ...] = tuple(itertools.product(PRODUCTS, LINKS, BLOCK_SECONDS))
HOST_SPREADS: tuple[Constants, ...] = ((0.0,), (0.04,), (0.08,), (0.12,), (0.16,))
NODE_SPREADS: tuple[Constants, ...] = ((0.0,), (0.01,), (0.015,), (0.02,), (0.025,), (0.03,))
CHOSEN_SPEEDS: Constants = (
    A100.device.product_efficiency.expected,
    A100.device.link_efficiency.expected,
    MEGATRON_LM.block_seconds.expected,
)
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


def _table(left: dict[str, Left], text: Callable[[Constants], str], *, without: Errors | None = None) -> Iterator[str]:
    """Rows of a table; `without`: with a column of the errors without what is fitted."""
    for model, one in left.items():
        plain = "" if without is None else f" {without[model][0.0,]:.1%} |"
        yield f"| {model} | {text(one.fitted)} | {one.error:.1%} | {one.chosen_error:.1%} |{plain}"
    means = [
        statistics.fmean(values) for values in zip(*((o.error, o.chosen_error) for o in left.values()), strict=True)
    ]
    plain = "" if without is None else f" {statistics.fmean(of[0.0,] for of in without.values()):.1%} |"
    yield f"| mean | | {means[0]:.1%} | {means[1]:.1%} |{plain}"


def main() -> int:
    small = list(single_node_runs(every=12))
    print("| model | products, links, block | error, left out | error, as planned |\n|---|---|---|---|")
    found = errors([*megatron_runs(), *small], (*SPEEDS, CHOSEN_SPEEDS), with_speeds)
    left = leave_one_out(found, SPEEDS, CHOSEN_SPEEDS)
    print("\n".join(_table(left, lambda c: f"{c[0]:.0%}, {c[1]:.0%}, {c[2] * 1e3:.1f} ms")))
    heads = "| error, left out | error, as planned | error without |\n|---|---|---|---|---|"
    for name, runs, grid, chosen, changed in (
        ("spread of hosts", small, HOST_SPREADS, CHOSEN_HOSTS, with_host_spread),
        ("spread of nodes", timed_runs(), NODE_SPREADS, CHOSEN_NODES, with_node_spread),
    ):
        print(f"\n| model | {name} {heads}")
        found = errors(runs, grid, changed)
        print("\n".join(_table(leave_one_out(found, grid, chosen), lambda c: f"{c[0]:.1%}", without=found)))
    print("\n| held out | error, as planned | error without |\n|---|---|---|")
    for model, of in errors(held_out_runs(), NODE_SPREADS, with_node_spread).items():
        print(f"| {model} | {of[CHOSEN_NODES]:.1%} | {of[0.0,]:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
