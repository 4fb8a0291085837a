"""From a DeepSpeed configuration, and an optimizer of torch's, to the settings of an engine (deepspeed_engine.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megacore.arrive.deepspeed_file import read_deepspeed
from megacore.arrive.rows import Document, value_at
from megacore.arrive.translation import translate_settings
from megacore.config import Config, LoggingConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from megacore.config.dimensions import fill_degrees, size_of_role
from megacore.config.fields import LARGEST_INT, field_infos
from megacore.config.messages import one_of
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings, sections_read
from megacore.config.spelling import flag_and_value
from megacore.errors import ConfigError
from megacore.parallel.mesh import world_size
from megacore.train.engine_settings import decays, of_torch

# What an engine has, besides the sections parallel, precision, optimizer and those of the optimizers.
_OF_LOGGING = ("csv", "tensorboard_dir", "wandb_project", "wandb_entity", "wandb_group", "profile_steps")
_OF_TRAINING = ("micro_batch_size", "global_batch_size", "recompute", "compile")
_OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "lamb", "onebitadam", "onebitlamb")
_EITHER = "train_batch_size and train_micro_batch_size_per_gpu are both left out: give one of them"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is made from."""

    # Sections of its configuration.
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    optimizer_settings: Sequence[OptimizerSettings]
    logging: LoggingConfig
    micro_batch_size: int  # samples of a microbatch
    accumulation: int  # microbatches of a step on each replica
    recompute: Any  # recompute, compile: as `PipelineEngine` takes them
    compile: bool
    scheduled: bool  # whether the file has a scheduler
    log_interval: int | None  # steps between lines of the log; None: no lines
    drop_last: bool  # whether the data loader drops a last batch that is incomplete
    notes: Sequence[str]  # what was translated


def engine_settings(
    source: str | Path | Document, optimizer: torch.optim.Optimizer | None, model: Any
) -> EngineSettings:
    """Translates a configuration for an engine. `optimizer`: of torch's, whose settings hold where the configuration
    has none. Raises ConfigError with everything that has no counterpart."""
    given, document = read_deepspeed(source)
    from_client = {}
    if optimizer is not None and value_at(document, "optimizer") is not None:
        kind = type(optimizer).__name__
        given.problems.append(f"optimizer {kind} is given, and the configuration has one too: keep one of them")
    elif optimizer is not None:
        from_client = of_torch(optimizer, given.problems)
    base = Config(training=TrainingConfig(train_iters=LARGEST_INT))
    translate_settings(given, from_client, base, world_size())
    values = {"lr_decay_style": "constant", **from_client, **given.values}
    sections = {"parallel": ParallelConfig, "precision": PrecisionConfig, "optimizer": OptimizerConfig, **OPTIMIZERS}
    of_sections = {name for section in sections.values() for name in field_infos(section)}
    for name, value in values.items():
        if name not in of_sections and name not in (*_OF_LOGGING, *_OF_TRAINING, "log_interval"):
            given.problems.append(f"{flag_and_value(name, value)} is of the training programs, not of an engine")
    if (kind := values.get("optimizer", "adamw")) not in _OPTIMIZERS:
        given.problems.append(
            f"optimizer {kind} of an engine needs the names of the matrices that it updates: use one of "
            f"{one_of(_OPTIMIZERS)}, or PipelineEngine with optimizer_settings (docs/guides/any-model.md)"
        )
    if not values.keys() & {"micro_batch_size", "global_batch_size"} and not given.problems:
        given.problems.append(_EITHER)
    if given.problems:
        raise ConfigError(given.problems)

    def section(kind: Any) -> Any:
        return kind(**{name: values[name] for name in field_infos(kind) if name in values})

    parallel, chosen = section(ParallelConfig), section(OptimizerConfig)
    micro = values.get("micro_batch_size", 1)
    replicas = max(1, size_of_role("batch", fill_degrees(parallel, world_size())))
    total = values.get("global_batch_size", micro * replicas)
    if total % (micro * replicas):
        raise ConfigError(
            [
                f"train_batch_size {total} must be a multiple of train_micro_batch_size_per_gpu {micro} x {replicas} "
                "data-parallel ranks: change one of them"
            ]
        )
    return EngineSettings(
        parallel=parallel,
        precision=section(PrecisionConfig),
        optimizer=chosen,
        optimizer_settings=[section(OPTIMIZERS[name]) for name in sections_read(chosen.optimizer)],
        logging=LoggingConfig(**{name: values[name] for name in _OF_LOGGING if name in values}),
        micro_batch_size=micro,
        accumulation=total // (micro * replicas),
        recompute=values.get("recompute", "none"),
        compile=values.get("compile", False),
        scheduled=value_at(document, "scheduler.type") is not None,
        log_interval=values.get("log_interval"),
        drop_last=value_at(document, "dataloader_drop_last") is True,
        notes=[*given.notes, *given.translation_notes()],
    )


def check_parameters(parameters: Any, model: nn.Module) -> None:
    """The parameters to train, tensors or groups, must be all that the model trains. Raises ConfigError where some are
    left out, or groups have settings of their own."""
    items = list(parameters)
    groups = [item for item in items if isinstance(item, dict)] or [{"params": items}]
    given = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    problems = []
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in given]
    if left:
        problems.append(
            f"model_parameters leaves out {', '.join(left[:3])} ({len(left)} in all), which have gradients: set their "
            "requires_grad to False"
        )
    others = sorted({name for group in groups for name in group if name not in ("params", "weight_decay", "name")})
    if others:
        problems.append(f"model_parameters: groups with {', '.join(others)} of their own are not in megacore")
    if any("weight_decay" in group for group in groups):
        fields = decays([{"weight_decay": 1.0, **group} for group in groups], "model_parameters", problems)
        if "param_group" in fields:
            problems.append(
                "model_parameters: the optimizer of the configuration decays no vectors: give vectors a group with "
                "weight_decay 0, or take the optimizer out of the configuration and give one of torch's"
            )
    if problems:
        raise ConfigError(problems)
