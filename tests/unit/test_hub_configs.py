"""Configurations of released models, entered from their config.json: each is understood, or refused by what megacore
does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import CheckpointError
from megacore.models.hf.families import family_of
from megacore.plan.outline import gpt_outline

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
REFUSED = {
    "tiiuae/falcon-rw-1b": "alibi is true: transformers rounds this family's ALiBi to bf16",
    "facebook/opt-350m": r"(?s)do_layer_norm_before is False.*word_embed_proj_dim is 512",
}
# In billions, as their pages say, with the embedding counted once where it is tied.
SIZES = {
    "distilbert/distilgpt2": 0.082,
    "meta-llama/Llama-2-7b-hf": 6.738,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.100,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "01-ai/Yi-6B": 6.061,
    "deepseek-ai/deepseek-coder-1.3b-base": 1.346,
    "mistralai/Mistral-Nemo-Base-2407": 12.248,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "bigscience/bloom-560m": 0.559,
    "microsoft/phi-4": 14.660,
    "microsoft/Phi-3-mini-128k-instruct": 3.821,
    "stabilityai/stablelm-2-1_6b": 1.644,
    "stabilityai/stablelm-2-12b": 12.144,
    "bigcode/starcoderbase-1b": 1.137,
    "mosaicml/mpt-7b": 6.649,
    "google/gemma-2-2b": 2.614,
    "google/gemma-3-1b-pt": 1.000,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "arcee-ai/AFM-4.5B-Base": 4.62,
    "kyutai/helium-1-preview-2b": 2.173,
    "baidu/ERNIE-4.5-0.3B-PT": 0.3607,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36.151,
    "nvidia/Minitron-4B-Base": 4.191,
    "THUDM/GLM-4-32B-0414": 32.566,
    "THUDM/glm-4-9b-chat-hf": 9.4,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": 1.2794,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32.003,
    "CohereForAI/c4ai-command-r7b-12-2024": 8.028,
    "CohereForAI/c4ai-command-r-v01": 34.981,
    "allenai/OLMo-1B-hf": 1.1768,
    "allenai/OLMo-1.7-7B-hf": 6.888,
    "allenai/Olmo-3-1025-7B": 7.298,
    "EleutherAI/gpt-neo-1.3B": 1.3156,
    "microsoft/phi-2": 2.78,
}


def test_there_are_thirty() -> None:
    assert len(CONFIGS) >= 30


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_a_released_model_is_understood(name: str) -> None:
    family = family_of(CONFIGS[name], "config.json")
    described = family.describe(CONFIGS[name], "config.json")
    assert described.unknown == ()
    model = described.model
    assert model.num_layers == CONFIGS[name].get("num_hidden_layers", model.num_layers)
    if name in SIZES:
        tied = 0 if model.untie_embeddings_and_output_weights else model.vocab_size * model.hidden_size
        parameters = sum(layer.parameters for layer in gpt_outline(model, 1)) - tied
        assert parameters / 1e9 == pytest.approx(SIZES[name], rel=5e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_another_is_refused_by_what_it_computes(name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        family_of(CONFIGS[name], "config.json").describe(CONFIGS[name], "config.json")
