"""Fits the constants of a cluster and its trainer to measured steps, rows of layouts with their seconds.

Few rows must not bend what is known well: the constants have priors at the values that the planner ships, and what they
leave of a row is shared by the layouts that are like it (measured_layouts.py). A fit is kept only where it predicts
rows that were left out clearly better than the shipped values do.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Link, Range
from megacore.plan.least_squares import Vector, solve
from megacore.plan.measured_layouts import OF_ONE_SHAPE, Layout, MeasuredLayouts, layout_of, likeness
from megacore.plan.step_time import step_seconds

LEAST_ROWS = 4  # as many as tell a median
_NOISE = 0.02  # of the logarithm of a measured step: as much do runs of one layout differ
_ROUNDS = 2  # the second one changes predictions by less than the noise


class Constant(NamedTuple):
    """What is fitted.

    Attributes:
        name: in words.
        deviation: standard deviation of its logarithm around the shipped value; of the time of every step, in parts of
            the shortest measured one.
    """

    name: str
    deviation: float


CONSTANTS = (
    Constant("GEMM and attention", 0.15),
    Constant("elementwise kernels", 0.2),
    Constant("links in a node, as of tensor parallelism", 0.3),
    Constant("network between nodes", 0.3),
    Constant("latency in a node", 1.0),
    Constant("host overhead per layer and pass", 0.4),
    Constant("time of every step", 0.05),
)
_DEVIATIONS = np.array([constant.deviation for constant in CONSTANTS])


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A measured step.

    Attributes:
        line: of the file.
        config: a resolved configuration.
        seconds: of a step.
    """

    line: int
    config: ResolvedConfig
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RowFit:
    """What was fitted to rows. Errors are predicted / measured - 1, in the order of the rows.

    Attributes:
        rows: measured.
        base: whose constants the priors are.
        cluster: fitted; the base where no fit is better.
        before: errors of the base.
        after: errors of the fitted cluster.
        left_out: errors of rows that are predicted from the others alone.
        is_aside: rows that count for nothing, as the others do not explain them.
        median_left_out: of the best fit, also where it was not kept.
    """

    rows: Sequence[MeasuredRow]
    base: Cluster
    cluster: Cluster
    before: Vector
    after: Vector
    left_out: Vector
    is_aside: Sequence[bool]
    median_left_out: float

    @property
    def is_kept(self) -> bool:
        """Whether a fit predicts rows that were left out clearly better than the base."""
        return self.cluster is not self.base


def with_constants(cluster: Cluster, logs: Sequence[float], shortest: float) -> Cluster:
    """The cluster with changed constants.

    Args:
        cluster: that has the shipped ones.
        logs: logarithms of the factors of `CONSTANTS`; of the last one, what is added in parts of `shortest`.
        shortest: seconds of the shortest measured step.
    """
    products, memory, links, network, latency, block = map(math.exp, logs[:-1])
    device, software = cluster.device, cluster.software
    step = max(software.step_seconds + logs[-1] * shortest, 0.0)
    return replace(
        cluster,
        device=replace(
            device,
            product_efficiency=_share(device.product_efficiency, products),
            attention_efficiency=_share(device.attention_efficiency, products),
            memory_efficiency=_share(device.memory_efficiency, memory),
            link_efficiency=_share(device.link_efficiency, links),
            network_efficiency=_share(device.network_efficiency, network),
            node_link=Link(bandwidth=device.node_link.bandwidth, latency=device.node_link.latency * latency),
        ),
        software=replace(
            software,
            block_seconds=Range(*(block * seconds for seconds in of_cases(software.block_seconds))),
            step_seconds=step,
        ),
    )


def of_cases(values: Range) -> tuple[float, ...]:
    """Slow, expected and fast."""
    return values.slow, values.expected, values.fast


def _share(values: Range, factor: float) -> Range:
    return Range(*(min(factor * value, 1.0) for value in of_cases(values)))


def fit_rows(rows: Sequence[MeasuredRow], base: Cluster) -> RowFit:
    """Fit the constants of a cluster to rows.

    What the constants leave is shared by layouts that are alike, or also by those of one shape: whichever predicts a
    row from the others better, by the median.

    Args:
        rows: at least `LEAST_ROWS`.
        base: with the software of the rows.
    """
    base = replace(base, layouts=None)
    shortest = min(row.seconds for row in rows)
    layouts = [layout_of(row.config) for row in rows]
    measured = np.log([row.seconds for row in rows])

    @functools.cache  # all fits begin at the same point
    def predicted_by(logs: tuple[float, ...]) -> Vector:
        cluster = with_constants(base, logs, shortest)
        return np.log([step_seconds(row.config, outline(row.config), cluster) for row in rows])

    def predicted(logs: Vector) -> Vector:
        return predicted_by(tuple(logs.tolist()))

    before = predicted(np.zeros(len(CONSTANTS))) - measured
    fits: list[RowFit] = []
    for of_shape in (0.0, OF_ONE_SHAPE):
        rest = np.array([[likeness(one, other, of_shape) for other in layouts] for one in layouts])
        found = solve(predicted, measured, _DEVIATIONS, rest=rest, noise=_NOISE, most=3 * _DEVIATIONS, rounds=_ROUNDS)
        cluster = replace(
            with_constants(base, found.logs.tolist(), shortest),
            layouts=_measured_layouts(layouts, found.weights, of_shape),
        )
        after = predicted(found.logs) + rest @ found.weights - measured
        left_out = np.expm1(found.left_out)
        fits.append(
            RowFit(
                rows=rows,
                base=base,
                cluster=cluster,
                before=np.expm1(before),
                after=np.expm1(after),
                left_out=left_out,
                is_aside=found.is_aside.tolist(),
                median_left_out=float(np.median(abs(left_out))),
            )
        )
    best = min(fits, key=lambda fit: fit.median_left_out)
    # The median of few errors is uncertain: a fit to them must be better by more than that.
    if best.median_left_out < (1 - len(rows) ** -0.5) * np.median(abs(best.before)):
        return best
    return replace(best, cluster=base, after=best.before)


def _measured_layouts(layouts: Sequence[Layout], weights: Vector, of_shape: float) -> MeasuredLayouts:
    """Rows of one layout count as one."""
    total: dict[Layout, float] = defaultdict(float)
    for layout, weight in zip(layouts, weights.tolist(), strict=True):
        total[layout] += weight
    return MeasuredLayouts(rows=tuple(total), weights=tuple(total.values()), of_shape=of_shape)
