"""The registry of optimizers: which class takes the step for which settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacore.config import Config
from megacore.config.optimizers import AdamWConfig, OptimizerSettings, SGDConfig
from megacore.optim.adamw import AdamW
from megacore.optim.optimizer import Optimizer
from megacore.optim.sgd import SGD
from megacore.zero.data_parallel import LocalRun

OPTIMIZER_CLASSES: dict[type[OptimizerSettings], type[Optimizer[Any]]] = {AdamWConfig: AdamW, SGDConfig: SGD}


def build_optimizer(runs: Sequence[LocalRun], config: Config) -> Optimizer[Any]:
    """The configured optimizer over what this rank updates, which may be nothing."""
    settings = config.optimizer_settings
    return OPTIMIZER_CLASSES[type(settings)](runs, settings, weight_decay=config.optimizer.weight_decay)
