"""The registry of optimizers: which class takes the step for which settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megacore.config import Config
from megacore.config.optimizers import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OneBitAdamConfig,
    OneBitLambConfig,
    OptimizerSettings,
    SGDConfig,
)
from megacore.ops.dispatch import triton_serves
from megacore.optim.adafactor import Adafactor
from megacore.optim.adam import Adam
from megacore.optim.adamw import AdamW
from megacore.optim.lamb import Lamb
from megacore.optim.lion import Lion
from megacore.optim.muon import Muon
from megacore.optim.onebit import OneBitAdam, OneBitLamb
from megacore.optim.optimizer import Optimizer
from megacore.optim.sgd import SGD
from megacore.zero.data_parallel import LocalRun

OPTIMIZER_CLASSES: dict[type[OptimizerSettings], type[Optimizer[Any]]] = {
    AdamWConfig: AdamW,
    AdamConfig: Adam,
    SGDConfig: SGD,
    LionConfig: Lion,
    LambConfig: Lamb,
    OneBitAdamConfig: OneBitAdam,
    OneBitLambConfig: OneBitLamb,
    MuonConfig: Muon,
    AdafactorConfig: Adafactor,
}


def build_optimizer(runs: Sequence[LocalRun], config: Config) -> Optimizer[Any]:
    """The configured optimizer over what this rank updates, which may be nothing."""
    settings = config.optimizer_settings
    kind, decay = OPTIMIZER_CLASSES[type(settings)], config.optimizer.weight_decay
    return kind(runs, settings, weight_decay=decay, adam=config.adamw)


def has_one_pass(config: Config, device: torch.device) -> bool:
    """Whether the configured optimizer updates the shards that lie on a device in one pass."""
    if config.parallel.offload_optimizer or not triton_serves(device):
        return False
    if config.adamw.moments_dtype != "fp32":
        return False  # the kernel reads and writes fp32
    if not config.parameter_groups.is_uniform:
        return False  # one launch has one learning rate
    return OPTIMIZER_CLASSES[type(config.optimizer_settings)].has_one_pass
