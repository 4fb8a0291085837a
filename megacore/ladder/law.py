"""The law of held-out losses: loss(N, D) = E + A / N^alpha + B / D^beta, of parameters N and tokens D.

Fitted as approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556): the Huber loss of the differences of log losses, from
many starts. The interval is that of refits to losses with residuals drawn by the size found (a parametric
bootstrap), with the residual of a further run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
OPERATIONS = 6  # floating-point operations per parameter and token, forward and backward
_HUBER = 1e-3  # of log losses, as Hoffmann et al. chose
_REFITS = 200
_COVERED = (5.0, 95.0)  # percentiles of the interval


class Point(NamedTuple):
    """What a run ended with: its parameters, its tokens, and the held-out loss in nats per token."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    """A law, with those that the data would allow.

    Attributes:
        constants: E, A, B, alpha, beta.
        refits: constants of other laws, for the interval. Empty: it comes from `noise` alone.
        noise: standard deviation of the log loss of a run.
    """

    constants: Sequence[float]
    refits: Sequence[Sequence[float]] = ()
    noise: float = 0.0

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token."""
        return float(_losses(np.array([self.constants]), parameters, tokens)[0])

    def interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """Within which 9 of 10 runs are expected to end."""
        laws = np.array(self.refits or [self.constants] * _REFITS)
        # The same draws each time, so that neighbours have like intervals.
        drawn = np.exp(self.noise * np.random.default_rng(0).standard_normal((16, len(laws))))
        low, high = np.percentile(_losses(laws, parameters, tokens) * drawn, _COVERED)
        return float(low), float(high)

    def best(self, operations: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss for so many operations (Hoffmann et al. 2022, equation 4)."""
        _, a, b, alpha, beta = self.constants
        scale = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
        parameters = scale * (operations / OPERATIONS) ** (beta / (alpha + beta))
        return parameters, operations / OPERATIONS / parameters


# Besiroglu et al. 2024 (arXiv 2404.10102), table 1. Of the errors only that of E, 0.03, says what a prediction may be
# off by: those of the other constants are large, and cancel. 0.03 / 2.2, a usual loss, is the noise.
PUBLISHED = Law((1.8172, 482.01, 2085.43, 0.3478, 0.3658), noise=0.014)


def fit(points: Sequence[Point]) -> Law:
    """The law of five points or more, with its interval."""
    n, d, losses = np.array(points, dtype=float).T
    middle = np.log(n).mean(), np.log(d).mean()  # of which the constants are told apart more easily
    x, y, seen = np.log(n) - middle[0], np.log(d) - middle[1], np.log(losses)
    low = seen.min()
    starts = product((-0.2, -0.7), (-1.0, -3.0), (-1.0, -3.0), (0.3, 0.8), (0.3, 0.8))
    grid = np.array([(low + e, low + a, low + b, alpha, beta) for e, a, b, alpha, beta in starts])
    found, errors = _descended(grid, x, y, np.tile(seen, (len(grid), 1)), steps=40)
    best, _ = _descended(found[errors.argmin()][None], x, y, seen[None], steps=400)
    expected = _logs(best, x, y)
    freedom = max(len(points) - best.shape[1], 1)
    noise = float(np.sqrt(((seen - expected) ** 2).sum() / freedom))
    random = np.random.default_rng(0)
    of_model = np.unique(n, return_inverse=True)[1]
    # Runs of one model share their first steps: half of the variance is that of the model. Few points tell the noise
    # badly, hence Student's distribution.
    drawn = random.standard_normal((_REFITS, of_model.max() + 1))[:, of_model] + random.standard_normal(
        (_REFITS, len(x))
    )
    drawn *= noise * np.sqrt(0.5 * freedom / random.chisquare(freedom, (_REFITS, 1)))
    refits, _ = _descended(np.tile(best, (_REFITS, 1)), x, y, expected + drawn, steps=60)
    return Law(_constants(best, *middle)[0].tolist(), _constants(refits, *middle).tolist(), noise)


def _losses(laws: Array, parameters: float, tokens: float) -> Array:
    e, a, b, alpha, beta = laws.T
    losses: Array = e + a / parameters**alpha + b / tokens**beta
    return losses


def _constants(laws: Array, x: float, y: float) -> Array:
    """E, A, B, alpha, beta of laws about the middle (x, y)."""
    e, a, b, alpha, beta = laws.T
    return np.stack([np.exp(e), np.exp(a + alpha * x), np.exp(b + beta * y), alpha, beta], axis=1)


def _terms(laws: Array, x: Array, y: Array) -> Array:
    """Logarithms of the three terms.  # [3, laws, points]"""
    e, a, b, alpha, beta = (column[:, None] for column in laws.T)
    return np.stack([e + 0 * x, a - alpha * x, b - beta * y])


def _logs(laws: Array, x: Array, y: Array) -> Array:
    logs: Array = np.logaddexp.reduce(_terms(laws, x, y), axis=0)
    return logs


def _descended(laws: Array, x: Array, y: Array, seen: Array, *, steps: int) -> tuple[Array, Array]:
    """Laws that are better than those given, each for its own row of log losses, and their Huber losses: steps of
    Levenberg and Marquardt, weighted so that they descend the Huber loss, of all laws at once."""

    def huber(residuals: Array) -> Array:
        size = np.abs(residuals)
        errors: Array = np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum(axis=1)
        return errors

    damping = np.full(len(laws), 1e-2)
    errors = huber(seen - _logs(laws, x, y))
    for _ in range(steps):
        terms = _terms(laws, x, y)
        logs = np.logaddexp.reduce(terms, axis=0)
        share, residuals = np.exp(terms - logs), seen - logs
        slopes = np.stack([*share, -x * share[1], -y * share[2]], axis=2)  # [laws, points, 5]
        weighted = slopes * np.minimum(1.0, _HUBER / np.maximum(np.abs(residuals), 1e-30))[..., None]
        square = np.einsum("lpi,lpj->lij", weighted, slopes)
        diagonal = np.einsum("lii->li", square)
        diagonal += damping[:, None] * diagonal + 1e-12
        step = np.linalg.solve(square, np.einsum("lpi,lp->li", weighted, residuals)[..., None])[..., 0]
        tried = laws + np.clip(step, -1.0, 1.0)
        # Exponents that are measured lie between; without bounds few points would allow any.
        tried[:, 3:] = tried[:, 3:].clip(0.02, 2.0)
        after = huber(seen - _logs(tried, x, y))
        is_better = after < errors
        laws, errors = np.where(is_better[:, None], tried, laws), np.where(is_better, after, errors)
        damping = np.clip(np.where(is_better, damping / 3, damping * 4), 1e-12, 1e6)
    return laws, errors
