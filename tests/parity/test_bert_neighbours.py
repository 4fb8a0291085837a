"""What a position may not see does not reach it, bit for bit: not padding, and not another document of its sample;
neither what it predicts, nor what its predictions add to loss and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megacore.config.bert import ResolvedBertConfig
from megacore.data.bert.dataset import BertBatch
from megacore.pipeline.stage import Stage
from tests.parity.bert_twins import (
    POSITIONS,
    VOCAB,
    batch_of,
    bert_input,
    classic_config,
    classic_twin,
    classic_values,
    loss_of,
    modern_config,
    modern_twin,
    modern_values,
    stage_of,
)


def models(attention: str) -> list[tuple[ResolvedBertConfig, Stage]]:
    """Both styles with large random weights."""
    classic, modern = classic_config(attention=attention), modern_config(attention=attention)
    return [
        (classic, stage_of(classic, classic_values(classic_twin()))),
        (modern, stage_of(modern, modern_values(modern_twin()))),
    ]


def with_other_content(batch: BertBatch, where: Tensor) -> BertBatch:
    """Other tokens and segments there."""
    return replace(
        batch,
        tokens=torch.where(where, (batch.tokens + 7) % VOCAB, batch.tokens),
        token_types=torch.where(where, 1 - batch.token_types, batch.token_types),
    )


@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax"])
def test_the_content_of_padding_changes_no_bit_of_an_output_or_a_gradient(attention: str) -> None:
    batch = batch_of((POSITIONS, 17, 3, 9))
    padding = batch.documents == 0
    for config, stage in models(attention):
        first, second = (results(config, stage, b) for b in (batch, with_other_content(batch, padding)))
        assert torch.equal(first["logits"][~padding], second["logits"][~padding])
        assert first.keys() == second.keys()
        assert [name for name in first if name != "logits" and not torch.equal(first[name], second[name])] == []


NUMBERS = torch.tensor([[1] * 5 + [2] * 12 + [3] * 4 + [0] * 3, [1] * 20 + [2] * 4])


@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_bit_of_loss_or_gradients_depends_on_a_neighbour_without_masks(number: int, attention: str) -> None:
    numbers, whole = NUMBERS, batch_of((21, 24), documents=NUMBERS)
    own = numbers == number
    # The sentence task reads the first position, which is document 1's.
    pairs = whole.sentence_labels if number == 1 else torch.full_like(whole.sentence_labels, -1)
    batch = replace(whole, loss_mask=own.float() * (torch.arange(POSITIONS) % 2), sentence_labels=pairs)
    for config, stage in models(attention):
        first, second = (results(config, stage, b) for b in (batch, with_other_content(batch, ~own)))
        assert torch.equal(first.pop("logits")[own], second.pop("logits")[own])
        if number > 1:
            first.pop("pairs", None)
        assert first["loss"] > 0
        assert [name for name in first if not torch.equal(first[name], second[name])] == []
        # The changed documents' own masked tokens do count.
        masked = replace(batch, loss_mask=whole.loss_mask)
        third, fourth = (results(config, stage, b) for b in (masked, with_other_content(masked, ~own)))
        assert all(not torch.equal(third[name], fourth[name]) for name in ("loss", "blocks.0.mlp.up.weight"))


@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax"])
def test_the_content_of_a_neighbour_changes_no_bit(attention: str) -> None:
    numbers = NUMBERS
    batch = batch_of((21, 24), documents=numbers)
    for config, stage in models(attention):
        first = results(config, stage, batch)["logits"]
        for number in (1, 2, 3):
            other = results(config, stage, with_other_content(batch, numbers != number))["logits"]
            assert torch.equal(first[numbers == number], other[numbers == number])
            assert not torch.equal(first, other)


def results(config: ResolvedBertConfig, stage: Stage, batch: BertBatch) -> dict[str, Tensor]:
    """Everything that comes out of a forward and a backward."""
    stage.zero_grad()
    output = stage(bert_input(batch))
    outputs = (output,) if isinstance(output, Tensor) else output
    kept = {name: part.detach().clone() for name, part in zip(("logits", "pairs"), outputs, strict=False)}
    loss = loss_of(config, output, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in stage.by_name().items() if p.grad is not None}
    return {**kept, "loss": loss.detach(), **gradients}
