"""Where a search of layouts begins: flags that need certain values of what the search chooses get them.

`--zero-shard-size 2`, for example, has no effect without ZeRO and needs an even number of replicas. A run by itself is
refused without them. A search has both among its layouts, and begins from one that has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacore.config.problem import Change, Problem, Values
from megacore.config.proposals import Changes, Recheck, fields_of
from megacore.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search chooses.

    Attributes:
        ranks: number of ranks that it divides.
        values: of each field that it chooses, by name: what it may be, given the configuration.
        allows: whether a field may have a value within the limits of the search, which no way out may exceed.
    """

    ranks: int
    values: Callable[[Config], Mapping[str, Sequence[Any]]]
    allows: Callable[[str, Any], bool]


def nearest_start(values: Mapping[str, Sequence[Any]], left: Recheck) -> Changes:
    """The values by which the fewest constraints are violated, as few of them as may be.

    It changes one or two fields at a time, those that the violated constraints are about, as long as fewer are
    violated, or the same ones with more values to offer.

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
        better = _fewest(single, known) or _fewest(pairs, known) or _with_most_ways(problems, single)
        if better is None:
            break
        problems, further = better
        changes |= further
    return changes


def with_other_values(problem: str, values: Mapping[str, Sequence[Any]], left: Recheck) -> str:
    """The message about a constraint. Where values of one field that a search chooses keep it, and all of them violate
    another constraint, it names that first and has the ways out of both.

    Args:
        problem: a violated constraint.
        values: that fields may take, by field.
        left: the violated constraints after fields have other values.
    """
    if not isinstance(problem, Problem):
        return problem
    known = frozenset(map(fields_of, left({})))
    for name in (name for name in values if name in fields_of(problem)):
        keeping = [
            (step, [one for one in others if fields_of(one) not in known])
            for step in _steps([problem], {}, {name: values[name]})
            if fields_of(problem) not in map(fields_of, others := left(step))
        ]
        if keeping:
            step, new = keeping[0]
            if len(new) == 1 and isinstance(new[0], Problem) and all(other for _, other in keeping):
                further = [
                    Change(way.text, {**step, **way.values})
                    for way in new[0].ways
                    if isinstance(way, Change) and way.values
                ]
                own = [way for way in problem.ways if not (isinstance(way, Values) and way.name == name)]
                both = f"{new[0].said}, and {problem.said}"
                return Problem(both, *further, *own, about=(*fields_of(problem), *fields_of(new[0])))
    return problem


def _with_most_ways(
    problems: Sequence[str], tried: Iterable[tuple[Sequence[str], dict[str, Any]]]
) -> tuple[Sequence[str], dict[str, Any]] | None:
    """Where the same constraints are violated with more values to offer, as for a divisor of more replicas."""
    about, most, best = [*map(fields_of, problems)], _offered(problems), None
    for one in tried:
        if [*map(fields_of, one[0])] == about and (number := _offered(one[0])) > most:
            best, most = one, number
    return best


def _offered(problems: Sequence[str]) -> int:
    """The number of values that violated constraints offer."""
    ways = [way for problem in problems if isinstance(problem, Problem) for way in problem.ways]
    return sum(len(way.among) for way in ways if isinstance(way, Values) and not way.bound)


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
