"""What a block with latent attention keeps for backward is what the planner's formula says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.activations import activation_config, by_formula, kept_on_a_device, kept_per_block

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
}
MODELS: dict[str, dict[str, Any]] = {
    "narrow values": {},
    "values as wide as keys": {"v_head_dim": 24},
    "wide values, without norms": {"q_lora_rank": None, "v_head_dim": 28, "qk_layernorm": False},
}
CASES = [LATENT | model | {"recompute": kind} for model in MODELS.values() for kind in ("none", "selective", "light")]


def kept_in_all(rank: int, tp: int, directory: str, cases: list[dict[str, Any]]) -> list[float]:
    return [sum(kept_per_block(rank, tp, (tp, 1, 1), directory, case).values()) for case in cases]


@pytest.mark.parametrize(
    ("tp", "more"),
    [
        (1, {"precision": "fp32"}),
        pytest.param(1, {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(2, {"precision": "fp32", "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_block_keeps_what_the_formula_says(tp: int, more: dict[str, Any], tmp_path: Path) -> None:
    cases = [case | more for case in CASES]
    for of_rank in run_distributed(kept_in_all, tp, str(tmp_path), cases, timeout=120):
        for case, kept in zip(cases, of_rank, strict=True):
            expected = sum(by_formula(activation_config((tp, 1, 1), str(tmp_path), **case)).values())
            assert kept == pytest.approx(expected, rel=0.001), case


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_block_on_a_device_keeps_what_the_formula_says(tp: int, tmp_path: Path) -> None:
    """With the operators of a GPU, on fake tensors; not a byte more or less."""
    for case in CASES:
        for split in (False, True)[:tp]:
            changes = case | {"precision": "bf16", "sequence_parallel": split}
            expected = by_formula(activation_config((tp, 1, 1), str(tmp_path), **changes), on_cpu=False)
            kept = kept_on_a_device((tp, 1, 1), str(tmp_path), changes)
            assert sum(kept.values()) == pytest.approx(sum(expected.values()), rel=1e-9), case
