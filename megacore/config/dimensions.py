"""The dimensions of the mesh: one row for each way in which the ranks divide the work. The table fixes how ranks are
numbered and how they are named in messages and files. What a dimension divides decides which groups the ranks form
(`megacore.parallel.mesh`), by the roles below. A further dimension is a further row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Divides = Literal["stages", "samples", "tokens", "matrices", "nothing"]


@dataclass(frozen=True)
class Dimension:
    """One dimension of the mesh."""

    name: str  # in messages, traces and checkpoints
    degree: str | int  # the field of `ParallelConfig` that holds the number of ranks along it, or that number
    # What ranks that differ only along this dimension hold different parts of. `stages`: the layers; `samples`: the
    # batch; `tokens`: the sequences; `matrices`: each layer; `nothing`: they repeat each other's work on the same data.
    divides: Divides
    optional: bool = False  # messages leave it out where it has one rank


# Outermost first. Ranks along the innermost dimension are neighbours, which the fastest links join (Narayanan et al.
# 2021, arXiv 2104.04473, section 3.3).
DIMENSIONS = (
    Dimension("pp", "pp", "stages"),
    Dimension("dp", "dp", "samples"),
    Dimension("cp", "cp", "tokens", optional=True),
    Dimension("tp", "tp", "matrices"),
)

# What the ranks of a group divide among themselves, by the group's role; in the order in which groups are made.
ROLES: Mapping[str, frozenset[Divides]] = {
    "pipeline": frozenset({"stages"}),
    "batch": frozenset({"samples"}),
    "sequence": frozenset({"tokens"}),
    "layer": frozenset({"matrices"}),
    "loss": frozenset({"samples", "tokens"}),
    "replicas": frozenset({"samples", "tokens"}),
    "copies": frozenset({"nothing"}),
}

EXPERT_ROLES: Mapping[str, int] = {"expert_replicas": 0, "dispatch": 1, "expert_layer": 2}
"""The groups of the ranks of a pipeline stage that divide experts, by role: which axis of (edp, ep, etp) they go along.

That is the stage's block of ranks that divide samples, tokens and matrices, seen in another way: etp ranks split each
expert, ep ranks hold different experts, and edp ranks hold copies of them."""


def ranks_of_role(role: str, parallel: Any) -> int:
    """The number of ranks in a group of a role, one of `ROLES`."""
    ranks, divided = 1, ROLES[role]
    for dimension in DIMENSIONS:  # a search asks a million times, for which a generator is slow
        if dimension.divides in divided:
            degree = dimension.degree
            ranks *= degree if isinstance(degree, int) else getattr(parallel, degree)
    return ranks


def shard_ranks(parallel: Any) -> int:
    """The number of ranks over which ZeRO shards; argument as for `ranks_of_role`."""
    given: int | None = parallel.zero_shard_size
    return ranks_of_role("replicas", parallel) if given is None or parallel.zero_stage == 0 else given


def size_of_role(role: str, degrees: Mapping[str, int]) -> int:
    """The same as `ranks_of_role`, from the ranks along each dimension by name."""
    return math.prod(degrees[d.name] for d in DIMENSIONS if d.divides in ROLES[role])


def degree_fields() -> tuple[str, ...]:
    """The fields of `ParallelConfig` that hold degrees: innermost first, and last those that may be left open."""
    ordered = sorted(DIMENSIONS, key=lambda d: (d.divides == "samples", -DIMENSIONS.index(d)))
    return tuple(dimension.degree for dimension in ordered if isinstance(dimension.degree, str))


def degrees_of(field: Callable[[str], int], dimensions: Sequence[Dimension] = DIMENSIONS) -> dict[str, int]:
    """The number of ranks along each dimension, by name, outermost first; `field` gives the value of a field."""
    return {d.name: d.degree if isinstance(d.degree, int) else field(d.degree) for d in dimensions}


def fill_degrees(parallel: Any, world_size: int, dimensions: Sequence[Dimension] = DIMENSIONS) -> dict[str, int]:
    """The number of ranks along each dimension, by name. The one degree that may be None takes the ranks that the
    others leave: 0, where they need more than `world_size`."""
    given = {d.name: d.degree if isinstance(d.degree, int) else getattr(parallel, d.degree) for d in dimensions}
    rest = world_size // math.prod(degree for degree in given.values() if degree is not None)
    return {name: rest if degree is None else degree for name, degree in given.items()}


def coordinates_of(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of a rank along each dimension, by name, outermost first."""
    coordinates, inner = {}, math.prod(degrees.values())
    for name, degree in degrees.items():
        inner //= degree
        coordinates[name] = rank // inner % degree
    return coordinates


def describe_rank(rank: int, degrees: Mapping[str, int]) -> str:
    """The coordinates of a rank in words: `pp 1, dp 0, tp 3`."""
    named = named_degrees(degrees)
    return ", ".join(f"{name} {number}" for name, number in coordinates_of(rank, degrees).items() if name in named)


def describe_degrees(degrees: Mapping[str, int]) -> str:
    """The ranks along each dimension in words, outermost first: `pp 2 x dp 4 x tp 2`; those not in the table last."""
    order = [dimension.name for dimension in DIMENSIONS]
    names = sorted(named_degrees(degrees), key=lambda name: order.index(name) if name in order else len(order))
    return " x ".join(f"{name} {degrees[name]}" for name in names)


def named_degrees(degrees: Mapping[str, int]) -> dict[str, int]:
    """Those that messages name: all but the optional ones of 1."""
    optional = {dimension.name for dimension in DIMENSIONS if dimension.optional}
    return {name: degree for name, degree in degrees.items() if degree != 1 or name not in optional}


def pipeline_dimension(dimensions: Sequence[Dimension] = DIMENSIONS) -> str:
    """The name of the dimension that divides the stages."""
    return next(dimension.name for dimension in dimensions if dimension.divides == "stages")


def group_in_words(ranks: Sequence[int], degrees: Mapping[str, int]) -> str:
    """`over dp`, `over all ranks`."""
    if len(ranks) == math.prod(degrees.values()):
        return "over all ranks"
    places = [coordinates_of(rank, degrees) for rank in ranks]
    return f"over {' x '.join(name for name in degrees if len({place[name] for place in places}) > 1)}"
