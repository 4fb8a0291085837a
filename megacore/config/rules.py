"""Constraints between sections: how a module of them states the ones that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megacore.config.schema import Config

Rule = Callable[[Config, int], Iterator[str]]
"""Yields what is wrong with a configuration on a number of processes."""
FURTHER = 64
"""Values beyond a bound that are tried."""


class Rules(list[tuple[frozenset[str], Rule]]):
    """Constraints, each with the fields that it reads."""

    def about(self, *names: str) -> Callable[[Rule], Rule]:
        """Adds a constraint. It is checked only if the value of each of these fields is valid by itself."""

        def add(rule: Rule) -> Rule:
            self.append((frozenset(names), rule))
            return rule

        return add
