"""A text that is read piece by piece gives the logits of the whole text, in every model of the table."""

from __future__ import annotations

import pytest
import torch

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
