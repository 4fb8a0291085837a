"""The settings of a planned run that differ from their defaults, as flags: what tells two saved reports apart.

What the lines of a report on the layout and the batch name is left out here, and so is what changes no figure of a
plan, such as the number of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.fields import field_infos, flag_and_value
from megacore.config.schema import sections_of

_SECTIONS = ("model", "experts", "parallel", "precision", "training", "optimizer", "average", "logging")
_IN_OTHER_LINES = {
    "preset", "tp", "pp", "dp", "cp", "ep", "etp", "schedule", "virtual_stages", "schedule_csv", "pipeline_balance",
    "zero_stage", "sequence_parallel", "precision", "micro_batch_size", "global_batch_size", "recompute",
    "recompute_num_layers",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "model": {
        "norm_epsilon", "init_method_std", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
        "logits_divisor",
    },
    "parallel": {"device", "distributed_timeout_minutes"},
    "precision": {"loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"},
    "training": {
        "train_iters", "seed", "eval_interval", "eval_iters", "skip_train", "output_dir", "max_bad_steps",
        "label_smoothing", "z_loss", "memory_check",
    },
    "average": {"eval_ema"},
}  # fmt: skip
_WITH_EFFECT = {"optimizer": {"optimizer"}, "logging": {"peak_tflops"}}
"""By section, where only these fields change a plan."""


def other_settings(config: ResolvedConfig) -> list[str]:
    """Flags with their values, as `--optimizer lion` and `--offload-activations`.

    Args:
        config: a resolved configuration.
    """
    return [flag_and_value(name, value) for section in _sections(config) for name, value in _changed(config, section)]


def _sections(config: ResolvedConfig) -> list[str]:
    """Names of the sections that a plan reads, with that of the chosen optimizer."""
    return [*_SECTIONS, config.optimizer.optimizer]


def _changed(config: ResolvedConfig, section: str) -> Iterator[tuple[str, Any]]:
    """The fields of a section that have another value than the preset of the model or, without one, the default.

    A size of the model that is in neither may follow from others, and is left out.
    """
    shape = config.presets.get(config.model.preset or "", {})
    given = {name: value for one in sections_of(type(config)) for name, value in vars(getattr(config, one)).items()}
    usual = {**config.defaults(given), **shape}
    left_out = _IN_OTHER_LINES | _WITHOUT_EFFECT.get(section, set())
    for name, info in field_infos(type(getattr(config, section))).items():
        is_derived = name in ResolvedModel.__annotations__ and name not in usual
        if name in left_out or is_derived or name not in _WITH_EFFECT.get(section, {name}):
            continue
        value, default = getattr(getattr(config, section), name), usual.get(name, info.default)
        if value != default and default is not dataclasses.MISSING:
            yield name, value
