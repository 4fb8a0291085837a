"""Reads `--pipeline-layout E,10*t|11*t|9*t,H`: which layers each stage holds, separated by `|`. `E` is the
embedding, `t` a transformer block, `H` the head; `10*t` is ten blocks. No torch: a mistake is refused before
anything is loaded."""

from __future__ import annotations

import re

_LAYERS = re.compile(r"(?:([0-9]{1,18})\*)?([EtH])")


def parse_layout(text: str, *, stages: int, blocks: int) -> list[range]:
    """The layers of each stage by number: the embedding is layer 0, the head the last. Raises ValueError with the
    reason."""
    shares = [blocks * (i + 1) // stages - blocks * i // stages for i in range(stages)]
    like = f"E,{'|'.join(f'{share}*t' for share in shares)},H" if all(shares) else ""

    def refused(why: str) -> ValueError:
        return ValueError(f"{why}: use, for example, {like}" if like else f"{why}: leave it out")

    kinds: list[list[str]] = []
    for number, stage in enumerate(text.split("|")):
        kinds.append([])
        for part in stage.split(","):
            match = _LAYERS.fullmatch(part.strip())
            if match is None:
                raise refused(f"stage {number}: {part.strip()!r} is not E, t or H, or a number of them")
            count = int(match[1] or 1)
            if count > blocks + 2:  # embedding and head
                raise refused(f"stage {number}: {part.strip()} is more than --num-layers {blocks}")
            kinds[-1] += [match[2]] * count
        if not kinds[-1]:
            raise refused(f"stage {number} holds no layer")
    if len(kinds) != stages:
        raise refused(f"it has {len(kinds)} stages, but --pp x --virtual-stages is {stages}")
    order = [kind for stage in kinds for kind in stage]
    if order != ["E", *["t"] * (len(order) - 2), "H"]:
        raise refused("the layers are not one E, then every t, then one H")
    if order.count("t") != blocks:
        raise refused(f"it has {order.count('t')} blocks, but --num-layers is {blocks}")
    ends = [sum(map(len, kinds[: number + 1])) for number in range(len(kinds))]
    return [range(end - len(stage), end) for end, stage in zip(ends, kinds, strict=True)]
