"""What to change where rules are violated: each proposal is tried on all rules before it is made.

Violated rules that share a flag are one group: a value that keeps one of them may violate another. First come values of
one flag, then the nearest combination of flags, then other numbers of processes: a best-first search over the values
that the rules themselves state (`solve`). It runs only after a refusal, and takes a second or two at most.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from megacore.config.problem import WORLD_SIZE, Change, Problem, Values, Way, message
from megacore.config.schema import Config
from megacore.config.spelling import OWNERS, fields_in, flag, flag_and_value, is_shared

Changes = Mapping[str, Any]
Recheck = Callable[[Changes], Sequence[str]]
"""The violated constraints after fields have other values."""
Steps = Callable[[Sequence[str], Changes], Iterable[tuple[Changes, float]]]

_MOST_WAYS = 3  # that a message proposes
_MOST_TRIED = 400  # combinations of a group
_MOST_CHANGED = 4  # flags of a combination
_LATER = 0.25  # of distance, for each value of a field that is nearer
_BRANCHES = 8  # values of a flag that a combination tries
_NEAR = 64  # processes more or fewer that are tried
_SAME = "the change proposed above solves this too"


def with_tried_ways(found: Sequence[str], recheck: Recheck, *, processes: int | None = None) -> list[str]:
    """The messages, each with the ways out of which nothing else is refused. `processes`: None: as many as the degrees
    say."""
    known = frozenset(map(_key, found))
    groups = {
        tuple(places): _Group([found[place] for place in places], known, recheck, processes)
        for places in _groups(found)
    }
    # What one group proposes first may violate a constraint beside what another one does: these are solved together.
    for one, other in itertools.combinations(list(groups), 2):
        places = tuple(sorted((*one, *other)))
        if {one, other} <= groups.keys() and groups[one].contradicts(groups[other]):
            both = _Group([found[place] for place in places], known, recheck, processes)
            if both.nearest:
                del groups[one], groups[other]
                groups[places] = both
    said = {place: group.in_words(found[place]) for places, group in groups.items() for place in places}
    return [said[place] for place in range(len(found))]


@dataclass(frozen=True)
class _Group:
    """Violated constraints that share flags."""

    problems: Sequence[str]
    known: frozenset[frozenset[str] | str]  # every violated constraint, by `_key`
    recheck: Recheck  # what is violated with other values
    processes: int | None  # of the run; None: as many as its degrees say

    def in_words(self, problem: str) -> str:
        """A message of the group with its ways out."""
        if not isinstance(problem, Problem):
            return problem
        words, in_prose = list[str](), list[str]()
        solving = {name for name, values in self._values.items() if values}
        earlier = self.problems[: self.problems.index(problem)]
        is_first = not any(isinstance(other, Problem) for other in earlier)
        for way in problem.ways:
            if isinstance(way, Values):
                if values := self._values[way.name]:
                    words.append(way.in_words(values, is_first=not words))
            elif not way.values:
                in_prose.append(way.text)
            elif change := self._first_that_solves(way):
                words.append(change.text)
                solving |= change.values.keys()
                if len(change.values) > 1 and any(change in _ways(other) for other in earlier):
                    return f"{problem.said}: {_SAME}"
        named = {way.name for way in problem.ways if isinstance(way, Values)}
        for name, values in self._values.items():
            if values and name not in named:
                words.append(self._by_name[name][0].in_words(values, is_first=False))
        if not solving and self._combination:
            return message(problem.said, [self._combined()]) if is_first else f"{problem.said}: {_SAME}"
        if not solving:
            words = self._weaker(problem)
        elif solving == {WORLD_SIZE} and is_first and self._of_flags:
            words.append(_combined(self._of_flags))
        if not words and not in_prose:
            # Flags of other constraints of the group have nothing to do with this one.
            own = fields_of(problem) - {WORLD_SIZE}
            *others, last = [flag(name) for name in self._by_name if name in own] or [""]
            several = f"choose other values of {', '.join(others)} and {last} together"
            words = [several if others else f"choose another value of {last}"] if last else []
            words = words or [way.text for way in problem.ways if isinstance(way, Change)]
        # A rule may mean first what cannot be tried: --pretrained-checkpoint DIR, with which adapters are trained.
        is_meant = any(way.text in in_prose for way in problem.ways[:1] if isinstance(way, Change))
        gives_up = all(way.startswith("leave ") for way in words)
        ways = [*in_prose, *words] if is_meant and gives_up else [*words, *in_prose]
        return message(problem.said, ways[:_MOST_WAYS])

    @cached_property
    def nearest(self) -> Changes:
        """What the first way out changes; nothing, where none is found."""
        for way in itertools.chain.from_iterable(map(_ways, self.problems)):
            if isinstance(way, Values) and (values := self._values[way.name]):
                return {way.name: values[0]}
            if isinstance(way, Change) and way.values and (change := self._first_that_solves(way)):
                return change.values
        return self._combination

    def contradicts(self, other: _Group) -> bool:
        """Whether the first ways out of both leave something to be refused that each alone does not."""
        mine, its = self.nearest, other.nearest
        if not mine or not its:
            return False
        if any(its[name] != value for name, value in mine.items() if name in its):
            return True
        own = {_key(problem) for problem in (*self.problems, *other.problems)}
        return any((key := _key(left)) in own or key not in self.known for left in self.recheck({**mine, **its}))

    def _first_that_solves(self, change: Change | None) -> Change | None:
        while change is not None and not self._solves(change.values):
            change = self._completed(change) or change.otherwise
        return change

    def _completed(self, change: Change) -> Change | None:
        """A flag that turns on what it needs, with the one more flag that the only constraint left asks for:
        --num-experts 8 --disable-bias-linear."""
        left = self._left(change.values) if change.turns_on else []
        for way in _ways(left[0]) if len(left) == 1 else ():
            values = way.values if isinstance(way, Change) else {}
            if all(values.values()) and self._solves(both := {**values, **change.values}):
                return Change(_combined({**change.values, **values}), both)
        return None

    def _weaker(self, problem: Problem) -> list[str]:
        """The ways out that keep all constraints on the flag that they change, where others of the group stay
        violated."""
        words = list[str]()
        for way in problem.ways:
            if isinstance(way, Values):
                values = self._solving(self._by_name[way.name], partial(self._keeps, way.name))
                words += [way.in_words(values, is_first=not words)] if values else []
            elif way.values and all(self._keeps(name, way.values) for name in way.values):
                words.append(way.text)
        return words

    def _keeps(self, name: str, changes: Changes) -> bool:
        left = self.recheck(changes)
        return not any(name in fields_of(other) or _key(other) not in self.known for other in left)

    @cached_property
    def _by_name(self) -> dict[str, list[Values]]:
        """The ways out by field."""
        ways: dict[str, list[Values]] = {}
        for way in _values(self.problems):
            ways.setdefault(way.name, []).append(way)
        return ways

    @cached_property
    def _values(self) -> dict[str, list[int]]:
        """The values of each field that by themselves are a way out of the whole group, nearest first."""
        return {name: self._solving(ways, self._solves) for name, ways in self._by_name.items()}

    def _solving(self, ways: Sequence[Values], solves: Callable[[Changes], bool]) -> list[int]:
        """The values of a field that are a way out, nearest first, as many as a message names."""
        first, solving = ways[0], list[int]()
        tried = dict.fromkeys(itertools.chain.from_iterable(way.tried() for way in ways))
        ordered = list(tried) if len(ways) == 1 else sorted(tried, key=lambda value: (abs(value - first.near), value))
        if len(ways) == 1 and first.bound and all(solves({first.name: value}) for value in _sample(ordered)):
            return ordered
        for value in ordered:
            if value != first.near and solves({first.name: value}):
                solving.append(value)
            if all(way.are_enough(solving) for way in ways):
                break
        return solving

    def _left(self, changes: Changes) -> list[str]:
        """What a change would leave to be refused: of the group, or new."""
        own = frozenset(map(_key, self.problems))
        return [other for other in self.recheck(changes) if (key := _key(other)) in own or key not in self.known]

    def _solves(self, changes: Changes) -> bool:
        return not self._left(changes)

    def _combined(self) -> str:
        changes = {name: value for name, value in self._combination.items() if name != WORLD_SIZE}
        if len(changes) == len(self._combination):
            return _combined(changes)
        near, found = self.processes or 0, self._combination[WORLD_SIZE]
        numbers = [
            next((n for n in side if self._solves({**changes, WORLD_SIZE: n})), None)
            for side in (range(near - 1, max(near - _NEAR, 0), -1), range(near + 1, near + _NEAR))
        ]
        named = [number for number in numbers if number is not None] or [found]
        spares = next((values.spares for values in self._by_name.get(WORLD_SIZE, ())), 0)
        start = Values(name=WORLD_SIZE, among=named, near=near, spares=spares).in_words(named)
        return f"{_combined(changes)}, and {start}" if changes else start

    @cached_property
    def _of_flags(self) -> dict[str, Any]:
        """The nearest values of several fields that are a way out together; empty, if there is none near."""
        return self._nearest(processes=())

    @cached_property
    def _combination(self) -> dict[str, Any]:
        """The same; or, where there is none and no way out in prose, other processes, with or without other values."""
        in_prose = any(isinstance(way, Change) and not way.values for one in self.problems for way in _ways(one))
        if self._of_flags or in_prose or self.processes is None:
            return self._of_flags
        near = self.processes
        beside = sorted(range(max(near - _NEAR, 1), near + _NEAR), key=lambda number: abs(number - near))
        return self._nearest(processes=beside)

    def _nearest(self, *, processes: Sequence[int]) -> dict[str, Any]:
        """A combination that leaves nothing; empty, if there is none near. `processes`: numbers of processes that are
        tried, nearest first."""
        # A user who changes only the number of processes need not touch the script.
        alone = next((number for number in processes if self._solves({WORLD_SIZE: number})), None)
        if alone is not None:
            return {WORLD_SIZE: alone}
        left, changes = solve(self.problems, self._left, partial(_steps, processes=bool(processes)))
        return {} if left else changes


def solve(problems: Sequence[str], recheck: Recheck, steps: Steps) -> tuple[Sequence[str], dict[str, Any]]:
    """The nearest changes of fields after which nothing is violated, or else the least: a best-first search. Returns
    what is left, and the changes; of several that leave as little, those that leave most values to choose from."""
    order, tried = itertools.count(), set[frozenset[tuple[str, Any]]]()
    # What is left, changes and their distances; first what is nearest to a way out.
    queue: list[tuple[float, int, Sequence[str], dict[str, Any], float]] = [(0, next(order), problems, {}, 0)]
    best = problems, dict[str, Any]()
    while queue and len(tried) < _MOST_TRIED:
        _, _, left, changes, distance = heapq.heappop(queue)
        if len(left) < len(best[0]):
            best = left, changes
        if not left:
            return best
        for further, length in steps(left, changes) if len(changes) < _MOST_CHANGED else ():
            changed = {**changes, **further}
            # The same changes in another order lead to the same configuration.
            if (key := frozenset(changed.items())) in tried:
                continue
            tried.add(key)
            others, total = recheck(changed), distance + length
            heapq.heappush(queue, (total + 2 * len(changed) + 2 * len(others), next(order), others, changed, total))
    ends = [best, *((left, changes) for _, _, left, changes, _ in sorted(queue))]
    return min(ends, key=lambda end: (len(end[0]), -sum(len(way.among) for way in _values(end[0]) if not way.bound)))


def _steps(left: Sequence[str], changes: Changes, *, processes: bool) -> Iterator[tuple[Changes, float]]:
    """Changes of fields that are as they were given, and of the number of processes if that may change, each with its
    distance in powers of two. The further values of one field come after the first ones of others."""
    for way in itertools.chain.from_iterable(map(_ways, left)):
        if isinstance(way, Change):
            if way.values and not way.values.keys() & changes.keys():
                yield way.values, 1.0
        elif way.name not in changes and (processes or way.name != WORLD_SIZE):
            for place, value in enumerate(way.tried()[:_BRANCHES]):
                if value != way.near:
                    distance = abs(math.log2((max(value, 0) + 1) / (max(way.near, 0) + 1)))
                    # In powers of two, so that halving a degree is as near as doubling it.
                    yield {way.name: value}, distance + _LATER * place


def _ways(problem: str) -> Sequence[Way]:
    return problem.ways if isinstance(problem, Problem) else ()


def _values(problems: Sequence[str]) -> Iterator[Values]:
    """The ways out that are values of one field."""
    return (way for problem in problems for way in _ways(problem) if isinstance(way, Values))


def _sample(values: Sequence[int]) -> list[int]:
    """The first values, one in the middle and the last."""
    return list(dict.fromkeys([*values[:3], values[len(values) // 2], values[-1]]))


def _combined(changes: Changes) -> str:
    """Values of several fields in words: flags to copy, and those to leave out."""
    owners = {name: owner for name in changes if (owner := OWNERS.get(name, ("",))[0]) in changes}
    # A flag that is left out takes its parameters along.
    along = {name for name, owner in owners.items() if changes[owner] is None or changes[owner] is False}
    whole = {owners[name] for name in along} | {name for name, value in changes.items() if value is None}
    left_out = [flag(name) for name in changes if name in whole - along]
    given = [flag_and_value(k, v, own=is_shared(k)) for k, v in changes.items() if k not in whole | along]
    words = [" ".join(given)] if given else []
    return " and ".join([*words, *([f"leave {' and '.join(left_out)} out"] if left_out else [])])


def fields_of(problem: str) -> frozenset[str]:
    """The fields that a constraint is about."""
    if isinstance(problem, Problem) and problem.only:
        return problem.only
    said = problem.said if isinstance(problem, Problem) else problem.partition(": ")[0]
    named = fields_in(said)
    also = problem.about if isinstance(problem, Problem) else frozenset()
    return also | named | {way.name for way in _values([problem])}


def _key(problem: str) -> frozenset[str] | str:
    """What tells a constraint from others, whatever the values are: the fields that it is about, or else its text."""
    # Constraints on the same fields are in one group and solved together: nothing need tell them apart.
    return fields_of(problem) or problem


def _groups(found: Sequence[str]) -> list[list[int]]:
    """The places of constraints that share fields with each other, directly or through others."""
    groups: list[tuple[frozenset[str], list[int]]] = []
    for place, problem in enumerate(found):
        fields, places = fields_of(problem), [place]
        for group in [group for group in groups if group[0] & fields]:
            fields, places = fields | group[0], group[1] + places
            groups.remove(group)
        groups.append((fields, places))
    return [sorted(places) for _, places in groups]


# ---- where a search of layouts begins --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search of layouts chooses. Flags that need certain values of it, as --zero-shard-size 2 needs ZeRO and an
    even number of replicas, get them: a search has both among its layouts, and begins from one that has."""

    ranks: int  # number of ranks that it divides
    # Of each field that it chooses, by name: what it may be, given the configuration.
    values: Callable[[Config], Mapping[str, Sequence[Any]]]
    # Whether a field may have a value within the limits of the search, which no way out may exceed.
    allows: Callable[[str, Any], bool]


def values_among(values: Mapping[str, Sequence[Any]]) -> Steps:
    """The steps to other values of the fields that constraints are about, each of one field. `values`: that fields may
    take, by field, best first."""

    def steps(problems: Sequence[str], changes: Changes) -> Iterator[tuple[Changes, float]]:
        about = frozenset[str]().union(*map(fields_of, problems))
        for name, possible in values.items():
            if name in about and name not in changes:
                yield from (({name: value}, 1 + place / len(possible)) for place, value in enumerate(possible))

    return steps


def with_other_values(problem: str, values: Mapping[str, Sequence[Any]], recheck: Recheck) -> str:
    """The message about a constraint. Where all `values` of a field that keep it violate another one, which `recheck`
    finds, it names that first and has the ways out of both."""
    if not isinstance(problem, Problem):
        return problem
    known = frozenset(map(fields_of, recheck({})))
    for name in (name for name in values if name in fields_of(problem)):
        keeping = [
            (step, [one for one in others if fields_of(one) not in known])
            for step, _ in values_among({name: values[name]})([problem], {})
            if fields_of(problem) not in map(fields_of, others := recheck(step))
        ]
        if not keeping:
            continue
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
