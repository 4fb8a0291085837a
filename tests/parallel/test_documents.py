"""Packed documents through a block: each is as if it were alone, and padding gives no more than itself. On several
ranks they are rows of tests/matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config import ModelConfig, ResolvedModel
from megacore.layers.attention import alibi_of_rank
from megacore.layers.block import TransformerBlock
from megacore.layers.context import BuildContext
from megacore.layers.rotary import Rotary
from megacore.models.initialize import initialize
from megacore.models.spec import LayerSpec
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 1}
BASE: dict[str, Any] = {**SHAPE, "init_method_std": 0.3}
ROPE = ModelConfig(
    **BASE, num_query_groups=1, position_embedding_type="rope", qk_layernorm=True, normalization="RMSNorm",
    activation="geglu-exact", disable_bias_linear=True,
).resolve(seq_length=16)  # fmt: skip
ALIBI = ModelConfig(**BASE, position_embedding_type="alibi", parallel_residual=True).resolve(seq_length=16)
LENGTHS = (5, 3, 4)
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 3 + [3] * 4 + [0] * 4])
POSITIONS = torch.tensor([[*range(5), *range(3), *range(4), *range(4)]])


def stage_of(config: ResolvedModel, *, causal: bool, window: int | None, **context: Any) -> Stage:
    """One block, initialised by name."""
    place = BuildContext(device=CPU, streams=RandomStreams(0, CPU), **context)

    def build() -> TransformerBlock:
        return TransformerBlock(
            config,
            place,
            "blocks.0",
            causal=causal,
            window=window,
            rotary=Rotary.of(config),
            alibi=alibi_of_rank(config, place),
        )

    stage = Stage([LayerSpec(name="blocks.0", build=build, parameters=0)]).eval()
    initialize(stage.by_name().values(), config, seed=1)
    return stage


def packed() -> Tensor:
    return torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", [ROPE, ALIBI], ids=["rope", "alibi"])
def test_a_packed_document_is_as_if_it_were_alone(config: ResolvedModel, causal: bool, window: int | None) -> None:
    stage, x = stage_of(config, causal=causal, window=window), packed()
    together, documents, positions = stage((x, DOCUMENTS, POSITIONS))
    assert documents is DOCUMENTS
    assert positions is POSITIONS
    start = 0
    for length in LENGTHS:
        alone = stage(x[:, start : start + length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        start += length
    if config is ALIBI:  # distances are those between neighbours wherever a document begins
        assert torch.equal(stage((x, DOCUMENTS))[0], together)


@pytest.mark.parametrize("config", [ROPE, ALIBI], ids=["rope", "alibi"])
def test_neighbours_and_padding_change_no_bit(config: ResolvedModel) -> None:
    stage, before = stage_of(config, causal=False, window=None), packed()
    after = before.clone()
    after[:, 5:8], after[:, 12:] = 7.0, -9.0
    one, other = (stage((x, DOCUMENTS, POSITIONS))[0] for x in (before, after))
    same = (DOCUMENTS == 1) | (DOCUMENTS == 3)
    assert torch.equal(one[same], other[same])
