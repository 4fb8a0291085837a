"""Fits the constants of a cluster and its trainer to measured steps, rows of layouts with their seconds.

Few rows must not bend what is known well: the constants have priors at the values that the planner ships, and what they
leave of a row is shared by the layouts that are like it (measured_layouts.py). A fit is kept only where it predicts
rows that were left out clearly better than the shipped values do.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megacore.config import ResolvedConfig
from megacore.config.messages import counted
from megacore.models.outline import outline
from megacore.plan.cluster import Cluster
from megacore.plan.devices import Link, Range
from megacore.plan.measured_layouts import OF_ONE_SHAPE, Layout, MeasuredLayouts, layout_of, likeness
from megacore.plan.planner import Origin
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


# ---- the solver ------------------------------------------------------------------------------------------------------

Vector = NDArray[np.float64]
_UNLIKELY = 3.0  # standard deviations from what the others say, beyond which a row is set aside
_MOST_ASIDE, _AT_ONCE = 0.25, 0.02  # of the rows
_ASIDE = 1.0  # standard deviation of such a row's logarithm
_CHANGE = 0.05  # of a constant's logarithm, by which predictions are differentiated
_SETTLED = 1e-9


class Solved(NamedTuple):
    """What was fitted.

    Attributes:
        logs: logarithms of the constants' factors. [constants]
        weights: what each row adds to others, by their covariance `rest`. [rows]
        left_out: logarithm of predicted by measured time of each row, predicted from the other rows. [rows]
        is_aside: whether a row counts for nothing, as the others do not explain it. [rows]
    """

    logs: Vector
    weights: Vector
    left_out: Vector
    is_aside: NDArray[np.bool_]


def solve(
    predicted: Callable[[Vector], Vector],
    measured: Vector,
    deviations: Vector,
    *,
    rest: Vector,
    noise: float,
    most: Vector,
    rounds: int,
) -> Solved:
    """Fit constants to times.

    Args:
        predicted: logarithms of times for logarithms of constants. [constants] -> [rows]
        measured: logarithms of times. [rows]
        deviations: standard deviations of the constants' priors, which are around 0. [constants]
        rest: covariance of what the constants do not explain. [rows, rows]
        noise: standard deviation of a measured logarithm.
        most: the largest size of each constant. [constants]
        rounds: Gauss-Newton steps at most.
    """
    logs, changes = np.zeros(len(deviations)), _CHANGE * np.eye(len(deviations))
    for _ in range(rounds):
        now = predicted(logs)
        slopes = np.stack([(predicted(logs + change) - now) / _CHANGE for change in changes], axis=1)
        target = measured - now + slopes @ logs
        inverse, is_aside = _explained((slopes * deviations**2) @ slopes.T + rest, target, noise)
        weights = inverse @ target
        left_out = -weights / np.diag(inverse)
        before, logs = logs, np.clip(deviations**2 * (slopes.T @ weights), -most, most)
        if np.max(abs(logs - before)) < _SETTLED:
            break
    return Solved(logs, weights, left_out, is_aside)


def _explained(covariance: Vector, target: Vector, noise: float) -> tuple[Vector, NDArray[np.bool_]]:
    """The inverse covariance of rows with their noise, and which of them are set aside."""
    is_aside: NDArray[np.bool_] = np.zeros(len(target), dtype=np.bool_)
    while True:
        inverse = np.asarray(
            np.linalg.inv(covariance + np.diag(np.where(is_aside, _ASIDE, noise) ** 2)), dtype=np.float64
        )
        apart = np.where(is_aside, 0.0, abs(inverse @ target) / np.sqrt(np.diag(inverse)))
        worst = np.argsort(-apart)[: max(1, int(_AT_ONCE * len(target)))]
        worst = worst[apart[worst] > _UNLIKELY]
        if len(worst) == 0 or is_aside.sum() + len(worst) > _MOST_ASIDE * len(target):
            return inverse, is_aside
        is_aside[worst] = True


# ---- what --fit prints -----------------------------------------------------------------------------------------------


class _Value(NamedTuple):
    """A constant of a cluster: as a number in a unit, and as a report has it."""

    number: float
    unit: str
    text: str


def _constants(cluster: Cluster) -> Iterator[_Value]:
    """Those of `CONSTANTS`, in their order."""
    device, software = cluster.device, cluster.software
    shares = {
        "of the peak": device.product_efficiency.expected,
        "of the memory bandwidth": device.memory_efficiency.expected,
        "of the bandwidth": device.link_efficiency.expected,
        "of the bandwidth between nodes": device.network_efficiency.expected,
    }
    for whole, share in shares.items():
        yield _Value(share, f"share {whole}", f"{share:.1%} {whole.removesuffix(' between nodes')}")
    times = (device.node_link.latency, "us"), (software.block_seconds.expected, "ms"), (software.step_seconds, "ms")
    for seconds, unit in times:
        number = seconds * (1e6 if unit == "us" else 1e3)
        yield _Value(number, unit, f"{number:.3g} {unit}")


def fit_text(fit: RowFit, path: Path) -> str:
    """The fit in words and tables."""
    return "\n".join(_lines(fit, path))


def _lines(fit: RowFit, path: Path) -> Iterator[str]:
    yield f"Fit of {counted(len(fit.rows), 'row')} in {path}: {fit.base.name} with {fit.base.software.name}\n"
    yield "| constant | shipped | fitted |\n|---|---|---|"
    for constant, before, after in zip(CONSTANTS, _constants(fit.base), _constants(fit.cluster), strict=True):
        yield f"| {constant.name} | {before.text} | {after.text} |"
    if fit.cluster.layouts is not None:
        number = counted(len(fit.cluster.layouts.rows), "layout")
        yield f"\nWhat these leave of {number} is added to layouts like them (degrees, microbatch, shape)."
    yield "\n| errors | median | worst |\n|---|---|---|"
    for name, errors in (("shipped", fit.before), ("fitted", fit.after), ("left out", fit.left_out)):
        yield f"| {name} | {_size(errors, np.median)} | {_size(errors, np.max)} |"
    yield "\nAn error is predicted / measured - 1. Left out: each row is predicted from the others."
    if any(fit.is_aside):
        yield f"Set aside, as the others do not explain them: {counted(sum(fit.is_aside), 'row')}."
    if not fit.is_kept:
        yield "The shipped constants are kept: no fit predicts rows that are left out clearly better. Give more rows."
    yield "\n| line | measured | shipped | fitted | left out |\n|---|---|---|---|---|"
    columns = (fit.rows, fit.before, fit.after, fit.left_out, fit.is_aside)
    for row, before, after, left_out, is_aside in zip(*columns, strict=True):
        line = f"{row.line}, set aside" if is_aside else row.line
        yield f"| {line} | {row.seconds:.4g} s | {before:+.1%} | {after:+.1%} | {left_out:+.1%} |"


def _size(errors: Vector, of: Callable[[Vector], float]) -> str:
    return f"{of(abs(errors)):.1%}"


def fit_json(fit: RowFit, path: Path) -> dict[str, Any]:
    """The figures of `fit_text`: constants, and the errors of each row and their medians."""
    before: Origin = "fitted" if fit.base.is_fitted else "assumed"
    constants = {
        constant.name: {
            "shipped": {"value": shipped.number, "unit": shipped.unit, "origin": before, "low": None, "high": None},
            "fitted": {"value": fitted.number, "unit": fitted.unit, "origin": "fitted", "low": None, "high": None},
        }
        for constant, shipped, fitted in zip(CONSTANTS, _constants(fit.base), _constants(fit.cluster), strict=True)
    }
    errors = {"shipped_error": fit.before, "fitted_error": fit.after, "left_out_error": fit.left_out}
    rows = [
        {
            "line": row.line,
            "measured_seconds": row.seconds,
            **{name: float(error[number]) for name, error in errors.items()},
            "set_aside": bool(fit.is_aside[number]),
        }
        for number, row in enumerate(fit.rows)
    ]
    return {
        "path": str(path),
        "base": fit.base.name,
        "software": fit.base.software.name,
        "kept": fit.is_kept,
        "constants": constants,
        "median_errors": {name: float(np.median(abs(error))) for name, error in errors.items()},
        "rows": rows,
    }
