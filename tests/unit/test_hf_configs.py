"""What a config.json says that megacore cannot represent exactly is refused by the field's name; what it says in
another spelling is understood."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megacore.config import ExpertsConfig, ModelConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.config.presets import GPT_PRESETS
from megacore.errors import CheckpointError
from megacore.models.hf.families import FAMILIES, describe_model, family_of
from megacore.models.hf.family import same_bert

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 11},
    "bloom": {"n_layer": 2, "hidden_size": 8, "n_head": 2, "vocab_size": 11},
}
_REST = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11}
SMALL |= {name: {**_REST, "head_dim": 4, "intermediate_size": 16} for name in ("llama", "mistral", "qwen2", "qwen3")}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SMALL |= dict.fromkeys(("qwen2_moe", "qwen3_moe"), SMALL["qwen2"] | _EXPERTS)
SMALL |= {"olmoe": SMALL["qwen2"] | {"num_experts": 4, "num_experts_per_tok": 2}}
SMALL |= {"mixtral": SMALL["mistral"] | {"num_local_experts": 4, "num_experts_per_tok": 2}}
_LATENT = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 3}
_DEEPSEEK = {**_REST, **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DEEPSEEK |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "intermediate_size": 16, "max_position_embeddings": 32}
SMALL |= {"deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK | {"n_group": 2, "topk_group": 1}}
SMALL |= dict.fromkeys(("granite", "smollm3", "olmo", "olmo2", "phi3", "starcoder2", "gemma", "gemma2"), SMALL["llama"])
SMALL |= {"stablelm": SMALL["llama"] | {"head_dim": 8}}
SMALL |= {"falcon": {k: v for k, v in _REST.items() if k != "num_key_value_heads"}, "gptj": SMALL["gpt2"]}
SMALL |= dict.fromkeys(("phi", "cohere", "cohere2", "olmo3", "exaone4", "glm", "glm4"), SMALL["llama"])
SMALL |= dict.fromkeys(("nemotron", "seed_oss", "ernie4_5", "helium", "arcee"), SMALL["llama"])
SMALL |= {"ministral3": SMALL["llama"] | {"max_position_embeddings": 16384}}
SMALL |= {"gpt_neo": {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 11}}
SMALL["gpt_neo"] |= {"max_position_embeddings": 16, "attention_types": [[["global", "local"], 1]]}
SMALL["gptj"] = SMALL["gptj"] | {"rotary_dim": 2}
SMALL |= {"opt": {**SMALL["falcon"], "ffn_dim": 16}}
SMALL |= {"gemma3_text": SMALL["llama"], "gpt_bigcode": SMALL["gpt2"]}
SMALL |= {"mpt": {"n_layers": 2, "d_model": 8, "n_heads": 2, "max_seq_len": 16, "vocab_size": 11}}
SMALL |= {"gpt_neox": {**_REST, "intermediate_size": 16, "rotary_pct": 0.5}}
del SMALL["gpt_neox"]["num_key_value_heads"]
SMALL |= {name: {k: v for k, v in SMALL["gpt_neox"].items() if k != "rotary_pct"} for name in ("bert", "modernbert")}
SMALL |= dict.fromkeys(("roberta", "xlm-roberta", "camembert"), SMALL["bert"])


_FACTORS = {"type": "longrope", "short_factor": [1.0, 2], "long_factor": [1.5, 4.0]}


def read(model_type: str, /, **changes: Any) -> ResolvedModel:
    values = {"model_type": model_type, **SMALL[model_type], **changes}
    return family_of(values, "config.json").to_model(values, "config.json")


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu', but megacore has only 'gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"n_layer": "2"}, "n_layer is '2', not a whole number"),
        ("gpt2", {"n_layer": True}, "n_layer is True, not a whole number"),
        ("gpt2", {"n_layer": 0}, "config.json: n_layer 0 must be at least 1 and at most 10000$"),
        ("gpt2", {"n_head": 3}, "n_embd 8 must be a multiple of n_head 3$"),
        ("gpt2", {"vocab_size": None}, "vocabulary or of the context is null"),
        ("gpt2", {"num_hidden_layers": 3}, "n_layer is 2, but num_hidden_layers is 3"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        (
            "gpt2",
            {"quantization_config": {"bits": 4}},
            "quantization_config is {'bits': 4}, but megacore has only None",
        ),
        (
            "gpt2",
            {"auto_map": {"AutoModel": "m.M"}},
            "auto_map is .*, but megacore has only None or {}; .* --ignore-config-field auto_map$",
        ),
        ("gpt2", {"model_type": "gpt3"}, "model_type is 'gpt3', .*related ones that it has: gptj and gpt2; all"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact is true with pretraining_tp 2"),
        ("gpt2", {"new": 1}, "new is a field .* --ignore-config-field new$"),
        ("qwen2", {"use_mrope": True}, "use_mrope is a field that megacore does not know"),
        ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures is .*GPT2DoubleHeadsModel"),
        ("llama", {"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_scaling.rope_type is 'su'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "beta_fast": 1}}, "rope_beta_fast 1 must be above"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "truncate": 1}}, "rope_scaling.truncate is '1', not true"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "attention_factor": 0}}, "attention_factor is 0"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is 'None', not a list"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is 'None', not a number"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}},
            "rope_scaling.attention_factor is a field that megacore does not know",
        ),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling is '\[1\]', not an object"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"attention_bias": "yes"}, "attention_bias is 'yes' and mlp_bias 'False', not true or false"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 must divide num_attention_heads 2$"),
        ("mistral", {"sliding_window": 0}, "sliding_window is '0'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("olmoe", {"clip_qkv": -8}, "clip_qkv -8 must be above 0"),
        ("olmo", {"clip_qkv": "8"}, "clip_qkv is '8', not a number"),
        ("olmo", {"rms_norm_eps": 1e-6}, "rms_norm_eps is a field that megacore does not know"),
        ("mpt", {"attn_config": {"clip_qkv": True}}, "clip_qkv is True, not a number"),
        ("olmoe", {"head_dim": 8}, "head_dim is 8, but the norms of this family are as wide as hidden_size"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 must be at most num_local_experts 4$"),
        ("mixtral", {"num_local_experts": "4"}, "num_local_experts is '4', not a whole number"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, but megacore has only 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, not true or false"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group is 'None', and topk_group 'None'"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method is 'best'"),
        ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps is not 1e-06"),
        ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts is 'None'"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "topk_group": 1}, "num_experts_per_tok is 1"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim is 8"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim 5 is rotated in pairs"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is false"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "kinds of layers that megacore does not know"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias is False"),
        ("gpt_neox", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("gpt_neox", {"rotary_pct": 0.3}, "rotary_percent 0.3 of a head"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is"),
        ("bloom", {"n_inner": 16}, "n_inner is 16"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size is 3"),
        ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("bert", {"is_decoder": True}, "is_decoder is True"),
        ("roberta", {"type_vocab_size": 3}, "type_vocab_size is '3', but megacore has only 1 or 2"),
        ("camembert", {"type_vocab_size": 3}, "type_vocab_size is '3', but megacore has only 1 or 2"),
        (
            "ministral3",
            {"max_position_embeddings": 262144},
            "llama_4_scaling_beta is .*from position 16384 on.* max_position_embeddings 16384 the model is the same",
        ),
        ("ministral3", {"rope_parameters": 3}, "rope_parameters is '3', not an object"),
        ("roberta", {"pad_token_id": None}, "pad_token_id is 'None', not a row of the position table"),
        (
            "modernbert",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types is not one global block and then a fixed number of local ones",
        ),
        ("modernbert", {"attention_bias": True}, "attention_bias is True"),
        ("modernbert", {"norm_bias": True}, "norm_bias is True"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.full_attention has a rope scaling",
        ),
    ],
)
def test_a_field_is_refused_by_name(model_type: str, changes: dict[str, Any], problem: str) -> None:
    read(model_type)
    with pytest.raises(CheckpointError, match=problem):
        read(model_type, **changes)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_fields_without_effect_refuse_nothing(model_type: str) -> None:
    """As checkpoints of the hub have them: of other libraries, of training, or of features that are off."""
    written = {
        "use_mrope": False,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "unsloth_fixed": True,
        "unsloth_version": "2026.1",
        "max_sequence_length": 4096,
        "embedding_dropout": 0.3,
        "some_pdrop": None,
        "quantization_config": None,
    }
    values = {"model_type": model_type, **SMALL[model_type]}
    family = family_of(values, "config.json")
    described = family.describe(values | written, "config.json")
    assert described.unknown == ()
    assert described.model == family.to_model(values, "config.json")
    assert family.describe(values | {"later": 1, "newer": None}, "config.json").unknown == ("later", "newer")


@pytest.mark.parametrize(
    ("model_type", "changes", "fields"),
    [
        ("llama", {"attention_bias": True}, {"add_qkv_bias": True, "add_attention_output_bias": True}),
        ("llama", {"mlp_bias": True}, {"disable_bias_linear": True, "add_mlp_bias": True}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, {"attention_pattern": "f,w"}),
        ("smollm3", {"no_rope_layer_interval": 2}, {"attention_pattern": "f,n"}),
        ("smollm3", {"no_rope_layers": [1, 1]}, {"attention_pattern": None, "window_size": None}),
        ("mixtral", {}, {"rotary_base": 1e6}),  # as transformers has it where the file does not
        ("smollm3", {}, {"rotary_base": 2e6}),
        ("granite", {"attention_multiplier": 0.5}, {"attention_multiplier": 0.5}),
        ("phi3", {"partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}),
        (
            "phi3",
            {"rope_scaling": _FACTORS, "max_position_embeddings": 8192, "original_max_position_embeddings": 1024},
            {
                "rope_scaling": "longrope",
                "rope_scaling_factor": 8.0,
                "rope_original_max_positions": 1024,
                "rope_short_factors": "1.0,2.0",
                "rope_long_factors": "1.5,4.0",
            },
        ),
        ("stablelm", {}, {"rotary_percent": 0.25} | {"add_qkv_bias": False}),
        ("gemma", {"hidden_size": 64}, {"embedding_multiplier": 8.0, "layernorm_1p": True}),
        (
            "gemma3_text",
            {"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 5e3, "sliding_window": 9},
            {"attention_pattern": "w,f", "rotary_base": 1e5, "window_rotary_base": 5e3, "window_size": 9},
        ),
        ("gemma2", {}, {"attention_pattern": "w,f", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attn_logit_softcapping": None, "norm_placement": "both"}),
        ("gpt_bigcode", {}, {"num_query_groups": 1}),
        ("stablelm", {"use_parallel_residual": True}, {"parallel_residual": True, "shared_parallel_norm": True}),
        ("stablelm", {"qk_layernorm": True}, {"qk_layernorm": True, "qk_layernorm_per_head": True}),
        ("opt", {}, {"position_offset": 2, "activation": "relu"}),
        ("falcon", {}, {"num_query_groups": 1, "shared_parallel_norm": True}),
        ("falcon", {"new_decoder_architecture": True}, {"num_query_groups": 2, "shared_parallel_norm": False}),
        ("falcon", {"multi_query": False, "parallel_attn": False}, {"parallel_residual": False}),
        ("phi", {}, {"rotary_percent": 0.5, "shared_parallel_norm": True, "add_output_layer_bias": True}),
        ("phi", {"num_key_value_heads": None, "qk_layernorm": True}, {"num_query_groups": 2, "qk_layernorm": True}),
        ("gpt_neo", {}, {"attention_pattern": "f,w", "window_size": 256, "attention_multiplier": 1.0}),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, {"attention_pattern": None, "window_size": None}),
        (
            "gpt_neo",
            {"attention_types": [[["local"], 2]], "window_size": 3},
            {"attention_pattern": None, "window_size": 3},
        ),
        (
            "olmo3",
            {"layer_types": ["sliding_attention", "full_attention"], "rope_scaling": {"type": "linear", "factor": 2}},
            {"attention_pattern": "w,f", "rope_scaling": "linear", "rotary_base": 5e5, "window_rotary_base": 5e5},
        ),
        # transformers gives the base of a file without tables to layers without a window alone
        (
            "olmo3",
            {"layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e4},
            {"rotary_base": 1e4, "window_rotary_base": 5e5},
        ),
        ("olmo3", {"rope_theta": 1e4}, {"rotary_base": 5e5, "window_rotary_base": None, "window_size": 4096}),
        ("exaone4", {"sliding_window_pattern": 2}, {"attention_pattern": "w,n", "window_size": 4096}),
        ("exaone4", {"layer_types": ["full_attention"] * 2}, {"attention_pattern": "n", "window_size": None}),
        (
            "exaone4",
            {"layer_types": ["full_attention"] * 2, "sliding_window": None},
            {"attention_pattern": None, "window_size": None},
        ),
        ("olmo", {}, {"norm_affine": False, "clip_qkv": None, "normalization": "LayerNorm", "norm_epsilon": 1e-5}),
        ("olmo", {"clip_qkv": 8}, {"clip_qkv": 8.0}),
        ("olmoe", {"clip_qkv": 8.0}, {"clip_qkv": 8.0}),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, {"clip_qkv": 6.0}),
        ("mpt", {"attn_config": {"clip_qkv": 0}}, {"clip_qkv": None}),
        ("cohere", {}, {"rotary_base": 5e5, "logits_divisor": 16.0, "shared_parallel_norm": True, "norm_bias": False}),
        ("cohere", {"attention_bias": True}, {"add_qkv_bias": True, "add_attention_output_bias": True}),
        ("cohere2", {"sliding_window_pattern": 2}, {"attention_pattern": "w,n", "rotary_base": 1e4}),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}}, "layer_types": ["full_attention"] * 2},
            {"rotary_base": 1e6},
        ),
        ("glm", {}, {"rotary_percent": 0.5, "add_qkv_bias": True, "norm_epsilon": 1.5625e-07}),
        ("glm4", {"attention_bias": False}, {"add_qkv_bias": False, "norm_placement": "both"}),
        ("nemotron", {}, {"rotary_percent": 0.5, "layernorm_1p": True, "norm_bias": True, "activation": "relu2"}),
        ("seed_oss", {}, {"add_qkv_bias": True, "attention_output_bias": False, "hidden_dropout": 0.1}),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}, {"disable_bias_linear": False}),
        ("ernie4_5", {}, {"rotary_base": 5e5, "untie_embeddings_and_output_weights": False}),
        ("ernie4_5", {"use_bias": True, "architectures": ["Ernie4_5_ForCausalLM"]}, {"disable_bias_linear": False}),
        ("helium", {"attention_bias": True}, {"rotary_base": 1e5, "add_qkv_bias": True, "mlp_bias": False}),
        ("arcee", {"mlp_bias": True}, {"activation": "relu2", "add_mlp_bias": True, "qkv_bias": False}),
        ("gptj", {}, {"rotary_percent": 0.5, "add_output_layer_bias": True, "qkv_bias": False, "mlp_bias": True}),
    ],
)
def test_layers_of_several_kinds_are_read(model_type: str, changes: dict[str, Any], fields: dict[str, Any]) -> None:
    model = read(model_type, **changes)
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("granite", {"attention_multiplier": 0}, "attention_multiplier 0 must be above 0"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers has 3 entries for 2 layers"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("olmo2", {"attention_bias": True}, "attention_bias is True"),
        ("phi3", {"rope_scaling": {"type": "su", "long_factor": "1"}}, "rope_scaling.long_factor is '1', not a list"),
        (
            "phi3",
            {"rope_scaling": {**_FACTORS, "short_factor": [1.0]}},
            "rope_short_factors has 1 number for 2 rotated",
        ),
        ("phi3", {"rope_scaling": {**_FACTORS, "short_factor": [1.0, 0]}}, "'0.0' is not above 0"),
        ("phi3", {"rope_scaling": {**_FACTORS, "factor": 0.5}}, "factor 0.5 must be at least 1"),
        ("stablelm", {"qk_layernorm": 1}, "qk_layernorm is '1', not true or false"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("opt", {"word_embed_proj_dim": 4}, "word_embed_proj_dim is 4"),
        ("falcon", {"alibi": True}, "alibi is true: transformers rounds"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn is False"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is 'None', not a number of dimensions of a head"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping 0 must be above 0"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("phi", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("phi", {"qk_layernorm": None}, "qk_layernorm is 'None', not true or false"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types has 3 entries for 2 layers"),
        ("gpt_neo", {"attention_types": [["global", "local"], 1]}, "attention_types is not a list of pairs"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types repeats kinds of layers '1000000000'"),
        ("gpt_neo", {"attention_layers": ["local", "global"]}, "attention_layers differs from attention_types"),
        ("gpt_neo", {"window_size": 0}, "window_size is '0', not a number of positions"),
        ("olmo3", {"attention_bias": True}, "attention_bias is True"),
        ("olmo3", {"sliding_window": None}, "sliding_window is null, but layers have a window"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no tables of kinds of layers"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "rope_parameters.sliding_attention is scaled",
        ),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG', not a number of layers"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "sliding_window is null, but layers have a window",
        ),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere", {"logit_scale": None}, "logit_scale is 'None', not a positive number"),
        ("cohere2", {"sliding_window": None}, "sliding_window is null, but layers have a window"),
        ("cohere2", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("glm", {"attention_bias": None}, "attention_bias is 'None', not true or false"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias is '1', not true or false"),
        ("ernie4_5", {"use_bias": None}, "use_bias is 'None', not true or false"),
        ("helium", {"mlp_bias": 0}, "mlp_bias is '0', not true or false"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("mpt", {"n_heads": 6, "d_model": 12}, "n_heads is 6, no power of two"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is 'True'"),
    ],
)
def test_what_a_family_computes_otherwise_is_refused(model_type: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        read(model_type, **changes)


@pytest.mark.parametrize(("theirs", "ours"), [("gelu_new", "gelu"), ("gelu", "gelu-exact"), ("relu", "relu")])
def test_activations_of_gpt2_both_ways(theirs: str, ours: str) -> None:
    config = read("gpt2", activation_function=theirs, embd_pdrop=0.3)
    assert (config.activation, config.hidden_dropout) == (ours, 0.1)
    family, values = describe_model(config)
    assert (family.model_type, values["activation_function"]) == ("gpt2", theirs)


def test_all_problems_come_together() -> None:
    with pytest.raises(CheckpointError) as caught:
        read("llama", hidden_act="gelu", mlp_bias="yes", rope_scaling={"type": "su"}, strange=1)
    said = str(caught.value)
    assert "that megacore cannot represent exactly" in said
    for name in ("hidden_act", "mlp_bias", "rope_scaling.rope_type", "strange"):
        assert re.search(rf"\n  - .*{re.escape(name)}", said), name


@pytest.mark.parametrize(
    "model_type, near",
    [
        ("qwen3_next", "related ones that it has: qwen3_moe and qwen3; "),
        ("llama4", "related ones that it has: llama; "),
        *((other, "") for other in (3, None, "zzz")),
    ],
)
def test_another_kind_of_model_is_refused_and_names_the_nearest_families(model_type: Any, near: str) -> None:
    said = f"which megacore does not have; {near}all families: docs/guides/conversion.md"
    with pytest.raises(CheckpointError, match=f"^config.json: model_type is '{model_type}', {said}$"):
        family_of({} if model_type is None else {"model_type": model_type}, "config.json")


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama", {"rope_scaling": None}, {}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500_000, "factor": 2.0}},
        ),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}, {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc"}),
        (
            "llama",
            {
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8, "mscale": 0, "beta_fast": None},
                "max_position_embeddings": 32,
            },
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
                "max_position_embeddings": 32,
            },
        ),
        ("gpt_neox", {"rotary_emb_base": 5e4}, {"rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {}),
        ("gpt2", {"use_cache": False, "temperature": 0.7, "id2label": {"0": "a"}}, {}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1}, {"layer_types": ["full_attention"] * 2}),
        ("bloom", {"n_embed": 8, "num_attention_heads": 2, "skip_bias_add": True}, {}),
    ],
)
def test_spellings_that_mean_the_same(model_type: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(model_type, **old) == read(model_type, **new)


@pytest.mark.parametrize("model_type", list(SMALL))
def test_there_and_back(model_type: str) -> None:
    family, config = FAMILIES[model_type], read(model_type)
    bert = family.to_bert(SMALL[model_type], "config.json", paired=False)
    values = family.from_model(config, bert)
    assert values is not None
    assert family.to_model(values, "config.json") == config
    assert same_bert(family.to_bert(values, "config.json", paired=False), bert, config)


@pytest.mark.parametrize("preset", list(GPT_PRESETS))
def test_every_preset_can_be_exported(preset: str) -> None:
    def section(kind: type[Any]) -> Any:
        return kind(**{name: value for name, value in GPT_PRESETS[preset].items() if name in field_infos(kind)})

    config: ModelConfig = section(ModelConfig)
    model = config.resolve(seq_length=1024, experts=section(ExpertsConfig).resolve(config.inner_size))
    family, described = describe_model(model, None)
    assert described["model_type"] == family.model_type
    assert family.has_experts == ("num_experts" in GPT_PRESETS[preset])


def test_a_model_of_no_family_is_refused() -> None:
    config = ModelConfig(vocab_size=11, num_layers=1, hidden_size=8, num_attention_heads=2, activation="geglu")
    with pytest.raises(
        CheckpointError, match="no family of transformers' models that megacore has computes what this one does"
    ):
        describe_model(config.resolve(seq_length=16))
