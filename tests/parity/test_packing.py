"""A packed sample is its documents: each gives what transformers' model gives for it by itself, and nothing of it
reaches another one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.hf_models import PLAIN, VOCAB, make_model, require_same_gradients, twin_of

# Of one token, of prime length, and what is left; the last one of each sample is its padding.
LENGTHS = [[1, 13, 2, 24], [7, 29, 3, 1], [40]]
# Without dynamic frequencies, which transformers stretches by the longest document, and we by the sample.
FAMILIES = ["llama2", "llama-linear", "llama-yarn", *PLAIN]


def places(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Documents and positions, [b, s]."""
    documents = [[number for number, n in enumerate(each, 1) for _ in range(n)] for each in lengths]
    return torch.tensor(documents), torch.tensor([[i for n in each for i in range(n)] for each in lengths])


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "sdpa") for name in FAMILIES] + [("gpt2", "fused-softmax"), ("bloom", "fused-softmax")],
)
def test_every_document_is_transformers_by_itself(name: str, implementation: str) -> None:
    model = make_model(name)
    stage = twin_of(model, attention=implementation)
    tokens = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    documents, positions = places(LENGTHS)
    logits = stage((tokens, documents, positions))[..., :VOCAB]
    total, loss = torch.zeros(()), torch.zeros(())
    for row, lengths in enumerate(LENGTHS):
        ends = list(itertools.accumulate(lengths))
        for first, last in zip([0, *ends], ends, strict=False):
            here = slice(first, last)
            expected = model(tokens[row : row + 1, here]).logits[0]
            torch.testing.assert_close(logits[row, here], expected, rtol=0, atol=1e-5)
            if last < 40:  # the rest is padding
                labels = tokens[row, first + 1 : last]
                total = total + F.cross_entropy(expected[:-1], labels, reduction="sum")
                loss = loss + F.cross_entropy(logits[row, first : last - 1], labels, reduction="sum")
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=0)

    loss.backward()
    total.backward()
    require_same_gradients(stage, model)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "bloom"])
@pytest.mark.parametrize(("start", "first", "last"), [(1, 1, 14), (14, 14, 16), (0, 0, 1), (9, 1, 14)])
def test_a_token_changes_no_bit_of_another_document(name: str, start: int, first: int, last: int) -> None:
    """The logits of other documents and of earlier positions, and the gradients of the others' hidden states."""
    stage = twin_of(make_model(name))
    documents, positions = places(LENGTHS[:1])
    weights = torch.randn(1, 40, VOCAB, generator=torch.Generator().manual_seed(2))
    outcomes = []
    for change in (0, 1):
        tokens = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
        tokens[0, start] = (tokens[0, start] + change) % VOCAB
        hidden, *beside = stage.run_layer(0, (tokens, documents, positions))
        hidden = hidden.detach().requires_grad_()
        x: Any = (hidden, *beside)
        for index in range(1, len(stage.layers)):
            x = stage.run_layer(index, x)
        (gradient,) = torch.autograd.grad((x[..., :VOCAB] * weights).sum(), [hidden])
        outcomes.append((x[..., :VOCAB].detach()[0], gradient[0]))
    (logits, gradients), (other_logits, other_gradients) = outcomes
    assert torch.equal(logits[:start], other_logits[:start]) and torch.equal(logits[last:], other_logits[last:])
    assert torch.equal(gradients[:first], other_gradients[:first])
    assert torch.equal(gradients[last:], other_gradients[last:])
    assert not torch.equal(logits[start], other_logits[start])
    assert not torch.equal(gradients[first:last], other_gradients[first:last])
