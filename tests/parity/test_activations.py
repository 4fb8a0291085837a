"""What a block keeps for backward is what docs/guides/memory.md derives, and at most what published formulas allow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megacore.config import ModelConfig, ResolvedConfig
from megacore.config.fields import field_infos
from megacore.ops import block_attention
from megacore.plan import activations
from megacore.plan.activations import Operator, attends_in_blocks
from tests.distributed import run_distributed
from tests.parity.activations import (
    activation_config,
    by_formula,
    kept_by_the_paper,
    kept_on_a_device,
    kept_per_block,
)

SEQUENCE_PARALLEL = {"sequence_parallel": True}
SELECTIVE, FULL = {"recompute": "selective"}, {"recompute": "full"}
LIGHT = {"recompute": "light"}
CASES: list[dict[str, Any]] = [{}, SELECTIVE, LIGHT, FULL]
Measured = list[tuple[dict[str, Any], ResolvedConfig, dict[Operator, float]]]  # case, its configuration, bytes kept
SPLIT_CASES = [*CASES, *(SEQUENCE_PARALLEL | case for case in CASES)]


def kept_in_all(rank: int, world_size: int, directory: str, cases: list[dict[str, Any]]) -> list[dict[Operator, float]]:
    """Each case in turn on the same ranks."""
    return [kept_per_block(rank, world_size, (world_size, 1, 1), directory, case) for case in cases]


DROPOUTS: tuple[dict[str, Any], ...] = ({}, {"attention_dropout": 0.1}, {"hidden_dropout": 0.0})


def cases_of(tp: int, precision: str) -> list[dict[str, Any]]:
    """Every way to keep less; on one rank with every kind of dropout, on more with two kinds each."""
    if tp == 1:
        return [{"precision": precision} | case | dropout for case in CASES for dropout in DROPOUTS]
    in_turn = [(case, DROPOUTS[1 + number % 2]) for number, case in enumerate(SPLIT_CASES)]
    return [{"precision": precision} | case | dropout for case, other in in_turn for dropout in ({}, other)]


@pytest.fixture(scope="module")
def kept_on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Measured]:
    """What `cases_of` keep on every rank, each measured once."""

    @cache
    def measure(tp: int, precision: str) -> Measured:
        directory, cases = str(tmp_path_factory.mktemp("run")), cases_of(tp, precision)
        found = run_distributed(kept_in_all, tp, directory, cases, timeout=120)
        return [
            (case, activation_config((tp, 1, 1), directory, **case), kept)
            for kept_by_rank in found
            for case, kept in zip(cases, kept_by_rank, strict=True)
        ]

    return measure


@pytest.mark.parametrize(
    ("tp", "precision"),
    [
        (1, "bf16"),
        (1, "fp32"),
        (2, "fp32"),
        (4, "bf16"),
        pytest.param(2, "bf16", marks=pytest.mark.slow),
        pytest.param(4, "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_block_keeps_what_the_formula_says(tp: int, precision: str, kept_on_ranks: Callable[..., Measured]) -> None:
    """On every rank, with every way to keep less, with and without either dropout; nothing is rounded, so 1%."""
    for case, config, kept in kept_on_ranks(tp, precision):
        assert kept == pytest.approx(by_formula(config), rel=0.01), case


ROPE = {"position_embedding_type": "rope"}
GROUPED: dict[str, Any] = {"num_query_groups": 2}
FAMILIES: list[dict[str, Any]] = [
    *({"activation": name} for name in field_infos(ModelConfig)["activation"].choices),
    {"normalization": "RMSNorm"},
    ROPE,
    GROUPED,
    GROUPED | ROPE,
    GROUPED | {"attention_dropout": 0.1},
    GROUPED | SELECTIVE | {"attention_dropout": 0.1},
    {"qk_layernorm": True},
    {"qk_layernorm": True, "normalization": "RMSNorm"} | ROPE,
    {"qk_layernorm": True, "qk_layernorm_per_head": True} | GROUPED | ROPE,
    {"norm_affine": False},
    {"norm_affine": False, "normalization": "RMSNorm"},
    LIGHT | {"norm_affine": False, "normalization": "RMSNorm"},
    {"norm_affine": False, "qk_layernorm": True, "normalization": "RMSNorm"} | GROUPED | ROPE,
    {"norm_affine": False, "qk_layernorm": True, "qk_layernorm_all_heads": True} | GROUPED,
    {"clip_qkv": 0.1} | GROUPED | ROPE,
    {"clip_qkv": 0.1},
    SELECTIVE | {"clip_qkv": 0.1} | GROUPED,
    {"clip_qkv": 0.1, "qk_layernorm": True} | GROUPED,
    {"parallel_residual": True, "disable_bias_linear": True},
    LIGHT | {"activation": "swiglu", "normalization": "RMSNorm"} | ROPE,
    LIGHT | {"activation": "geglu", "parallel_residual": True},
    LIGHT | {"activation": "relu"},
    LIGHT | {"activation": "relu2"},
    {"position_embedding_type": "alibi"},
    {"window_size": 16},
    {"attention": "fused-softmax"},
    {"attn_logit_softcapping": 5.0},
    {"attn_logit_softcapping": 5.0, "attention": "fused-softmax"},
    {"parallel_residual": True, "shared_parallel_norm": True},
    {"attention": "fused-softmax", "attention_dropout": 0.1},
    GROUPED | ROPE | {"activation": "swiglu", "normalization": "RMSNorm", "hidden_dropout": 0.0},
]


LONG: dict[str, Any] = {"seq_length": 1088, "max_position_embeddings": 1088, "num_attention_heads": 4}
IN_BLOCKS: list[dict[str, Any]] = [
    {"window_size": 100},
    {"position_embedding_type": "alibi"},
    {"attention_dropout": 0.1},
    {"attention_dropout": 0.1, "window_size": 100} | GROUPED | SELECTIVE,
    {"window_size": 100, "normalization": "RMSNorm"} | GROUPED | ROPE,
]


def test_long_sequences_keep_neither_masks_nor_weights(tmp_path: Path) -> None:
    """They are attended to in blocks: of s x s numbers not one is kept, and the formula knows it."""
    cases = [LONG | case for case in IN_BLOCKS]
    for case, kept in zip(cases, kept_in_all(0, 1, str(tmp_path), cases), strict=True):
        config = activation_config((1, 1, 1), str(tmp_path), **case)
        assert attends_in_blocks(config, config.model, on_cpu=True)
        assert kept == pytest.approx(by_formula(config), rel=0.01), case


def test_the_planner_knows_where_attention_takes_blocks(tmp_path: Path) -> None:
    """It has the rule a second time, for it does not load torch."""
    attention = import_module("megacore.ops.attention")  # the package exports the function of this name
    assert activations._BLOCK == attention.BLOCK
    for length, window, dropout, on_cpu in itertools.product((1024, 1025), (None, 8), (0.0, 0.1), (False, True)):
        config = activation_config(
            (1, 1, 1), str(tmp_path), seq_length=length, window_size=window, attention_dropout=dropout
        )
        expected = attention.takes_blocks(length, masked=window is not None, dropout=dropout, on_cpu=on_cpu)
        assert attends_in_blocks(config, config.model, on_cpu=on_cpu) == expected
    assert activations._ALIBI_BLOCK == block_attention._ALIBI_BLOCK


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_blocks_of_every_family_keep_what_the_formula_says(precision: str, tmp_path: Path) -> None:
    cases = [{"precision": precision} | case for case in FAMILIES]
    for case, kept in zip(cases, kept_in_all(0, 1, str(tmp_path), cases), strict=True):
        expected = by_formula(activation_config((1, 1, 1), str(tmp_path), **case))
        assert kept == pytest.approx(expected, rel=0.01), case


LLAMA = (
    GROUPED
    | ROPE
    | {
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "hidden_dropout": 0.0,
    }
)


MODELS: dict[str, dict[str, Any]] = {"gpt2-dropout": {}, "gpt2": {"hidden_dropout": 0.0}, "llama": LLAMA}
WHOLE: dict[str, Any] = {"sequence_parallel": False}
APART = SEQUENCE_PARALLEL | {"reproducible": True}  # gradients of inputs and of weights
# Where tp is 2, each kind of parallelism with one model, and the most frequent kind with two; in `make test-slow` all.
IN_TURN = [(WHOLE, "gpt2"), (SEQUENCE_PARALLEL, "gpt2-dropout"), (SEQUENCE_PARALLEL, "llama"), (APART, "llama")]


@pytest.mark.parametrize(
    ("tp", "parallel", "model"),
    [
        *((1, WHOLE, model) for model in MODELS),
        *(
            pytest.param(2, parallel, model, marks=[] if (parallel, model) in IN_TURN else [pytest.mark.slow])
            for parallel in (WHOLE, SEQUENCE_PARALLEL, APART)
            for model in MODELS
        ),
    ],
    ids=str,
)
def test_a_block_on_a_device_keeps_what_the_formula_says(
    tp: int, parallel: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """With the operators of a GPU, on fake tensors; not a byte more or less."""
    for case in CASES:
        changes = {"precision": "bf16"} | parallel | MODELS[model] | case
        expected = by_formula(activation_config((tp, 1, 1), str(tmp_path), **changes), on_cpu=False)
        assert kept_on_a_device((tp, 1, 1), str(tmp_path), changes) == expected, case


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt2-dropout", "llama"])
def test_a_compiled_block_keeps_what_the_formula_says(model: dict[str, Any], tmp_path: Path) -> None:
    """With `--recompute light` no less: compiled code decides by itself. It does not say which operator keeps what."""
    cases = [{"precision": "bf16", "compile": True, "compile_backend": "aot-eager"} | model | c for c in ({}, LIGHT)]
    for case, kept in zip(cases, kept_in_all(0, 1, str(tmp_path), cases), strict=True):
        expected = sum(by_formula(activation_config((1, 1, 1), str(tmp_path), **case)).values())
        assert sum(kept.values()) == pytest.approx(expected, rel=0.001), case


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_sixteen_bits_keep_no_more_than_published(tp: int, kept_on_ranks: Callable[..., Measured]) -> None:
    """With hidden dropout and fused attention; the norms' statistics, which the paper leaves out, are within the 1%."""
    without_changes = [row for row in kept_on_ranks(tp, "bf16") if not row[0].keys() & {*DROPOUTS[1], *DROPOUTS[2]}]
    assert len(without_changes) == tp * len(CASES if tp == 1 else SPLIT_CASES)
    for case, config, kept in without_changes:
        paper = kept_by_the_paper(config)
        total = sum(kept.values())
        assert total <= 1.01 * paper, case
        if case.get("recompute") in ("selective", "full"):  # the paper has no other
            assert total == pytest.approx(paper, rel=0.01), case
