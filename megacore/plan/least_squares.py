"""Fits logarithms of constants to measured times: Gauss-Newton steps with a prior, robust against single rows.

The linear system of each step is that of Gaussian process regression (Rasmussen and Williams 2006, chapter 2): the
covariance of the measured logarithms is what the constants' priors, what rows have in common besides, and noise make
it. Its inverse has the prediction of every row from the others and how sure that is (section 5.4.2), so that rows are
set aside that the others do not explain: one after the other, as one such row hides the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
