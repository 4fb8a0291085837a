"""The one-process BERT and ModernBERT against transformers' with the same weights, on batches of unequal lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.bert_twins import (
    POSITIONS,
    VOCAB,
    batch_of,
    bert_input,
    classic_config,
    classic_twin,
    classic_values,
    hidden_states,
    loss_of,
    modern_config,
    modern_twin,
    modern_values,
    stage_of,
)

LENGTHS = (POSITIONS, 17, 3, 9)
IGNORED = -100


@pytest.mark.parametrize("multiple", [1, 128])
def test_classic_is_transformers_bert(multiple: int) -> None:
    twin, batch = classic_twin(), batch_of(LENGTHS)
    config = classic_config(make_vocab_size_divisible_by=multiple)
    stage, real = stage_of(config, classic_values(twin)), batch.documents > 0
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
    stage, real = stage_of(config, modern_values(twin)), batch.documents > 0
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
    logits = stage_of(modern_config(), modern_values(twin))(bert_input(batch))[..., :VOCAB]
    for number in (1, 2, 3):
        own = numbers == number
        close(logits[own], twin(input_ids=batch.tokens[own].unsqueeze(0)).logits[0])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
