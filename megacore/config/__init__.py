"""The configuration of a run: sections, validation, presets, the command line, TOML files."""

from megacore.config.optimizers import AdamWConfig, OptimizerSettings, SGDConfig
from megacore.config.schema import (
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
    known,
    resolve,
    sections_of,
    validate,
)

__all__ = [
    "SECTIONS",
    "AdamWConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerSettings",
    "ParallelConfig",
    "PrecisionConfig",
    "SGDConfig",
    "TrainingConfig",
    "known",
    "resolve",
    "sections_of",
    "validate",
]
