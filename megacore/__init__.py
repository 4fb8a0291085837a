"""megacore: a 3D-parallel trainer for transformer language models.

Tensor x pipeline x data parallelism with one command and one code path, from a laptop core (gloo) to many GPU nodes
(NCCL). Importing the package is cheap on purpose: nothing here imports torch, so that a wrong flag is refused before
it is loaded. The names of `__all__` are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.arrive.deepspeed_engine import initialize
    from megacore.commands.from_python import pretrain_gpt
    from megacore.config import OptimizerConfig, ParallelConfig
    from megacore.optim.optimizers import register_optimizer
    from megacore.parallel.mesh import build_mesh
    from megacore.train.engine import Layer, PipelineEngine
    from megacore.train.trainer import Trainer

__all__ = [
    "Layer",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineEngine",
    "Trainer",
    "build_mesh",
    "initialize",
    "pretrain_gpt",
    "register_optimizer",
]
__version__ = "0.1.0"

_MODULES = {
    "Layer": "megacore.train.engine",
    "OptimizerConfig": "megacore.config",
    "ParallelConfig": "megacore.config",
    "PipelineEngine": "megacore.train.engine",
    "Trainer": "megacore.train.trainer",
    "build_mesh": "megacore.parallel.mesh",
    "initialize": "megacore.arrive.deepspeed_engine",
    "pretrain_gpt": "megacore.commands.from_python",
    "register_optimizer": "megacore.optim.optimizers",
}


def has_ring(name: str) -> bool:
    """Whether the tree has the package megacore.NAME; a folder of nothing but compiled files does not count."""
    spec = find_spec(f"megacore.{name}")
    return spec is not None and spec.origin is not None


if not has_ring("arrive"):
    __all__.remove("initialize")
    del _MODULES["initialize"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'megacore' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
