"""Named models, as plain data: small differences from the defaults of the sections and, for BERT, of --bert-style.

`--preset NAME` sets the fields below; a configuration file and flags override it. `vocab_size` applies only without a
tokenizer. Sizes are those of the released weights. Where these accept longer contexts than they were mostly trained
on, `seq_length` is the shorter one; llama-3-8b-128k is for training on long ones.

The GPT-2 family follows Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2, and
trains as its predecessor did (Radford et al. 2018, section 4.1): dropout, Adam with a small weight decay, a learning
rate that decays to 0. BLOOM follows Le Scao et al. 2022 (arXiv 2211.05100), Pythia Biderman et al. 2023 (arXiv
2304.01373), Mistral Jiang et al. 2023 (arXiv 2310.06825), Mixtral Jiang et al. 2024 (arXiv 2401.04088), Llama 3 its
team's report of 2024 (arXiv 2407.21783), Qwen3 its team's of 2025 (arXiv 2505.09388), OLMoE Muennighoff et al. 2024
(arXiv 2409.02060), Gemma 2 its team's of 2024 (arXiv 2408.00118), OPT Zhang et al. 2022 (arXiv 2205.01068), Falcon
Almazrouei et al. 2023 (arXiv 2311.16867), GPT-Neo Black et al. 2021 (doi 10.5281/zenodo.5297715), Phi-4 Abdin et al.
2024 (arXiv 2412.08905), DeepSeek-V2 and V3 DeepSeek-AI 2024 (arXiv 2405.04434, 2412.19437).
bert-base and bert-large follow Devlin et al. (arXiv 1810.04805, section 3) with the released uncased vocabulary,
modernbert-base Warner et al. (arXiv 2412.13663, table 4), RoBERTa Liu et al. (arXiv 1907.11692).
"""

from __future__ import annotations

from collections.abc import Mapping

from megacore.config.messages import did_you_mean, one_of

Shape = dict[str, int | float | bool | str]

_AS_IN_2018: Shape = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "adam_beta2": 0.999,
    "weight_decay": 0.01,
    "min_lr": 0.0,
}


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> Shape:
    return {
        **_AS_IN_2018,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": 1024,
        "max_position_embeddings": 1024,
        "vocab_size": 50257,
    }


_ROTARY: Shape = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
}
_GEMMA: Shape = {
    **_ROTARY,
    "activation": "geglu",
    "kv_channels": 256,
    "layernorm_1p": True,
    "norm_epsilon": 1e-6,
}
_GEMMA2: Shape = {
    **_GEMMA,
    "norm_placement": "both",
    "attention_pattern": "w,f",
    "window_size": 4096,
    "attention_multiplier": 256**-0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "vocab_size": 256_000,
}
_OPT: Shape = {
    "activation": "relu",
    "position_offset": 2,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "vocab_size": 50_272,
}
_FALCON: Shape = {
    "activation": "gelu-exact",
    "parallel_residual": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "vocab_size": 65_024,
}
_LLAMA3: Shape = {**_ROTARY, "rotary_base": 500_000.0, "num_query_groups": 8, "vocab_size": 128_256}
_LLAMA3_8B: Shape = {  # 8.03B
    **_LLAMA3,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 14_336,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "untie_embeddings_and_output_weights": True,
}
_DEEPSEEK: Shape = {
    **_ROTARY,
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "rope_scaling": "yarn",
    "rope_scaling_factor": 40.0,
    "rope_original_max_positions": 4096,
    "seq_length": 4096,
    "max_position_embeddings": 163_840,
    "untie_embeddings_and_output_weights": True,
}

