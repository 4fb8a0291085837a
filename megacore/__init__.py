"""megacore: a 3D-parallel trainer for transformer language models.

Tensor x pipeline x data parallelism with one command and one code path, from a laptop core (gloo) to many GPU nodes
(NCCL). Importing the package is cheap on purpose: nothing here imports torch, so that a wrong flag is refused before
it is loaded. The names of `__all__` are loaded when they are first used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from megacore.lazy import listed_names, loader_of

if TYPE_CHECKING:
    from megacore.arrive.deepspeed_engine import initialize
    from megacore.commands.from_python import pretrain_gpt
    from megacore.config import OptimizerConfig, ParallelConfig
    from megacore.optim.optimizers import register_optimizer
    from megacore.parallel.mesh import build_mesh
    from megacore.train.engine import Layer, PipelineEngine
    from megacore.train.trainer import Trainer

__version__ = "0.2.0"


def has_ring(name: str) -> bool:
    """Whether the tree has the package megacore.NAME; a folder of nothing but compiled files does not count."""
    spec = find_spec(f"megacore.{name}")
    return spec is not None and spec.origin is not None


_NAMES = listed_names(__name__)
if not has_ring("arrive"):
    del _NAMES["initialize"]
__all__ = sorted(_NAMES)
__getattr__ = loader_of(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
