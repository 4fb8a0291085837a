"""Where a search of layouts begins: flags that need certain values of what the search chooses get them.

`--zero-shard-size 2`, for example, has no effect without ZeRO and needs an even number of replicas. A run by itself is
refused without them. A search has both among its layouts, and begins from one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config.proposals import Changes, Recheck, fields_of
from megacore.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search chooses.

    Attributes:
        ranks: number of ranks that it divides.
        values: of each field that it chooses, by name: what it may be, given the configuration.
    """

    ranks: int
    values: Callable[[Config], Mapping[str, Sequence[Any]]]


def nearest_start(values: Mapping[str, Sequence[Any]], left: Recheck) -> Changes:
    """The values by which the fewest constraints are violated, as few of them as may be.

    It changes one or two fields at a time, those that the violated constraints are about, as long as fewer are
    violated.

    Args:
        values: that fields may take, by field.
        left: the violated constraints after fields have other values.
    """
    changes: dict[str, Any] = {}
    problems = left(changes)
    while problems:
        known = len(problems)
        single = [(left({**changes, **one}), one) for one in _steps(problems, changes, values)]
        pairs = (
            (left({**changes, **one, **two}), {**one, **two})
            for remaining, one in single
            for two in _steps(remaining, {**changes, **one}, values)
        )
        better = _fewest(single, known) or _fewest(pairs, known)
        if better is None:
            break
        problems, further = better
        changes |= further
    return changes


def _steps(problems: Sequence[str], changes: Changes, values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Other values of the fields that constraints are about, each of one field."""
    about = frozenset[str]().union(*map(fields_of, problems))
    for name, possible in values.items():
        if name in about and name not in changes:
            for value in possible:
                yield {name: value}


def _fewest(
    tried: Iterable[tuple[Sequence[str], dict[str, Any]]], known: int
) -> tuple[Sequence[str], dict[str, Any]] | None:
    """The first of those that leave no problem, or else the fewest, if that is fewer than are known."""
    best = None
    for one in tried:
        if (number := len(one[0])) < known:
            best, known = one, number
        if not known:
            break
    return best