GPT_PRESETS: dict[str, Shape] = {
    "gpt2-tiny": {**_gpt2(2, 64, 4), "seq_length": 64, "max_position_embeddings": 64, "vocab_size": 512},  # for tests
    "gpt2-small": _gpt2(12, 768, 12),  # 124M
    "gpt2-medium": _gpt2(24, 1024, 16),  # 355M
    "gpt2-large": _gpt2(36, 1280, 20),  # 774M
    "gpt2-xl": _gpt2(48, 1600, 25),  # 1.56B
    "llama-3.2-1b": {  # 1.24B
        **_LLAMA3,
        "num_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "ffn_hidden_size": 8192,
        "seq_length": 8192,
        "max_position_embeddings": 131_072,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 32.0,
        "rope_original_max_positions": 8192,
    },
    "llama-3-8b": _LLAMA3_8B,
    "llama-3-8b-128k": {  # of Llama 3.1
        **_LLAMA3_8B,
        "seq_length": 131_072,
        "max_position_embeddings": 131_072,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_max_positions": 8192,
    },
    "qwen3-0.6b": {  # 596M
        **_ROTARY,
        "num_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 3072,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,
        "rotary_base": 1_000_000.0,
        "seq_length": 4096,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
    },
    "mistral-7b": {  # 7.24B, of version 0.1
        **_ROTARY,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14_336,
        "window_size": 4096,
        "seq_length": 8192,
        "max_position_embeddings": 32_768,
        "vocab_size": 32_000,
        "untie_embeddings_and_output_weights": True,
    },
    "mixtral-8x7b": {  # 46.7B, of which a token uses 12.9B
        **_ROTARY,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14_336,
        "num_experts": 8,
        "moe_router_topk": 2,
        "rotary_base": 1_000_000.0,
        "seq_length": 4096,
        "max_position_embeddings": 32_768,
        "vocab_size": 32_000,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen3-30b-a3b": {  # 30.5B, of which a token uses 3.35B
        **_ROTARY,
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "ffn_hidden_size": 6144,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,
        "rotary_base": 1_000_000.0,
        "seq_length": 4096,
        "max_position_embeddings": 40_960,
        "vocab_size": 151_936,
        "untie_embeddings_and_output_weights": True,
    },
    "olmoe-1b-7b": {  # 6.92B, of which a token uses 1.28B
        **_ROTARY,
        "num_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "ffn_hidden_size": 1024,
        "num_experts": 64,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": True,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": 50_304,
        "untie_embeddings_and_output_weights": True,
    },
    "deepseek-v2-lite": {  # 15.7B, of which a token uses 2.66B
        **_DEEPSEEK,
        "num_layers": 27,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "ffn_hidden_size": 10_944,
        "num_experts": 64,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_size": 2816,
        "moe_first_dense_layers": 1,
        "rope_mscale": 0.707,
        "rope_mscale_all_dim": 0.707,
        "vocab_size": 102_400,
    },
    "deepseek-v3": {  # 671B, of which a token uses 37.6B
        **_DEEPSEEK,
        "num_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "ffn_hidden_size": 18_432,
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_group_best": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_size": 2048,
        "moe_first_dense_layers": 3,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 1.0,
        "vocab_size": 129_280,
    },
    "granite-3.1-2b": {  # 2.53B
        **_ROTARY,
        "num_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 8192,
        "rotary_base": 5_000_000.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_divisor": 8.0,
        "seq_length": 4096,
        "max_position_embeddings": 131_072,
        "vocab_size": 49_155,
    },
    "smollm3-3b": {  # 3.08B
        **_ROTARY,
        "num_layers": 36,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_query_groups": 4,
        "ffn_hidden_size": 11_008,
        "norm_epsilon": 1e-6,
        "rotary_base": 5_000_000.0,
        "attention_pattern": "3*f,n",
        "seq_length": 4096,
        "max_position_embeddings": 65_536,
        "vocab_size": 128_256,
    },
    "olmo-2-7b": {  # 7.30B
        **_ROTARY,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 11_008,
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "norm_epsilon": 1e-6,
        "rotary_base": 500_000.0,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": 100_352,
        "untie_embeddings_and_output_weights": True,
    },
    "phi-3-mini": {  # 3.82B, for 4k tokens
        **_ROTARY,
        "num_layers": 32,
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "ffn_hidden_size": 8192,
        "window_size": 2047,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": 32_064,
        "untie_embeddings_and_output_weights": True,
    },
    "phi-4": {  # 14.7B
        **_ROTARY,
        "num_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_query_groups": 10,
        "ffn_hidden_size": 17_920,
        "rotary_base": 250_000.0,
        "seq_length": 16_384,
        "max_position_embeddings": 16_384,
        "vocab_size": 100_352,
        "untie_embeddings_and_output_weights": True,
    },
    "starcoder2-3b": {  # 3.03B
        "num_layers": 30,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_base": 999_999.4420358813,
        "window_size": 4096,
        "seq_length": 4096,
        "max_position_embeddings": 16_384,
        "vocab_size": 49_152,
    },
    "gemma-2b": {  # 2.51B
        **_GEMMA,
        "num_layers": 18,
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_query_groups": 1,
        "ffn_hidden_size": 16_384,
        "embedding_multiplier": 2048**0.5,
        "seq_length": 8192,
        "max_position_embeddings": 8192,
        "vocab_size": 256_000,
    },
    "gemma-2-2b": {  # 2.61B
        **_GEMMA2,
        "num_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 9216,
        "embedding_multiplier": 2304**0.5,
    },
    "gemma-2-9b": {  # 9.24B
        **_GEMMA2,
        "num_layers": 42,
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 14_336,
        "embedding_multiplier": 3584**0.5,
    },
    "gemma-3-1b": {  # 1.00B
        **_GEMMA,
        "num_layers": 26,
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_query_groups": 1,
        "ffn_hidden_size": 6912,
        "embedding_multiplier": 1152**0.5,
        "norm_placement": "both",
        "qk_layernorm": True,
        "rotary_base": 1_000_000.0,
        "attention_pattern": "5*w,f",
        "window_size": 512,
        "window_rotary_base": 10_000.0,
        "attention_multiplier": 256**-0.5,
        "seq_length": 8192,
        "max_position_embeddings": 32_768,
        "vocab_size": 262_144,
    },
    "opt-1.3b": {  # 1.32B
        **_OPT,
        "num_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 32,
    },
    "opt-6.7b": {  # 6.66B
        **_OPT,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
    },
    "falcon-7b": {  # 6.92B
        **_FALCON,
        "num_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_query_groups": 1,
        "shared_parallel_norm": True,
    },
    "falcon-40b": {  # 41.3B
        **_FALCON,
        "num_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_query_groups": 8,
    },
    "gpt-j-6b": {  # 6.05B
        "num_layers": 28,
        "hidden_size": 4096,
        "num_attention_heads": 16,
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.25,
        "disable_bias_linear": True,
        "add_mlp_bias": True,
        "add_output_layer_bias": True,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 50_400,
        "untie_embeddings_and_output_weights": True,
    },
    "phi-2": {  # 2.78B
        "num_layers": 32,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "parallel_residual": True,
        "shared_parallel_norm": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.4,
        "add_output_layer_bias": True,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 51_200,
        "untie_embeddings_and_output_weights": True,
    },
    "gpt-neo-1.3b": {  # 1.32B
        "num_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "attention_pattern": "f,w",
        "window_size": 256,
        "attention_multiplier": 1.0,
        "disable_bias_linear": True,
        "add_attention_output_bias": True,
        "add_mlp_bias": True,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 50_257,
    },
    "pythia-160m": {  # 162M
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "activation": "gelu-exact",
        "parallel_residual": True,
        "position_embedding_type": "rope",
        "rotary_percent": 0.25,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 50_304,
        "untie_embeddings_and_output_weights": True,
    },
    "bloom-176b": {  # 176B
        "num_layers": 70,
        "hidden_size": 14_336,
        "num_attention_heads": 112,
        "position_embedding_type": "alibi",
        "embedding_layernorm": True,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "vocab_size": 250_880,
    },
}


