"""The section of what a run takes from a checkpoint that it does not simply continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megacore.config.fields import Flag, Section


@dataclass(frozen=True, kw_only=True)
class StartConfig(Section):
    """Which parts of a checkpoint a run starts from."""

    pretrained_checkpoint: Annotated[str | None, Flag(metavar="DIR")] = None
    """Starts at step 0 from the weights of this checkpoint, or of the newest of a run, with new optimizer state. With
    --load auto, only where --output-dir has no checkpoint. Default: weights drawn from --seed."""
    load_optim: bool = True
    """Loads the optimizer's state with --load. Without it the run keeps its step and its position in the data."""
