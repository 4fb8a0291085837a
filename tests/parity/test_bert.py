"""BERT and ModernBERT in one process against transformers' with the same weights; what a position may not see does not
reach it, bit for bit; parameters and operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.cli import parse_config
from megacore.config.presets import BERT_PRESETS
from megacore.data.bert.dataset import BertBatch
from megacore.layers.context import BuildContext
from megacore.models.bert import bert_flops, bert_layers
from megacore.models.spec import LayerSpec
from megacore.parallel.mesh import ALONE
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.bert_twins import (
    POSITIONS,
    VOCAB,
    batch_of,
    bert_input,
    classic_config,
    classic_twin,
    hidden_states,
    loss_of,
    modern_config,
    modern_twin,
    stage_of,
)

LENGTHS = (POSITIONS, 17, 3, 9)
IGNORED = -100


@pytest.mark.parametrize("multiple", [1, 128])
def test_classic_is_transformers_bert(multiple: int) -> None:
    twin, batch = classic_twin(), batch_of(LENGTHS)
    config = classic_config(make_vocab_size_divisible_by=multiple)
    stage, real = stage_of(config, twin), batch.documents > 0
    expected = twin(
        input_ids=batch.tokens,
        token_type_ids=batch.token_types,
        attention_mask=real.long(),
        labels=batch.labels.masked_fill(batch.loss_mask == 0, IGNORED),
        next_sentence_label=batch.sentence_labels,
        output_hidden_states=True,
    )
    for found, theirs in zip(hidden_states(stage, batch), expected.hidden_states, strict=True):
        close(found[real], theirs[real])
    tokens, pairs = stage(bert_input(batch))
    close(tokens[..., :VOCAB][real], expected.prediction_logits[real])
    close(pairs, expected.seq_relationship_logits)
    torch.testing.assert_close(loss_of(config, (tokens, pairs), batch), expected.loss, rtol=0, atol=1e-6)


def test_modern_is_transformers_modernbert_on_padded_batches() -> None:
    twin, batch = modern_twin(), batch_of(LENGTHS)
    config = modern_config()  # of six blocks
    stage, real = stage_of(config, twin), batch.documents > 0
    expected = twin(
        input_ids=batch.tokens,
        attention_mask=real.long(),
        labels=batch.labels.masked_fill(batch.loss_mask == 0, IGNORED),
        output_hidden_states=True,
    )
    found = hidden_states(stage, batch)
    found[-1] = stage.get_submodule("layers.7.norm")(found[-1])  # transformers counts the final norm to the last layer
    for ours, theirs in zip(found, expected.hidden_states, strict=True):
        close(ours[real], theirs[real])
    logits = stage(bert_input(batch))
    close(logits[..., :VOCAB][real], expected.logits[real])
    torch.testing.assert_close(loss_of(config, logits, batch), expected.loss, rtol=0, atol=1e-6)


def test_packed_documents_are_what_modernbert_makes_of_each_alone() -> None:
    twin, numbers = modern_twin(), torch.tensor([[1] * 5 + [2] * 12 + [3] * 4 + [0] * 3])
    batch = batch_of((21,), documents=numbers)
    logits = stage_of(modern_config(), twin)(bert_input(batch))[..., :VOCAB]
    for number in (1, 2, 3):
        own = numbers == number
        close(logits[own], twin(input_ids=batch.tokens[own].unsqueeze(0)).logits[0])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ---- what a position may not see: padding, another document, and what its predictions add to loss and gradients


def models(attention: str) -> list[tuple[ResolvedBertConfig, Stage]]:
    """Both styles with large random weights."""
    classic, modern = classic_config(attention=attention), modern_config(attention=attention)
    return [(classic, stage_of(classic, classic_twin())), (modern, stage_of(modern, modern_twin()))]


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


# ---- sizes


def layers_of(config: ResolvedBertConfig) -> list[LayerSpec]:
    return bert_layers(config, BuildContext(device=torch.device("cpu"), streams=RandomStreams(0, torch.device("cpu"))))


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


def test_operations_are_those_that_a_forward_does() -> None:
    config = classic_config(sentence_task="none", make_vocab_size_divisible_by=1, attention="fused-softmax")
    device = torch.device("cpu")
    stage = Stage(
        bert_layers(config, BuildContext.of(config, layer_group=ALONE, device=device, streams=RandomStreams(0, device)))
    )
    with FlopCounterMode(display=False) as counter:
        stage(bert_input(batch_of((POSITIONS,))))
    assert bert_flops(config) == 3 * counter.get_total_flops()
