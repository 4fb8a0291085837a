"""What must hold between the optimizer, the number formats of its state and of gradients, and the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megacore.config.fields import field_infos, use
from megacore.config.flags import field_of_optimizer
from megacore.config.mup import mup_problems
from megacore.config.optimizers import OptimizerSettings
from megacore.config.problem import Change, Problem
from megacore.config.rules import Rules
from megacore.config.schema import Config, sections_of
from megacore.config.spelling import OWNERS, PARAMETERS, flag_and_value

OPTIMIZER_RULES = Rules()


@OPTIMIZER_RULES.about("optimizer")
def _idle_optimizers(config: Config, world_size: int) -> Iterator[str]:
    chosen_name, settings = config.optimizer.optimizer, config.optimizer_settings

    def spelled(name: str, value: Any) -> str:
        fields = PARAMETERS["optimizer"].get(OWNERS.get(name, ("", ""))[1], (name,))
        is_of_other = name != field_of_optimizer(fields, chosen_name, type(config))  # --lion-beta1 with adamw
        return flag_and_value(name, value, own=is_of_other)

    for name in sections_of(type(config)):
        section = getattr(config, name)
        if isinstance(section, OptimizerSettings) and name not in (chosen_name, *settings.shares):
            wrong, fields = frozenset(section.wrong_fields()), tuple(field_infos(type(section)))
            needs = use("optimizer", name)
            yield from section.without_effect(fields, wrong, f"--optimizer {chosen_name}", needs, spelled)


@OPTIMIZER_RULES.about("optimizer", "moments_dtype")
def _moments(config: Config, world_size: int) -> Iterator[str]:
    chosen, dtype = config.optimizer.optimizer, config.adamw.moments_dtype
    if dtype != "fp32" and "adamw" in config.optimizer_settings.shares:  # others have no use for [adamw] at all
        yield Problem(
            f"--optimizer moments-dtype={dtype} is not possible with --optimizer {chosen}",
            Change("leave it out", {"moments_dtype": "fp32"}),
            Change("--optimizer adamw", {"optimizer": "adamw"}),
        )


@OPTIMIZER_RULES.about("reproducible", "grad_reduce_dtype")
def _reproducible(config: Config, world_size: int) -> Iterator[str]:
    if config.training.reproducible and config.precision.grad_reduce_dtype != "fp32":
        yield Problem(
            f"--reproducible needs exact sums of gradients, but --grad-reduce-dtype "
            f"{config.precision.grad_reduce_dtype} rounds them",
            Change("--grad-reduce-dtype fp32", {"grad_reduce_dtype": "fp32"}),
            Change("leave --reproducible out", {"reproducible": False}),
        )


@OPTIMIZER_RULES.about(
    "mup_base_width", "mup_base_head_size", "hidden_size", "num_attention_heads", "kv_channels", "optimizer"
)
def _mup(config: Config, world_size: int) -> Iterator[str]:
    has_experts = config.experts.num_experts is not None
    yield from mup_problems(config.mup, config.model, config.optimizer.optimizer, has_experts=has_experts)
