"""The settings of a planned run that differ from their defaults, as flags: what tells two saved reports apart.

Every field of the configuration is named unless it is left out here by name, so a new one is. Left out are those that
other lines of a report name, and those that say how long and where a run trains, with which data and learning rates.
Some that are named, such as the constants of an optimizer, change no figure of a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megacore.config import ModelConfig, ResolvedConfig, ResolvedModel
from megacore.config.bert import BertSection
from megacore.config.fields import field_infos, flag_and_value
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.schema import sections_of

_IN_OTHER_LINES = {
    "preset", "tp", "pp", "dp", "cp", "ep", "etp", "schedule", "virtual_stages", "schedule_csv", "pipeline_balance",
    "zero_stage", "sequence_parallel", "precision", "micro_batch_size", "global_batch_size", "recompute",
    "recompute_num_layers",
}  # fmt: skip
_SECTIONS_LEFT_OUT = {"data", "checkpoint", "start", "watch", "spikes"}
_LEFT_OUT = {
    "model": {"attention_multiplier", "logits_divisor"},  # which muP sets
    "parallel": {"device", "distributed_timeout_minutes"},
    "precision": {"loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"},
    "optimizer": {
        "lr", "min_lr", "decoupled_min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_style",
        "lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_style", "lr_decay_power", "lr_restart_iters",
        "lr_restart_factor", "lr_cycle_momentum", "lr_cycle_style", "lr_range_test", "lr_range_test_start",
        "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "clip_grad",
        "clip_grad_adaptive", "clip_grad_z_threshold", "clip_grad_decay", "clip_grad_warmup_iters",
    },
    "average": {"eval_ema"},
    "bert": {"mask_prob", "short_seq_prob", "whole_word_masking", "max_ngram"},
    "training": {
        "train_iters", "seed", "eval_interval", "eval_iters", "skip_train", "output_dir", "max_bad_steps",
        "memory_check",
    },
    "logging": {
        "log_interval", "gradient_noise_interval", "csv", "tensorboard_dir", "wandb_project", "wandb_entity",
        "wandb_name", "wandb_group", "wandb_mode", "profile_steps", "trace", "trace_steps",
    },
}  # fmt: skip


def other_settings(config: ResolvedConfig) -> list[str]:
    """Flags with their values, as `--optimizer lion` and `--offload-activations`.

    Args:
        config: a resolved configuration.
    """
    usual = _usual(config)
    return [
        flag_and_value(name, value)
        for section in _sections(config)
        for name, value in _changed(config, section, usual)
        if name not in _IN_OTHER_LINES | _LEFT_OUT.get(section, set())
    ]


def _sections(config: ResolvedConfig) -> Iterator[str]:
    """Names of the sections that may decide a plan: not those of other optimizers."""
    others = OPTIMIZERS.keys() - {config.optimizer.optimizer, *config.optimizer_settings.shares}
    return (name for name in sections_of(type(config)) if name not in _SECTIONS_LEFT_OUT | others)


def _usual(config: ResolvedConfig) -> dict[str, Any]:
    """Values by field that stand for the default: of the preset of the model, or as they follow from other values."""
    given = {name: value for one in sections_of(type(config)) for name, value in vars(getattr(config, one)).items()}
    style = {"bert_style": bert.bert_style} if (bert := getattr(config, "bert", None)) else {}
    task = {"sentence_task": BertSection(**style).resolve().sentence_task}
    usual = {**task, **config.defaults(given), **config.presets.get(config.model.preset or "", {})}
    sizes = [name for name in ResolvedModel.__annotations__ if name in field_infos(ModelConfig)]
    values = {name: getattr(config.model, name) for name in field_infos(ModelConfig)}
    model = ModelConfig(**values | {name: usual.get(name) for name in sizes})
    followed = model.resolve(seq_length=config.data.seq_length, vocab_size=config.model.vocab_size)
    vocabulary = {"vocab_size": usual.get("vocab_size")}  # which follows from nothing
    return usual | {name: getattr(followed, name) for name in sizes} | vocabulary


def _changed(config: ResolvedConfig, section: str, usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a section that have another value than usual, with it."""
    for name, info in field_infos(type(getattr(config, section))).items():
        value, default = getattr(getattr(config, section), name), usual.get(name, info.default)
        if value != default and default is not dataclasses.MISSING:
            yield name, value
