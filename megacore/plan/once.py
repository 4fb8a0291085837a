"""Figures of a configuration that are asked for again and again, as by a search for each of a layout's ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from megacore.config import ResolvedConfig, ResolvedModel

P = ParamSpec("P")
R = TypeVar("R")
_KEPT = "_planned_once"


def once_per_config(
    function: Callable[Concatenate[ResolvedConfig, P], R],
) -> Callable[Concatenate[ResolvedConfig, P], R]:
    """The function, which computes once for each configuration and its other arguments.

    Results are kept by the configuration itself, which does not change. Blocks are told apart by identity.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(config: ResolvedConfig, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, Any] | None = config.__dict__.get(_KEPT)
        if results is None:
            results = config.__dict__[_KEPT] = {}
        key: Any = name
        if args or kwargs:
            key = (name, *[id(arg) if isinstance(arg, ResolvedModel) else arg for arg in args], *kwargs.values())
        found = results.get(key)
        if found is None:
            found = results[key] = (
                function(config, *args, **kwargs),
                args,
            )  # these live as long as their identity counts
        result: R = found[0]
        return result

    return kept
