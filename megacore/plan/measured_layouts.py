"""How much longer than predicted measured layouts take: what a few constants leave, for layouts that are alike.

A product of one shape may reach half of the peak and a slightly larger one two thirds (tiles, the choice of a kernel).
No constant of a cluster says so, but rows that share their shapes share the error. The logarithm of measured by
predicted seconds is therefore a Gaussian process over the degrees and shapes of a layout (Rasmussen and Williams 2006,
chapter 2): near measured rows it repeats what they say, and far from them it says nothing.
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
Layout = tuple[int, ...]


def layout_of(config: ResolvedConfig) -> Layout:
    """What of a configuration decides which others are like it, in the order of `LENGTHS`."""
    parallel, training = config.parallel, config.training
    sizes = training.micro_batch_size, config.model.hidden_size, config.data.seq_length
    return parallel.tp, parallel.cp, parallel.ep, parallel.pp, *sizes


@functools.lru_cache(maxsize=65536)
def likeness(one: Layout, other: Layout) -> float:
    """The covariance of what two layouts take longer than predicted, in logarithms."""
    apart = sum(
        (math.log2(mine / theirs) / length) ** 2
        for mine, theirs, length in zip(one, other, LENGTHS.values(), strict=True)
    )
    return DEVIATION**2 * math.exp(-apart / 2)


@dataclass(frozen=True)
class MeasuredLayouts:
    """What measured layouts say of others.

    Attributes:
        rows: measured layouts.
        weights: what each of them adds, by its likeness to the layout that is asked for.
    """

    rows: Sequence[Layout]
    weights: Sequence[float]

    def factor(self, config: ResolvedConfig) -> float:
        """Seconds of a step by those that the constants predict."""
        asked = layout_of(config)
        return math.exp(sum(w * likeness(asked, row) for row, w in zip(self.rows, self.weights, strict=True)))
