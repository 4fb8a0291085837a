"""The shapes of the learning rate's decay, by name: what share of the way from --lr to --min-lr is left."""

from __future__ import annotations

import math
from collections.abc import Callable

LR_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Functions of the progress from 0, where the decay begins, to 1, where it ends; each is 1 at 0 and 0 at 1."""

LR_DECAY_STYLES: list[str] = [
    "constant", "linear", "cosine", "inverse-square-root", "WSD", "polynomial", "cosine-restarts", "1cycle",
]  # fmt: skip
"""The values of --lr-decay-style. A name that is one of `LR_SHAPES` too decays along it from the warm-up on."""


def register_lr_style(name: str, remaining: Callable[[float], float]) -> None:
    """Make a decay of one's own a value of --lr-decay-style, before flags are read.

    `remaining`: share of the way from --lr to --min-lr that is left, from the progress of the decay in [0, 1]. Every
    rank and every resumed run calls it for the same steps: it must depend on its argument alone. Raises ValueError
    where the name is taken, or the share is not 1 where the decay begins and 0 where it ends.
    """
    problems = []
    if name in (*LR_DECAY_STYLES, *LR_SHAPES) and LR_SHAPES.get(name) is not remaining:
        problems.append("the name is taken: use another one")
    first, last = remaining(0.0), remaining(1.0)
    if not (math.isclose(first, 1.0) and math.isclose(last, 0.0, abs_tol=1e-9)):
        problems.append(f"the share left is {first} at 0 and {last} at 1: it must be 1 and 0")
    if problems:
        raise ValueError(f"register_lr_style of {name!r}: " + "; ".join(problems))
    LR_SHAPES[name] = remaining
    if name not in LR_DECAY_STYLES:
        LR_DECAY_STYLES.append(name)
