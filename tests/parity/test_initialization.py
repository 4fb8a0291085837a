"""Initial weights are a function of the seed and the global name: a slice is a slice of the whole.

That they are bit-identical on every layout is part of every row of tests/matrix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megacore.config import ModelConfig
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.initialize import initialize
from megacore.parallel.random import RandomStreams, normal_slice
from megacore.parallel.sharding import ShardSpec
from megacore.pipeline.stage import Stage


def initial(seed: int = 1234) -> dict[str, Tensor]:
    """The weights of a model of nine blocks."""
    model = ModelConfig(
        num_layers=9, hidden_size=256, num_attention_heads=8, vocab_size=131, init_method_std=0.02
    ).resolve(seq_length=16)
    device = torch.device("cpu")
    stage = Stage(gpt_layers(model, BuildContext(device=device, streams=RandomStreams(0, device))))
    initialize(stage.by_name().values(), model, seed=seed)
    assert all(not parameter[parameter.spec.shape[0] :].any() for parameter in stage.by_name().values()), "padding"
    return {name: parameter.spec.unpadded(parameter.detach()) for name, parameter in stage.by_name().items()}


def test_the_seed_and_the_name_decide() -> None:
    one, other = initial(), initial(seed=7)
    assert not torch.equal(one["embedding.positions"], other["embedding.positions"])
    assert not torch.equal(one["blocks.0.mlp.up.weight"], one["blocks.1.mlp.up.weight"])


def test_the_distribution_is_as_documented() -> None:
    weights = initial()
    for name, std in (
        ("embedding.tokens.weight", 0.02),
        ("blocks.3.attention.qkv.weight", 0.02),
        ("blocks.3.mlp.up.weight", 0.02),
        ("blocks.3.mlp.down.weight", 0.02 / math.sqrt(2 * 9)),
        ("blocks.3.attention.output.weight", 0.02 / math.sqrt(2 * 9)),
    ):
        assert weights[name].std() == pytest.approx(std, rel=0.02), name
        assert abs(weights[name].mean()) < 4 * std / math.sqrt(weights[name].numel()), name
    assert torch.all(weights["blocks.3.mlp.up.bias"] == 0)
    assert torch.all(weights["blocks.3.mlp_norm.weight"] == 1)


@pytest.mark.parametrize(
    "ranges", [{0: (0, 3)}, {0: (1000, 1537)}, {1: (100, 611)}, {0: (500, 1100), 1: (7, 1999)}, {}]
)
def test_slices_across_blocks_are_slices_of_the_whole(ranges: dict[int, tuple[int, int]]) -> None:
    """1537 x 2000 elements are three blocks of the generator."""
    whole = normal_slice(ShardSpec(name="w", shape=(1537, 2000)), seed=5, std=1.0)
    spec = replace(ShardSpec.split((1537, 2000), ranges), name="w")
    assert torch.equal(normal_slice(spec, seed=5, std=1.0), spec.take(whole))
