"""Figures of a configuration that are asked for again and again, as by a search for each of a layout's ranks.

Most of them depend on a part of the layout alone. What layers keep of a microbatch, and how long it takes them, depends
neither on the number of replicas nor on ZeRO. What state takes, and what replicas send of it, depends neither on the
microbatch nor on recomputation nor on the schedule. What is between the first forward and the last backward is the same
on ZeRO's stages 0 and 1. Layouts that agree in such a part compute its figures once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from megacore.config import ResolvedConfig

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[Concatenate[ResolvedConfig, P], R]
Part = Literal["layers", "state", "microbatches", "split"]


def once_per(part: Part) -> Callable[[Function[P, R]], Function[P, R]]:
    """For a function that computes once for each configuration and its other arguments.

    Results are kept by the configuration, which does not change. Positional arguments are told apart by identity, and
    keyword arguments by name and value.

    Args:
        part: of the layout, on which alone it may depend, as `share_results` has it; how the model is staged is told
            by its arguments.
    """

    def computed_once(function: Function[P, R]) -> Function[P, R]:
        name, place = f"{function.__module__}.{function.__qualname__}", f"_planned_of_{part}"

        @functools.wraps(function)
        def once(config: ResolvedConfig, *args: P.args, **kwargs: P.kwargs) -> R:
            results: dict[Any, Any] | None = config.__dict__.get(place)
            if results is None:
                results = config.__dict__[place] = {}
            key: Any = name
            if args or kwargs:
                key = (name, *map(id, args), *kwargs.items())
            found = results.get(key)
            if found is None:
                # The arguments live as long as their identity counts.
                found = results[key] = (function(config, *args, **kwargs), args, kwargs)
            result: R = found[0]
            return result

        return once

    return computed_once


def share_results(config: ResolvedConfig, known: dict[Hashable, dict[Any, Any]]) -> None:
    """Let a configuration, which has no results so far, have those of other layouts of one search, as far as they agree
    in a part. All have as many ranks."""
    parallel, training = config.parallel, config.training
    degrees = parallel.tp, parallel.cp, parallel.ep, parallel.expert_split
    ways = parallel.sequence_parallel, parallel.may_split_backward, training.recompute, training.recompute_num_layers
    layers = *degrees, parallel.pp > 1, *ways, training.micro_batch_size
    # On ZeRO's stages 2 and 3 replicas communicate in every microbatch.
    stage, in_each = parallel.zero_stage, parallel.zero_stage >= 2
    passes = (config.microbatches, parallel.may_split_backward) if in_each else ()
    pipeline = parallel.pp, parallel.schedule, parallel.virtual_stages, config.microbatches
    seen: dict[Part, tuple[Hashable, ...]] = {
        "layers": layers,
        "state": (*degrees, parallel.pp, stage, parallel.offload_optimizer, *passes),
        "microbatches": (*layers, *pipeline, stage if in_each else 0),
        "split": (parallel.tp,),
    }
    for part, values in seen.items():
        config.__dict__[f"_planned_of_{part}"] = known.setdefault((part, *values), {})
