"""Initial weights are a function of the seed and the global name: a slice is a slice of the whole. What is said of a
model before it is built: its parameters against those that are built and the published numbers; its operations against
torch's own count.

That weights are bit-identical on every layout is part of every row of tests/matrix."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import ExpertsConfig, ModelConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.config.presets import GPT_PRESETS
from megacore.layers.context import BuildContext
from megacore.models.flops import block_flops, flops_per_sequence, head_flops
from megacore.models.gpt import gpt_layers
from megacore.models.initialize import initialize
from megacore.models.outline import gpt_outline
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams, normal_slice
from megacore.parallel.sharding import ShardSpec
from megacore.pipeline.stage import Stage
from tests.parity.hf_models import PLAIN, POSITIONS, VOCAB, config_of, make_model


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
    assert not torch.equal(whole[:13], whole[524:537])  # a block is 524 rows


# ---- what is said of a model before it is built: its parameters and its operations


META, CPU = torch.device("meta"), torch.device("cpu")
MODELS = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def published() -> dict[str, int]:
    """The parameters of released weights in models.md, where a row has one preset, or several that begin alike."""
    found: dict[str, int] = {}
    for line in MODELS.read_text(encoding="utf-8").splitlines():
        _, presets, parameters, *_ = f"{line}| | ".split("|")
        first, *others = presets.partition("(")[0].strip().split(", ")
        counts = re.findall(r"\d{1,3}(?:,\d{3}){2,}", parameters.partition(", of which")[0])
        if first in GPT_PRESETS and counts:
            names = [first, *(first.rpartition("-")[0] + other for other in others)]
            found |= {name: int(count.replace(",", "")) for name, count in zip(names, counts, strict=True)}
    return found


def preset(name: str) -> ResolvedModel:
    def section(kind: type[Any]) -> Any:
        return kind(**{k: v for k, v in GPT_PRESETS[name].items() if k in field_infos(kind)})

    model: ModelConfig = section(ModelConfig)
    return model.resolve(seq_length=1024, experts=section(ExpertsConfig).resolve(model.inner_size))


def layers_of(config: ResolvedModel, device: torch.device, **context: Any) -> list[LayerSpec]:
    return gpt_layers(config, BuildContext(device=device, streams=RandomStreams(0, CPU), **context))


def test_presets_have_the_published_number_of_parameters() -> None:
    counts = {}
    for name in GPT_PRESETS.keys() - {"gpt2-tiny"}:
        config = preset(name)
        tied = 0 if config.untie_embeddings_and_output_weights else config.vocab_size * config.hidden_size
        counts[name] = sum(layer.parameters for layer in layers_of(config, META)) - tied
    assert counts == published()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen3-0.6b", "llama-3-8b", "mistral-7b", "pythia-160m", "bloom-176b"])
def test_a_rank_holds_what_is_said(name: str, tp: int) -> None:
    """Padding of the vocabulary and whatever every rank holds whole included, on the first rank and on the last."""
    config = dataclasses.replace(preset(name), vocab_size=1001, num_layers=1)
    sizes = gpt_outline(config, tp)
    for rank in {0, tp - 1}:
        group = Group(ranks=tuple(range(tp)), rank=rank)
        for layer, size in zip(layers_of(config, META, layer_group=group), sizes, strict=True):
            built = Stage([dataclasses.replace(layer, tied={})])
            assert sum(parameter.numel() for parameter in built.parameters()) == size.held == layer.held, layer.name


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "mistral"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    config = config_of(make_model(name))
    stage = Stage(layers_of(config, CPU, attention="fused-softmax")).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stage(torch.zeros(1, POSITIONS, dtype=torch.int64))
    padded = -(-VOCAB // 128) * 128 / VOCAB  # the padded vocabulary is computed, but does not count
    forward = config.num_layers * block_flops(config, POSITIONS) + head_flops(config) * padded
    assert counter.get_total_flops() == pytest.approx(POSITIONS * forward, rel=1e-12)


def test_a_window_counts_the_keys_that_it_holds() -> None:
    config = config_of(make_model("mistral"))
    everything = dataclasses.replace(config, window_size=None)
    fewer = 4.0 * (POSITIONS - 7) * config.num_attention_heads * config.head_size
    assert block_flops(everything, POSITIONS) - block_flops(config, POSITIONS) == fewer
    assert flops_per_sequence(config, 7) == flops_per_sequence(everything, 7)
