"""Why no layout of a search is valid: the given values and limits that contradict each other, and what to change."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from megacore.config import ResolvedConfig, violations
from megacore.config.dimensions import degree_fields
from megacore.config.messages import divisors, multiples, one_of
from megacore.config.problem import Problem
from megacore.config.solve import fields_of
from megacore.config.spelling import flag, flag_and_value
from megacore.plan.cluster import Cluster
from megacore.plan.search import Found, search
from megacore.plan.search_space import (
    Choice,
    Constraints,
    Validity,
    divisions_of,
    variants,
    with_batch,
    with_choice,
)

_MOST_NAMED = 4  # values of a way out
_MOST_ASKED = 8  # layouts of a division of the ranks that are asked what is wrong with them
_MOST_TRIED = 400  # layouts of another number of ranks, or of another batch
_NEAR = 64  # ranks or samples more or fewer that are tried
_ANOTHER = "another --world-size or --global-batch-size"
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

    def distance(self, choice: Choice) -> float:
        """How far a layout is from keeping it: 0 where it does, of numbers in powers of two."""
        value = _value(choice, self.name)
        if value == self.value or (self.kind != "fixed" and (value > self.value) == (self.kind == "least")):
            return 0.0
        return abs(math.log2(value / self.value)) if value and isinstance(self.value, int) and self.value else 1.0

    def flag_with(self, values: Sequence[Any]) -> str:
        """The flag with other values."""
        if isinstance(self.value, bool):
            return one_of([flag_and_value(self.name, value) for value in values])
        return f"{flag(self.name).replace('--', self.prefix, 1)} {one_of(values)}"


def conflicts(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, *, batch_of_ranks: bool
) -> Iterator[str]:
    """What is wrong with constraints that change nothing, or that no valid layout keeps.

    Named are constraints of which each one is needed for the contradiction. First come ways out that change one flag or
    number and keep everything else; where there are none, the values of the nearest layout together.

    Args:
        config: of the search.
        cluster: that computes.
        constraints: what a layout may be.
        batch_of_ranks: the batch is as many times the number of ranks, whatever that is.
    """
    world = f"--world-size {constraints.world_size}"
    is_valid = Validity(config, constraints.world_size)

    def layouts(given: Sequence[_Given]) -> Iterator[Choice]:
        return _layouts(config, cluster, _with(constraints, given), is_valid)

    def is_possible(given: Sequence[_Given]) -> bool:
        return next(layouts(given), None) is not None

    kinds = zip(_KINDS, (constraints.fixed, constraints.least, constraints.most), strict=True)
    given = needed = [_Given(kind, name, value) for kind, values in kinds for name, value in values.items()]
    if config.model.experts is None:
        idle = (one for one in given if one.name in ("ep", "etp"))
        yield from (f"{one} has no effect without experts: leave it out, or use --num-experts" for one in idle)
    if is_possible(given):
        return
    ways = list(_other_sizes(config, cluster, constraints, batch_of_ranks=batch_of_ranks))
    if not is_possible([]):
        yield f"--search: no layout of {world} is valid: use {', or '.join(ways) or _ANOTHER}"
        return
    for one in given:
        if not is_possible(others := _without(needed, one)):
            needed = others
    possible = {one: {_value(choice, one.name) for choice in layouts(_without(given, one))} - {None} for one in needed}
    ways = [one.flag_with(_nearest(one, values)) for one, values in possible.items() if values] + ways
    if not ways:
        nearest = min(layouts([]), key=lambda choice: sum(one.distance(choice) for one in given))
        needed = [one for one in given if one.distance(nearest)]
        ways = [" ".join(str(one._replace(value=_value(nearest, one.name))) for one in needed)]
    product = _product(needed, constraints.world_size)
    contradiction = product or " and ".join(map(str, needed)) + _reason(config, cluster, constraints, needed)
    yield f"--search: no valid layout of {world} has {contradiction}: use {', or '.join(ways)}"


def _layouts(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, is_valid: Callable[[Choice], bool]
) -> Iterator[Choice]:
    for degrees in divisions_of(config, cluster, constraints):
        yield from filter(is_valid, variants(config, constraints, degrees, ("none", "full")))


def _product(needed: Sequence[_Given], world_size: int) -> str:
    """The product of degrees that are too many ranks, or of all of them that are too few; empty where others are
    needed."""
    degrees = {one.name: one.value for one in needed if one.name in degree_fields()}
    ranks, kinds = math.prod(degrees.values()), {one.kind for one in needed}
    is_more = ranks > world_size and "most" not in kinds
    is_fewer = ranks < world_size and "least" not in kinds and degrees.keys() >= {"tp", "pp", "dp"}
    are_all = 1 < len(degrees) == len(needed)
    return f"{' x '.join(map(str, needed))} = {ranks} ranks" if are_all and (is_more or is_fewer) else ""


def _reason(config: ResolvedConfig, cluster: Cluster, constraints: Constraints, needed: Sequence[_Given]) -> str:
    """What is wrong with the layouts that keep all constraints, a few of each division of the ranks, where it is one
    constraint on flags besides the needed ones."""
    names, wrong = {one.name for one in needed}, []
    for degrees in divisions_of(config, cluster, constraints):
        for choice in itertools.islice(variants(config, constraints, degrees, ("none", "full")), _MOST_ASKED):
            wrong.append(violations(with_choice(config, choice), constraints.world_size))
    common = set.intersection(*map(set, wrong)) if wrong else set()
    further = [one for one in common if not fields_of(one) <= names]
    if len(further) != 1:
        return ""
    (one,) = further
    return f" ({one.said if isinstance(one, Problem) else one.partition(': ')[0]})"


def _other_sizes(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, *, batch_of_ranks: bool
) -> Iterator[str]:
    """Numbers of ranks of which a layout keeps all constraints, and batches: the nearest ones, or else divisors and
    multiples."""
    world, batch = constraints.world_size, config.training.global_batch_size

    def is_possible(ranks: int, size: int) -> bool:
        sized, others = with_batch(config, size), dataclasses.replace(constraints, world_size=ranks)
        tried = itertools.islice(_layouts(sized, cluster, others, lambda _: True), _MOST_TRIED)
        return any(map(Validity(sized, ranks), tried))

    def nearest(number: int, is_right: Callable[[int], bool]) -> list[int]:
        fewer = [size for size in reversed(divisors(number, most=None)) if size <= number - _NEAR]
        more = [size for size in (*multiples(number, world), 2 * number) if size >= number + _NEAR]
        sides = [*range(number - 1, max(number - _NEAR, 0), -1), *fewer], [*range(number + 1, number + _NEAR), *more]
        found = (next(filter(is_right, side), None) for side in sides)
        return [one for one in found if one is not None]

    if worlds := nearest(world, lambda ranks: is_possible(ranks, batch // world * ranks if batch_of_ranks else batch)):
        yield f"--world-size {one_of(worlds)}"
    if not batch_of_ranks and (batches := nearest(batch, lambda size: is_possible(world, size))):
        yield f"--global-batch-size {one_of(batches)}"


def _with(constraints: Constraints, given: Sequence[_Given]) -> Constraints:
    """The constraints with only these."""
    fixed, least, most = ({name: value for kind, name, value in given if kind == one} for one in _KINDS)
    return dataclasses.replace(constraints, fixed=fixed, least=least, most=most)


def _without(given: Sequence[_Given], one: _Given) -> list[_Given]:
    return [other for other in given if other is not one]


def _value(choice: Choice, name: str) -> Any:
    if name == "etp":
        return choice.parallel.expert_split
    return getattr(choice.parallel if hasattr(choice.parallel, name) else choice.training, name)


def _nearest(given: _Given, possible: set[Any]) -> list[Any]:
    """Of the values that a field may have without a constraint on it, those nearest to it."""
    if given.kind == "most":
        return [min(possible)]
    if given.kind == "least":
        return [max(possible)]
    if isinstance(given.value, int) and not isinstance(given.value, bool):
        return sorted(sorted(possible, key=lambda value: abs(value - given.value))[:_MOST_NAMED])
    return sorted(possible, key=str)[:_MOST_NAMED]


# ---- what would fit --------------------------------------------------------------------------------------------------

_MOST_RANKS = 4096
_MOST_SEARCHED = 4_000  # valid layouts of all searches for one way out, about a second
_NUMBERS = 3  # of ranks that are tried


def ways_of_search(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, found: Found, *, batch_of_ranks: bool
) -> Iterator[str]:
    """Values of --world-size and --global-batch-size of which a layout fits, or flags to leave out; a search that would
    take long tries none.

    Args:
        config: of the search.
        cluster: that computes.
        constraints: what a layout may be.
        found: by the search: no layout that fits, and what the smallest needs.
        batch_of_ranks: the batch is as many times the number of ranks, whatever that is.
    """
    world, batch, tried = constraints.world_size, config.training.global_batch_size, found.tried

    def first(candidates: Iterable[tuple[str, ResolvedConfig, int]]) -> Iterator[str]:
        """The words of the first candidate of which a layout fits, as long as there is not much to search."""
        left = _MOST_SEARCHED
        for words, sized, ranks in candidates:
            if left < ranks // world * tried:
                return
            others = search(sized, cluster, dataclasses.replace(constraints, world_size=ranks))
            if others.layouts:
                yield words
                return
            left -= others.tried

    more = _more_ranks(found.times_too_large * world, cluster, world)
    batches = ((ranks, batch * ranks // world if batch_of_ranks else batch) for ranks in more)
    yield from first((f"--world-size {ranks}", with_batch(config, size), ranks) for ranks, size in batches)
    smaller = (batch >> n for n in range(1, batch.bit_length()))
    yield from first((f"--global-batch-size {size}", with_batch(config, size), world) for size in smaller)
    if found.least_on_host is not None:
        kept = {"offload_optimizer": False, "offload_params": False, "offload_activations": False, "survive": False}
        flags = [*config.offload_flags, *(["--survive"] if config.watch.survive else [])]
        words = " ".join(name.replace("--", "--no-", 1) for name in flags)
        yield from first([(words, config.with_values(kept), world)])


def _more_ranks(at_least: float, cluster: Cluster, world: int) -> Iterator[int]:
    """Whole nodes, or a part of one that leaves all its ranks as much: the fewest that may be enough, as all ranks
    together need no less memory, and then powers of two."""
    node = cluster.device.node_ranks if world % cluster.device.node_ranks == 0 else world
    nodes = max(math.ceil(at_least / node), world // node + 1)
    powers = [1 << n for n in range((nodes - 1).bit_length(), (nodes - 1).bit_length() + _NUMBERS)]
    for count in sorted({nodes, *powers})[:_NUMBERS]:
        if count * node <= min(_MOST_RANKS, cluster.devices):
            yield count * node
