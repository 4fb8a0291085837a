"""Sampling from a trained model in one process, whatever layout trained it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.errors import CheckpointError
from megacore.inference.key_values import KeyValues
from megacore.models.gpt import next_token_logits
from megacore.pipeline.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # divides the logits; 0 always takes the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    # Keep the fewest likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019, arXiv 1904.09751).
    top_p: float = 1.0
    # Of every token of the text so far, prompt included: divides its logit, or multiplies it if it is below 0 (Keskar
    # et al. 2019, arXiv 1909.05858); 1 changes nothing.
    repetition_penalty: float = 1.0
    seed: int = 1234  # of the random draws


@torch.no_grad()
def generate(
    stage: Stage, config: ResolvedModel, prompt: list[int], *, max_new_tokens: int, sampling: Sampling
) -> Iterator[int]:
    """Token ids that continue a prompt of at least one, one at a time; a context longer than the model's positions
    keeps its end. Raises CheckpointError where the model's output is not finite, and so no choice of a token means
    anything."""
    stage.eval()
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(stage.parameters()).device
    tokens, positions, vocabulary = list(prompt), config.max_position_embeddings, config.vocab_size
    capacity = min(len(prompt) + max_new_tokens, positions)
    read = KeyValues.of(stage, config, capacity) if len(prompt) <= capacity else None
    with nullcontext() if read is None else read.laid_out():
        for _ in range(max_new_tokens):
            if read is not None and len(tokens) <= capacity:
                logits = read.next_logits(tokens[read.length :]).cpu()
            else:  # a context that has lost its beginning: every position is another one than before
                context = torch.tensor([tokens[-positions:]], device=device)
                logits = next_token_logits(stage(context), vocabulary)[0].cpu()
            if not logits.isfinite().all():
                raise CheckpointError(
                    "the model's output is not finite (NaN or infinite), because weights of the checkpoint are not, or "
                    "because they overflow: use a checkpoint of an earlier step"
                )
            if sampling.repetition_penalty != 1.0:
                logits = penalized(logits, tokens, sampling.repetition_penalty)
            tokens.append(choose(logits, sampling, generator))
            yield tokens[-1]


def penalized(logits: Tensor, tokens: list[int], penalty: float) -> Tensor:
    """Logits [V] in double precision, with a repetition penalty of the tokens that are there, however often."""
    logits, there = logits.double(), torch.tensor(sorted(set(tokens)))
    chosen = logits[there]
    return logits.scatter(0, there, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id from logits [V]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # Below the largest logit, so that a tiny temperature overflows towards probability 0, and in double precision.
    below = logits.double() - logits.max().double()
    values, ids = torch.where(below == 0.0, 0.0, below / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probabilities = values.softmax(0)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
