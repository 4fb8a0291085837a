"""What a run asks of `--survive`: to be kept by processes that outlive its failures, and where it continues after one.
`megacore.survive` is optional: a tree without it refuses the flag. This module alone knows where it is, and loads no
torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from megacore import has_ring
from megacore.config import ResolvedConfig
from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.train.callbacks import Callback
    from megacore.train.trainer import Trainer

C = TypeVar("C", bound=ResolvedConfig)


class Survival:
    """What a run asks, with the answers of a tree that cannot survive."""

    def check(self, config: ResolvedConfig) -> None:
        """Refuse a run that cannot be kept here, as a check of the command line. Raises ConfigError."""
        if config.watch.survive:
            raise ConfigError(["--survive needs megacore/survive, which is not installed: leave it out"])

    def keep(self, config: C, train: Callable[[C], int], read_data: Callable[[C], object]) -> int | None:
        """Start the training in a child of this process, again after each failure that can be survived; the exit status
        of the run, or None: this process is to train by itself. `read_data`: builds the indexes of the data, which a
        spare process does before it has to train."""
        return None

    @property
    def recovers(self) -> bool:
        """Whether the run has begun before, and goes on after a failure."""
        return False

    def continued(self, config: C, mesh: Mesh) -> C:
        """The configuration with what the run continues from after a failure as --load; itself at the start. All ranks
        call this together."""
        return config

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """What keeps the state in memory."""
        return []


def survival() -> Survival:
    """That of `megacore.survive`, where it is installed."""
    if not has_ring("survive"):
        return Survival()
    return cast(Survival, importlib.import_module("megacore.survive.for_training").SURVIVAL)
