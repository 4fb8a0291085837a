"""How far predicted steps were from published ones, and from which difference on two layouts can be told apart.

The errors count as those of unseen rows: constants that are fitted to all models but one are those of the planner
(left-out of f982e306:benchmarks/planner.py). A range from the errors of the other models alone has the measured time
of 757 of 813 rows, one from the fast to the slow case that of 663. tests/plans/test_published_runs.py keeps the table.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.plan.cluster import Cluster

APART = 0.10
"""Difference of two predicted times from which on one layout counts as faster. Of 2,828 published pairs of layouts of
one model, batch and number of A100, 95 % of those that differ by more were measured in the predicted order, and 69 % of
the others."""
_SMALL_HIDDEN, _NARROW = 2048, 256  # below these widths launches take as long as operators


class Errors(NamedTuple):
    """Of published steps of one device, trainer and kind of model.

    Attributes:
        rows: number of steps.
        ranks: of the largest of them.
        low, high: measured / predicted seconds; of 20 rows and more the 5th and 95th percentile, of fewer the extremes.
    """

    rows: int
    ranks: int
    low: float
    high: float


PUBLISHED = {
    (chip, trainer, kind): Errors(*errors)
    for chip, trainer, kind, *errors in tomllib.loads(
        Path(__file__).with_name("published_errors.toml").read_text(encoding="utf-8")
    )["rows"]
}
"""By device, trainer and kind of model; what is not here was never checked."""


def is_small(config: ResolvedConfig, cluster: Cluster) -> bool:
    """Whether launches may take as long as operators do, so that the time of a step is of low confidence."""
    hidden = config.model.hidden_size
    return not cluster.on_cpu and (hidden < _SMALL_HIDDEN or hidden / config.parallel.tp < _NARROW)


def errors_of(config: ResolvedConfig, cluster: Cluster) -> Errors | None:
    """Errors of published steps like this one, the largest on as many devices or more; None: there is none, or the
    cluster is fitted to measured steps, whose spread is its range."""
    found = (
        None if cluster.is_fitted else PUBLISHED.get((cluster.chip, cluster.software.name, kind_of(config, cluster)))
    )
    return found if found is not None and config.parallel.ranks <= found.ranks else None


def kind_of(config: ResolvedConfig, cluster: Cluster) -> str:
    """The kind of model by which errors are known."""
    if config.model.experts is not None:
        return "mixtures of experts"
    return "small models" if is_small(config, cluster) else "dense models"


def checked_steps(config: ResolvedConfig, cluster: Cluster) -> int:
    """Number of published steps like this one; 0: it was never checked."""
    found = errors_of(config, cluster)
    return 0 if found is None else found.rows


def range_of(fast: float, seconds: float, slow: float, config: ResolvedConfig, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step at the least and most: of the fast and the slow case, and by the errors of published steps."""
    found = errors_of(config, cluster)
    return (fast, slow) if found is None else (min(fast, seconds * found.low), max(slow, seconds * found.high))


def checked_line(config: ResolvedConfig, cluster: Cluster) -> str:
    """What is known of the error of a step, for a report."""
    if cluster.is_fitted:
        return "checked: the cluster is fitted to measured steps"
    found, chip = errors_of(config, cluster), cluster.chip or cluster.name
    what = f"of {kind_of(config, cluster)} with {cluster.software.name}"
    if found is None:
        where = f"{config.parallel.ranks:,} or more {chip}"
        return f"never checked: no step {what} on {where} is published; the range is assumed"
    spread = f"{found.low:g} to {found.high:g}" if found.rows > 1 else f"{found.low:g}"
    return f"checked: {counted(found.rows, 'published step')} {what} on {chip} took {spread} times the predicted time"
