"""What a config.json says that megacore cannot represent exactly is refused by the field's name; what it says in
another spelling is understood; and so are the configurations of released models, entered from their config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import ModelConfig, ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.config.presets import GPT_PRESETS
from megacore.convert.plan import ExpertsStep, make_plan, model_layers, model_shapes, their_shapes
from megacore.errors import CheckpointError
from megacore.models.hf.families import FAMILIES, describe_model, family_of
from megacore.models.hf.family import Family, same_bert
from megacore.models.outline import gpt_outline
from megacore.pipeline.stage import Stage
from tests.parity.test_initialization import preset as model_of_preset

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("hf_configs.json").read_text())
SMALL: dict[str, dict[str, Any]] = TABLES["small"]
RELEASED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
BILLIONS: dict[str, float] = TABLES["billions"]  # as their pages say, with the embedding counted once where it is tied


def read(model_type: str, /, **changes: Any) -> ResolvedModel:
    values = {"model_type": model_type, **SMALL[model_type], **changes}
    return family_of(values, "config.json").to_model(values, "config.json")


@pytest.mark.parametrize(("model_type", "changes", "problem"), TABLES["refused"])
def test_a_field_is_refused_by_name(model_type: str, changes: dict[str, Any], problem: str) -> None:
    read(model_type)
    with pytest.raises(CheckpointError, match=problem):
        read(model_type, **changes)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_fields_without_effect_refuse_nothing(model_type: str) -> None:
    """As checkpoints of the hub have them: of other libraries, of training, or of features that are off."""
    values = {"model_type": model_type, **SMALL[model_type]}
    family = family_of(values, "config.json")
    described = family.describe(values | TABLES["idle"], "config.json")
    assert described.unknown == ()
    assert described.model == family.to_model(values, "config.json")
    assert family.describe(values | {"later": 1, "newer": None}, "config.json").unknown == ("later", "newer")


@pytest.mark.parametrize(("model_type", "changes", "fields"), TABLES["read"])
def test_layers_of_several_kinds_are_read(model_type: str, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    """Where a file lacks a field it is as transformers has it, down to the base of each kind of layers."""
    model = read(model_type, **changes)
    assert {name: getattr(model, name) for name in fields} == fields


NEAR = {"qwen3_vl": "related ones that it has: qwen3 and qwen3_moe; ", "llama4": "related ones that it has: llama; "}


@pytest.mark.parametrize("model_type, near", [*NEAR.items(), *((other, "") for other in (3, None, "zzz"))])
def test_another_kind_of_model_is_refused_and_names_the_nearest_families(model_type: Any, near: str) -> None:
    said = f"which megacore does not have; {near}all families: docs/guides/conversion.md"
    with pytest.raises(CheckpointError, match=f"^config.json: model_type is '{model_type}', {said}$"):
        family_of({} if model_type is None else {"model_type": model_type}, "config.json")


@pytest.mark.parametrize(("model_type", "old", "new"), TABLES["same"])
def test_spellings_that_mean_the_same(model_type: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(model_type, **old) == read(model_type, **new)


@pytest.mark.parametrize("model_type", list(SMALL))
def test_there_and_back(model_type: str) -> None:
    family, config = FAMILIES[model_type], read(model_type)
    bert = family.to_bert(SMALL[model_type], "config.json", paired=False)
    values = family.from_model(config, bert)
    assert values is not None
    assert family.to_model(values, "config.json") == config
    assert same_bert(family.to_bert(values, "config.json", paired=False), bert, config)


@pytest.mark.parametrize("preset", list(GPT_PRESETS))
def test_every_preset_can_be_exported(preset: str) -> None:
    family, described = describe_model(model_of_preset(preset), None)
    assert described["model_type"] == family.model_type
    assert family.has_experts == ("num_experts" in GPT_PRESETS[preset])


def test_a_model_of_no_family_is_refused() -> None:
    config = ModelConfig(vocab_size=11, num_layers=1, hidden_size=8, num_attention_heads=2, activation="geglu")
    said = "no family of transformers' models that megacore has computes what this one does"
    with pytest.raises(CheckpointError, match=said):
        describe_model(config.resolve(seq_length=16))


@pytest.mark.parametrize("name", sorted(RELEASED.keys() | BILLIONS.keys()))
def test_a_released_model_is_understood_or_refused_by_what_it_computes(name: str) -> None:
    refused = {
        "tiiuae/falcon-rw-1b": "alibi is true: transformers rounds this family's ALiBi to bf16",
        "facebook/opt-350m": r"(?s)do_layer_norm_before is False.*word_embed_proj_dim is 512",
    }
    family = family_of(RELEASED[name], "config.json")
    if name in refused:
        with pytest.raises(CheckpointError, match=refused[name]):
            family.describe(RELEASED[name], "config.json")
        return
    described = family.describe(RELEASED[name], "config.json")
    assert described.unknown == ()
    model = described.model
    assert model.num_layers == RELEASED[name].get("num_hidden_layers", model.num_layers)
    if name in BILLIONS:
        tied = 0 if model.untie_embeddings_and_output_weights else model.vocab_size * model.hidden_size
        parameters = sum(layer.parameters for layer in gpt_outline(model, 1)) - tied
        assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=5e-3)


# ---- orders of rows --------------------------------------------------------------------------------------------------

LAYERS = 5


def model_of(model_type: str) -> tuple[Family, ResolvedModel, ResolvedBert | None]:
    """A family and a small model of it, of several layers."""
    family = FAMILIES[model_type]
    small = SMALL[model_type]
    (layers,) = small.keys() & {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
    values = {**small, layers: LAYERS}
    if "attention_types" in values:  # a list of all layers
        values["attention_types"] = [[["global"], LAYERS]]
    config = family.to_model(values, "config.json")
    return family, config, family.to_bert(values, "config.json", paired=model_type == "bert")


@pytest.mark.parametrize("model_type", list(SMALL))
def test_runs_cover_every_row_once(model_type: str) -> None:
    # A tensor of all experts has no runs of rows: conversion there and back shows it.
    plan = [step for step in make_plan(*model_of(model_type)) if not isinstance(step, ExpertsStep)]
    places: dict[str, list[int]] = {}
    for step in plan:
        runs = list(step.runs())
        assert sum(run.rows for run in runs) == math.prod(step.shape[: max(len(step.shape) - 1, 1)])
        for run in runs:
            places.setdefault(step.theirs[run.source], []).extend(range(run.start, run.stop))
    transposed = {name for step in plan if step.transposed for name in step.theirs}
    for name, shape in their_shapes(plan).items():
        assert sorted(places[name]) == list(range(shape[-1 if name in transposed else 0])), name


@pytest.mark.parametrize("model_type", list(SMALL))
def test_shapes_are_those_of_the_whole_model(model_type: str) -> None:
    _, config, bert = model_of(model_type)
    for layers in (1, 2, LAYERS):
        config = dataclasses.replace(config, num_layers=layers)
        built = Stage(model_layers(config, torch.device("meta"), bert)).by_name()
        expected = [(name, parameter.spec.shape) for name, parameter in built.items()]
        assert list(model_shapes(config, bert).items()) == expected
