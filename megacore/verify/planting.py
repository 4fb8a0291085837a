"""What a planted defect is, and how it is planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megacore.config import ResolvedConfig
from megacore.train.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One mistake.

    Attributes:
        name: on the command line.
        what: the mistake.
        needs: what a layout must have for the mistake to be possible.
        possible: whether a configuration has it.
        plant: makes the mistake on this rank until the stack closes.
        kinds: of the first tensor that differs, in which the mistake should show.
    """

    name: str
    what: str
    needs: str
    possible: Callable[[ResolvedConfig], bool]
    plant: Callable[[TrainStep, ExitStack], None]
    kinds: tuple[str, ...]


@contextmanager
def planted(defect: Defect | None, steps: TrainStep) -> Iterator[None]:
    """The defect is there inside; None: nothing is."""
    with ExitStack() as stack:
        if defect is not None:
            defect.plant(steps, stack)
        yield


def defect(
    name: str,
    what: str,
    plant: Callable[[TrainStep, ExitStack], None],
    *kinds: str,
    needs: str = "",
    possible: Callable[[ResolvedConfig], bool] = lambda config: True,
) -> Defect:
    """A `Defect`.

    Args:
        name: on the command line.
        what: the mistake.
        plant: makes it.
        kinds: in which it should show.
        needs: what a layout must have.
        possible: whether a configuration has it.
    """
    return Defect(name=name, what=what, needs=needs, possible=possible, plant=plant, kinds=kinds)
