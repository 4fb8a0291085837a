"""The model's section: what cannot be, and what would be ignored, is refused by flag and with the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megacore.config import ModelConfig, ResolvedConfig, ResolvedModel, TrainingConfig, sections_of, validate
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.fields import field_infos
from megacore.config.layer_pattern import parse_pattern, pattern_of, repeated
from tests.unit.test_config import make

ROPE = {"position_embedding_type": "rope"}
# Values, --tp, and words that the one problem must hold.
LATENT = {**ROPE, "multi_latent_attention": True, "disable_bias_linear": True}
WRONG: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    (
        {"num_query_groups": 5},
        1,
        ("--num-query-groups 5", "--num-attention-heads 12: use 1, 2, 3, 4, 6 or 12"),
    ),
    (
        {"num_attention_heads": 12, "num_query_groups": 3},
        2,
        ("--tp 2", "--num-query-groups 3", "use --tp 1"),
    ),
    (
        {"num_attention_heads": 8, "num_query_groups": 1, "kv_channels": 2},
        8,
        ("--tp 8 must divide --num-query-groups 1", "4 rows", "use --tp 1, 2 or 4"),
    ),
    ({"normalization": "layernorm"}, 1, ("--normalization layernorm is not known", "LayerNorm or RMSNorm")),
    ({"activation": "silu"}, 1, ("--activation silu is not known", "swiglu")),
    ({"position_embedding_type": "rotary"}, 1, ("rotary is not known", "learned, rope, alibi or none")),
    (
        {"rotary_base": 500_000.0},
        1,
        ("--rotary-base 500000 has no effect", "use --position-embedding-type rope"),
    ),
    ({"rotary_percent": 0.5, "position_embedding_type": "alibi"}, 1, ("--rotary-percent 0.5 has no effect", "alibi")),
    ({"rope_scaling": "llama3"}, 1, ("--rope-scaling llama3 has no effect with --position-embedding-type learned",)),
    ({**ROPE, "rope_scaling_factor": 4.0}, 1, ("--rope-scaling-factor 4 has no effect", "--rope-scaling none")),
    (
        {**ROPE, "rope_scaling": "linear", "rope_original_max_positions": 8192},
        1,
        ("--rope-original-max-positions 8192 has no effect with --rope-scaling linear", "llama3"),
    ),
    (
        {**ROPE, "rope_scaling": "dynamic", "rope_original_max_positions": 64, "rope_low_freq_factor": 2.0},
        1,
        ("--rope-low-freq-factor 2 has no effect with --rope-scaling dynamic",),
    ),
    ({**ROPE, "rope_scaling": "llama3"}, 1, ("--rope-scaling llama3 needs --rope-original-max-positions",)),
    (
        {**ROPE, "rope_scaling": "llama3", "rope_original_max_positions": 64, "rope_low_freq_factor": 4.0},
        1,
        ("--rope-low-freq-factor 4 must be below --rope-high-freq-factor 4",),
    ),
    ({**ROPE, "rope_scaling": "yarn"}, 1, ("--rope-scaling yarn needs --rope-original-max-positions",)),
    (
        {**ROPE, "rope_scaling": "yarn", "rope_original_max_positions": 64, "rope_beta_fast": 0.5},
        1,
        ("--rope-beta-fast 0.5 must be above --rope-beta-slow 1",),
    ),
    (
        {**ROPE, "rope_scaling": "llama3", "rope_original_max_positions": 64, "rope_mscale": 1.0},
        1,
        ("--rope-mscale 1 has no effect with --rope-scaling llama3", "use --rope-scaling yarn"),
    ),
    ({"qk_layernorm_all_heads": True}, 1, ("--qk-layernorm-all-heads has no effect with no --qk-layernorm",)),
    ({"qk_layernorm_per_head": True}, 1, ("--qk-layernorm-per-head has no effect with no --qk-layernorm",)),
    (
        {"qk_layernorm": True, "qk_layernorm_all_heads": True, "qk_layernorm_per_head": True},
        1,
        ("--qk-layernorm-all-heads normalises all heads together", "leave one of them out"),
    ),
    ({**LATENT, "qk_layernorm": True, "qk_layernorm_per_head": True}, 1, ("--qk-layernorm-per-head has no effect",)),
    ({"kv_lora_rank": 8}, 1, ("--kv-lora-rank 8 has no effect with no --multi-latent-attention",)),
    ({**LATENT, "position_embedding_type": "none"}, 1, ("--multi-latent-attention needs --position-embedding-type",)),
    ({**LATENT, "disable_bias_linear": False}, 1, ("--multi-latent-attention needs --disable-bias-linear",)),
    ({**LATENT, "num_query_groups": 2}, 1, ("--num-query-groups 2 has no effect with --multi-latent-attention",)),
    ({**LATENT, "kv_channels": 16}, 1, ("--kv-channels 16 has no effect with --multi-latent-attention",)),
    ({**LATENT, "rotary_percent": 0.5}, 1, ("--rotary-percent 0.5 has no effect with --multi-latent-attention",)),
    ({**LATENT, "qk_rope_head_dim": 9}, 1, ("--qk-rope-head-dim 9 is rotated in pairs", "8 or 10")),
    ({**ROPE, "kv_channels": 9}, 1, ("a head of 9 is 9 dimensions", "in pairs", "--rotary-percent 0.888889")),
    ({**ROPE, "rotary_percent": 0.01}, 1, ("a head of 64 is 0 dimensions", "--rotary-percent 0.03125")),
    ({"normalization": "RMSNorm", "norm_bias": False}, 1, ("--no-norm-bias has no effect", "RMSNorm", "leave it out")),
    ({"add_qkv_bias": True}, 1, ("--add-qkv-bias has no effect without --disable-bias-linear",)),
    ({"window_size": 0}, 1, ("--window-size 0", "use 1 to 100000000", "leave the flag out")),
    ({"rope_scaling_factor": 0.5, **ROPE, "rope_scaling": "linear"}, 1, ("--rope-scaling-factor 0.5", "1 or more")),
]


@pytest.mark.parametrize("values, tp, words", WRONG, ids=[str(values) for values, _, _ in WRONG])
def test_what_cannot_be_is_refused(values: dict[str, Any], tp: int, words: tuple[str, ...]) -> None:
    (problem,) = validate(make(tp=tp, **values), tp)
    assert all(word in problem for word in words), problem


RIGHT: list[tuple[dict[str, Any], int]] = [
    ({"num_query_groups": 4}, 2),
    ({"num_query_groups": 2}, 4),
    ({"num_attention_heads": 8, "num_query_groups": 1}, 8),
    ({"hidden_size": 100, "kv_channels": 10}, 1),
    ({**ROPE, "rope_scaling": "linear", "rope_scaling_factor": 2.0}, 1),
    ({"disable_bias_linear": True, "add_qkv_bias": True, "norm_bias": False}, 1),
]


@pytest.mark.parametrize("values, tp", RIGHT, ids=[str(values) for values, _ in RIGHT])
def test_what_can_be_is_taken(values: dict[str, Any], tp: int) -> None:
    assert validate(make(tp=tp, **values), tp) == []


def test_sizes_that_follow_are_filled() -> None:
    model = make(num_query_groups=4, seq_length=77).resolve(1).model
    assert (model.num_query_groups, model.kv_channels, model.ffn_hidden_size) == (4, 64, 4 * 768)
    assert model.max_position_embeddings == 77
    assert make().resolve(1).model.num_query_groups == ModelConfig().num_attention_heads


def test_a_resolved_section_has_no_unknown_sizes_and_the_ranges_of_the_one_it_narrows() -> None:
    model = ModelConfig(vocab_size=8).resolve(seq_length=16)
    assert (model.vocab_size, model.max_position_embeddings, model.ffn_hidden_size) == (8, 16, 4 * 768)
    assert ModelConfig().resolve(seq_length=16, vocab_size=9).vocab_size == 9
    assert list(field_infos(ResolvedModel)) == list(field_infos(ModelConfig))  # the order of config.toml
    for name, info in field_infos(ResolvedModel).items():
        declared = field_infos(ModelConfig)[name]
        assert (info.range, info.choices, info.flags) == (declared.range, declared.choices, declared.flags)
    for value, message in ((None, "--vocab-size is missing"), (0, "--vocab-size 0 must be at least 1")):
        (problem,) = dataclasses.replace(model, vocab_size=value).problems()  # type: ignore[arg-type]
        assert problem.startswith(message)
    with pytest.raises(TypeError, match="vocab_size"):
        ResolvedModel(num_query_groups=1, kv_channels=1, ffn_hidden_size=1, max_position_embeddings=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="vocabulary"):
        make(vocab_size=None).resolve(1)


def test_a_resolved_configuration_is_of_its_own_kind() -> None:
    gpt, bert = make().resolve(1), BertConfig(training=TrainingConfig(train_iters=1)).resolve(1, vocab_size=9)
    assert (type(gpt), type(bert)) == (ResolvedConfig, ResolvedBertConfig)
    assert type(bert.resolve(1)) is ResolvedBertConfig
    assert list(sections_of(ResolvedBertConfig)) == list(sections_of(BertConfig))
    assert (bert.bert.mask_prob, bert.bert.sentence_task, bert.presets) == (0.15, "nsp", BertConfig.presets)


@pytest.mark.parametrize(
    ("text", "kinds", "shortest"),
    [("w,f", "wfwfwf", "w,f"), ("5*w,f", "wwwwwf", "5*w,f"), ("f,f,n", "ffnffn", "2*f,n"), ("2*w,w", "wwwwww", "w")],
)
def test_a_pattern_of_attention_repeats(text: str, kinds: str, shortest: str) -> None:
    assert repeated(parse_pattern(text), 6) == kinds
    assert pattern_of(kinds) == shortest


_LONGROPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rope_scaling": "longrope",
    "rope_original_max_positions": 16,
    "rope_long_factors": ",".join(["1.5"] * 32),
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_pattern": "w,x", "window_size": 4}, "'x' is not known: use w, f or n"),
        ({"attention_pattern": "w,f"}, "--attention-pattern w,f has blocks with a window: use --window-size"),
        ({"attention_pattern": "f", "window_size": 4}, "--window-size 4 has no effect with --attention-pattern f"),
        ({"attention_pattern": "f,n"}, "has blocks without rotary positions, and --position-embedding-type learned"),
        ({"window_rotary_base": 5.0}, "--window-rotary-base 5 has no effect with no --attention-pattern"),
        ({"norm_placement": "after", "parallel_residual": True}, "is not possible with --parallel-residual"),
        ({"shared_parallel_norm": True}, "--shared-parallel-norm has no effect with no --parallel-residual"),
        (
            {"position_offset": 2, "position_embedding_type": "rope"},
            "--position-offset 2 has no effect with --position-",
        ),
        ({**_LONGROPE, "rope_short_factors": "1,x"}, "--rope-short-factors: 'x' is not a number: give 32 numbers"),
        ({**_LONGROPE, "rope_short_factors": "1,2"}, "--rope-short-factors has 2 numbers for 32 rotated pairs of dim"),
        ({**_LONGROPE, "rope_long_factors": None}, "longrope needs --rope-long-factors: give 32 numbers"),
        ({"rope_long_factors": "1"}, "--rope-long-factors 1 has no effect with --position-embedding-type learned"),
        ({"attn_logit_softcapping": -1.0}, "--attn-logit-softcapping -1 must be above 0"),
        ({"add_mlp_bias": True}, "--add-mlp-bias has no effect without --disable-bias-linear"),
    ],
    ids=str,
)
def test_fields_of_newer_families_need_each_other(fields: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in ModelConfig(**fields).problems())
