"""Figures of a configuration that are asked for again and again, as by a search for each of a layout's ranks.

Most of them depend on a part of the layout alone. What layers keep of a microbatch, and how long it takes them, depends
neither on the number of replicas nor on ZeRO. What state takes, and what replicas send of it, depends neither on the
microbatch nor on recomputation nor on the schedule. What is between the first forward and the last backward is the same
on ZeRO's stages 0 and 1. Layouts that agree in such a part compute its figures once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
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
        part: of the layout, on which alone it may depend: what `seen_by_layers`, `seen_by_state` or
            `seen_by_microbatches` names (the cut of the model is told by its arguments), or how many ranks split a
            layer.
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


def seen_by_layers(config: ResolvedConfig) -> tuple[Hashable, ...]:
    """What the layers of a rank see of a layout of given ranks."""
    parallel, training = config.parallel, config.training
    degrees = parallel.tp, parallel.cp, parallel.ep, parallel.expert_split, parallel.pp > 1
    ways = parallel.sequence_parallel, parallel.may_split_backward, training.recompute, training.recompute_num_layers
    return *degrees, *ways, training.micro_batch_size


def seen_by_state(config: ResolvedConfig) -> tuple[Hashable, ...]:
    """What the state of a rank, and its replicas, see of a layout of given ranks, of which the others are replicas."""
    parallel = config.parallel
    degrees = parallel.tp, parallel.cp, parallel.pp, parallel.ep, parallel.expert_split
    # On stages 2 and 3 replicas communicate in every microbatch.
    passes = (config.microbatches, parallel.may_split_backward) if parallel.zero_stage >= 2 else ()
    return *degrees, parallel.zero_stage, parallel.offload_optimizer, *passes


def seen_by_microbatches(config: ResolvedConfig) -> tuple[Hashable, ...]:
    """What the microbatches of a step see, beside `seen_by_layers`, of a layout of given ranks: the pipeline, and the
    stage of ZeRO if its replicas communicate in every microbatch."""
    parallel = config.parallel
    stage = parallel.zero_stage if parallel.zero_stage >= 2 else 0
    return parallel.pp, parallel.schedule, parallel.virtual_stages, stage, config.microbatches


@dataclass(frozen=True)
class SharedResults:
    """Results that the layouts of one search have in common, as far as they agree in a part."""

    _known: dict[Hashable, dict[Any, Any]] = field(default_factory=dict)

    def share_with(self, config: ResolvedConfig) -> None:
        """Lets a configuration have them; it has none so far."""
        of_layers = seen_by_layers(config)
        seen: dict[Part, tuple[Hashable, ...]] = {
            "layers": of_layers,
            "state": seen_by_state(config),
            "microbatches": (of_layers, *seen_by_microbatches(config)),
            "split": (config.parallel.tp,),
        }
        for part, values in seen.items():
            config.__dict__[f"_planned_of_{part}"] = self._known.setdefault((part, *values), {})
