"""The models and trainings of the table, by name: changes of `make_config`'s small GPT-2, or of BERT."""

from __future__ import annotations

from typing import Any

Changes = dict[str, Any]


def size_of(stages: int, *, reproducible: bool, whole: bool) -> Changes:
    """How long a run is and how deep its model: eight steps and the five blocks of `make_config`; or three steps, one
    more than the warm-up, and one block more than stages, so that no pp above 1 divides them. Exact sums take longer,
    and need fewer steps."""
    if whole:
        return {"train_iters": 4, "lr_warmup_iters": 1} if reproducible else {"train_iters": 8, "lr_warmup_iters": 2}
    steps = 2 if reproducible else 3
    return {"num_layers": stages + 1, "train_iters": steps, "lr_warmup_iters": steps - 1}


LLAMA: Changes = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
# AdamW forgives a gradient that is wrong by a factor; plain SGD does not.
SGD: Changes = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "clip_grad": 0.0}
# Plain AdamW moves an entry whose gradient is zero but for rounding (the key's bias) by the sign of the rounding; with
# an epsilon above it every weight is a smooth function of the gradients, and weights are compared as tightly as losses.
SMOOTH: Changes = {"adam_eps": 1e-4}
DROPOUT: Changes = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "micro_batch_size": 1, "global_batch_size": 4}
EXACT: Changes = {"reproducible": True, "micro_batch_size": 1}
# Sums that only tensor and context parallelism would cut are not cut: several times as fast.
UNCUT: Changes = EXACT | {"reproducible_blocks": 1}
EXPERTS: Changes = {"num_experts": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True}
LATENT: Changes = {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "rope_scaling": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_positions": 8,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.2,
    "num_layers": 2,
    "train_iters": 3,
    "lr_warmup_iters": 2,
}
PACKED: Changes = {"reset_attention_mask": True, "reset_position_ids": True}
TWO_GROUPS: Changes = LLAMA | {"num_query_groups": 2}
QWEN3: Changes = TWO_GROUPS | {"ffn_hidden_size": 48, "qk_layernorm": True, "kv_channels": 16}
GROUPED: Changes = {"position_embedding_type": "rope", "normalization": "RMSNorm", "num_query_groups": 2}
GEMMA: Changes = GROUPED | {
    "activation": "geglu", "disable_bias_linear": True, "layernorm_1p": True, "norm_placement": "both",
    "window_size": 5,
}  # fmt: skip
WINDOWS: Changes = TWO_GROUPS | {"ffn_hidden_size": 48, "window_size": 3}
BLOOM: Changes = {"position_embedding_type": "alibi", "embedding_layernorm": True}
ONE_GROUP: Changes = {"num_query_groups": 1}
MOE: Changes = SMOOTH | EXPERTS | {
    "num_layers": 3,
    "activation": "swiglu",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_first_dense_layers": 1,
}  # fmt: skip
SIGMOID: Changes = {"moe_router_score_function": "sigmoid", "moe_shared_expert_size": 8, "moe_shared_expert_gate": True}
GLOBAL: Changes = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0}
GROUPS: Changes = {
    "num_experts": 8,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_score_function": "sigmoid",
}

