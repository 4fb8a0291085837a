"""The configuration of a run: sections, validation, presets, the command line, TOML files.

schema.py holds the whole (`Config`, `ResolvedConfig`), and the modules that it imports hold its sections: model.py the
section of the model, parallel.py that of parallelism. constraints.py says what must hold between them, validation.py
checks it, and cli.py turns a command line into a configuration. Each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import listed_names, loader_of

if TYPE_CHECKING:
    from megacore.config.checkpoint import CheckpointConfig, StartConfig
    from megacore.config.data import DataConfig
    from megacore.config.experts import ExpertsConfig, ResolvedExperts
    from megacore.config.logging import LoggingConfig
    from megacore.config.lora import LoraConfig
    from megacore.config.model import ModelConfig, MupConfig, ResolvedModel
    from megacore.config.optimizer import OptimizerConfig
    from megacore.config.optimizers import (
        AdafactorConfig,
        AdamConfig,
        AdamWConfig,
        AverageConfig,
        LambConfig,
        LionConfig,
        MuonConfig,
        OneBitAdamConfig,
        OneBitLambConfig,
        OptimizerSettings,
        SGDConfig,
    )
    from megacore.config.parallel import ParallelConfig, ResolvedParallel
    from megacore.config.precision import PrecisionConfig, ResolvedPrecision
    from megacore.config.rampup import RampupConfig
    from megacore.config.schema import SECTIONS, Config, ResolvedConfig, sections_of
    from megacore.config.training import ResolvedTraining, TrainingConfig
    from megacore.config.validation import validate, violations
    from megacore.config.watch import SpikeConfig, WatchConfig

_NAMES = listed_names(__name__)
__all__ = sorted(_NAMES)
__getattr__ = loader_of(__name__, _NAMES)
