"""What is compared takes turns, so that a machine that others use slows all of it alike; ratios are of one round each.
Standard library alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.generated_pages import table


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    wait: Callable[[], object] = lambda: None,
    *,
    warm_up: int = 1,
    failures: tuple[type[BaseException], ...] = (),
    failed: Callable[[str, BaseException], object] = lambda name, error: None,
) -> dict[str, list[Any]]:
    """What each run measures of itself in every round; of one that returns nothing, its seconds.

    Args:
        runs: what takes turns, by name.
        rounds: how many are counted. Every other one begins at the other end.
        wait: called before and after each run, as to wait for other ranks.
        warm_up: rounds before them, which do not count.
        failures: exceptions after which a run takes part no more, and is missing in what is returned.
        failed: called with the name of such a run, and the exception.
    """
    found: dict[str, list[Any]] = {name: [] for name in runs}
    for number in range(rounds + warm_up):
        for name in list(found)[:: -1 if number % 2 else 1]:
            wait()
            start = time.perf_counter()
            try:
                measured = runs[name]()
            except failures as error:
                failed(name, error)
                del found[name]
                continue
            wait()
            found[name].append(time.perf_counter() - start if measured is None else measured)
    return {name: taken[warm_up:] for name, taken in found.items()}


def ratio(of: Sequence[float], to: Sequence[float]) -> str:
    """The median over the rounds, and the range."""
    ratios = sorted(a / b for a, b in zip(of, to, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def beside(
    seconds: Mapping[str, Sequence[float]], base: str, tokens: int, more: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Seconds by name as a Markdown table.

    Args:
        seconds: of each round.
        base: whose speed is 1.
        tokens: of a round.
        more: further columns by their head, with a cell for each name.
    """
    more = more or {}
    head = ("", "median, ms", "tokens/s", f"speed beside {base}, median of rounds (lowest to highest)", *more)
    rows = []
    for number, (name, taken) in enumerate(seconds.items()):
        middle = statistics.median(taken)
        cells = (name, f"{middle * 1e3:.1f}", f"{tokens / middle:,.0f}", ratio(seconds[base], taken))
        rows.append((*cells, *(column[number] for column in more.values())))
    return table(head, rows)
