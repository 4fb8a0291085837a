"""How well the planner predicts models that its constants were not fitted to: `python -m tests.plans.leave_one_out`.

Three constants decide the predictions of Megatron-LM on A100: the share of the peak that products reach, the share of a
link's bandwidth that collectives reach, and the time of the program for a pass through a block. For each model they are
fitted to all other models, each with the same weight, on a grid, and the model is predicted with them. Prints the table
of docs/guides/planner.md; exit status 0.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace

from megacore.plan.devices import Range
from megacore.plan.outline import outline
from megacore.plan.step_time import step_time
from tests.plans.published import Run, megatron_runs, single_node_runs

PRODUCTS = (0.79, 0.83, 0.87)
LINKS = (0.65, 0.75, 0.85)
BLOCK_SECONDS = (0.9e-3, 1.1e-3, 1.3e-3)
Constants = tuple[float, float, float]
GRID: tuple[Constants, ...] = tuple(itertools.product(PRODUCTS, LINKS, BLOCK_SECONDS))
CHOSEN: Constants = (0.83, 0.75, 1.1e-3)  # megacore/plan/devices.py, published.py


@dataclass(frozen=True)
class Left:
    """A model that was left out.

    Attributes:
        rows: measured.
        fitted: to the other models.
        error: median, relative, with these.
        chosen_error: with the constants that the planner has.
    """

    rows: int
    fitted: Constants
    error: float
    chosen_error: float


def predicted(run: Run) -> dict[Constants, float]:
    """Seconds of a run by constants."""
    config, seconds = run.config, {}
    layers = outline(config)
    for constants in {*GRID, CHOSEN}:
        products, links, block = (Range(value, value, value) for value in constants)
        device = replace(run.cluster.device, product_efficiency=products, link_efficiency=links)
        cluster, software = replace(run.cluster, device=device), replace(run.software, block_seconds=block)
        seconds[constants] = step_time(config, layers, cluster, software=software).seconds
    return seconds


def leave_one_out(every: int = 1) -> dict[str, Left]:
    """Every model, predicted from the others.

    Args:
        every: of the rows of one node take one of so many.
    """
    errors: dict[str, dict[Constants, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in (*megatron_runs(), *single_node_runs(every)):
        assert run.seconds is not None
        for constants, seconds in predicted(run).items():
            errors[run.model][constants].append(abs(seconds / run.seconds - 1))
    medians = {model: {c: statistics.median(found) for c, found in of.items()} for model, of in errors.items()}
    left = {}
    for model, own in medians.items():
        others = [of for name, of in medians.items() if name != model]
        fitted = min(GRID, key=lambda constants: statistics.fmean(of[constants] for of in others))
        left[model] = Left(len(errors[model][fitted]), fitted, own[fitted], own[CHOSEN])
    return left


def main() -> int:
    print("| model | rows | products, links, block | error, left out | error, as planned |\n|---|---|---|---|---|")
    for model, one in leave_one_out(every=12).items():
        products, links, block = one.fitted
        constants = f"{products:.0%}, {links:.0%}, {block * 1e3:.1f} ms"
        print(f"| {model} | {one.rows} | {constants} | {one.error:.1%} | {one.chosen_error:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
