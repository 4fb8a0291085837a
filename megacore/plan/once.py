"""Figures of a configuration that are asked for again and again, as by a search for each of a layout's ranks.

Layouts that differ only in what no layer of the model sees have these figures in common: in the number of replicas, in
the stages of ZeRO, and in how layers are divided among stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

from megacore.config import ResolvedConfig

P = ParamSpec("P")
R = TypeVar("R")
_KEPT = "_planned_once"
_BY_VALUE = (bool, int, float, str, tuple)


def once_per_config(
    function: Callable[Concatenate[ResolvedConfig, P], R],
) -> Callable[Concatenate[ResolvedConfig, P], R]:
    """The function, which computes once for each configuration and its other arguments.

    Of the configuration it may depend only on what `seen_by_layers` names, and on what the layouts of a search have in
    common. Results are kept by the configuration itself, which does not change. Arguments other than numbers, texts and
    tuples of these are told apart by identity.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(config: ResolvedConfig, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, Any] | None = config.__dict__.get(_KEPT)
        if results is None:
            results = config.__dict__[_KEPT] = {}
        key: Any = name
        if args or kwargs:
            key = (name, *[arg if isinstance(arg, _BY_VALUE) else id(arg) for arg in (*args, *kwargs.values())])
        found = results.get(key)
        if found is None:
            # The arguments live as long as their identity counts.
            found = results[key] = (function(config, *args, **kwargs), args, kwargs)
        result: R = found[0]
        return result

    return kept


def seen_by_layers(config: ResolvedConfig) -> tuple[Hashable, ...]:
    """What the layers of a rank see of a layout. Configurations of one search in which it is equal may share results."""
    parallel, training = config.parallel, config.training
    degrees = parallel.tp, parallel.cp, parallel.ep, parallel.expert_split, parallel.pp > 1
    ways = parallel.sequence_parallel, parallel.may_split_backward, training.recompute, training.recompute_num_layers
    return *degrees, *ways, training.micro_batch_size


def share_results(config: ResolvedConfig, results: dict[Any, Any]) -> None:
    """Lets a configuration keep the results of `once_per_config` where others keep theirs.

    Args:
        config: a configuration without results.
        results: of configurations that are alike in `seen_by_layers`; empty at first.
    """
    config.__dict__[_KEPT] = results
