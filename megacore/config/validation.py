"""Every violated constraint of a configuration, each with the way out.

A section validates its fields (`Section.wrong_fields`, `Section.constraints`). What must hold between sections is in
the modules of rules, each about one subject; a new constraint joins those of its subject (rules.py). missing_files.py
asks the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from megacore.config.batch_rules import BATCH_RULES
from megacore.config.compression import COMPRESSION_RULES
from megacore.config.data_rules import DATA_RULES
from megacore.config.dimensions import degree_fields
from megacore.config.duration_rules import DURATION_RULES
from megacore.config.expert_rules import EXPERT_RULES
from megacore.config.fields import Section
from megacore.config.layout_rules import LAYOUT_RULES
from megacore.config.optimizer_rules import OPTIMIZER_RULES
from megacore.config.problem import WORLD_SIZE
from megacore.config.proposals import with_tried_ways
from megacore.config.reproducible import REPRODUCIBLE_RULES
from megacore.config.schema import DECIDE_SEQUENCES, Config, sections_of

_RULES = [
    *chain(
        EXPERT_RULES, REPRODUCIBLE_RULES, COMPRESSION_RULES, LAYOUT_RULES, BATCH_RULES, DURATION_RULES, DATA_RULES,
        OPTIMIZER_RULES,
    )
]  # fmt: skip


def validate(
    config: Config,
    world_size: int,
    *,
    unread: frozenset[str] = frozenset(),
    follows_degrees: bool = False,
    divided: int | None = None,
    on_cpu: bool | None = None,
    further: Callable[[Config], list[str]] | None = None,
) -> list[str]:
    """Names every violated constraint of a configuration, resolved or not.

    Args:
        config: the configuration to check; none of its values need be valid.
        world_size: the number of processes of the run.
        unread: fields that were given a value which could not be read. Constraints on them are not checked.
        follows_degrees: the run is planned for as many processes as its degrees say; other degrees change their number.
        divided: the number of ranks that a search divides in other ways than the run, which it begins from: degrees
            whose product does not divide it are no way out.
        on_cpu: as for `violations`.
        further: constraints of the caller.

    Returns:
        One message per problem. It names the flags, their values, the constraint and the ways out, which are tried on
        all constraints.
    """

    def found_in(one: Config, ranks: int) -> list[str]:
        return [*(further(one) if further else ()), *violations(one, ranks, unread=unread, on_cpu=on_cpu)]

    def recheck(changes: Mapping[str, Any]) -> list[str]:
        values = dict(changes)
        given = values.pop(WORLD_SIZE, world_size)
        changed = config.with_values(values)
        product = degrees_product(changed)
        left = found_in(changed, product if follows_degrees else given)
        if divided is not None and product and divided % product:
            left.append(f"{product} ranks do not divide {divided}")
        return left

    found = found_in(config, world_size)
    return with_tried_ways(found, recheck, processes=None if follows_degrees else world_size) if found else []


def degrees_product(config: Config) -> int:
    """The number of processes that the given degrees ask for."""
    given = (getattr(config.parallel, name) for name in degree_fields())
    return math.prod(degree for degree in given if isinstance(degree, int) and degree > 0)


def violations(
    config: Config, world_size: int, *, unread: frozenset[str] = frozenset(), on_cpu: bool | None = None
) -> list[str]:
    """As `validate`, but no way out is tried: for callers that ask whether a configuration is valid.

    Args:
        config: the configuration to check; none of its values need be valid.
        world_size: the number of processes of the run.
        unread: fields that were given a value which could not be read.
        on_cpu: whether the ranks compute on a CPU, whose defaults the rules then see, or else on accelerators. None:
            not known, and what the device decides counts as off.
    """
    sections: list[Section] = [getattr(config, name) for name in sections_of(type(config))]
    wrong_by_section = [section.wrong_fields() for section in sections]
    wrong = unread.union(*wrong_by_section)
    refused = config.wrong_fields(wrong)
    wrong |= refused.keys()
    problems = list(refused.values())
    for section, messages in zip(sections, wrong_by_section, strict=True):
        problems += [message for name, message in messages.items() if name not in unread]
        problems += section.constraints(wrong)
    if on_cpu is not None and not DECIDE_SEQUENCES & wrong:
        config = config.with_sequences_of_device(on_cpu=on_cpu)
    for names, rule in _RULES:
        if not names & wrong:
            problems += rule(config, world_size)
    return [*problems, *config.constraints(wrong)]
