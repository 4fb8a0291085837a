"""The configuration of a run: sections, validation, presets, the command line, TOML files."""

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
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainingConfig",
    "known",
    "resolve",
    "sections_of",
    "validate",
]
