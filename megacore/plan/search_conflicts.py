"""Why no layout of a search is valid: the given values and limits that contradict each other, and what to change."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    LEAST_POSITIONS,
    Choice,
    Constraints,
    Validity,
    context_degrees,
    divisions_of,
    possible_degrees,
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

    def flag_with(self, values: Sequence[Any]) -> str:
        """The flag with other values."""
        if not values:
            return f"no {self}"
        if isinstance(self.value, bool):
            return one_of([flag_and_value(self.name, value) for value in values])
        return f"{flag(self.name).replace('--', self.prefix, 1)} {one_of(values)}"


def conflict(config: ResolvedConfig, cluster: Cluster, constraints: Constraints, *, batch_of_ranks: bool) -> str:
    """What is wrong with constraints that no valid layout keeps.

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

    product, ranks = _largest_product(config, constraints)
    sizes = list(_other_sizes(config, cluster, constraints, ranks, batch_of_ranks=batch_of_ranks))
    given = needed = _all_of(constraints)
    if ranks < constraints.world_size:
        ways = [
            one.flag_with(_nearest(one, values))
            for one in given
            if (values := _values(layouts(_without(given, one)), one.name))
        ]
        ways = [*ways, *sizes] or ["larger ones" if given else _ANOTHER]
        return f"--search: {product} must be at least {world}: use {', or '.join(ways)}"
    if not is_possible([]):
        return f"--search: no layout of {world} is valid: use {', or '.join(sizes) or _ANOTHER}"
    for one in given:
        if not is_possible(others := _without(needed, one)):
            needed = others
    ways = []
    for one in needed:
        possible = [_values(layouts(_without(from_, one)), one.name) for from_ in (given, needed)]
        ways.append(one.flag_with(_nearest(one, possible[0] or possible[1])))
    contradiction = " and ".join(map(str, needed)) + _reason(config, cluster, constraints, needed)
    return f"--search: no valid layout of {world} has {contradiction}: use {', or '.join([*ways, *sizes])}"


