"""`--init-from-hf`: a run that starts from a directory of transformers, without a checkpoint between. The model's shape
comes from config.json, before torch is loaded; flags may repeat it, not contradict it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.config import ExpertsConfig, ResolvedConfig
from megacore.config.experts import differing_experts
from megacore.config.model import differing
from megacore.config.spelling import flag_and_value
from megacore.convert.hf_directory import CONFIG, open_directory, read_config
from megacore.errors import CheckpointError, ConfigError
from megacore.models.hf.families import family_of

if TYPE_CHECKING:
    from torch import Tensor

    from megacore.parallel.sharding import ShardedParameter


def ignored_fields(text: str | None) -> tuple[str, ...]:
    """The names in the value of --ignore-config-field."""
    return tuple(name for name in (text or "").split(",") if name)


def shape_from_hf(given: Mapping[str, Any]) -> dict[str, Any]:
    """The model's fields as the directory of `--init-from-hf` has them, where the given values have one. Raises
    CheckpointError where its config.json cannot be read, or megacore cannot represent it exactly."""
    path = given.get("init_from_hf")
    if not isinstance(path, str) or not os.path.isdir(path):  # missing_files says so
        return {}
    values = read_config(Path(path), ignored_fields(given.get("ignore_config_field")))
    where = str(Path(path) / CONFIG)
    family = family_of(values, where)
    if family.bert_style is not None:
        raise CheckpointError(
            f"--init-from-hf {path} is a {family.model_type}: convert it with tools/convert_checkpoint.py, and give "
            "pretrain_bert.py --load"
        )
    config = family.to_model(values, where)
    if config.mtp_num_layers:
        config = family.stored_model(config, open_directory(Path(path)).tensors)
    fields = dataclasses.asdict(config)
    fields |= fields.pop("experts") or {}
    return {name: value for name, value in fields.items() if value is not None and name != "preset"}


def check_init_from_hf(config: ResolvedConfig) -> None:
    """Compare the flags with config.json, and look at the headers of the weight files. Raises CheckpointError where the
    directory cannot be read; ConfigError with every flag that contradicts config.json."""
    path = config.checkpoint.init_from_hf
    if path is None:
        return
    directory = open_directory(Path(path), ignored_fields(config.checkpoint.ignore_config_field))
    family = family_of(directory.config, directory.where)
    there = family.stored_model(family.to_model(directory.config, directory.where), directory.tensors)
    if not config.model.mtp_num_layers:  # a run may leave those blocks out
        there = dataclasses.replace(there, mtp_num_layers=0)
    problems = [
        f"{flag_and_value(name, getattr(config.model, name))} contradicts {directory.where}, which makes it "
        f"{getattr(there, name)}: leave the flag out, or leave --init-from-hf out"
        for name in differing(there, config.model)
    ]
    experts = there.experts or ExpertsConfig()
    problems += [
        f"{flag_and_value(name, getattr(config.experts, name))} contradicts {directory.where}, which makes it "
        f"{getattr(experts, name)}: leave the flag out, or leave --init-from-hf out"
        for name in differing_experts(experts, config.model.experts)
    ]
    if problems:
        raise ConfigError(problems)


class WeightsFromHF:
    """Initial weights from a directory of transformers (`megacore.models.initialize.InitialWeights`), each rank's
    slices. Raises CheckpointError where it does not hold what its config.json describes."""

    def __init__(self, path: Path, ignored: Sequence[str] = ()) -> None:
        from megacore.convert.from_hf import open_model

        self._model = open_model(path, ignored)
        self._steps = {step.ours: step for step in self._model.plan}

    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        for parameter in parameters:
            values = self._steps[parameter.spec.name].slice(parameter.spec, self._model.stored.tensors)
            parameter.data.zero_()
            parameter.spec.unpadded(parameter.data).copy_(values)

    def fill_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            if name in self._steps:
                buffer.copy_(self._model.read(self._steps[name]))
