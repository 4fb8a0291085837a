"""Fits logarithms of constants to measured times: Gauss-Newton steps with a prior, robust against single rows.

The linear system of each step is that of Gaussian process regression (Rasmussen and Williams 2006, chapter 2): the
covariance of the measured logarithms is what the constants' priors, what rows have in common besides, and noise make
it. A row that is far from the others gets more noise, as Student's t distribution says by reweighting (Lange, Little
and Taylor 1989, JASA 84). The inverse also has the prediction of every row from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_FREEDOM = 4.0  # degrees of freedom of Student's t
_CHANGE = 0.05  # of a constant's logarithm, by which predictions are differentiated
_REWEIGHTINGS, _SETTLED = 20, 1e-9


class Solved(NamedTuple):
    """What was fitted.

    Attributes:
        logs: logarithms of the constants' factors. [constants]
        weights: what each row adds to others, by their covariance `rest`. [rows]
        left_out: logarithm of predicted by measured time of each row, predicted from the other rows. [rows]
    """

    logs: Vector
    weights: Vector
    left_out: Vector


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
    weights = left_out = np.zeros(len(measured))
    for _ in range(rounds):
        now = predicted(logs)
        slopes = np.stack([(predicted(logs + change) - now) / _CHANGE for change in changes], axis=1)
        target = measured - now + slopes @ logs
        covariance = (slopes * deviations**2) @ slopes.T + rest
        trust = np.ones(len(measured))
        for _ in range(_REWEIGHTINGS):
            inverse = np.linalg.inv(covariance + np.diag(noise**2 / trust))
            weights = inverse @ target
            trust = (_FREEDOM + 1) / (_FREEDOM + (noise / trust * weights) ** 2)
        left_out = -weights / np.diag(inverse)
        before, logs = logs, np.clip(deviations**2 * (slopes.T @ weights), -most, most)
        if np.max(abs(logs - before)) < _SETTLED:
            break
    return Solved(logs, weights, left_out)
