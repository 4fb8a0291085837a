"""Every violated constraint of a configuration, each with the way out. A section validates its fields
(`Section.wrong_fields`) and what must hold between them (`Section.violated`). What must hold between sections is in
constraints.py. missing_files.py asks the disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megacore.config.constraints import RULES, idle_optimizers, settings_of
from megacore.config.dimensions import degree_fields, fill_degrees
from megacore.config.fields import Section
from megacore.config.problem import WORLD_SIZE
from megacore.config.schema import DECIDE_SEQUENCES, Config, sections_of
from megacore.config.solve import Searched, solve, values_among, with_other_values, with_tried_ways
from megacore.config.spelling import flag


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The constraints of a configuration, and of what it would be with other values."""

    config: Config  # the configuration to check, resolved or not; none of its values need be valid
    world_size: int
    # Fields that were given a value which could not be read. Constraints on them are not checked.
    unread: frozenset[str] = frozenset()
    # The run is planned for as many processes as its degrees say; other degrees change their number.
    follows_degrees: bool = False
    # What a search chooses that begins from the run: degrees whose product does not divide its ranks are no way out.
    searched: Searched | None = None
    on_cpu: bool | None = None  # as for `violations`
    further: Callable[[Config], list[str]] | None = None  # constraints of the caller

    def messages(self) -> list[str]:
        """One message per problem. It names the flags, their values, the constraint and the ways out, which are tried
        on all constraints."""
        found = self._left({})
        if found and self.searched is not None:
            values = self.searched.values(self.config)
            found = [with_other_values(problem, values, self._left) for problem in found]
        processes = None if self.follows_degrees else self.world_size
        return with_tried_ways(found, self._left, processes=processes) if found else []

    def of_start(self) -> Validation:
        """The same from where a search begins: with values that it chooses anyway, if these violate fewer
        constraints."""
        if self.searched is None:
            return self
        values = dict(self.searched.values(self.config))
        if not self.follows_degrees:
            values.pop(degree_fields()[-1], None)  # the ranks that the other degrees leave

        def left(changes: Mapping[str, Any]) -> list[str]:
            beyond = [
                f"{flag(name)} {value} is not searched"
                for name, possible in values.items()
                if possible and (value := changes.get(name, self.config.value(name))) not in (None, *possible)
            ]
            return [*self._left(changes), *beyond]

        start = self.config.with_values(solve(left({}), left, values_among(values))[1])
        last = degree_fields()[-1]
        if start.value(last) is None and (ranks := fill_degrees(start.parallel, self.world_size)[last]):
            start = start.with_values({last: ranks})  # which a search chooses too, so that it is not derived
        return replace(self, config=start, world_size=self._ranks(start, self.world_size))

    def _ranks(self, config: Config, given: int) -> int:
        return degrees_product(config) if self.follows_degrees else given

    def _left(self, changes: Mapping[str, Any]) -> list[str]:
        """What is violated with other values of fields, or of the number of processes."""
        values = dict(changes)
        given = values.pop(WORLD_SIZE, self.world_size)
        changed = self.config.with_values(values)
        left = list(self.further(changed)) if self.further else []
        left += violations(changed, self._ranks(changed, given), unread=self.unread, on_cpu=self.on_cpu)
        product = degrees_product(changed)
        if changes and self.searched is not None and product and self.searched.ranks % product:
            left.append(f"{product} ranks do not divide {self.searched.ranks}")
        if self.searched is not None:
            beyond = [name for name, value in values.items() if not self.searched.allows(name, value)]
            left += [f"{flag(name)} {values[name]} is not within the limits of the search" for name in beyond]
        return left


def validate(config: Config, world_size: int) -> list[str]:
    """`Validation.messages` of a run on so many processes."""
    return Validation(config=config, world_size=world_size).messages()


def degrees_product(config: Config) -> int:
    """The number of processes that the given degrees ask for."""
    given = (getattr(config.parallel, name) for name in degree_fields())
    return math.prod(degree for degree in given if isinstance(degree, int) and degree > 0)


def violations(
    config: Config, world_size: int, *, unread: frozenset[str] = frozenset(), on_cpu: bool | None = None
) -> list[str]:
    """As `validate`, but no way out is tried: for callers that ask whether a configuration is valid. Arguments as for
    `Validation`."""
    names, idle = sections_of(type(config)), idle_optimizers(config)
    sections: list[Section] = [getattr(config, name) for name in names]
    # A value that nothing reads need not be in its range.
    wrong_by_section = [{} if name in idle else getattr(config, name).wrong_fields() for name in names]
    wrong = unread.union(*wrong_by_section)
    refused = config.wrong_fields(wrong)
    wrong |= refused.keys()
    problems = list(refused.values())
    c = settings_of(config, world_size, wrong)
    for name, section, messages in zip(names, sections, wrong_by_section, strict=True):
        problems += [message for field, message in messages.items() if field not in unread]
        problems += () if name in idle else section.violated(c)
    if on_cpu is not None and not DECIDE_SEQUENCES & wrong:
        c = settings_of(config.with_sequences_of_device(on_cpu=on_cpu), world_size, wrong)
    return [*problems, *c.violated(RULES), *c.violated(config.rules)]
