"""A parameter keeps its ShardSpec when it is copied, pickled or moved."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter, ShardSpec, sharded_parameters
from megacore.pipeline.stage import Stage
from tests.parity.runs import make_config

SPEC = replace(ShardSpec.split((8, 3), {0: (4, 6)}), name="blocks.1.mlp.up.weight")


@pytest.mark.parametrize("way", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_copy_is_the_same_slice(way: object, requires_grad: bool) -> None:
    parameter = ShardedParameter(torch.randn(2, 3), SPEC, requires_grad)
    found = way(parameter)  # type: ignore[operator]
    assert type(found) is ShardedParameter
    assert found.spec == SPEC
    assert found.requires_grad == requires_grad
    assert torch.equal(found, parameter)
    assert found.data_ptr() != parameter.data_ptr()


def stage(device: str) -> Stage:
    """All layers of a small GPT."""
    config = make_config((1, 1, 1), "unused", position_embedding_type="learned")
    context = BuildContext(device=torch.device(device), streams=RandomStreams(0, torch.device("cpu")))
    return Stage(gpt_layers(config.model, context))


def test_a_model_without_memory_gets_it_and_keeps_its_specs() -> None:
    empty, expected = stage("meta"), {p.spec.name: p.spec for p in sharded_parameters(stage("cpu"))}
    empty.to_empty(device="cpu")
    found = sharded_parameters(empty)
    assert {p.spec.name: p.spec for p in found} == expected
    assert all(p.device.type == "cpu" and p.requires_grad for p in found)
