"""megacore: a 3D-parallel trainer for transformer language models.

Tensor x pipeline x data parallelism with one command and one code path, from a laptop core (gloo) to many GPU nodes
(NCCL). Importing the package is cheap on purpose: nothing here imports torch, so that a wrong flag is refused before
it is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """(engine, optimizer, data loader, scheduler) for any model, from a DeepSpeed configuration.

    The arguments are those of `megacore.train.deepspeed_engine.initialize`, which is loaded here: it needs torch.
    """
    made: tuple[Any, Any, Any, Any] = importlib.import_module("megacore.train.deepspeed_engine").initialize(
        *args, **kwargs
    )
    return made
