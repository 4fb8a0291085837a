"""What is said of a model before it is built: its parameters against those that are built and the published numbers;
its operations against torch's own count."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import DataConfig, ExpertsConfig, ModelConfig, ResolvedModel, TrainingConfig
from megacore.config.bert import BertConfig, BertSection, ResolvedBertConfig
from megacore.config.fields import field_infos
from megacore.config.presets import GPT_PRESETS
from megacore.layers.context import BuildContext
from megacore.layers.rotary import Rotary
from megacore.models.bert import bert_layers
from megacore.models.flops import block_flops, flops_per_sequence, head_flops
from megacore.models.gpt import gpt_layers
from megacore.models.outline import bert_outline, gpt_outline
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import sharded_parameters
from megacore.pipeline.partition import partition
from megacore.pipeline.stage import Stage
from tests.parity.hf_models import PLAIN, POSITIONS, VOCAB, config_of, make_model

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


def test_llama_for_long_contexts_turns_as_the_published_configuration_says() -> None:
    """rope_type llama3, factor 8, low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192,
    rope_theta 500000: of the wavelengths below 2048 positions none is stretched, of those above 8192 all are, 8 times.
    """
    plain, rotary = Rotary(128, base=500_000.0).frequencies(1), Rotary.of(preset("llama-3-8b-128k"))
    assert rotary is not None
    for before, after in zip(plain.tolist(), rotary.frequencies(131_072).tolist(), strict=True):
        wavelength = 2 * math.pi / before
        between = (8192 / wavelength - 1) / 3
        stretched = before * (1 / 8 if wavelength > 8192 else 1.0 if wavelength < 2048 else between + (1 - between) / 8)
        assert after == pytest.approx(stretched, rel=1e-6)


@pytest.mark.parametrize("name", GPT_PRESETS)
def test_every_layer_has_the_parameters_that_its_description_says(name: str) -> None:
    config = preset(name)
    variants = [config]
    if config.normalization == "LayerNorm":
        variants.append(dataclasses.replace(config, norm_bias=False, disable_bias_linear=True, add_qkv_bias=True))
        variants.append(dataclasses.replace(config, qk_layernorm=True, activation="geglu", num_query_groups=1))
        variants.append(dataclasses.replace(config, qk_layernorm=True, qk_layernorm_per_head=True, num_query_groups=1))
    plain: dict[str, Any] = {"norm_affine": False, "norm_bias": True, "layernorm_1p": False}
    variants.append(dataclasses.replace(config, **plain, qk_layernorm=not config.qk_layernorm_per_head))
    for variant in variants:
        layers = layers_of(variant, META)
        for layer in (layers[0], layers[1], layers[-2], layers[-1]):  # blocks are alike, except the first of some
            built = Stage([dataclasses.replace(layer, tied={})])
            sizes = [math.prod(p.spec.shape) for p in sharded_parameters(built)]
            assert sum(sizes) == layer.parameters, layer.name


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


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_a_bert_holds_what_is_said(style: str) -> None:
    config = bert_config(style)
    streams = RandomStreams(0, CPU)
    for tp in (1, 2):
        own = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp=tp))
        context = BuildContext(device=META, streams=streams, layer_group=Group(ranks=tuple(range(tp))))
        for layer, size in zip(bert_layers(own, context), bert_outline(own), strict=True):
            built = Stage([dataclasses.replace(layer, tied={})])
            assert sum(math.prod(p.spec.shape) for p in sharded_parameters(built)) == size.parameters, layer.name
            assert sum(parameter.numel() for parameter in built.parameters()) == size.held, layer.name


def bert_config(style: str) -> ResolvedBertConfig:
    defaults = BertConfig.defaults({"bert_style": style})
    layers: dict[str, Any] = {name: value for name, value in defaults.items() if name in field_infos(ModelConfig)}
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=301, **layers)
    training = TrainingConfig(train_iters=1)
    section = BertSection(bert_style=style)  # type: ignore[arg-type]
    return BertConfig(model=model, bert=section, training=training, data=DataConfig(mock_data=True)).resolve(1)


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


def test_bloom_balances_as_its_authors_had_it() -> None:
    """70 blocks on 12 stages: 6 each, one fewer beside the embedding and beside the head."""
    layers = layers_of(preset("bloom-176b"), META)
    stages = partition(layers, 12, [layer.parameters for layer in layers])
    assert [len(stage) for stage in stages] == [6, *[6] * 10, 6]
