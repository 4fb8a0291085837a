"""Whether a model can be divided as layouts ask, and which sizes can: found out before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.comparison.job import Layout, Sizes
from megacore.config.messages import nearest_multiples, one_of

_WHY = {
    "heads": "tensor-parallel ranks",
    "seq": "tensor-parallel ranks, which divide positions too",
    "vocab": "tensor-parallel ranks of Megatron-Core",
    "batch": "replicas x microbatches",
}
_MOST_NAMES = 3  # of layouts, in a message


def misfits(sizes: Sizes, layouts: Sequence[Layout], *, is_megatron: bool = False) -> dict[str, str]:
    """What is wrong with sizes, by field of `Sizes`: the constraint, and values that every layout can divide.

    Args:
        sizes: of the model and the batch.
        layouts: ways to divide it.
        is_megatron: Megatron-Core must take part; the others pad the vocabulary.
    """
    units = {name: [_unit(name, layout, is_megatron=is_megatron) for layout in layouts] for name in _WHY}
    # Heads are advised with the hidden size, which must be a multiple of them.
    heads = min(nearest_multiples(sizes.heads, math.lcm(*units["heads"])), key=lambda count: abs(count - sizes.heads))
    hidden = f"--hidden {one_of(nearest_multiples(sizes.hidden, heads))}"
    found: dict[str, str] = {}
    for name, each in units.items():
        value, unit = getattr(sizes, name), math.lcm(*each)
        if value % unit:
            ways_out = f"--{name} {one_of(nearest_multiples(value, unit))}"
            if name == "heads":
                ways_out = f"--heads {heads}" + (f" with {hidden}" if sizes.hidden % heads else "")
            dividing = [layout for layout, its in zip(layouts, each, strict=True) if its > 1]
            found[name] = (
                f"--{name} {value} must be a multiple of {unit} ({_WHY[name]}) {_for(dividing)}: use {ways_out}"
            )
    stages = max((_stages(layout) for layout in layouts), default=1)
    if sizes.layers < stages:
        many = [layout for layout in layouts if _stages(layout) > sizes.layers]
        found["layers"] = (
            f"--layers {sizes.layers} must be at least {stages} (pipeline stages) {_for(many)}: "
            f"use --layers {stages} or more"
        )
    if sizes.hidden % sizes.heads:
        along = f" with --heads {heads}" if heads != sizes.heads else ""
        found["hidden"] = f"--hidden {sizes.hidden} must be a multiple of --heads {sizes.heads}: use {hidden}{along}"
    return found


def _unit(name: str, layout: Layout, *, is_megatron: bool) -> int:
    """What a size must be a multiple of."""
    if name == "batch":
        return layout.dp * layout.microbatches
    is_free = (name == "seq" and not layout.sequence_parallel) or (name == "vocab" and not is_megatron)
    return 1 if is_free else layout.tp


def _stages(layout: Layout) -> int:
    return layout.pp * layout.virtual_stages


def _for(layouts: Sequence[Layout]) -> str:
    names = [layout.name for layout in layouts[:_MOST_NAMES]]
    more = f" and {len(layouts) - _MOST_NAMES} more" if len(layouts) > _MOST_NAMES else ""
    return f"for {', '.join(names)}{more}"
