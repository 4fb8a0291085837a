"""A text that is read piece by piece gives the logits of the whole text, in every model of the table; a packed
sample is its documents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.inference.generate import Sampling, generate
from megacore.inference.key_values import KeyValues
from megacore.layers.attention import SelfAttention
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers, next_token_logits
from megacore.models.initialize import RandomWeights
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.matrix.programs import PROGRAMS, Changes
from tests.parity.hf_models import PLAIN, VOCAB, make_model, require_same_gradients, twin_of
from tests.parity.runs import make_config

CPU, POSITIONS, PIECES = torch.device("cpu"), 24, (1, 5, 1, 1, 9, 1)
# A longer text turns earlier positions otherwise, or leaves tokens out of their experts.
WITHOUT = {"stretched", "phi longrope", "capacity", "first", "padded", "limited"}
MODELS = PROGRAMS | {"mamba": {**PROGRAMS["deltanet"], "layer_pattern": "m,f"}}


def model(changes: Changes) -> tuple[Stage, ResolvedModel, KeyValues | None]:
    config = make_config((1, 1, 1), "unused", **changes, max_position_embeddings=POSITIONS).model
    stage = Stage(gpt_layers(config, BuildContext(device=CPU, streams=RandomStreams(1, CPU)))).eval()
    RandomWeights(config, seed=3).fill(stage.by_name().values())
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    return stage, config, KeyValues.of(stage, config, POSITIONS)


@pytest.mark.parametrize("name", [name for name, changes in MODELS.items() if "bert_style" not in changes])
@torch.no_grad()
def test_pieces_have_the_logits_of_the_whole(name: str) -> None:
    stage, _, read = model({**MODELS[name], "mtp_num_layers": 0})  # blocks that generation leaves out
    assert (read is None) == (name in WITHOUT)
    if read is None:
        return
    text = torch.randint(0, 64, (sum(PIECES),), generator=torch.Generator().manual_seed(5)).tolist()
    for size in PIECES:
        with read.laid_out():
            found = read.next_logits(text[read.length : read.length + size])
        expected = next_token_logits(stage(torch.tensor([text[: read.length]])), len(found))[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "llama", "stretched", "deltanet", "mamba"])
@torch.no_grad()
def test_generation_goes_on_beyond_the_positions(name: str) -> None:
    """Then the beginning is left out, and with it every position changes."""
    stage, config, _ = model(MODELS[name])
    tokens = [3, 1, 4]
    found = list(generate(stage, config, tokens, max_new_tokens=POSITIONS + 5, sampling=Sampling(temperature=0.0)))
    for _ in found:
        tokens += [int(next_token_logits(stage(torch.tensor([tokens[-POSITIONS:]])), config.vocab_size).argmax())]
    assert found == tokens[3:] and all(parameter.is_contiguous() for parameter in stage.parameters())


class Backwards(SelfAttention):
    """Looks at later positions beside its heads."""

    def forward(self, x: torch.Tensor, *where: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x) + x.flip(1)


def test_a_model_with_a_layer_of_a_program_is_read_whole() -> None:
    for part in ("block", "attention", "mlp", "others"):
        stage, config, _ = model({})
        block = stage.layers[1]
        if part == "block":
            stage.layers[1] = torch.nn.Identity()
        elif part == "others":
            stage.layers = torch.nn.ModuleList([block])
        elif part == "mlp":
            block.mlp = torch.nn.Identity()
        else:
            block.attention.__class__ = Backwards
        assert KeyValues.of(stage, config, POSITIONS) is None, part


# ---- packed samples


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