def _classic(num_layers: int, hidden_size: int, num_attention_heads: int) -> Shape:
    return {
        "bert_style": "classic",
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": 512,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    }


_ROBERTA: Shape = {
    "sentence_task": "none",
    "num_token_types": 1,
    "position_offset": 2,
    "norm_epsilon": 1e-5,
}

BERT_PRESETS: dict[str, Shape] = {
    "bert-tiny": {
        **_classic(2, 64, 4),
        "seq_length": 64,
        "max_position_embeddings": 64,
        "vocab_size": 512,
    },  # for tests
    "bert-base": _classic(12, 768, 12),  # 110M
    "bert-large": _classic(24, 1024, 16),  # 335M
    "modernbert-base": {  # 149M
        "bert_style": "modern",
        "num_layers": 22,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "ffn_hidden_size": 1152,
        "seq_length": 1024,
        "max_position_embeddings": 8192,
        "vocab_size": 50368,
    },
    "roberta-base": {**_ROBERTA, **_classic(12, 768, 12), "vocab_size": 50_265},  # 125M
    "roberta-large": {**_ROBERTA, **_classic(24, 1024, 16), "vocab_size": 50_265},  # 355M
}

PRESETS = {**GPT_PRESETS, **BERT_PRESETS}


def preset_problem(name: str, accepted: Mapping[str, Shape]) -> str:
    """The message for a name that is not among the presets that an entry point accepts."""
    if name in PRESETS:
        owner, program = ("GPT's", "pretrain_gpt.py") if name in GPT_PRESETS else ("BERT's", "pretrain_bert.py")
        return f"--preset {name} is {owner}: use {one_of(list(accepted))}, or start {program} instead"
    return f"--preset {name} is not known: use {one_of(list(accepted))}{did_you_mean(name, accepted)}"
