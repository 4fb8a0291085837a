"""What is said of a model before it is built: its parameters against those that are built and the published numbers;
its operations against torch's own count."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacore.config import ExpertsConfig, ModelConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.config.presets import GPT_PRESETS
from megacore.layers.context import BuildContext
from megacore.models.flops import block_flops, flops_per_sequence, head_flops
from megacore.models.gpt import gpt_layers
from megacore.models.outline import gpt_outline
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
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
