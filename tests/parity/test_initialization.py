"""Initial weights are a function of the seed and the global name: bit-identical on every layout."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megacore.config import ModelConfig, ResolvedModel
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.initialize import initialize
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams, normal_slice
from megacore.parallel.sharding import ShardSpec
from megacore.pipeline.partition import partition
from megacore.pipeline.stage import Stage

CPU = torch.device("cpu")
# dp does not appear: its ranks run the same code on the same arguments.
LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in range(1, 9) if tp * pp <= 8]


def config(**changes: object) -> ResolvedModel:
    values = {
        "num_layers": 9,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "vocab_size": 131,
        "max_position_embeddings": 16,
    }
    return ModelConfig(**(values | changes)).resolve(seq_length=16)  # type: ignore[arg-type]


def whole_model(model: ResolvedModel, tp: int, pp: int, seed: int = 1234) -> dict[str, Tensor]:
    """Build every rank's stage here, and put the slices together."""
    whole: dict[str, Tensor] = {}
    for tp_rank in range(tp):
        group = Group(ranks=tuple(range(tp)), rank=tp_rank)
        layers = gpt_layers(model, BuildContext(layer_group=group, device=CPU, streams=RandomStreams(0, CPU)))
        for part in partition(layers, pp, [layer.parameters for layer in layers]):
            stage = Stage([layers[i] for i in part])
            initialize(stage.by_name().values(), model, seed=seed)
            for name, parameter in stage.by_name().items():
                full = whole.setdefault(name, torch.full(parameter.spec.shape, torch.nan))
                held, piece = parameter.spec.take(full), parameter.spec.unpadded(parameter.detach())
                assert torch.all(torch.isnan(held) | (held == piece)), f"copies of {name} differ"
                held.copy_(piece)
                assert torch.all(parameter.detach()[piece.shape[0] :] == 0), "padding"
    return whole


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_bits(layout: tuple[int, int], untied: bool) -> None:
    model = config(untie_embeddings_and_output_weights=untied)
    expected, found = whole_model(model, 1, 1), whole_model(model, *layout)
    assert found.keys() == expected.keys()
    assert ("head.weight" in found) == untied
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_seed_and_the_name_decide() -> None:
    one, other = whole_model(config(), 1, 1), whole_model(config(), 1, 1, seed=7)
    assert not torch.equal(one["embedding.positions"], other["embedding.positions"])
    assert not torch.equal(one["blocks.0.mlp.up.weight"], one["blocks.1.mlp.up.weight"])


def test_the_distribution_is_as_documented() -> None:
    weights = whole_model(config(hidden_size=256, ffn_hidden_size=1024, init_method_std=0.02), 1, 1)
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
