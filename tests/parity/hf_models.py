"""Tiny models of transformers with random weights, one or more a family: what conversion is tested with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedConfig

VOCAB, POSITIONS = 101, 40
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def _gpt2(**changes: Any) -> PreTrainedConfig:
    plain = {"n_positions": POSITIONS, "n_embd": 32, "n_head": 4, "n_layer": 3}
    return GPT2Config(vocab_size=VOCAB, initializer_range=0.2, **plain, **_ENDS, **changes)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _gpt2,
    "gpt2-untied": lambda: _gpt2(tie_word_embeddings=False, n_inner=48, layer_norm_epsilon=1e-6),
}
# One of each family; the others are variations of them.
PLAIN = ["gpt2"]


def make_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with large random weights, biases and norms too: a wrong layout cannot hide."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().to(dtype)


def save_model(model: nn.Module, directory: Path, **changes: Any) -> Path:
    """Save as transformers does."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **changes)  # type: ignore[operator]
    return directory


def tokens(seed: int = 1) -> Tensor:
    """[3, s] random tokens."""
    return torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(seed))