def too_many_ranks(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, *, batch_of_ranks: bool
) -> Iterator[str]:
    """That the given degrees and the smallest ones need more ranks than there are; arguments as for `conflict`.

    Each way out leaves a division of the ranks: one flag or, where none does, several flags together; or more ranks.
    """
    world = constraints.world_size
    rest = [one for one in _all_of(constraints) if one.kind == "most" or one.name not in degree_fields()]
    given = [one for name in degree_fields() for one in _all_of(constraints) if one.name == name and one not in rest]
    ranks = math.prod(one.value for one in given)
    if ranks <= world or len(given) < 2:
        return

    def divisions(given: Sequence[_Given], ranks: int = world) -> Iterator[Mapping[str, Any]]:
        sized = with_batch(config, config.training.global_batch_size // world * ranks) if batch_of_ranks else config
        allowed = dataclasses.replace(_with(constraints, [*rest, *given]), world_size=ranks)
        return divisions_of(sized, cluster, allowed)

    ways = list[str]()
    for one in given:
        smaller = [one._replace(value=d) for d in divisors(world, most=None) if d < one.value]
        works = [less for less in smaller if next(divisions([*_without(given, one), less]), None) is not None]
        if works and one.kind == "least":
            ways.append(f"{works[-1]} or less")
        elif works:
            ways.append(one.flag_with([less.value for less in works]))
    if not ways:
        nearest = min(divisions([]), key=partial(_distance, given), default=None)
        if nearest is not None:
            lower = [one._replace(value=min(one.value, nearest[one.name])) for one in given]
            ways.append(" ".join(str(less) for less, one in zip(lower, given, strict=True) if less != one))
    if next(divisions(given, ranks), None) is not None:
        ways.append(f"--world-size {ranks}")
    product = " x ".join(map(str, given))
    yield f"{product} = {ranks} must be at most --world-size {world}: use {', or '.join(ways or ['smaller ones'])}"


def _distance(given: Sequence[_Given], degrees: Mapping[str, Any]) -> tuple[float, float]:
    """How many times smaller degrees are than the given ones, in all and at the most."""
    factors = [max(one.value / degrees[one.name], 1.0) for one in given]
    return math.prod(factors), max(factors)


def _layouts(
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, is_valid: Callable[[Choice], bool]
) -> Iterator[Choice]:
    for degrees in divisions_of(config, cluster, constraints):
        yield from filter(is_valid, variants(config, constraints, degrees, ("none", "full")))


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
    config: ResolvedConfig, cluster: Cluster, constraints: Constraints, most: int, *, batch_of_ranks: bool
) -> Iterator[str]:
    """Numbers of ranks of which a layout keeps all constraints, and batches: the nearest ones, or else divisors and
    multiples; `most` ranks is the product of the largest degrees."""
    world, batch = constraints.world_size, config.training.global_batch_size

    def is_possible(ranks: int, size: int) -> bool:
        sized, others = with_batch(config, size), dataclasses.replace(constraints, world_size=ranks)
        tried = itertools.islice(_layouts(sized, cluster, others, lambda _: True), _MOST_TRIED)
        return any(map(Validity(sized, ranks), tried))

    def nearest(number: int, is_right: Callable[[int], bool]) -> list[int]:
        fewer = sorted({most, *divisors(number, most=None)}, reverse=True)
        below = [*range(number - 1, max(number - _NEAR, 0), -1), *(size for size in fewer if size <= number - _NEAR)]
        more = [size for size in multiples(number, world) if size > number]
        above = [*range(number + 1, number + _NEAR), *more, 2 * number]
        found = (next(filter(is_right, side), None) for side in (below, above))
        return [one for one in found if one is not None]

    if worlds := nearest(world, lambda ranks: is_possible(ranks, batch // world * ranks if batch_of_ranks else batch)):
        yield f"--world-size {one_of(worlds)}"
    if not batch_of_ranks and (batches := nearest(batch, lambda size: is_possible(world, size))):
        yield f"--global-batch-size {one_of(batches)}"


def _largest_product(config: ResolvedConfig, constraints: Constraints) -> tuple[str, int]:
    """The product of the largest degrees, in words and as a number."""
    possible, factors, ranks = possible_degrees(config, constraints), [], 1
    world = constraints.world_size
    for name in degree_fields():
        values, reason = possible[name]
        if name == "cp":
            values = [cp for cp in context_degrees(config, constraints) if world % cp == 0]
            reason = f"leave a rank {LEAST_POSITIONS:,} positions"
        largest = max((value for value in values if constraints.allow(name, value)), default=1)
        ranks *= largest
        if name in constraints.fixed:
            factors.append(f"--{name} {largest}")
        elif name in constraints.most:
            most = constraints.most[name]
            factors.append(f"--max-{name} {most}" + (f" ({largest} is possible)" if largest < most else ""))
        elif largest > 1 or name != "cp":
            factors.append(
                f"--{name} {largest} (the largest possible: it must divide --world-size {world} and {reason})"
            )
    return f"{' x '.join(factors)} = {ranks}", ranks


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
    world, batch = constraints.world_size, config.training.global_batch_size
    left = _MOST_SEARCHED
    for ranks in _more_ranks(found.times_too_large * world, cluster, world):
        if left < ranks // world * found.tried:
            break
        sized = with_batch(config, batch * ranks // world) if batch_of_ranks else config
        wider = search(sized, cluster, dataclasses.replace(constraints, world_size=ranks))
        if wider.layouts:
            yield f"--world-size {ranks}"
            break
        left -= wider.tried
    left, smaller = _MOST_SEARCHED, batch
    while smaller > 1 and left >= found.tried:
        smaller //= 2
        of_smaller = search(with_batch(config, smaller), cluster, constraints)
        if of_smaller.layouts:
            yield f"--global-batch-size {smaller}"
            break
        left -= of_smaller.tried
    is_host_short = found.least_on_host is not None and found.tried <= _MOST_SEARCHED
    if is_host_short and search(_without_offloading(config), cluster, constraints).layouts:
        yield " ".join(flag.replace("--", "--no-", 1) for flag in config.offload_flags)


def _without_offloading(config: ResolvedConfig) -> ResolvedConfig:
    """The configuration with nothing in host memory."""
    parallel = dataclasses.replace(config.parallel, offload_optimizer=False, offload_params=False)
    training = dataclasses.replace(config.training, offload_activations=False)
    return dataclasses.replace(config, parallel=parallel, training=training)


def _more_ranks(at_least: float, cluster: Cluster, world: int) -> Iterator[int]:
    """Whole nodes, or a part of one that leaves all its ranks as much: the fewest that may be enough, as all ranks
    together need no less memory, and then powers of two."""
    node = cluster.device.node_ranks if world % cluster.device.node_ranks == 0 else world
    nodes = max(math.ceil(at_least / node), world // node + 1)
    powers = [1 << n for n in range((nodes - 1).bit_length(), (nodes - 1).bit_length() + _NUMBERS)]
    for count in sorted({nodes, *powers})[:_NUMBERS]:
        if count * node <= min(_MOST_RANKS, cluster.devices):
            yield count * node
