"""A pipeline written out by hand: `E,10*t|11*t|9*t,H` says which layers each stage holds.

Stages are separated by `|` and their layers by commas: `E` the embedding, `t` a transformer block, `H` the head, each
with a number and `*` in front for several. Parsed without torch: a mistake is refused before anything is loaded.
"""

from __future__ import annotations

import re

_LAYERS = re.compile(r"(?:([0-9]{1,18})\*)?([EtH])")


def parse_layout(text: str, *, stages: int, blocks: int) -> list[range]:
    """Layer numbers of each stage, the embedding being 0 and the head the last.

    Args:
        text: the layout.
        stages: how many stages there must be.
        blocks: how many blocks the model has.

    Raises:
        ValueError: what is wrong with it.
    """
    kinds: list[list[str]] = []
    for number, stage in enumerate(text.split("|")):
        kinds.append([])
        for part in stage.split(","):
            match = _LAYERS.fullmatch(part.strip())
            if match is None:
                raise ValueError(
                    f"stage {number}: {part.strip()!r} is not E, t or H, or a number of them: "
                    "write, for example, E,2*t|2*t,H"
                )
            count = int(match[1] or 1)
            if count > blocks + 2:  # embedding and head
                raise ValueError(
                    f"stage {number}: {part.strip()} is more than --num-layers {blocks}: use a smaller number"
                )
            kinds[-1] += [match[2]] * count
        if not kinds[-1]:
            raise ValueError(f"stage {number} holds no layer")
    if len(kinds) != stages:
        raise ValueError(f"it has {len(kinds)} stages, but there must be {stages} (--pp x --virtual-stages)")
    order = [kind for stage in kinds for kind in stage]
    if order != ["E", *["t"] * (len(order) - 2), "H"]:
        raise ValueError("the layers must be one E, then every t, then one H")
    if order.count("t") != blocks:
        held = order.count("t")
        raise ValueError(
            f"it has {held} blocks, but --num-layers is {blocks}: use --num-layers {held}, or write {blocks} in all"
        )
    ends = [sum(map(len, kinds[: number + 1])) for number in range(len(kinds))]
    return [range(end - len(stage), end) for end, stage in zip(ends, kinds, strict=True)]
