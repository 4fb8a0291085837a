"""Multi-head latent attention against a loop in double precision, and generation. Layouts are rows of tests/matrix;
against transformers' models it is compared by test_conversion.py (deepseek-v2 and deepseek-v3)."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.manifest import find_checkpoint, read_manifest, trained_model
from megacore.config import ModelConfig
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import model_of
from megacore.layers.context import BuildContext
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.rotary import Rotary
from megacore.models.gpt import gpt_layers
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from tests.matrix.programs import LATENT
from tests.matrix.rows import LATENT_EXPERTS
from tests.parity.runs import make_config, make_trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [3, 12])
def test_scores_are_divided_by_the_root_of_the_query_however_wide_values_are(values: int) -> None:
    """Against a loop over positions and heads, in double precision, with the weights of the layer."""
    config = ModelConfig(
        num_attention_heads=2, hidden_size=16, multi_latent_attention=True, kv_lora_rank=6, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=values, position_embedding_type="rope", disable_bias_linear=True,
    ).resolve(seq_length=7, vocab_size=11)  # fmt: skip
    config = dataclasses.replace(config, q_lora_rank=None)
    rotary = Rotary.of(config)
    layer = LatentAttention(config, BuildContext(device=CPU, streams=RandomStreams(0, CPU)), "a", rotary=rotary)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    x = torch.randn(1, 7, 16, generator=generator)
    weight = {name: one.detach().double() for name, one in layer.named_parameters()}
    short = x[0].double() @ weight["key_value_down.weight"].t()
    queries = (x[0].double() @ weight["query.weight"].t()).unflatten(-1, (2, 8))
    both = (short[:, :6] @ weight["key_value.weight"].t()).unflatten(-1, (2, 4 + values))

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        angles = [position * 10_000.0 ** (-pair / 2) for pair in range(2)]
        pairs = [(vector[i] * math.cos(a) - vector[i + 2] * math.sin(a)) for i, a in enumerate(angles)]
        pairs += [(vector[i + 2] * math.cos(a) + vector[i] * math.sin(a)) for i, a in enumerate(angles)]
        return torch.stack(pairs)

    rows = []
    for i in range(7):
        heads = []
        for head in range(2):
            scores = torch.stack([
                queries[i, head, :4] @ both[j, head, :4]
                + turned(queries[i, head, 4:], i) @ turned(short[j, 6:], j)
                for j in range(i + 1)
            ])  # fmt: skip
            heads.append((scores / math.sqrt(8)).softmax(0) @ both[: i + 1, head, 4:])
        rows.append(torch.cat(heads) @ weight["output.weight"].t())
    torch.testing.assert_close(layer(x)[0].double(), torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_generates_what_the_trained_model_predicts(tmp_path: Path) -> None:
    changes = LATENT | LATENT_EXPERTS | {"train_iters": 1, "lr_warmup_iters": 0}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=CPU))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    stage = model_of(directory, partial(gpt_layers, model), CPU)
    tokens = [5, 9, 2]
    found = list(generate(stage, model, tokens, max_new_tokens=4, sampling=Sampling(temperature=0.0)))
    trained = trainer.model.chunks[0].eval()
    with torch.no_grad():
        for _ in range(4):
            tokens = [*tokens, int(trained(torch.tensor([tokens]))[0, -1, : model.vocab_size].argmax())]
    assert found == tokens[3:]
