"""Why no layout of a search is valid: the given values and limits that contradict each other, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from megacore.config import ResolvedConfig
from megacore.config.dimensions import degree_fields
from megacore.config.fields import flag, flag_and_value
from megacore.config.messages import one_of
from megacore.plan.cluster import Cluster
from megacore.plan.search_space import (
    LEAST_POSITIONS,
    Choice,
    Constraints,
    context_degrees,
    divisions_of,
    possible_degrees,
    variants,
)
from megacore.plan.validity import Validity

_MOST_NAMED = 4  # values of a way out
_Kind = Literal["fixed", "least", "most"]
_KINDS: tuple[_Kind, ...] = "fixed", "least", "most"


class _Given(NamedTuple):
    """A value or a limit of the command line."""

    kind: _Kind
    name: str
    value: Any

    @property
    def prefix(self) -> str:
        return {"fixed": "--", "least": "--min-", "most": "--max-"}[self.kind]

    def __str__(self) -> str:
        return flag_and_value(self.name, self.value).replace("--", self.prefix, 1)

    def flag_with(self, values: Sequence[Any]) -> str:
        """The flag with other values."""
        if not values:
            return f"no {self}"
        if isinstance(self.value, bool):
            return one_of([flag_and_value(self.name, value) for value in values])
        return f"{flag(self.name).replace('--', self.prefix, 1)} {one_of(values)}"


def conflict(config: ResolvedConfig, cluster: Cluster, constraints: Constraints) -> str:
    """What is wrong with constraints that no valid layout keeps.

    Args:
        config: of the search.
        cluster: that computes.
        constraints: what a layout may be.
    """
    world = f"--world-size {constraints.world_size}"
    if (product := _too_few_ranks(config, constraints)) is not None:
        return product
    is_valid = Validity(config, constraints.world_size)

    def layouts(given: Sequence[_Given]) -> Iterator[Choice]:
        kept = _with(constraints, given)
        for degrees in divisions_of(config, cluster, kept):
            yield from filter(is_valid, variants(config, kept, degrees, ("none", "full")))

    def is_possible(given: Sequence[_Given]) -> bool:
        return next(layouts(given), None) is not None

    if not is_possible([]):
        return f"--search: no layout of {world} is valid: use another --world-size or --global-batch-size"
    given = needed = _all_of(constraints)
    for one in given:
        if not is_possible(others := _without(needed, one)):
            needed = others
    ways = []
    for one in needed:
        possible = [_values(layouts(_without(from_, one)), one.name) for from_ in (given, needed)]
        ways.append(one.flag_with(_nearest(one, possible[0] or possible[1])))
    return (
        f"--search: no valid layout of {world} has {' and '.join(map(str, needed))}: use {', or '.join(ways)}, or "
        "another --world-size or --global-batch-size"
    )


def _too_few_ranks(config: ResolvedConfig, constraints: Constraints) -> str | None:
    """That the largest degrees are not enough for all ranks."""
    possible, factors, ranks = possible_degrees(config, constraints), [], 1
    for name in degree_fields():
        values, reason = possible[name]
        if name == "cp":
            values, reason = context_degrees(config, constraints), f"leave a rank {LEAST_POSITIONS:,} positions"
        largest = max((value for value in values if constraints.allow(name, value)), default=1)
        ranks *= largest
        if name in constraints.fixed:
            factors.append(f"--{name} {largest}")
        elif name in constraints.most:
            most = constraints.most[name]
            factors.append(f"--max-{name} {most}" + (f" ({largest} is possible)" if largest < most else ""))
        elif largest > 1 or name != "cp":
            factors.append(f"--{name} {largest} (the largest of those that {reason})")
    if ranks >= constraints.world_size:
        return None
    return (
        f"--search: {' x '.join(factors)} = {ranks} must be at least --world-size {constraints.world_size}: use larger "
        f"ones, or at most --world-size {ranks}"
    )


def _all_of(constraints: Constraints) -> list[_Given]:
    sources = constraints.fixed, constraints.least, constraints.most
    pairs = zip(_KINDS, sources, strict=True)
    return [_Given(kind, name, value) for kind, values in pairs for name, value in values.items()]


def _with(constraints: Constraints, given: Sequence[_Given]) -> Constraints:
    """The constraints with only these."""
    fixed, least, most = ({name: value for kind, name, value in given if kind == one} for one in _KINDS)
    return dataclasses.replace(constraints, fixed=fixed, least=least, most=most)


def _without(given: Sequence[_Given], one: _Given) -> list[_Given]:
    return [other for other in given if other is not one]


def _values(choices: Iterable[Choice], name: str) -> set[Any]:
    """The values of a field."""
    if name == "etp":
        return {choice.parallel.expert_split for choice in choices}
    sections = (choice.parallel if hasattr(choice.parallel, name) else choice.training for choice in choices)
    return {getattr(section, name) for section in sections} - {None}


def _nearest(given: _Given, possible: set[Any]) -> list[Any]:
    """Of the values that a field may have without a constraint on it, those nearest to it."""
    if given.kind == "most":
        return [min(possible)]
    if given.kind == "least":
        return [max(possible)]
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        return sorted(sorted(possible, key=lambda value: abs(value - given.value))[:_MOST_NAMED])
    return sorted(possible, key=str)[:_MOST_NAMED]
