"""The one-process GPT against transformers' GPT2LMHeadModel with the same weights, and its training against plain
torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megacore.config import ModelConfig
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.ops import cross_entropy
from megacore.parallel.cross_entropy import vocabulary_share
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.reference import from_gpt2, gpt2_names, plain_torch
from tests.parity.runs import Run, agree

VOCAB, POSITIONS, HIDDEN, HEADS, LAYERS = 101, 40, 32, 4, 3


def reference() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=LAYERS,
        initializer_range=0.2,  # large weights, so that a wrong layout cannot hide
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def values_of(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """GPT-2's tensors under megacore's names, in megacore's layout."""
    theirs = {name.removeprefix("transformer."): p for name, p in model.named_parameters()}
    return {ours: from_gpt2(ours, theirs[name], HEADS) for ours, name in gpt2_names(LAYERS).items()}


@pytest.mark.parametrize("multiple", [1, 128])
def test_gpt_is_gpt2(multiple: int) -> None:
    model = reference()
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * HIDDEN,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        make_vocab_size_divisible_by=multiple,
    ).resolve(seq_length=POSITIONS)
    device = torch.device("cpu")
    stage = Stage(gpt_layers(config, BuildContext(device=device, streams=RandomStreams(0, device)))).eval()
    parameters, values = stage.by_name(), values_of(model)
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.zero_()
            parameter.spec.unpadded(parameter).copy_(values[name])

    tokens = torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, labels=tokens)
    logits = stage(tokens)[..., :VOCAB]
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    loss = cross_entropy(logits[:, :-1], tokens[:, 1:], share=vocabulary_share(VOCAB)).mean()
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-6)

    loss.backward()
    expected.loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    for name, twin in (("embedding.tokens.weight", "wte.weight"), ("embedding.positions", "wpe.weight")):
        gradient, wanted = parameters[name].grad, theirs[f"transformer.{twin}"]
        assert gradient is not None
        assert wanted is not None
        torch.testing.assert_close(parameters[name].spec.unpadded(gradient), wanted, rtol=1e-5, atol=1e-6)


def test_twenty_steps_are_those_of_plain_torch(run: Run, tmp_path: Path) -> None:
    """Loss, norm, clipping, AdamW, decay groups and schedule, step by step, with AdamW's usual epsilon.

    tests/matrix/test_zero.py compares weights and moments too, on every layout.
    """
    found, expected = run((1, 1, 1)), plain_torch(tmp_path)
    agree(found, expected)
    assert min(expected.norms) > 0.5, "clipping is meant to be active"
    assert expected.losses[-1] < expected.losses[0]
