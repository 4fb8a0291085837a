"""The traced peak of every rank's memory against the bytes that a run of the rank holds, over the layouts, ZeRO stages
and schedules of test_traffic.py.

A trace runs few layers and microbatches of a stage. Here a rank takes two whole steps on fake tensors, by the code of a
run; what exists at its peak is counted storage by storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from megacore.tracer import dry_run
from megacore.tracer.dry_run import RankReport, run_rank
from megacore.tracer.fake_job import absent_accelerator
from tests.distributed import run_distributed
from tests.parallel.test_traffic import CASES, EXPERTS, FOUR_NORMS, MORE, PARALLEL
from tests.parity.bert_runs import make_bert_config
from tests.parity.runs import make_config

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024, "num_layers": 4}
QUICK = ("pp 2, GPipe", "tp 2, dp 2, ZeRO 3", "dp 4, ep 2, ZeRO 1")
# A length at which activations outweigh gradients and parameters; the weights of attention would be an eighth of them.
LONG = 128
SHARDED = (
    "dp 2, ZeRO 2",
    "dp 4, ZeRO 2",
    "dp 2, ZeRO 3",
    "tp 2, dp 2, ZeRO 3",
    "pp 2, zero-bubble",
    "pp 2, dp 2, ZeRO 3, zero-bubble",
)
AT_LENGTH = ("pp 2, GPipe", "dp 2", "dp 2, ZeRO 1", "tp 2", "tp 2, sequence parallel", "tp 2, recomputed", "tp 2, pp 2")

BERT: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "BERT": ((1, 1, 1), {}),
    "BERT, bf16, one sentence": ((1, 1, 1), {"precision": "bf16", "sentence_task": "none"}),
    "BERT, short": ((1, 1, 1), {"seq_length": 16}),
    "BERT, recomputed": ((1, 1, 1), {"recompute": "full"}),
    "BERT, light": ((1, 1, 1), {"recompute": "light"}),
    "BERT, pp 2": ((1, 2, 1), {}),
    "BERT, tp 2, sequence parallel": ((2, 1, 1), {"sequence_parallel": True}),
    "BERT, dp 2, ZeRO 2": ((1, 1, 2), {"zero_stage": 2}),
    "ModernBERT": ((1, 1, 1), {"bert_style": "modern"}),
    "ModernBERT, pp 2, dp 2": ((1, 2, 2), {"bert_style": "modern"}),
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
}
# Blocks of which no other case has any.
KINDS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "latent attention": ((1, 1, 1), LATENT),
    "latent attention, bf16, recomputed": ((1, 1, 1), LATENT | {"precision": "bf16", "recompute": "full"}),
    "latent attention, tp 2, sequence parallel": ((2, 1, 1), LATENT | {"sequence_parallel": True}),
    "latent attention, experts, tp 2, dp 2": (
        (2, 1, 2),
        LATENT | {"sequence_parallel": True, "num_experts": 8, "ep": 4, "etp": 1, "zero_stage": 1},
    ),
    "exact GeGLU": ((1, 1, 1), {"activation": "geglu-exact", "disable_bias_linear": True}),
    "norm after the embedding": ((1, 1, 1), {"embedding_layernorm": True, "position_embedding_type": "alibi"}),
    "ALiBi": (
        (1, 1, 1),
        {"position_embedding_type": "alibi", "num_attention_heads": 16, "seq_length": 256, "micro_batch_size": 1},
    ),
    "packed": ((1, 1, 1), {"reset_attention_mask": True, "reset_position_ids": True}),
    "parallel blocks": ((1, 1, 1), {"parallel_residual": True}),
    "parallel blocks of one norm": ((1, 1, 1), PARALLEL),
    "parallel blocks of one norm, light": ((1, 1, 1), PARALLEL | {"recompute": "light"}),
    "four norms": ((1, 1, 1), FOUR_NORMS),
    "four norms, bf16, light": ((1, 1, 1), FOUR_NORMS | {"precision": "bf16", "recompute": "light"}),
    "norms without weights, clipping, bf16": (
        (1, 1, 1),
        {"norm_affine": False, "clip_qkv": 8.0, "position_embedding_type": "rope", "precision": "bf16"},
    ),
    "norms after the layers": ((1, 1, 1), FOUR_NORMS | {"norm_placement": "after"}),
    "soft caps": ((1, 1, 1), {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "soft caps, bf16, recomputed": (
        (1, 1, 1),
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "precision": "bf16", "recompute": "full"},
    ),
    "squared ReLU": ((1, 1, 1), {"activation": "relu2"}),
    "average": ((1, 1, 1), {"ema_decay": 0.9}),
    "average, bf16, dp 2, ZeRO 2": ((1, 1, 2), {"ema_decay": 0.9, "precision": "bf16", "zero_stage": 2}),
    "moments in 16 bits, dp 2, ZeRO 1": ((1, 1, 2), {"moments_dtype": "bf16", "zero_stage": 1}),
    "muP": ((1, 1, 1), {"mup_base_width": 64}),
}

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "precision": "bf16",
    "micro_batch_size": 1,
}
OF_EXPERTS = LLAMA | EXPERTS | {"num_layers": 6, "zero_stage": 3}
# Gradients that a step makes anew, in steps of one microbatch: those of experts without copies are not among them.
ANEW: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "experts of one rank": ((1, 1, 4), OF_EXPERTS | {"ep": 4}),
    "experts of one rank, tp 2": ((2, 1, 4), OF_EXPERTS | {"ep": 4}),
    "experts of one rank, ZeRO 2": ((1, 1, 4), OF_EXPERTS | {"ep": 4, "zero_stage": 2}),
    "experts of two ranks": ((1, 1, 8), OF_EXPERTS | {"ep": 4}),
    "experts of two ranks, tp 2": ((2, 1, 8), OF_EXPERTS | {"ep": 4}),
    "tied table, ZeRO 2": ((1, 1, 3), LLAMA | {"zero_stage": 2, "vocab_size": 8192}),
    "tied table, ZeRO 3": ((1, 1, 3), LLAMA | {"zero_stage": 3, "vocab_size": 8192}),
    "tied table, tp 2, ZeRO 3": ((2, 1, 3), LLAMA | {"zero_stage": 3, "vocab_size": 8192}),
    "two tables, ZeRO 2": (
        (1, 1, 4),
        LLAMA | {"zero_stage": 2, "vocab_size": 8192, "untie_embeddings_and_output_weights": True},
    ),
    "two tables, ZeRO 3": (
        (1, 1, 4),
        LLAMA | {"zero_stage": 3, "vocab_size": 8192, "untie_embeddings_and_output_weights": True},
    ),
}

BUCKETS: dict[str, Any] = {"num_attention_heads": 8, "vocab_size": 8192, "micro_batch_size": 8}
# Buckets that are much larger than the others, and the one that is reduced from one microbatch to the next.
UNEQUAL: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tied table and positions, ZeRO 3": (
        (1, 1, 2),
        BUCKETS | {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 1, "global_batch_size": 2},
    ),
    "tied table, four microbatches, ZeRO 3": (
        (1, 1, 2),
        BUCKETS
        | {"precision": "bf16", "zero_stage": 3, "micro_batch_size": 1, "global_batch_size": 8}
        | {"position_embedding_type": "rope"},
    ),
    "tied table, activations in host memory, ZeRO 3": (
        (1, 1, 2),
        BUCKETS | {"zero_stage": 3, "offload_activations": True, "micro_batch_size": 4, "global_batch_size": 16},
    ),
    "table of the last stage, ZeRO 3": (
        (1, 2, 2),
        BUCKETS
        | {"precision": "bf16", "zero_stage": 3, "recompute": "full", "micro_batch_size": 2, "vocab_size": 32768},
    ),
    "table of the last stage, zero-bubble, ZeRO 2": (
        (1, 2, 2),
        BUCKETS | {"precision": "bf16", "zero_stage": 2, "micro_batch_size": 4, "schedule": "zero-bubble"},
    ),
    "two tables, fp32, ZeRO 2": (
        (1, 1, 2),
        BUCKETS | {"zero_stage": 2, "untie_embeddings_and_output_weights": True, "global_batch_size": 64},
    ),
    "tied table, bf16 sums, ZeRO 2": (
        (1, 1, 4),
        BUCKETS | {"precision": "bf16", "grad_reduce_dtype": "bf16", "zero_stage": 2, "global_batch_size": 32},
    ),
    "interleaved, recomputed, ZeRO 3": (
        (1, 2, 2),
        {"precision": "bf16", "zero_stage": 3, "recompute": "full", "hidden_size": 512, "virtual_stages": 2}
        | {"schedule": "interleaved", "micro_batch_size": 2, "global_batch_size": 8, "vocab_size": 512}
        | {"untie_embeddings_and_output_weights": True},
    ),
    "gradients of two tables copied into their buffers, fp32": (
        (1, 1, 1),
        BUCKETS | {"untie_embeddings_and_output_weights": True, "micro_batch_size": 32, "global_batch_size": 32},
    ),
    "gradients of a tied table, optimizer in host memory": (
        (1, 1, 1),
        BUCKETS
        | {"precision": "bf16", "grad_reduce_dtype": "bf16", "offload_optimizer": True, "vocab_size": 32768}
        | {"micro_batch_size": 1, "global_batch_size": 1},
    ),
    "loss in two chunks, fp32": (
        (1, 1, 1),
        BUCKETS
        | {"loss_chunks": 2, "vocab_size": 32768, "micro_batch_size": 8, "global_batch_size": 16, "optimizer": "sgd"}
        | {"untie_embeddings_and_output_weights": True},
    ),
    "experts, light": (
        (2, 1, 4),
        BUCKETS
        | {"precision": "bf16", "num_experts": 4, "etp": 1, "ep": 4, "zero_stage": 1, "sequence_parallel": True}
        | {"disable_bias_linear": True, "vocab_size": 512, "recompute": "light", "global_batch_size": 64},
    ),
}

ROWS: dict[str, Any] = {
    "disable_bias_linear": True,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "precision": "bf16",
} | {
    "num_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 64,
    "micro_batch_size": 8,
    "global_batch_size": 64,
}
WIDE: dict[str, Any] = {"activation": "swiglu", "moe_ffn_hidden_size": 1024, "moe_router_topk": 2, "num_experts": 4}
# Experts whose rows take more than anything else of a block, and experts much wider than the model.
OF_ROWS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "rows, ep 2, ZeRO 1": ((1, 1, 4), ROWS | {"ep": 2, "zero_stage": 1}),
    "rows, ep 2, ZeRO 2": ((1, 1, 4), ROWS | {"ep": 2, "zero_stage": 2}),
    "rows, ep 2, ZeRO 3": ((1, 1, 4), ROWS | {"ep": 2, "zero_stage": 3}),
    "rows, ep 4, recomputed": ((1, 1, 4), ROWS | {"ep": 4, "zero_stage": 1, "recompute": "full"}),
    "wide experts, ZeRO 3": ((1, 1, 2), ROWS | WIDE | {"zero_stage": 3, "global_batch_size": 16}),
    "wide experts, ep 2, light": ((1, 1, 4), ROWS | WIDE | {"ep": 2, "zero_stage": 2, "recompute": "light"}),
}

MATRICES: dict[str, Any] = BUCKETS | {"precision": "bf16", "zero_stage": 2, "micro_batch_size": 1}
TWO_TABLES: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
# Matrices that the optimizer takes whole: the bucket of the other parameters, with the embedding, fills as long as
# backward runs.
WHOLE: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "Muon, tied table": ((1, 1, 2), MATRICES | {"optimizer": "muon", "global_batch_size": 2}),
    "Muon, two tables, light": (
        (1, 1, 2),
        MATRICES | TWO_TABLES | {"optimizer": "muon", "global_batch_size": 8, "recompute": "light"},
    ),
    "Muon, two tables, no biases, tp 2": (
        (2, 1, 4),
        MATRICES | TWO_TABLES | LLAMA | {"optimizer": "muon", "global_batch_size": 4},
    ),
    "Adafactor, tied table, recomputed": (
        (1, 1, 8),
        MATRICES | {"optimizer": "adafactor", "global_batch_size": 16, "recompute": "full"},
    ),
    "Adafactor, bf16 sums": (
        (1, 1, 1),
        MATRICES
        | {"optimizer": "adafactor", "grad_reduce_dtype": "bf16", "zero_stage": 0, "num_layers": 24}
        | {"vocab_size": 512, "bucket_size_mb": 1.0},
    ),
    "Muon, experts": (
        (1, 1, 4),
        MATRICES | EXPERTS | LLAMA | {"optimizer": "muon", "ep": 2, "global_batch_size": 8},
    ),
    "Muon, a part of the matrices": (
        (1, 1, 2),
        MATRICES | {"optimizer": "muon", "muon_parameters": "blocks.*.mlp.*", "global_batch_size": 4},
    ),
}

# Backwards of several stages, and backwards in halves: what a rank holds beside each of them differs.
STAGES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "interleaved, GPT-2, ZeRO 2": (
        (1, 2, 2),
        {"precision": "bf16", "grad_reduce_dtype": "bf16", "zero_stage": 2, "bucket_size_mb": 25.0}
        | {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 2, "global_batch_size": 8}
        | {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50257, "seq_length": 1024},
    ),
    "interleaved, tied table and positions, ZeRO 3": (
        (1, 2, 2),
        BUCKETS
        | {"precision": "bf16", "zero_stage": 3, "schedule": "interleaved", "virtual_stages": 2}
        | {"recompute": "full", "micro_batch_size": 1, "global_batch_size": 8},
    ),
    "interleaved, logits in the backward of one stage only": (
        (1, 2, 1),
        {"schedule": "interleaved", "virtual_stages": 2, "num_layers": 8, "vocab_size": 8192, "seq_length": 256}
        | {"micro_batch_size": 2, "global_batch_size": 16},
    ),
    "zero-bubble, tp 2, sequence parallel": (
        (2, 2, 1),
        {"precision": "bf16", "schedule": "zero-bubble", "sequence_parallel": True, "vocab_size": 512},
    ),
    "zero-bubble, recomputed, which is 1F1B": (
        (1, 2, 1),
        {"precision": "bf16", "schedule": "zero-bubble", "recompute": "full", "micro_batch_size": 4}
        | {"vocab_size": 4096, "global_batch_size": 16},
    ),
    "zero-bubble, light": (
        (1, 2, 1),
        {"precision": "bf16", "schedule": "zero-bubble", "recompute": "light", "global_batch_size": 16},
    ),
    "zero-bubble, tied table, ZeRO 2": (
        (1, 2, 2),
        BUCKETS
        | {"precision": "bf16", "grad_reduce_dtype": "bf16", "zero_stage": 2, "schedule": "zero-bubble"}
        | {"micro_batch_size": 4, "global_batch_size": 32},
    ),
    "zero-bubble, four stages, ZeRO 2": (
        (1, 4, 2),
        BUCKETS
        | {"precision": "bf16", "zero_stage": 2, "schedule": "zero-bubble", "hidden_size": 512, "num_layers": 8}
        | {"vocab_size": 512, "seq_length": 512, "micro_batch_size": 2, "global_batch_size": 32}
        | {"bucket_size_mb": 25.0},
    ),
    "zero-bubble, one stage, tied table": (
        (1, 1, 1),
        BUCKETS | {"precision": "bf16", "schedule": "zero-bubble", "micro_batch_size": 2, "global_batch_size": 8},
    ),
    "activations in host memory, recomputed, four stages": (
        (1, 4, 1),
        {"precision": "bf16", "offload_activations": True, "num_layers": 8, "micro_batch_size": 8, "recompute": "full"}
        | {"global_batch_size": 64, "vocab_size": 512, "schedule": "1f1b"},
    ),
    "activations in host memory, one block on the last stage": (
        (1, 4, 1),
        {"precision": "bf16", "offload_activations": True, "num_layers": 7, "micro_batch_size": 8}
        | {"global_batch_size": 64, "schedule": "1f1b"},
    ),
    "activations in host memory, stages of one block": (
        (1, 2, 1),
        {"precision": "bf16", "offload_activations": True, "num_layers": 4, "micro_batch_size": 8}
        | {"global_batch_size": 64, "schedule": "interleaved", "virtual_stages": 2},
    ),
    "inputs of blocks in shards": (
        (4, 1, 1),
        {"precision": "bf16", "recompute": "full", "distribute_saved_activations": True, "num_layers": 8}
        | {"sequence_parallel": False, "micro_batch_size": 8, "global_batch_size": 16, "vocab_size": 512},
    ),
    "inputs of blocks in shards, four stages": (
        (8, 4, 1),
        {"precision": "bf16", "recompute": "full", "distribute_saved_activations": True, "num_layers": 8}
        | {"sequence_parallel": False, "micro_batch_size": 8, "global_batch_size": 64, "vocab_size": 512}
        | {"schedule": "1f1b", "num_attention_heads": 8, "hidden_size": 512},
    ),
    "recomputed, an input ahead of the last stage": (
        (4, 4, 1),
        {"precision": "bf16", "recompute": "full", "num_layers": 8, "sequence_parallel": False}
        | {"micro_batch_size": 8, "global_batch_size": 64, "vocab_size": 512, "schedule": "1f1b"},
    ),
    "activations in host memory": (
        (1, 2, 1),
        {"precision": "bf16", "offload_activations": True, "num_layers": 8, "micro_batch_size": 8}
        | {"global_batch_size": 64, "untie_embeddings_and_output_weights": True},
    ),
    "activations in host memory, dropout, ZeRO 2": (
        (1, 2, 2),
        {"precision": "bf16", "offload_activations": True, "micro_batch_size": 8, "schedule": "1f1b"}
        | {"zero_stage": 2, "global_batch_size": 128, "hidden_dropout": 0.1, "vocab_size": 8192},
    ),
} | {
    f"a block of each stage recomputed, {name}": (
        layout,
        {"precision": "bf16", "recompute": "full", "recompute_num_layers": 1, "num_layers": 8, "micro_batch_size": 8}
        | {"global_batch_size": 32, "vocab_size": 512}
        | schedule,
    )
    for name, layout, schedule in (
        ("1F1B", (1, 2, 1), {}),
        ("GPipe", (1, 2, 1), {"schedule": "gpipe"}),
        ("interleaved", (1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}),
        ("zero-bubble", (1, 2, 1), {"schedule": "zero-bubble"}),
        ("ZeRO 3", (1, 1, 2), {"zero_stage": 3}),
    )
}
OFFLOADED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    f"activations in host memory, zero-bubble, {name}": (
        layout,
        {"precision": "bf16", "offload_activations": True, "num_layers": 8, "schedule": "zero-bubble"}
        | {"micro_batch_size": 8, "global_batch_size": 32}
        | of_case,
    )
    for name, layout, of_case in (
        ("two stages", (1, 2, 1), {}),
        ("four stages", (1, 4, 1), {"global_batch_size": 64}),
        ("tp 2", (2, 2, 1), {"precision": "fp32"}),
        ("tp 2, four stages, SwiGLU", (2, 4, 1), {"global_batch_size": 64, "activation": "swiglu"}),
    )
}
# Ranks that divide sequences.
DIVIDED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    f"cp {cp}, {comm}, {recompute}": (
        (1, 2, 1),
        {"precision": "bf16", "num_layers": 4, "cp": cp, "cp_comm": comm, "recompute": recompute}
        | {"micro_batch_size": 8, "global_batch_size": 32, "vocab_size": 512, "schedule": "1f1b"},
    )
    for cp, comm, recompute in (
        (2, "ring", "full"),
        (4, "ring", "full"),
        (2, "ring", "light"),
        (2, "allgather", "full"),
        (2, "ulysses", "none"),
    )
} | {
    f"cp 2, {comm}, ZeRO 2": (
        (1, 1, 1),
        {"precision": "bf16", "num_layers": 4, "cp": 2, "cp_comm": comm, "zero_stage": 2, "micro_batch_size": 8}
        | {"global_batch_size": 8, "vocab_size": 2048, "bucket_size_mb": 2.0},
    )
    for comm in ("ring", "allgather")
}

# Attention's weights are most of what is kept.
SCORES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    f"scores, {name}": (
        layout,
        {"precision": "bf16", "attention": "fused-softmax", "num_layers": 2, "num_attention_heads": 16}
        | {"micro_batch_size": 2, "global_batch_size": 8, "max_position_embeddings": 512}
        | of_case,
    )
    for name, layout, of_case in (
        ("zero-bubble", (1, 2, 1), {"schedule": "zero-bubble"}),
        ("zero-bubble, recomputed", (1, 2, 1), {"schedule": "zero-bubble", "recompute": "selective"}),
        (
            "zero-bubble, recomputed, both dropouts",
            (1, 2, 1),
            {"schedule": "zero-bubble", "recompute": "selective", "attention_dropout": 0.1, "hidden_dropout": 0.1},
        ),
        ("1F1B, both dropouts", (1, 2, 1), {"attention_dropout": 0.1, "hidden_dropout": 0.1}),
        ("recomputed", (1, 1, 1), {"recompute": "selective"}),
        ("recomputed, dropout", (1, 1, 1), {"recompute": "selective", "attention_dropout": 0.1}),
        ("ALiBi", (1, 1, 1), {"position_embedding_type": "alibi"}),
        ("soft cap", (1, 1, 1), {"attn_logit_softcapping": 30.0}),
        (
            "grouped queries",
            (1, 1, 1),
            {"num_attention_heads": 4, "num_query_groups": 1, "position_embedding_type": "rope", "recompute": "light"}
            | {"num_layers": 4},
        ),
        (
            "zero-bubble, activations in host memory",
            (1, 2, 1),
            {"schedule": "zero-bubble", "offload_activations": True, "num_layers": 6},
        ),
        (
            "none, zero-bubble, dropout",
            (1, 2, 1),
            {"schedule": "zero-bubble", "attention": "sdpa", "hidden_dropout": 0.1},
        ),
    )
}

LARGE_TABLE: dict[str, Any] = MATRICES | {"vocab_size": 32768, "global_batch_size": 4, "zero_stage": 0}
WIDE_MATRICES: dict[str, Any] = BUCKETS | {
    "precision": "bf16",
    "hidden_size": 1024,
    "vocab_size": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "bucket_size_mb": 25.0,
    "untie_embeddings_and_output_weights": True,
}
# Updates that take more than the backward before.
UPDATED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "Adafactor, two tables, bf16 sums, pp 2": (
        (1, 2, 1),
        LARGE_TABLE | TWO_TABLES | {"optimizer": "adafactor", "grad_reduce_dtype": "bf16"},
    ),
    "Adafactor, two tables, bf16 sums, ZeRO 1": (
        (1, 2, 2),
        LARGE_TABLE | TWO_TABLES | {"optimizer": "adafactor", "grad_reduce_dtype": "bf16", "zero_stage": 1},
    ),
    "Adafactor, experts, ZeRO 3": (
        (1, 1, 4),
        MATRICES | EXPERTS | LLAMA | {"optimizer": "adafactor", "ep": 2, "zero_stage": 3, "global_batch_size": 8},
    ),
    "LAMB, tied table, pp 2": ((1, 2, 1), LARGE_TABLE | {"optimizer": "lamb"}),
    "Muon, bf16 sums, pp 2": (
        (1, 2, 1),
        WIDE_MATRICES | {"optimizer": "muon", "grad_reduce_dtype": "bf16", "recompute": "full"},
    ),
    "Muon, fp32, pp 2": ((1, 2, 1), WIDE_MATRICES | {"optimizer": "muon", "precision": "fp32"}),
    "Muon, bf16 sums, dp 2": (
        (1, 2, 2),
        WIDE_MATRICES | {"optimizer": "muon", "grad_reduce_dtype": "bf16", "recompute": "full"},
    ),
    "LAMB, two tables, pp 2": ((1, 2, 1), LARGE_TABLE | TWO_TABLES | {"optimizer": "lamb"}),
    "Lion, two tables, bf16 sums, pp 2": (
        (1, 2, 1),
        LARGE_TABLE | TWO_TABLES | {"optimizer": "lion", "grad_reduce_dtype": "bf16"},
    ),
    "tied table of four stages": (
        (1, 4, 1),
        LARGE_TABLE | {"schedule": "1f1b", "offload_activations": True},
    ),
    "SGD, tied table, bf16 sums": (
        (1, 1, 1),
        LARGE_TABLE | {"optimizer": "sgd", "grad_reduce_dtype": "bf16", "global_batch_size": 1},
    ),
    "SGD, two tables, pp 2": ((1, 2, 1), LARGE_TABLE | TWO_TABLES | {"optimizer": "sgd"}),
    "SGD, Nesterov's momentum": ((1, 1, 1), LARGE_TABLE | {"optimizer": "sgd", "sgd_nesterov": True}),
    "AdamW, moments in bf16, pp 2": ((1, 2, 1), LARGE_TABLE | TWO_TABLES | {"moments_dtype": "bf16"}),
    "AdamW, moments and sums in bf16, tp 2, ZeRO 1": (
        (2, 1, 2),
        LARGE_TABLE | TWO_TABLES | {"moments_dtype": "bf16", "grad_reduce_dtype": "bf16", "zero_stage": 1},
    ),
    "1-bit Adam": ((1, 1, 4), MATRICES | {"optimizer": "onebitadam", "zero_stage": 0, "vocab_size": 512}),
    "1-bit LAMB": ((1, 1, 4), MATRICES | {"optimizer": "onebitlamb", "zero_stage": 0, "vocab_size": 512}),
}


def whole_steps(rank: int, world_size: int, cases: Sequence[str], sizes: dict[str, Any]) -> list[list[RankReport]]:
    """Of each case the first rank of every stage, after two steps of all its microbatches."""
    absent_accelerator()
    found = []
    with mock.patch.object(dry_run, "_counts", lambda config, rank: [config.microbatches] * 2):
        for case in cases:
            layout, of_case = (
                (CASES | MORE | KINDS | BERT | ANEW | UNEQUAL | OF_ROWS | WHOLE | STAGES)
                | (OFFLOADED | DIVIDED | SCORES | UPDATED)
            )[case]
            make = make_bert_config if case in BERT else make_config
            config = make(layout, "unused", **{**SIZES, **sizes, **of_case}).for_device(on_cpu=False)
            ranks, pp = config.parallel.ranks, config.parallel.pp
            found.append([run_rank(config, rank, on_cpu=False) for rank in range(0, ranks, ranks // pp)])
    return found


def require_peaks(cases: Sequence[str], **sizes: Any) -> None:
    found = run_distributed(whole_steps, 1, cases, sizes, init=False, timeout=300)[0]
    for case, reports in zip(cases, found, strict=True):
        for report in reports:
            assert report.problem is None
            assert report.planned.expected_tensors == pytest.approx(report.peak, rel=0.015), f"{case}, {report.rank}"


def test_peak_of_memory() -> None:
    require_peaks(QUICK)


@pytest.mark.slow
def test_peak_of_memory_of_long_sequences() -> None:
    require_peaks(["pp 2"], seq_length=LONG)


@pytest.mark.parametrize("length", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_peak_of_memory_where_a_step_makes_gradients_anew(length: int) -> None:
    for case, (layout, _) in ANEW.items():
        require_peaks([case], seq_length=length, global_batch_size=layout[2])


@pytest.mark.slow
def test_peak_of_memory_where_buckets_are_unequal() -> None:
    require_peaks([*UNEQUAL], seq_length=64)


@pytest.mark.slow
def test_peak_of_memory_where_experts_are_most_of_it() -> None:
    require_peaks([*OF_ROWS], seq_length=64)


@pytest.mark.slow
def test_peak_of_memory_where_the_optimizer_takes_matrices_whole() -> None:
    require_peaks([*WHOLE], seq_length=64)


@pytest.mark.slow
def test_peak_of_memory_where_the_update_takes_most() -> None:
    require_peaks([*UPDATED], seq_length=64)


@pytest.mark.slow
def test_peak_of_memory_where_scores_are_most_of_it() -> None:
    require_peaks([*SCORES], seq_length=512)


@pytest.mark.slow
def test_peak_of_memory_of_backwards_of_several_stages_and_in_halves() -> None:
    require_peaks([*STAGES], seq_length=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", OFFLOADED)
def test_peak_of_memory_of_offloaded_activations_and_backwards_in_halves(case: str) -> None:
    require_peaks([case], seq_length=LONG)


@pytest.mark.slow
def test_peak_of_memory_where_ranks_divide_sequences() -> None:
    require_peaks([*DIVIDED], seq_length=2 * LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*AT_LENGTH, *SHARDED, *(case for case in CASES if "expert" in case or "ep 2" in case)]
)
def test_peak_of_memory_of_long_sequences_in_other_layouts(case: str) -> None:
    require_peaks([case], seq_length=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*BERT, *KINDS])
def test_peak_of_memory_of_bert_and_other_blocks(case: str) -> None:
    require_peaks([case], seq_length=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["soft caps", "soft caps, bf16, recomputed"])
def test_peak_of_memory_where_tiles_of_scores_are_most_of_it(case: str) -> None:
    require_peaks([case], seq_length=1024)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES | MORE if case not in QUICK])
def test_peak_of_memory_of_all_layouts(case: str) -> None:
    require_peaks([case])
