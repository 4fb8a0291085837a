"""Multi-head latent attention: every layout computes what one process does, and values may be wider than keys.

Against transformers' models it is compared by test_conversion.py (deepseek-v2 and deepseek-v3).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import ModelConfig
from megacore.layers.context import BuildContext
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.rotary import Rotary
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.random import RandomStreams
from tests.distributed import run_distributed
from tests.matrix.programs import LATENT
from tests.parity.runs import Layout, Outcome, agree, make_config, train_on

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "short queries": {},
    "wide values": {"q_lora_rank": None, "v_head_dim": 14, "rope_mscale_all_dim": None, "qk_layernorm": False},
    "packed": {"reset_attention_mask": True, "reset_position_ids": True, "window_size": 5},
}
Case = tuple[str, Layout, dict[str, Any]]
FEW: list[Case] = [
    ("short queries", (4, 1, 1), {"sequence_parallel": True, "recompute": "selective"}),
    ("wide values", (2, 2, 1), {"schedule": "zero-bubble"}),
]
MORE: list[Case] = [
    ("short queries", (4, 1, 1), {}),
    ("short queries", (2, 1, 2), {"sequence_parallel": True, "zero_stage": 3, "recompute": "full"}),
    ("short queries", (2, 2, 1), {"schedule": "zero-bubble", "sequence_parallel": True}),
    ("short queries", (1, 1, 4), {"zero_stage": 2, "recompute": "light"}),
    ("short queries", (2, 1, 2), {"reproducible": True}),
    ("short queries", (2, 1, 1), {"cp": 2, "cp_comm": "ring", "sequence_parallel": True}),
    ("short queries", (2, 1, 1), {"cp": 2, "cp_comm": "allgather"}),
    ("wide values", (1, 1, 2), {"cp": 2, "cp_comm": "ulysses", "zero_stage": 1}),
    ("wide values", (1, 2, 1), {"cp": 2, "cp_comm": "ring", "recompute": "selective"}),
    ("wide values", (4, 1, 1), {"sequence_parallel": True}),
    ("wide values", (2, 1, 2), {"attention": "fused-softmax", "loss_chunks": 2}),
    ("packed", (2, 2, 1), {"sequence_parallel": True}),
    ("packed", (2, 1, 1), {"cp": 2, "cp_comm": "allgather", "sequence_parallel": True}),
    ("packed", (1, 1, 1), {"cp": 4, "cp_comm": "ring"}),
    ("packed", (2, 1, 1), {"cp": 2, "cp_comm": "ulysses"}),
]


def train_all(
    rank: int, world_size: int, cases: list[Case], directory: str
) -> tuple[dict[str, Outcome], list[Outcome]]:
    """One process of each model, dealt out to the ranks, and every layout, all ranks together."""
    models = list(dict.fromkeys(model for model, _, _ in cases))[rank::world_size]
    alone = {}
    for model in models:
        config = make_config((1, 1, 1), f"{directory}/{rank}", **LATENT | MODELS[model])
        alone[model] = train_on(Mesh(device=CPU), config)
    found = []
    for model, layout, changes in cases:
        config = make_config(layout, directory, **LATENT | MODELS[model] | changes)
        found.append(train_on(build_mesh(config.parallel), config))
    return alone, found if rank == 0 else []


@pytest.mark.parametrize("cases", [FEW, *(pytest.param(MORE[i : i + 5], marks=pytest.mark.slow) for i in (0, 5, 10))])
def test_it_is_the_same_on_every_layout(cases: list[Case], tmp_path: Path) -> None:
    replies = run_distributed(train_all, 4, cases, str(tmp_path), timeout=300)
    alone = {model: outcome for outcomes, _ in replies for model, outcome in outcomes.items()}
    for (model, layout, changes), found in zip(cases, replies[0][1], strict=True):
        print(model, layout, changes)  # shown where it fails
        agree(found, alone[model])


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
