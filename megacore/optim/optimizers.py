"""The registry of optimizers: which class takes the step for which settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megacore.config import Config, sections_of
from megacore.config.fields import field_infos
from megacore.config.flags import all_fields
from megacore.config.optimizers import (
    OPTIMIZERS,
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
from megacore.optim.adamw import Adam, AdamW
from megacore.optim.lamb import Lamb
from megacore.optim.lion import Lion
from megacore.optim.muon import Muon
from megacore.optim.onebit import OneBitAdam, OneBitLamb
from megacore.optim.optimizer import Optimizer
from megacore.optim.sgd import SGD
from megacore.zero.local_segments import LocalRun

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


def register_optimizer(name: str, settings: type[OptimizerSettings], optimizer: type[Optimizer[Any]]) -> None:
    """Make an optimizer of one's own a value of --optimizer, before flags are read or an engine is made. Its settings
    become the section of that name: the flags of its fields, a table of configuration files, and `--help NAME`. The
    engine takes an instance of the settings as `optimizer_settings`. Raises ValueError with everything that is wrong
    with the name and the settings.

    Args:
        name: of the optimizer, in lower case.
        settings: a frozen dataclass that derives from `OptimizerSettings`; every field has a default.
        optimizer: takes the step for these settings.
    """
    problems = []
    if not (name.isidentifier() and name.islower()):
        problems.append(f"the name {name!r} must be a word of lower-case letters, digits and underscores")
    if OPTIMIZERS.get(name, settings) is not settings or name in sections_of(Config):
        problems.append(f"the name {name!r} is taken: use another one")
    if settings.__bases__ != (OptimizerSettings,) or "__dataclass_fields__" not in vars(settings):
        problems.append("the settings must be a frozen dataclass whose only base is OptimizerSettings")
    else:
        own, others = field_infos(settings), set(all_fields(Config))
        for kind in OPTIMIZERS.values():
            others |= set() if kind is settings else field_infos(kind).keys()
        problems += [
            f"the field {field} is a flag of another section: give it the optimizer's name"
            for field in own.keys() & others
        ]
        problems += [f"the field {field} has no default: give it one" for field, info in own.items() if info.required]
    if problems:
        raise ValueError(f"register_optimizer of {settings.__name__}: " + "; ".join(problems))
    OPTIMIZERS[name] = settings
    OPTIMIZER_CLASSES[settings] = optimizer


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
