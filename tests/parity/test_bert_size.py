"""BERT's parameters: as its layers are described, as they are built, and as transformers' models have them."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig as TransformersConfig
from transformers import (
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import parse_config
from megacore.config.presets import BERT_PRESETS
from megacore.layers.context import BuildContext
from megacore.models.bert import bert_flops, bert_layers
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import ALONE
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.bert_twins import POSITIONS, batch_of, bert_input, classic_config, modern_config


def layers_of(config: ResolvedBertConfig) -> list[LayerSpec]:
    return bert_layers(config, BuildContext(device=torch.device("cpu"), streams=RandomStreams(0, torch.device("cpu"))))


def published(preset: str) -> PreTrainedModel:
    """transformers' model of the shape, without memory."""
    with torch.device("meta"):
        if preset == "modernbert-base":
            return ModernBertForMaskedLM(ModernBertConfig())
        if preset == "bert-base":
            return BertForPreTraining(TransformersConfig())
        large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
        if preset.startswith("roberta"):
            released = {"max_position_embeddings": 514, "type_vocab_size": 1}
            return RobertaForMaskedLM(RobertaConfig(**released, **(large if preset == "roberta-large" else {})))
        return BertForPreTraining(TransformersConfig(**large))


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        *(("bert-base", 110_106_428), ("bert-large", 336_226_108), ("modernbert-base", 149_655_232)),
        *(("roberta-base", 124_697_433), ("roberta-large", 355_412_057)),
    ],
)
def test_presets_have_the_parameters_of_the_published_models(preset: str, count: int) -> None:
    assert preset in BERT_PRESETS
    argv = ["--preset", preset, "--mock-data", "--train-iters", "2"]
    config = parse_config(argv, prog="x", description="x", kind=BertConfig)
    table = config.model.vocab_size * config.model.hidden_size  # that the embedding and the head share
    assert sum(layer.parameters for layer in layers_of(config)) - table == count
    assert sum(parameter.numel() for parameter in published(preset).parameters()) == count


@pytest.mark.parametrize(
    "config", [classic_config(), classic_config(sentence_task="none"), modern_config()], ids=["nsp", "none", "modern"]
)
def test_layers_have_the_parameters_that_their_descriptions_say(config: ResolvedBertConfig) -> None:
    for layer in layers_of(config):
        held = Stage([layer]).by_name().values()
        assert sum(prod(parameter.spec.shape) for parameter in held) == layer.parameters, layer.name


def test_operations_are_those_that_a_forward_does() -> None:
    config = classic_config(sentence_task="none", make_vocab_size_divisible_by=1, attention="fused-softmax")
    device = torch.device("cpu")
    stage = Stage(
        bert_layers(config, BuildContext.of(config, layer_group=ALONE, device=device, streams=RandomStreams(0, device)))
    )
    with FlopCounterMode(display=False) as counter:
        stage(bert_input(batch_of((POSITIONS,))))
    assert bert_flops(config) == 3 * counter.get_total_flops()