PROGRAMS: dict[str, Changes] = {
    "gpt2": {},
    "gpt2 untied": {"untie_embeddings_and_output_weights": True},
    "gpt2 packed": PACKED,
    "gpt2 experts": EXPERTS,
    "llama": TWO_GROUPS | {"ffn_hidden_size": 48},
    "llama packed": TWO_GROUPS | {"ffn_hidden_size": 48} | PACKED,
    "windows": WINDOWS,
    "windows packed": WINDOWS | {"reset_attention_mask": True},
    "bloom": BLOOM,
    "bloom packed": BLOOM | {"reset_attention_mask": True},
    "qwen": LLAMA | ONE_GROUP | {"ffn_hidden_size": 48, "qk_layernorm": True},
    "stretched": TWO_GROUPS | {
        "ffn_hidden_size": 48, "rope_scaling": "dynamic", "rope_scaling_factor": 2.0, "rope_original_max_positions": 8,
    },
    "positions alone": TWO_GROUPS | {"ffn_hidden_size": 48, "reset_position_ids": True},
    # Tensor-parallel ranks share the key head, which nothing copies on the way: no rotation, no norm.
    "shared learned": ONE_GROUP,
    "shared rope": ONE_GROUP | {"position_embedding_type": "rope"},
    "shared alibi": ONE_GROUP | {"position_embedding_type": "alibi", "window_size": 6},
    "shared none": ONE_GROUP | {"position_embedding_type": "none"},
    "shared in some blocks": LLAMA | ONE_GROUP | {"ffn_hidden_size": 48, "attention_pattern": "n,w", "window_size": 6},
    "shared packed": ONE_GROUP | PACKED,
    "qwen2": TWO_GROUPS | {"ffn_hidden_size": 48, "add_qkv_bias": True},
    "qwen3": QWEN3,
    "one key head": QWEN3 | ONE_GROUP | {"add_qkv_bias": True},
    "norm of all heads": QWEN3 | {"qk_layernorm_all_heads": True},
    "LayerNorm of all heads": QWEN3 | {"qk_layernorm_all_heads": True, "normalization": "LayerNorm"},
    "norm of each head": QWEN3 | {"qk_layernorm_per_head": True, "normalization": "LayerNorm"},
    "RMSNorm of each head": QWEN3 | {"qk_layernorm_per_head": True, "layernorm_1p": True},
    "neox": {
        "position_embedding_type": "rope", "rotary_percent": 0.25, "activation": "gelu-exact",
        "parallel_residual": True, "untie_embeddings_and_output_weights": True,
    },
    "gemma 2": GEMMA | {
        "attention_multiplier": 0.5, "attention_pattern": "w,f", "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma 3": GEMMA | {
        "qk_layernorm": True, "embedding_multiplier": 5.5, "attention_multiplier": 0.3, "attention_pattern": "2*w,f",
        "window_rotary_base": 100.0,
    },
    "granite": GROUPED | {
        "activation": "swiglu", "disable_bias_linear": True, "add_qkv_bias": True, "add_attention_output_bias": True,
        "residual_multiplier": 0.4, "logits_divisor": 3.0, "attention_pattern": "f,n",
    },
    "olmo": GROUPED | {
        "normalization": "LayerNorm", "norm_affine": False, "clip_qkv": 0.02, "activation": "swiglu",
        "disable_bias_linear": True,
    },
    "olmo 2": GROUPED | {
        "norm_placement": "after", "qk_layernorm": True, "qk_layernorm_all_heads": True, "disable_bias_linear": True,
        "add_mlp_bias": True,
    },
    "gpt-j": {
        "position_embedding_type": "rope", "rotary_percent": 0.5, "parallel_residual": True,
        "shared_parallel_norm": True, "add_output_layer_bias": True, "disable_bias_linear": True, "add_mlp_bias": True,
    },
    "opt": {"position_offset": 2, "activation": "relu", "add_output_layer_bias": True},
    "phi longrope": GROUPED | {
        "rope_scaling": "longrope", "rope_scaling_factor": 4.0, "rope_original_max_positions": 8,
        "rope_short_factors": "1.0,1.5,2.0,4.0", "rope_long_factors": "1.0,2.5,6.0,8.0",  # of heads of 8
    },
    "norms": {"layernorm_1p": True, "norm_placement": "both", "logits_divisor": 0.5, "window_size": 6},
    "latent": LATENT,
    "latent wide": LATENT | {
        "q_lora_rank": None, "v_head_dim": 14, "rope_mscale_all_dim": None, "qk_layernorm": False,
    },
    "latent packed": LATENT | PACKED | {"window_size": 5},
    "bert": {"bert_style": "classic"},
    "modern bert": {"bert_style": "modern", "window_size": 6},
    "softmax": MOE,
    "sigmoid": MOE | SIGMOID | {"moe_first_dense_layers": 0},
    "gelu": MOE | {"activation": "gelu", "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_freq": 2},
    "many": MOE | {"num_experts": 8, "moe_router_topk": 3},
    "every": MOE | {"moe_router_topk": 4},
    "groups": MOE | GROUPS,
    "bias": MOE | {
        "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01, "moe_aux_loss_coeff": 0.0,
    },
    "capacity": MOE | {"moe_expert_capacity_factor": 0.75, "num_experts": 8, "moe_router_topk": 3},
    "first": MOE | {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "global": MOE | GLOBAL,
    "jitter": MOE | {"moe_input_jitter_eps": 0.1, "moe_shared_expert_size": 8},
    "padded": MOE | {"packing": "best-fit", "moe_expert_capacity_factor": 1.0},
    "limited": MOE | GLOBAL | {"packing": "best-fit", "moe_expert_capacity_factor": 0.75, "moe_input_jitter_eps": 0.1},
}  # fmt: skip
