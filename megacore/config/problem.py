"""A violated constraint with its ways out as data, so that each can be tried before it is offered. A constraint states
other values of a field (`Values`) or a change in words (`Change`). As text a problem offers them as they are;
`solve.py` keeps those that leave no constraint violated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from megacore.config.messages import divisors, multiples, one_of
from megacore.config.nodes import torchrun_flags
from megacore.config.spelling import flag, with_value

WORLD_SIZE = "world_size"
"""The number of processes, where a field is meant otherwise."""
_TRIED = 160  # values of a way out, at most


@dataclass(frozen=True, kw_only=True)
class Values:
    """Other values of one field."""

    name: str  # of the field, or `WORLD_SIZE`
    among: Sequence[int]  # what it may be, as far as this constraint goes; with `bound` in order, from the bound on
    near: int  # the value that it has; those nearest to it are tried and named first
    # `or more`, `or less` or `to N`, where every value beyond the first of `among` keeps the constraint
    bound: str = ""
    bare: bool = False  # the message is about this field, and its values need no flag
    most: int = 6  # how many are named
    around: bool = False  # only the nearest below and the nearest above the value that it has are named
    spares: int = 0  # processes that are started beside those of `WORLD_SIZE`

    def tried(self) -> list[int]:
        if self.bound:
            return list(self.among[:_TRIED])
        return sorted(self.among, key=lambda value: (abs(value - self.near), value))[:_TRIED]

    def named(self, values: Sequence[int]) -> list[int]:
        """Those of some values, nearest first, that a message names."""
        if self.around:
            below, above = ([v for v in values if (v < self.near) == is_below] for is_below in (True, False))
            values = [*below[:1], *above[:1]]
        return list(values[: self.most])

    def are_enough(self, values: Sequence[int]) -> bool:
        """Whether more values would change nothing in what a message says."""
        return len(values) >= max(self.most, 3) or (self.around and len(self.named(values)) == 2)

    def in_words(self, values: Sequence[int], *, is_first: bool = True) -> str:
        """The way out with some values, in the order of `tried`; `is_first`: no other one precedes it."""
        named = [value + self.spares for value in sorted(self.named(values))]
        text = one_of(named)
        if self.bound and len(values) == len(self.tried()):
            text = str(values[0]) if len(self.among) == 1 else f"{values[0]} {self.bound}"
        if self.name == WORLD_SIZE:
            noun = "process" if named == [1] else "processes"
            # A plan counts the ranks that train.
            planned = f" {one_of(sorted(self.named(values)))}" if self.spares else ""
            return f"start {text} {noun} (torchrun {torchrun_flags(*named)}; for a plan --world-size{planned})"
        return text if self.bare and is_first else with_value(flag(self.name), text)


def divisors_of(name: str, near: int, number: int, *, bare: bool = False) -> Values:
    """The divisors of a number as values of a field; arguments as for `Values`."""
    return Values(name=name, among=divisors(number, most=None), near=near, bare=bare)


def up_to(name: str, near: int, high: int, *, low: int = 1) -> Values:
    """The values from `low` to `high` of a field that the message is about; other arguments as for `Values`."""
    return Values(name=name, among=range(high, low - 1, -1), near=near, bound="or less", bare=True)


def multiples_of(name: str, near: int, unit: int, *, bare: bool = False) -> Values:
    """The multiples of a unit next to the value of a field; arguments as for `Values`."""
    return Values(name=name, among=multiples(near, unit), near=near, bare=bare, most=_TRIED, around=True)


@dataclass(frozen=True)
class Change:
    """A way out in words."""

    text: str  # it follows `use` or `or`
    # By field, which the change sets; none, where it cannot be tried.
    values: Mapping[str, Any] = field(default_factory=dict)
    otherwise: Change | None = None  # what is offered where this is no way out
    turns_on: bool = False  # it gives a flag what that has no effect without; others may be needed beside it


Way = Values | Change


class Problem(str):
    """A message about a violated constraint."""

    said: str
    ways: tuple[Way, ...]
    about: frozenset[str]  # fields that the constraint depends on and does not name
    only: frozenset[str]  # the fields that it is about, where it names others; empty: those that it names

    def __new__(cls, said: str, *ways: Way | None, about: Sequence[str] = (), only: Sequence[str] = ()) -> Self:
        kept = tuple(way for way in ways if way is not None and (isinstance(way, Change) or way.among))
        words = [
            way.text if isinstance(way, Change) else way.in_words(way.tried(), is_first=not place)
            for place, way in enumerate(kept)
        ]
        problem = super().__new__(cls, message(said, words))
        problem.said, problem.ways, problem.about, problem.only = said, kept, frozenset(about), frozenset(only)
        return problem


def message(said: str, ways: Sequence[str]) -> str:
    """A constraint and the ways out of it as one sentence."""
    words, verb = list[str](), ""
    for way in (way.removeprefix("use ") for way in ways):
        if way.startswith(_VERBS):
            verb = ""
        elif verb != "use ":
            verb = "use "
            way = f"use {way}"
        words.append(way)
    return f"{said}: {', or '.join(words)}" if words else said


_VERBS = ("use, ", "leave ", "add ", "start ", "choose ", "give ", "with ")
