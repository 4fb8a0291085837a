"""Bytes as text: one unit for all figures that are compared, GiB or MiB, and more decimals where two would show zeros.

A report chooses its unit once, by its largest size: a model of a hundred thousand parameters is read in MiB, in the
table, in the sentences below it and in the picture. Tables have two decimals, that of planned and
counted sizes three; sentences and pictures have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megacore.plan.memory import RankMemory

_LEAST = 0.1  # of a unit, that the largest size has at least
_MOST_DECIMALS = 6


@dataclass(frozen=True)
class SizeUnit:
    """A unit of memory.

    Attributes:
        name: as texts have it.
        bytes: of one.
    """

    name: str
    bytes: float

    def text(self, size: float, decimals: int = 1) -> str:
        """`1,025.3 MiB`."""
        return f"{self.number(size, decimals)} {self.name}"

    def number(self, size: float, decimals: int = 1) -> str:
        """`1,025.3`; of a size that would read 0.0 two digits: `0.00042`."""
        return self._formatted(size, self._decimals(size, decimals))

    def column(self, sizes: Sequence[float]) -> list[str]:
        """Sizes with the same number of decimals: two, or as many as the largest of them needs, to be no zero."""
        needed = self._decimals(max(sizes, default=0.0), 2)
        return [self._formatted(size, needed) for size in sizes]

    def apart(self, more: float, less: float) -> tuple[str, str]:
        """Two sizes of which the first is larger, with the decimals that tell them apart."""
        for decimals in range(1, _MOST_DECIMALS):
            if self.number(more, decimals) != self.number(less, decimals):
                break
        return self.number(more, decimals), self.number(less, decimals)

    def _formatted(self, size: float, decimals: int) -> str:
        return f"{size / self.bytes:,.{decimals}f}"

    def _decimals(self, size: float, decimals: int) -> int:
        if not 0 < size / self.bytes < 0.5 * 10.0**-decimals:
            return decimals
        return min(1 - math.floor(math.log10(size / self.bytes)), _MOST_DECIMALS)


GIB_UNIT, MIB_UNIT = SizeUnit("GiB", 2.0**30), SizeUnit("MiB", 2.0**20)


def size_unit(sizes: Iterable[float]) -> SizeUnit:
    """The unit of a report in which these sizes are the largest."""
    return GIB_UNIT if max(sizes, default=0.0) >= _LEAST * GIB_UNIT.bytes else MIB_UNIT


def memory_unit(memory: Iterable[RankMemory]) -> SizeUnit:
    """The unit of a report on these ranks: by their tensors, as the process itself takes as much for every model."""
    return size_unit(rank.expected_tensors + rank.on_host for rank in memory)
