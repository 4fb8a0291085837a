"""Which tensors make which: the orders of rows cover every row once, and the shapes that are told from two blocks are
those of the whole model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.convert.plan import make_plan, model_layers, model_shapes, their_shapes
from megacore.models.hf.families import FAMILIES
from megacore.models.hf.family import Family
from megacore.pipeline.stage import Stage
from tests.unit.test_hf_configs import SMALL

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
    plan = make_plan(*model_of(model_type))
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
