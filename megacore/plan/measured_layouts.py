"""How much longer than predicted measured layouts take: what a few constants leave, for layouts that are alike.

A product of one shape may reach half of the peak and a slightly larger one two thirds (tiles, the choice of a kernel).
No constant of a cluster says so, but rows that share their shapes share the error. The logarithm of measured by
predicted seconds is therefore a Gaussian process over the degrees and shapes of a layout (Rasmussen and Williams 2006,
chapter 2): near measured rows it repeats what they say, and far from them it says nothing. A part of it may belong to
one shape alone, whatever the pipeline is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megacore.config import ResolvedConfig

# Powers of two over which two layouts become unlike. Ranks that split a layer choose the shape of its products and
# whether it crosses nodes, and so matter most.
LENGTHS = {
    "tp": 0.6,
    "cp": 0.6,
    "ep": 0.6,
    "pp": 2.0,
    "micro_batch_size": 2.0,
    "hidden_size": 2.0,
    "seq_length": 2.0,
}
DEVIATION = 0.1  # of the logarithm, before anything is measured
OF_ONE_SHAPE = 0.07  # the same, of what one shape has alone
_PIPELINE = list(LENGTHS).index("pp")
Layout = tuple[int, ...]


def layout_of(config: ResolvedConfig) -> Layout:
    """What of a configuration decides which others are like it, in the order of `LENGTHS`."""
    parallel, training = config.parallel, config.training
    sizes = training.micro_batch_size, config.model.hidden_size, config.data.seq_length
    return parallel.tp, parallel.cp, parallel.ep, parallel.pp, *sizes


@functools.lru_cache(maxsize=65536)
def likeness(one: Layout, other: Layout, of_shape: float) -> float:
    """The covariance of what two layouts take longer than predicted, in logarithms.

    Args:
        one: a layout.
        other: another one.
        of_shape: standard deviation of what one shape has alone.
    """
    apart = sum(
        (math.log2(mine / theirs) / length) ** 2
        for mine, theirs, length in zip(one, other, LENGTHS.values(), strict=True)
    )
    is_one_shape = _shape(one) == _shape(other)
    return DEVIATION**2 * math.exp(-apart / 2) + (of_shape**2 if is_one_shape else 0.0)


def _shape(layout: Layout) -> Layout:
    return layout[:_PIPELINE] + layout[_PIPELINE + 1 :]


@dataclass(frozen=True, kw_only=True)
class MeasuredLayouts:
    """What measured layouts say of others.

    Attributes:
        rows: measured layouts.
        weights: what each of them adds, by its likeness to the layout that is asked for.
        of_shape: of `likeness`.
    """

    rows: Sequence[Layout]
    weights: Sequence[float]
    of_shape: float

    def factor(self, config: ResolvedConfig) -> float:
        """Seconds of a step by those that the constants predict."""
        asked, rows = layout_of(config), zip(self.rows, self.weights, strict=True)
        return math.exp(sum(weight * likeness(asked, row, self.of_shape) for row, weight in rows))
