"""The table: what changes no number, on which layouts, to which rounding. tests/matrix/runner.py says how to read it.

In `make test` stands every feature once, on the layout that asks most of it; `more` and `slow` are the cross products.
"""
# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from tests.matrix import runner
from tests.matrix.programs import DROPOUT, EXACT, LATENT, LLAMA, PROGRAMS, SGD, SMOOTH, UNCUT, Changes
from tests.matrix.runner import BITWISE, LEARNED, RESUME, TORCH, WEIGHTS, Relation, Row, follows, near_to, resharded

STAGES = range(4)

LAYOUTS = [
    # Each pair of dimensions, and each by itself with more than two ranks.
    Row("layouts", "gpt2", {}, ["tp4", "pp3", "dp4", "tp2 pp2 dp2"], more=["tp2 pp2", "tp2 dp2", "pp2 dp2", "tp2", "pp2", "pp4", "dp2", "tp2 pp3", "tp4 dp2", "tp4 pp2", "pp4 dp2", "pp2 dp4"], whole=True),
    Row("layouts-twenty-steps", "gpt2", {"num_layers": 5, "train_iters": 20, "lr_warmup_iters": 4}, ["", "pp2 dp2"], runner.TORCH_RUN, slow=True),
    Row("sgd-untied", "gpt2 untied", SGD, ["tp2", "pp2", "dp2"], runner.SGD_WEIGHTS, whole=True),
    Row("sgd-untied-cube", "gpt2 untied", SGD, ["tp2 pp2 dp2"], runner.SGD_WEIGHTS, slow=True, whole=True),
    # Masks are functions of names and indices: with equal micro-batches even dropout is the same on every layout.
    Row("hidden-dropout", "gpt2", {"hidden_dropout": 0.2, "micro_batch_size": 1}, ["tp2"], more=["pp2 dp2"], whole=True),
    Row("attention-dropout", "gpt2", {"attention_dropout": 0.2, "micro_batch_size": 1}, ["pp2 dp2"], whole=True),
    Row("same-again", "gpt2", {"seed": 7}, ["dp2 | log_interval=11"], BITWISE),
    # Sequence parallelism.
    Row("sp", "gpt2", {}, ["tp2 dp2 sp z3"], more=["tp4 sp", "tp2 sp", "tp2 pp2 sp", "tp2 dp2 sp z1", "tp2 pp2 dp2 sp z3"], whole=True),
    Row("sp-sgd", "gpt2", SGD, ["tp2 pp2 sp"], whole=True),
    # Schedules, without exact sums.
    Row("schedules", "gpt2", {"num_layers": 4}, ["zb", "tp2 dp2 zb z3"], more=["pp4 zb"]),
    Row("schedules-whole", "gpt2", {"num_layers": 8}, ["tp2 pp2 dp2 interleaved virtual2 z2", "pp4 zb", "zb", "tp2 dp2 zb z3"], slow=True, whole=True),
    Row("schedules-cube", "gpt2", {"num_layers": 5}, ["tp2 pp2 dp2 interleaved virtual2 z2"], slow=True),
]

ZERO = [
    # Four microbatches a step on every layout. In `make test` every stage runs by itself and beside a pipeline.
    Row("zero-torch", "gpt2", SMOOTH, ["", "dp2 mb1 z0", "dp2 mb1 z1", "dp2 mb1 z2", "dp2 mb1 z3", "tp2 pp2 dp2 mb1 z2"], TORCH, more=["pp2 dp2 mb1 z1", "pp2 dp2 mb1 z3"]),
    Row("zero-torch-dp4", "gpt2", SMOOTH | {"global_batch_size": 16}, ["dp4 z3"], TORCH, more=["dp4 z2"]),
    *(
        Row(f"zero{stage}-torch-whole", "gpt2", SMOOTH, [f"{words} z{stage}" for words in ("", "pp2", "tp2", "tp2 pp2", "dp2 mb1", "pp2 dp2 mb1", "tp2 pp2 dp2 mb1", "tp2 dp2 mb1", "pp4 dp2 mb1")], TORCH, slow=True, whole=True)
        for stage in STAGES
    ),
    Row("zero-torch-dp4-whole", "gpt2", SMOOTH | {"global_batch_size": 16}, [f"{words} z{stage}" for stage in STAGES for words in ("dp4", "tp2 dp4")], TORCH, slow=True, whole=True),
    Row("zero-without-dp", "gpt2", {}, ["tp2 | z3", "pp2 | z1"], runner.LOSSES, more=["tp2 | z1", "pp2 | z3"], whole=True),
    Row("overlap", "gpt2", SMOOTH | {"num_layers": 3}, ["dp2 z1 | waits", "pp2 dp2 z3 | waits"], BITWISE, more=["dp2 z0 | waits", "dp2 z2 | waits", "pp2 dp2 z0 | waits", "pp2 dp2 z1 | waits", "pp2 dp2 z2 | waits", "dp2 z3 | waits"]),
    Row("bucket-sizes", "gpt2", SMOOTH, ["dp2 z1 bucket_size_mb=1e-6", "dp2 z2 bucket_size_mb=100.0"], more=["dp2 z1 bucket_size_mb=100.0", "dp2 z2 bucket_size_mb=1e-6"]),
    Row("zero-sgd-untied", "gpt2 untied", SGD | {"sgd_momentum": 0.9, "lr": 0.05}, ["dp2 z2", "pp2 dp2 z3"], whole=True),
    # Master weights keep what 16 bits lose.
    Row("sixteen-bits", "gpt2", {}, ["dp2 z0 precision=bf16", "dp2 z1 precision=fp16", "dp2 z2 precision=bf16", "dp2 z3 precision=fp16"], runner.NEAR_FP32, more=["dp2 z0 precision=fp16", "dp2 z1 precision=bf16", "dp2 z2 precision=fp16", "dp2 z3 precision=bf16"], whole=True),
    Row("offload", "gpt2", {"num_layers": 3}, ["dp2 z2 precision=bf16 | offload", "tp2 dp2 z3 | offload"], runner.OFFLOADED, more=["| offload", "dp2 z1 | offload"]),
    Row("offload-bf16-pp", "gpt2", {"num_layers": 3}, ["pp2 dp2 z2 precision=bf16 | offload"], runner.OFFLOADED, slow=True),
    Row("offload-fp16-sgd", "gpt2", {"num_layers": 3, "optimizer": "sgd"}, ["dp2 z3 precision=fp16 | offload"], runner.OFFLOADED),
    Row("offload-reproducible", "gpt2", {"reproducible": True}, ["dp2 z1 | offload"], runner.OFFLOADED),
    Row("zero-shards", "gpt2", SMOOTH | {"num_layers": 2, "global_batch_size": 16}, ["dp4 z2 shards2"], TORCH, more=["dp4 z1 shards2", "dp4 z3 shards2", "dp4 z2 shards2 waits", "dp2 cp2 mb1 z2 shards2"]),
    Row("zero-shards-offload", "gpt2", SMOOTH | {"num_layers": 2, "global_batch_size": 16, "clip_grad": 100.0}, ["dp4 z3 shards2 offload"], TORCH, slow=True),
]

IN_WINDOWS = {"window_size": 6, "position_embedding_type": "rope", "num_query_groups": 2}
NEWER = ("gemma 3", "gemma 2", "granite", "olmo", "olmo 2", "gpt-j", "opt", "phi longrope", "norms")
LATENT_EXPERTS = {
    "num_experts": 8, "moe_ffn_hidden_size": 16, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_best": 1, "moe_shared_expert_size": 8,
    "moe_first_dense_layers": 1, "moe_aux_loss_coeff": 0.1, "adam_eps": 1e-4,
}
RECOMPUTE = ("recompute=selective", "recompute=light", "recompute=full", "recompute=full recompute_num_layers=1")
SAVERS = [  # dropout included
    # Each way on one of two layouts, in turn.
    Row("recompute", "gpt2", DROPOUT | {"train_iters": 2}, [f"{('pp2 dp2 z3', 'tp2 pp2')[number % 2]} | {way}" for number, way in enumerate(RECOMPUTE)], BITWISE, more=[f"{place} | {way}" for number, way in enumerate(RECOMPUTE) for place in ("", ("tp2 pp2", "pp2 dp2 z3")[number % 2])], whole=True),
    # The gradients of weights are computed later, from outputs of norms that are computed once more.
    Row("recompute-split-backward", "gpt2", DROPOUT | {"train_iters": 2}, ["tp2 pp2 sp zb | recompute=light"], BITWISE),
    Row("recompute-split-backward-pp", "gpt2", DROPOUT | {"train_iters": 2}, ["pp2 zb | recompute=light"], BITWISE, slow=True),
    Row("recompute-swiglu-experts", "gpt2", {"num_experts": 4, "disable_bias_linear": True, "activation": "swiglu"}, ["dp2 ep2 z3 | recompute=light"], BITWISE),
    Row("recompute-experts", "gpt2", {"num_experts": 4, "disable_bias_linear": True}, ["tp2 ep2 etp1 sp | recompute=light"], BITWISE, more=["pp2 zb | recompute=light"]),
    Row("recompute-experts-reproducible", "gpt2", {"num_experts": 4, "disable_bias_linear": True, "reproducible": True, "global_batch_size": 4}, ["tp2 | recompute=light"], BITWISE),
    Row("savers-together", "gpt2", DROPOUT | {"train_iters": 2}, ["tp2 dp2 sp z2 | recompute=full"], BITWISE, whole=True),
]

FAMILIES = [  # each family of models and each form of attention, on layouts that divide what is its own
    Row("family-llama", "llama", {}, ["tp4 sp recompute=selective"], more=["tp4", "pp4", "tp2 dp2 z3 sp", "tp2 pp2", "tp2 pp2 zb"]),
    Row("family-stretched", "stretched", {}, ["pp2 dp2 z2"], slow=True),
    Row("family-windows", "windows", {}, ["tp2 pp2 recompute=selective"], more=["pp4", "tp4 attention=fused-softmax"], slow=True),
    Row("family-qwen2", "qwen2", {"num_layers": 4}, ["pp2 dp2 interleaved virtual2"]),
    Row("family-qwen2-more", "qwen2", {}, ["tp2 dp2 zb z3", "tp2 dp2 z1"], slow=True),
    Row("family-qwen3", "qwen3", {}, ["tp2 dp2 z3 recompute=full sp"], more=["tp4", "tp2 pp2 sp"]),
    Row("family-one-key-head", "one key head", {}, ["tp2 pp2 zb"], more=["tp4 sp"], slow=True),
    Row("family-norm-of-all-heads", "norm of all heads", {}, ["tp4 sp"], more=["tp2 pp2 zb", "tp4", "tp2 dp2 z3 recompute=full"], slow=True),
    Row("family-layer-norm-of-all-heads", "LayerNorm of all heads", {}, ["tp2 dp2 sp recompute=light", "tp4"], slow=True),
    Row("family-norm-of-each-head", "norm of each head", {}, ["tp2 pp2 sp zb"], more=["tp4", "tp4 sp recompute=selective", "tp2 dp2 z3 recompute=full"]),
    Row("family-rms-norm-of-each-head", "RMSNorm of each head", {}, ["tp2 dp2 sp recompute=light"], slow=True),
    Row("family-neox", "neox", {}, ["tp2 pp2 sp"], more=["tp4 sp", "tp2 pp2 zb", "pp2 dp2 z1 recompute=full"]),
    Row("family-bloom", "bloom", {}, ["tp4 sp"], more=["tp2 pp2 recompute=full", "dp4 z3", "tp2 pp2 zb"]),
    *(Row(f"family-{name}-reproducible", name, EXACT, ["pp2 dp2 z3", "pp4"], BITWISE, slow=True) for name in ("llama", "qwen3", "neox", "bloom")),
    Row("family-llama-reproducible-tp", "llama", EXACT, ["tp2 dp2"], BITWISE, slow=True),
    Row("family-norm-of-each-head-reproducible", "norm of each head", EXACT, ["tp4"], BITWISE, slow=True),
    Row("family-gemma-3", "gemma 3", {}, ["tp2 pp2 sp"], more=["dp2 cp2 z2", "tp4"], slow=True),
    Row("family-gemma-2", "gemma 2", {}, ["tp2 cp2 sp"], more=["cp2 cp_comm=allgather chunks3", "cp2 cp_comm=ulysses", "cp4 cp_comm=ulysses", "tp2 pp3 chunks2 zb"]),
    Row("family-gemma-2-dropout", "gemma 2", {"attention_dropout": 0.2, "micro_batch_size": 1}, ["dp2 z3 recompute=full"], slow=True),
    Row("family-granite", "granite", {}, ["tp2 cp2 z1 chunks3"], more=["pp2 dp2 z3 zb"]),
    Row("family-olmo", "olmo", {}, ["tp2 sp chunks3"], more=["tp4 pp2 zb"], slow=True),
    Row("family-olmo-norms", "olmo", {"qk_layernorm": True, "qk_layernorm_all_heads": True}, ["dp2 z3 recompute=light"], slow=True),
    Row("family-olmo-rms-norm", "olmo", {"normalization": "RMSNorm"}, ["pp2 cp2"], slow=True),
    Row("family-olmo-2", "olmo 2", {}, ["tp2 dp2 sp z2", "pp3 recompute=full"], slow=True),
    Row("family-norms", "norms", {}, ["tp2 pp2 recompute=light"], slow=True),
    Row("family-gpt-j", "gpt-j", {}, ["tp2 cp2 sp", "tp2 pp3 chunks2 zb", "pp2 dp2 z3 recompute=light"], slow=True),
    Row("family-opt", "opt", {}, ["tp2 pp2 sp", "cp2"], slow=True),
    Row("family-phi-longrope", "phi longrope", {}, ["tp2 cp2 sp", "pp3"], slow=True),
    *(Row(f"family-{name.replace(' ', '-')}-exact", name, EXACT, ["tp2 sp", "pp3", "cp2"], BITWISE, slow=True) for name in ("gemma 2", "gpt-j", "olmo", "opt")),
    *(Row(f"family-{name.replace(' ', '-')}-recompute", name, {}, [f"| {way}" for way in RECOMPUTE[:3]], BITWISE, slow=True) for name in NEWER),
    *(Row(f"family-{name.replace(' ', '-')}-compiled", name, {}, ["compiled"], slow=True) for name in NEWER),
    # Latent attention.
    Row("latent", "latent", {}, ["tp4 sp recompute=selective"], more=["tp4", "tp2 dp2 sp z3 recompute=full", "tp2 pp2 zb sp", "dp4 z2 recompute=light", "tp2 cp2 cp_comm=ring sp", "tp2 cp2 cp_comm=allgather"]),
    Row("latent-wide", "latent wide", {}, ["tp2 pp2 zb"], more=["dp2 cp2 cp_comm=ulysses z1", "pp2 cp2 cp_comm=ring recompute=selective", "tp4 sp", "tp2 dp2 attention=fused-softmax chunks2"], slow=True),
    Row("latent-packed", "latent packed", {}, ["tp2 pp2 sp", "tp2 cp2 cp_comm=allgather sp", "cp4 cp_comm=ring", "tp2 cp2 cp_comm=ulysses"], slow=True),
    Row("latent-experts", "latent", LATENT_EXPERTS, ["compiled", "compiled recompute=light"], slow=True),
    # Attention in blocks, as that of long sequences is, against whole masks.
    *(
        Row(f"blocks-{name}", "gpt2", changes, ["tp2 in-blocks"], more=["pp2 mb1 zb in-blocks"])
        for name, changes in (("windows", IN_WINDOWS), ("alibi", {"position_embedding_type": "alibi"}), ("shared", {"num_query_groups": 1, "reset_attention_mask": True}))
    ),
    Row("blocks-alibi-windows", "gpt2", IN_WINDOWS | {"position_embedding_type": "alibi"}, ["tp2 recompute=selective in-blocks"]),
    Row("blocks-shared-alibi", "gpt2", {"num_query_groups": 1, "window_size": 6, "position_embedding_type": "alibi"}, ["tp2 in-blocks"], slow=True),
    Row("blocks-bert", "bert", {}, ["tp2 in-blocks"], slow=True),
    Row("blocks-modern-bert", "bert", {"bert_style": "modern"}, ["tp2 in-blocks recompute=full"]),
    Row("blocks-dropout", "gpt2", IN_WINDOWS | {"hidden_dropout": 0.1, "attention_dropout": 0.2}, [f"in-blocks | recompute={way}" for way in ("selective", "full")], BITWISE),
    *(  # Beyond the length up to which masks are whole.
        Row(f"blocks-long-{name}", "gpt2", {"num_query_groups": 1, "seq_length": 1100, "global_batch_size": 2, "micro_batch_size": 1, "num_layers": 2} | changes, ["tp2"], slow=True)
        for name, changes in (("packed", {"reset_attention_mask": True}), ("alibi", {"window_size": 300, "position_embedding_type": "alibi"}))
    ),
]

DROPPED = {"hidden_dropout": 0.2, "micro_batch_size": 1}
TWO_KEYS = LLAMA | {"num_query_groups": 2}
COMPILED_EXPERTS = TWO_KEYS | {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.1, "num_layers": 2}
COMPILED = [  # pairwise: each model, schedule, ZeRO stage, recomputation and precision with some of the others
    Row("compiled-bert", "modern bert", {"window_size": 4}, ["| compiled"], near_to(1e-5), more=["pp2 | compiled"], slow=True),
    Row("compiled-classic-bert", "bert", {"hidden_dropout": 0.1}, ["| compiled", "pp2 | compiled"], near_to(1e-5), slow=True),
    Row("generated-kernels", "gpt2", DROPPED | {"num_layers": 1, "train_iters": 2, "lr_warmup_iters": 1}, ["| compile=True"], near_to(1e-5), slow=True),
    Row("generated-kernels-tp", "gpt2", TWO_KEYS, ["tp2 | compile=True"], near_to(1e-5), slow=True),
    Row("compiled", "gpt2", DROPPED, ["tp2 zb recompute=selective | compiled", "tp2 pp2 zb recompute=selective | compiled", "| compiled", "pp2 interleaved virtual2 window_size=5 recompute=full num_layers=4 | compiled"], near_to(1e-5), slow=True),
    Row("compiled-bf16", "gpt2", DROPPED | {"attention_dropout": 0.2, "precision": "bf16"}, ["pp2 dp2 z2 | compiled"], near_to(1e-5), slow=True),
    Row("compiled-llama", "gpt2", TWO_KEYS, ["tp2 recompute=light | compiled", "tp4 qk_layernorm=True sp num_query_groups=4 | compiled", "pp2 dp2 zb z3 recompute=full | compiled"], near_to(1e-5), slow=True),
    Row("compiled-llama-dropout", "gpt2", TWO_KEYS | DROPPED, ["tp2 dp2 sp z3 recompute=full | compiled"], near_to(1e-5), slow=True),
    # Compiled code sums over ranks with gloo's own reduce-scatter, which adds in another order; in bf16 that shows.
    Row("compiled-llama-bf16", "gpt2", TWO_KEYS | DROPPED | {"precision": "bf16"}, ["tp2 pp2 dp2 sp z2 | compiled"], near_to(2**-8), slow=True),
    Row("compiled-fp16", "gpt2", {"parallel_residual": True, "attention": "fused-softmax", "activation": "geglu", "precision": "fp16"}, ["| compiled"], near_to(1e-5), slow=True),
    Row("compiled-reproducible", "bloom", {"embedding_layernorm": False, "reproducible": True}, ["tp2 dp2 z1 | compiled"], near_to(1e-5), slow=True),
    Row("compiled-gpipe", "gpt2", {"embedding_layernorm": True}, ["pp2 gpipe recompute=full recompute_num_layers=1 | compiled"], near_to(1e-5), slow=True),
    Row("compiled-experts", "gpt2", COMPILED_EXPERTS, ["tp2 dp2 ep2 z1 recompute=full | compiled"], near_to(1e-5), slow=True),
    Row("compiled-experts-capacity", "gpt2", COMPILED_EXPERTS | {"moe_expert_capacity_factor": 1.0}, ["pp2 dp2 ep2 zb | compiled"], near_to(1e-5), slow=True),
    Row("compiled-offload", "gpt2", {"optimizer": "sgd", "sgd_momentum": 0.0}, ["dp2 z1 offload | compiled"], near_to(1e-5), slow=True),
]

FOUR = UNCUT | {"num_layers": 4}
SIX = UNCUT | {"num_layers": 6}
SCHEDULES = [  # exact sums
    Row("schedules-exact", "gpt2", FOUR, ["pp2 interleaved virtual2", "pp4 zb", "pp2 dp2 zb z1 recompute=full", "dp2 zb z3"], BITWISE, more=["pp2 gpipe", "pp2 zb", "pp2 dp2 interleaved virtual2 z1", "zb", "dp2 zb z2", "pp4 gpipe", "pp2 dp2 interleaved virtual2 z3", "dp2 zb"]),
    Row("schedules-exact-untied", "gpt2 untied", SIX, ["pp2 interleaved virtual3"], BITWISE, slow=True),
    Row("schedules-exact-six-blocks", "gpt2", SIX, ["pp3 interleaved virtual2"], BITWISE),
    Row("schedules-exact-virtual3", "gpt2", SIX, ["pp2 dp2 interleaved virtual3 z2"], BITWISE, slow=True),
    Row("schedules-exact-dropout", "gpt2", FOUR | {"hidden_dropout": 0.1}, ["pp2 dp2 zb z2 recompute=selective"], BITWISE, more=["zb recompute=full"]),
    Row("schedules-exact-bf16", "gpt2", FOUR | {"precision": "bf16"}, ["pp2 dp2 zb z3"], BITWISE, slow=True),
    Row("schedules-exact-flops", "gpt2", UNCUT | {"num_layers": 5}, ["pp3 zb pipeline_balance=flops"], BITWISE),
    Row("schedules-exact-own-layout", "gpt2", UNCUT | {"num_layers": 7}, ["pp2 interleaved virtual2 pipeline_layout=E,t|3*t|t|2*t,H"], BITWISE),
    Row("schedules-one-microbatch", "gpt2", FOUR | {"global_batch_size": 1}, ["pp2 interleaved virtual2"], BITWISE, more=["pp2 zb"]),
    Row("schedules-three-microbatches", "gpt2", FOUR | {"global_batch_size": 3}, ["pp2 gpipe"], BITWISE, more=["pp2 interleaved virtual2"]),
    Row("schedules-one-microbatch-gpipe", "gpt2", FOUR | {"global_batch_size": 1}, ["pp2 gpipe"], BITWISE, slow=True),
    Row("schedules-three-microbatches-zb", "gpt2", FOUR | {"global_batch_size": 3}, ["pp2 zb"], BITWISE, slow=True),
    # Embedding and head are one parameter on one stage, whose gradient no operator has alone. Each microbatch costs tens of messages.
    Row("schedules-tp", "gpt2", FOUR | {"global_batch_size": 4}, ["tp2 | pp2 interleaved virtual2", "tp2 sp | pp2 zb"], BITWISE, more=["tp2 | zb", "tp2 | pp2 gpipe", "tp2 sp | pp2 gpipe", "tp2 sp | pp2 interleaved virtual2", "tp2 | pp2 zb"]),
    *(  # Uneven stages: 18 blocks on 8 ranks, with embedding and head.
        Row(f"schedules-eight-ranks-{batch}", "gpt2", UNCUT | {"num_layers": 18, "global_batch_size": batch}, ["pp8", "pp8 gpipe", "pp8 interleaved virtual2", "pp8 zb"], BITWISE, slow=True)
        for batch in (4, 8)
    ),
    Row("schedule-of-ones-own", "gpt2", FOUR | {"global_batch_size": 4}, ["pp2 own-schedule"], BITWISE),
]

# Microbatches and ranks have unequal numbers of masked tokens and of pairs, none included.
BERT = [
    Row("bert", "bert", {}, ["tp2 pp2 sp", "dp2 z3 zb"], more=["pp2 dp2 z2", "zb", "tp2", "tp4", "tp4 sp", "pp4", "tp2 dp2 z3 sp", "pp3 zb", "dp2 z1", "dp4 z2", "dp4 z3 recompute=full", "pp2 dp2 z3", "tp2 pp2 zb sp", "pp4 dp2 gpipe", "tp2 pp2 dp2", "tp2 pp2 dp2 z3 sp recompute=selective"], whole=True),
    Row("bert-interleaved", "bert", {"num_layers": 5}, ["pp2 interleaved virtual2"], whole=True),
    Row("bert-interleaved-cube", "bert", {"num_layers": 6}, ["tp2 pp2 dp2 z1 interleaved virtual2"], slow=True, whole=True),
    Row("modern-bert", "modern bert", {}, ["tp2 pp2 sp"], more=["tp4", "pp3 zb", "tp2 dp2 zb z3", "pp2 interleaved virtual2", "dp4 z3 recompute=full", "tp2 pp2 dp2 z2 sp"], whole=True),
    Row("modern-bert-rmsnorm", "modern bert", {"normalization": "RMSNorm", "norm_bias": True}, ["tp2 sp"], slow=True, whole=True),
    Row("bert-reproducible", "bert", UNCUT, ["pp2 dp2 z2"], BITWISE),
    Row("bert-reproducible-whole", "bert", EXACT | {"train_iters": 8}, ["pp2 dp2 z2"], BITWISE, slow=True, whole=True),
    Row("bert-chunks", "bert", {"num_layers": 3}, ["chunks3", "pp2 zb chunks3"], slow=True),
    Row("modern-bert-chunks", "modern bert", {"num_layers": 3}, ["tp2 sp chunks3"]),
    *(
        Row(f"bert-reproducible-cp-{style.replace(' ', '-')}", style, EXACT | {"global_batch_size": 4, "num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}, ["cp2", "tp2 cp2 sp z2"], BITWISE, slow=True)
        for style in ("bert", "modern bert")
    ),
]

# Logits and loss a chunk of the vocabulary at a time, against all logits.
CHUNKS = [
    Row("chunks", "gpt2", {"num_layers": 3}, ["tp2 dp2 sp z2 chunks3"], more=["chunks3"]),
    Row("chunks-smoothing", "gpt2", {"num_layers": 3, "label_smoothing": 0.1, "z_loss": 1e-3}, ["tp2 chunks3"], more=["chunks3"]),
    Row("chunks-split-backward", "gpt2", {"num_layers": 3}, ["pp2 zb chunks3"], slow=True),
    Row("chunks-untied", "gpt2 untied", {"num_layers": 3}, ["tp2 pp2 zb sp chunks3"], more=["pp2 dp2 z3 chunks3"]),
    Row("chunks-reproducible", "gpt2", UNCUT | {"num_layers": 3, "loss_chunks": 3}, ["pp2 dp2 z1 zb"], BITWISE),
    Row("chunks-reproducible-1f1b", "gpt2", UNCUT | {"num_layers": 3, "loss_chunks": 3}, ["pp2 dp2 z1"], BITWISE, slow=True),
]

TWO = {"num_layers": 2, "train_iters": 4, "lr_warmup_iters": 1}
ADAM, NESTEROV, LAMB = {"optimizer": "adam"}, {"optimizer": "sgd", "sgd_nesterov": True, "lr": 0.1}, {"optimizer": "lamb", "lr": 1e-2}
MUON, ADAFACTOR, LION = {"optimizer": "muon", "lr": 1e-2}, {"optimizer": "adafactor", "lr": 1e-2}, {"optimizer": "lion", "lr": 1e-4}
MUON_HEADS = MUON | {"muon_split_qkv": "heads", "num_query_groups": 2}
RULES = ("blocks.0.*:freeze", "*.mlp.*.weight:lr=0.5,weight-decay=3", "embedding.*:weight-decay=0")
GROUPS = {"param_group": RULES, "lr_layer_decay": 0.5, "num_layers": 3, "train_iters": 4, "lr_warmup_iters": 4}
DECOUPLED = {"min_lr": 1e-4, "decoupled_lr": 4e-3, "decoupled_min_lr": 2e-3, "lr_warmup_iters": 2, "train_iters": 5, "num_layers": 5, "lr_decay_style": "linear"}
OF_TWO_RANKS = ["tp2 mb1", "pp2 mb1", "cp2 mb1", "dp2 mb1", "dp2 mb1 z1", "dp2 mb1 z2", "dp2 mb1 z3"]
OF_FOUR_RANKS = ["tp2 dp2 mb1 sp z1", "tp2 pp2 mb1", "tp2 dp2 mb1", "tp2 dp2 mb1 z3", "dp4 z2", "dp4 z3 shards2"]
EACH_OPTIMIZER: dict[str, tuple[Changes, Relation]] = {"adam": (ADAM, LEARNED), "sgd": (NESTEROV, LEARNED), "lamb": (LAMB, LEARNED), "muon": (MUON, LEARNED), "muon-heads": (MUON_HEADS, LEARNED), "lion": (LION, runner.FP32)}
OPTIMIZERS = [
    # What needs whole parameters.
    Row("lamb-z1", "gpt2", TWO | LAMB, ["dp2 mb1 z1"], LEARNED),
    Row("muon-tp-z0", "gpt2", TWO | MUON, ["tp2 mb1", "dp2 mb1"], LEARNED),
    Row("adafactor-more", "gpt2", TWO | ADAFACTOR, [words for words in OF_TWO_RANKS + OF_FOUR_RANKS if "tp" not in words], runner.UPDATED, slow=True),
    Row("adafactor-offload", "gpt2", TWO | ADAFACTOR | {"clip_grad": 0.0}, ["dp2 mb1 z1 offload"], runner.UPDATED, slow=True),
    Row("adafactor-experts", "gpt2 experts", TWO | ADAFACTOR, ["dp2 mb1 ep2 z1", "dp4 ep2 z2"], runner.UPDATED, slow=True),
    *(Row(f"{name}-two-ranks", "gpt2", TWO | changes, OF_TWO_RANKS, relation, slow=True) for name, (changes, relation) in EACH_OPTIMIZER.items()),
    *(Row(f"{name}-four-ranks", "gpt2", TWO | changes, OF_FOUR_RANKS, relation, slow=True) for name, (changes, relation) in EACH_OPTIMIZER.items()),
    *(Row(f"{name}-offload", "gpt2", TWO | changes | {"clip_grad": 0.0}, ["dp2 mb1 z1 offload"], runner.UPDATED if name == "sgd" else relation, slow=True) for name, (changes, relation) in EACH_OPTIMIZER.items()),
    *(Row(f"{name}-experts", "gpt2 experts", TWO | changes, ["dp2 mb1 ep2 z1", "dp4 ep2 z2", "tp2 dp2 mb1 ep2"], relation, slow=True) for name, (changes, relation) in EACH_OPTIMIZER.items()),
    Row("parameter-groups", "gpt2", GROUPS, ["pp2", "tp2 dp2 z3"], runner.FROZEN, slow=True),
    Row("parameter-groups-offload", "gpt2", GROUPS, ["dp2 z1 offload"], runner.LEARNS_ALIKE, slow=True),
    Row("decoupled-rates", "gpt2", DECOUPLED, ["pp2", "tp2 z1"], slow=True),
    Row("mup", "gpt2", TWO | {"train_iters": 3, "mup_base_width": 8}, ["tp2 mb1", "pp2 mb1", "dp2 mb1 z3"], slow=True),
    Row("mup-adam", "gpt2", TWO | ADAM | {"train_iters": 3, "mup_base_width": 8}, ["dp2 mb1 z1"], slow=True),
    # A batch that grows.
    Row("rampup", "gpt2", {"rampup_batch_size": ("4", "4", "24"), "global_batch_size": 16, "train_iters": 7, "num_layers": 3}, ["pp2 dp2 z2"]),
]

MOMENTS = [  # the same bits of moments in 16 and 8 bits
    Row("int8-moments", "gpt2", EXACT | {"global_batch_size": 4, "moments_dtype": "int8"}, ["tp2"], BITWISE),
    *(
        row
        for dtype in ("bf16", "int8")
        for row in (
            Row(f"{dtype}-moments-more", "gpt2", TWO | EXACT | {"moments_dtype": dtype}, ["tp2", "pp2", "dp2", "dp2 z1", "dp2 z2", "dp2 z3", "tp2 dp2 sp z1", "tp2 dp2 z3", "tp4"], BITWISE, slow=True),
            Row(f"{dtype}-moments-offload", "gpt2", TWO | EXACT | {"moments_dtype": dtype, "clip_grad": 0.0}, ["dp2 z1 offload"], BITWISE, slow=True),
            Row(f"{dtype}-moments-resume", "gpt2", TWO | EXACT | {"moments_dtype": dtype}, ["tp2", "dp2 z3", ""], RESUME, slow=True),
        )
    ),
]

SIX_STEPS = {"num_layers": 2, "train_iters": 6, "lr_warmup_iters": 1}
USUAL: dict[str, Changes] = {"onebitadam": {}, "onebitlamb": LAMB}
COMPRESSED = [  # what is sent in fewer bits follows the run that sends all
    Row("compressed", "gpt2", SIX_STEPS, ["dp2 mb1 | grad_reduce_compression=int8"], follows(1, 2e-3)),
    Row("compressed-lion", "gpt2", SIX_STEPS | LION, ["dp2 mb1 z2 | grad_reduce_compression=int8"], follows(1, 2e-3)),
    *(
        Row(f"compressed-{compression}-{name}", "gpt2", SIX_STEPS | changes, [f"{words} z{stage} | grad_reduce_compression={compression}" for stage in STAGES], follows(1, rel), slow=True)
        for compression, rel in (("bf16", 2e-4), ("int8", 2e-3))
        for name, words, changes in (
            ("tp-sp", "tp2 dp2 mb1 sp", {}),
            ("pp-lamb", "pp2 dp2 mb1", LAMB),
            ("cp-sgd", "dp2 cp2 mb1", {"optimizer": "sgd", "lr": 1e-2}),
            # To all experts: where a token chooses, a rounding may change its choice, and the loss by 3e-4.
            ("experts", "dp4 ep2", {"num_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True}),
            ("muon-offload", "dp4 offload", {"optimizer": "muon", "lr": 1e-3}),
            ("int8-moments", "tp2 dp2 mb1 overlap_grad_reduce=False", {"moments_dtype": "int8"}),
        )
    ),
    *(
        Row(f"compressed-resume-{name}", "gpt2", SIX_STEPS, [f"{first} mb1 grad_reduce_compression=int8", f"{other} mb1 grad_reduce_compression=int8"], resharded(rel), slow=slow)
        for name, first, other, rel, slow in (("z0", "dp2", "dp2 z1", 1e-4, False), ("z0-alone", "dp2", "", 1e-3, True), ("z3", "dp2 z3", "dp2 z1", 1e-4, True), ("z3-alone", "dp2 z3", "", 1e-3, True))
    ),
    *(  # The warm-up is the usual optimizer's; norms add up in another order.
        Row(f"{name}-warm-up", "gpt2", usual | {"num_layers": 1, "train_iters": 4, "lr_warmup_iters": 1, "lr_decay_iters": 9, "clip_grad": 0.0}, [f"dp2 optimizer={name} onebit_freeze_step=3 | optimizer={usual.get('optimizer', 'adamw')} onebit_freeze_step=None"], runner.LOSSES)
        for name, usual in USUAL.items()
    ),
    # Blocks belong to parameters: what is compressed is the same, wherever they lie.
    Row("onebit-stages", "gpt2", SIX_STEPS | {"optimizer": "onebitadam", "onebit_freeze_step": 2}, ["dp2 mb1 | pp2"], runner.LOSSES_NEAR, slow=True),
    *(
        Row(f"{name}-{place}", "gpt2", SIX_STEPS | usual | changes, [f"{words} | optimizer={name} onebit_freeze_step=2"], follows(2, 1e-2), slow=True)
        for name, usual in USUAL.items()
        for place, words, changes in (
            ("pp2", "pp2 dp2 mb1", {}),
            ("tp2", "tp2 dp2 mb1", {}),
            ("tp2-sp", "tp2 dp2 mb1 sp", {}),
            ("cp2", "dp2 cp2 mb1", {}),
            ("ep2", "dp4 ep2", {"num_experts": 4, "moe_ffn_hidden_size": 16, "disable_bias_linear": True}),
            ("bf16", "pp2 dp2 mb1", {"precision": "bf16", "ema_decay": 0.9}),
        )
    ),
]

# Many buckets, tied embeddings, a vocabulary that no tp divides, and blocks that no pipeline divides.
SAVED = EXACT | {"global_batch_size": 4, "num_layers": 3, "train_iters": 2, "lr_warmup_iters": 1}
PLACES = {
    "one": "", "dp2": "dp2 z0", "pp2": "pp2 interleaved virtual2", "pp2-dp2": "pp2 dp2 z1", "tp2": "tp2", "tp2-dp2": "tp2 dp2 z2",
    "tp2-pp2": "tp2 pp2 gpipe", "cube": "tp2 pp2 dp2 z3", "tp4": "tp4", "pp4": "pp4 zb", "dp4": "dp4 z0", "pp3": "pp3",
}
EVERYWHERE = [f"{words.partition(' z')[0]} z{stage}" if "dp" in words else words for words in PLACES.values() for stage in (STAGES if "dp" in words else [0])]
BALANCED = {"moe_aux_loss_coeff": 0.1, "moe_router_bias_update_rate": 0.05, "num_layers": 2, "train_iters": 2}
EXPERT_PLACES = ["dp4 ep4 z2", "tp2 dp2 ep2 z1", "tp2 dp2 ep2 etp1 sp z3", "pp2 dp2 ep2", "tp4", "dp2 cp2 ep4 z1", "tp2 cp2 ep2 etp1 sp z2"]
RESUMES = [
    Row("reshard-tp4", "gpt2", SAVED, ["tp4", "pp2 zb"], RESUME),
    Row("reshard-pp2-dp2", "gpt2", SAVED, ["pp2 dp2 z1", "tp2 pp2 dp2 z0", "dp4 z1"], RESUME),
    *(Row(f"reshard-{name}-everywhere", "gpt2", SAVED | {"num_layers": 5, "train_iters": 8, "lr_warmup_iters": 2}, [words, *EVERYWHERE], RESUME, slow=True) for name, words in PLACES.items()),
    Row("recompute-resume", "gpt2", DROPOUT | {"num_layers": 2, "train_iters": 2}, ["recompute=light", ""], RESUME),
    Row("recompute-resume-with-it", "gpt2", DROPOUT | {"num_layers": 2, "train_iters": 2}, ["", "recompute=light"], RESUME),
    Row("average-resume", "gpt2", UNCUT | {"num_layers": 2, "ema_decay": 0.7, "clip_grad": 0.0}, ["dp2 z3", ""], RESUME, more=["dp2 z3", "pp2", "dp2 z1", "dp2 z1 offload"]),
    Row("context-reshard", "gpt2", SMOOTH | {"num_layers": 2, "train_iters": 2}, ["cp2 z1", "dp2 z3", ""], runner.RESHARD),
    # The biases by which experts are balanced decide which ones are chosen.
    Row("experts-reshard", "bias", BALANCED, [EXPERT_PLACES[0], EXPERT_PLACES[1], ""], runner.RESHARD_NEAR),
    *(Row(f"experts-reshard-{number}", "bias", BALANCED, [words, *EXPERT_PLACES, ""], runner.RESHARD_NEAR, slow=True) for number, words in enumerate(EXPERT_PLACES)),
    *(Row(f"{name}-reshard", "gpt2", TWO | changes, ["tp2 dp2 mb1 sp z1", "dp2 mb1 z3", "pp2 mb1"], runner.RESHARD_NEAR, slow=True) for name, (changes, _) in EACH_OPTIMIZER.items()),
    Row("adafactor-reshard", "gpt2", TWO | ADAFACTOR, ["dp4 z2", "dp2 mb1 z3", "pp2 mb1"], runner.RESHARD_NEAR, slow=True),
    Row("zero-shards-reshard", "gpt2", SMOOTH | {"num_layers": 2, "global_batch_size": 16}, ["dp4 z3 shards2", "dp4 z2", "dp4 z1 shards4", ""], runner.RESHARD, slow=True),
    Row("offload-reshard", "gpt2", SMOOTH | {"num_layers": 2, "train_iters": 2, "micro_batch_size": 1}, ["pp2 dp2 z1 offload", "tp2 dp2"], runner.RESHARD),
    Row("bert-resume", "bert", DROPOUT | {"num_layers": 2, "train_iters": 2}, ["", ""], RESUME),
]

EXPERTS = [
    Row("experts-etp1", "sigmoid", {}, ["tp2 dp2 ep4 etp1 sp z1"], WEIGHTS),
    Row("experts-pp", "softmax", {}, ["pp2 dp2 ep2 z2 zb recompute=full"], WEIGHTS),
    Row("experts-cp", "limited", {}, ["tp2 cp2 ep4 etp1 sp"], WEIGHTS),
    Row("experts-cp-losses", "softmax", {"num_layers": 2}, ["cp2 ep2"], WEIGHTS),  # of sequences that ranks divide
    Row("experts-gelu", "gelu", {}, ["tp2 dp2 ep2 z3", "tp2 dp2 ep2 z3 recompute=light"], WEIGHTS, slow=True),
    Row("experts-bias", "bias", {}, ["dp4 ep2 z1 recompute=full", "tp2 dp2 ep4 etp1 sp", "pp2 dp2 ep2 z2 replay_interval=1"], WEIGHTS, slow=True),
    Row("experts-softmax", "softmax", {}, ["dp4 ep4 z1", "tp4 ep4 etp1 sp", "pp2 cp2 ep2 cp_comm=allgather zb", "pp2 dp2 ep2 z2 zb"], WEIGHTS, slow=True),
    Row("experts-softmax-sgd", "softmax", SGD, ["dp4 ep2"], WEIGHTS, slow=True),
    Row("experts-softmax-dropout", "softmax", {"hidden_dropout": 0.2, "micro_batch_size": 1}, ["dp4 ep2"], WEIGHTS, slow=True),
    Row("experts-many", "many", {}, ["dp4 ep2 z3"], WEIGHTS, slow=True),
    Row("experts-many-offload", "many", {"clip_grad": 0.0}, ["dp4 ep4 z1 offload"], WEIGHTS, slow=True),
    Row("experts-every", "every", {}, ["dp4 ep4"], WEIGHTS, slow=True),
    Row("experts-groups", "groups", {}, ["tp2 dp2 ep2 sp"], WEIGHTS, slow=True),
    Row("experts-groups-latent", "groups", LATENT | {"moe_router_group_best": 1}, ["tp2 dp2 ep4 etp1 sp"], WEIGHTS, slow=True),
    Row("experts-sigmoid-cp", "sigmoid", {}, ["tp2 cp2 ep2 sp"], WEIGHTS, slow=True),
    Row("experts-capacity", "capacity", {}, ["dp4 ep2 z1", "tp2 dp2 ep4 etp1 sp"], WEIGHTS, slow=True),
    Row("experts-first", "first", {}, ["dp2 cp2 ep4"], WEIGHTS, slow=True),
    Row("experts-global", "global", {}, ["pp2 dp2 ep2 recompute=full zb"], WEIGHTS, slow=True),
    Row("experts-jitter", "jitter", {}, ["tp2 cp2 ep2 sp", "dp4 ep2"], WEIGHTS, slow=True),
    Row("experts-padded", "padded", {}, ["tp2 pp2 ep2 etp1 sp", "dp4 ep4 z3"], WEIGHTS, slow=True),
    *(
        Row(f"experts-{precision}", "softmax", {"train_iters": 10}, [f"{words} precision={precision} {scale}" for words in ("dp4 ep4 z1", "tp2 dp2 ep4 etp1 sp z2", "pp2 dp2 ep2 zb")], runner.SIXTEEN_BITS, slow=True)
        for precision, scale in (("bf16", ""), ("fp16", "initial_loss_scale=1024.0"))
    ),
    Row("experts-reproducible", "sigmoid", UNCUT, ["pp2 dp2 ep2 zb recompute=full"], BITWISE, more=["dp4 ep2 z2"]),
    Row("experts-reproducible-limited", "limited", UNCUT, ["dp4 ep2 z2", "pp2 dp2 ep2 zb recompute=full"], BITWISE, slow=True),
    *(
        row
        for program in ("sigmoid", "limited")
        for row in (
            Row(f"{program}-reproducible-more", program, EXACT, ["dp4 ep4 z3 recompute=full", "dp4 ep1 z1", "pp2 dp2 ep2 z1 replay_interval=1", "tp2 | dp2 ep2", "tp2 | dp2 z2", "tp2 | pp2"], BITWISE, slow=True),
            Row(f"{program}-reproducible-pp4", program, EXACT | {"num_layers": 4}, ["pp4"], BITWISE, slow=True),
        )
    ),
    # Ranks route parts of a sequence.
    Row("experts-reproducible-sp", "sigmoid", EXACT | {"reproducible_blocks": 1}, ["tp2 sp etp1 | ep2", *(f"tp2 sp etp1 | dp2 ep{ep} z1" for ep in (1, 2, 4))], BITWISE, slow=True),
]

SHORT = SMOOTH | {"num_layers": 2}
EIGHT_STEPS = SHORT | {"train_iters": 8}
COMMS = ("allgather", "ring", "ulysses")
SHARED = [name for name in PROGRAMS if name.startswith("shared")]
DECODERS = ["gpt2", "llama", "windows", "bloom", "qwen", "stretched", "gpt2 packed", "llama packed", "windows packed", "bloom packed", *SHARED]
THREE = SHORT | {"seq_length": 24, "num_attention_heads": 6, "hidden_size": 48}
TINY = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 1, "position_embedding_type": "rope", "train_iters": 1, "lr_warmup_iters": 0}
CONTEXT = [
    Row("context-windows-packed", "windows packed", SHORT, ["pp2 cp2 zb cp_comm=ring"], WEIGHTS),
    Row("context-qwen", "qwen", SHORT, ["dp2 cp2 z3 recompute=full cp_comm=ulysses"], WEIGHTS, more=["tp2 cp2 recompute=full cp_comm=ulysses"]),
    Row("context-gpt2-packed", "gpt2 packed", SHORT, ["tp2 cp2 sp chunks2 cp_comm=allgather"], WEIGHTS),
    Row("context-shared-learned", "shared learned", SHORT, ["tp2 cp2 cp_comm=ring"], WEIGHTS, slow=True),
    Row("context-bert", "bert", SHORT, ["tp2 cp2 sp"], WEIGHTS, more=["cp4 cp_comm=ulysses", "dp2 cp2 z2 recompute=full", "pp2 cp2 zb chunks2 z3"]),
    Row("context-modern-bert", "modern bert", SHORT, ["pp2 cp2 zb z3 cp_comm=ulysses"], WEIGHTS, more=["pp2 cp2 gpipe recompute=selective", "tp2 cp2 sp recompute=light z1"], slow=True),
    Row("context-bloom", "bloom", SHORT, ["dp2 cp2 z3 recompute=selective cp_comm=allgather", "dp2 cp2 z1 cp_comm=ring"], WEIGHTS, slow=True),
    Row("context-gpt2", "gpt2", SHORT, ["dp2 cp2 z2 cp_comm=allgather", "tp2 cp2 sp chunks2 cp_comm=allgather"], WEIGHTS, slow=True),
    Row("context-llama", "llama", SHORT, ["pp2 cp2 cp_comm=ulysses zb"], WEIGHTS, slow=True),
    Row("context-llama-sgd", "llama", SHORT | {"optimizer": "sgd"}, ["cp4 cp_comm=ring"], WEIGHTS, slow=True),
    Row("context-llama-offload", "llama", SHORT | {"clip_grad": 0.0}, ["dp2 cp2 z1 offload"], WEIGHTS, slow=True),
    Row("context-stretched", "stretched", SHORT, ["pp2 cp2 mb1 gpipe"], WEIGHTS, slow=True),
    Row("context-bert-sgd", "bert", SHORT | {"optimizer": "sgd"}, ["cp4"], WEIGHTS, slow=True),
    Row("context-bert-interleaved", "bert", SHORT | {"num_layers": 5}, ["pp2 cp2 interleaved virtual2"], WEIGHTS, slow=True),
    Row("context-windows", "windows", SHORT, ["pp2 cp2 zb cp_comm=ring"], WEIGHTS, slow=True),
    Row("context-gpt2-packed-ring", "gpt2 packed", SHORT, ["cp4 cp_comm=ring"], WEIGHTS, slow=True),
    Row("context-llama-packed", "llama packed", SHORT, ["pp2 cp2 cp_comm=ulysses gpipe"], WEIGHTS, slow=True),
    Row("context-bloom-packed", "bloom packed", SHORT, ["dp2 cp2 z3 recompute=selective cp_comm=ring"], WEIGHTS, slow=True),
    *(Row(f"context-{name.replace(' ', '-')}-tp", name, SHORT, ["tp2 cp2 cp_comm=allgather", "tp2 cp2 sp cp_comm=ring", "tp2 cp2 cp_comm=ulysses"], WEIGHTS, slow=True) for name in SHARED),
    *(Row(f"context-{name.replace(' ', '-')}-eight-steps", name, EIGHT_STEPS, [f"cp{cp} cp_comm={comm}" for cp in (2, 4) for comm in COMMS], WEIGHTS, slow=True) for name in DECODERS),
    *(Row(f"context-{name.replace(' ', '-')}-eight-steps", name, EIGHT_STEPS, [f"cp{cp} cp_comm={comm}" for cp in (2, 4) for comm in COMMS if comm != "ring"], WEIGHTS, slow=True) for name in ("bert", "modern bert")),
    # Chunks are no powers of two on three ranks, and `ulysses` gives each two of the heads.
    *(
        Row(f"context-{name.replace(' ', '-')}-three-ranks", name, THREE | groups, [f"cp3 cp_comm={comm}" for comm in COMMS], WEIGHTS, slow=True)
        for name, groups in (("llama", {"num_query_groups": 3}), ("gpt2", {}), ("windows packed", {"num_query_groups": 1}), ("llama packed", {"num_query_groups": 3}))
    ),
    *(Row(f"context-{name.replace(' ', '-')}-compiled", name, SHORT, [f"tp2 cp2 compiled cp_comm={comm}" for comm in COMMS if comm != "ring" or "bert" not in name], WEIGHTS, slow=True) for name in ("gpt2", "windows", "modern bert")),
    *(
        Row(f"context-{name.replace(' ', '-')}-{precision}", name, SHORT, [f"dp2 cp2 z1 precision={precision} cp_comm={comm}" for comm in COMMS], runner.CONTEXT_BITS, slow=True)
        for name in ("gpt2", "llama packed") for precision in ("bf16", "fp16")
    ),
    # One step of a tiny model: what a score matrix of the whole sequence would make impossible.
    Row("context-65536-positions", "gpt2", TINY | {"seq_length": 65536, "global_batch_size": 1, "micro_batch_size": 1, "loss_chunks": 16}, ["cp2 cp_comm=ring"], runner.LONG, slow=True),
    # Packed samples, without context parallelism.
    Row("packed-gpt2", "gpt2 packed", SHORT | {"num_layers": 4}, ["tp2 pp2 sp interleaved virtual2"], WEIGHTS, slow=True),
    Row("packed-gpt2-sgd", "gpt2 packed", SHORT | {"optimizer": "sgd"}, ["dp4 z1"], WEIGHTS, slow=True),
    Row("packed-llama", "llama packed", SHORT, ["pp2 dp2 zb z3 recompute=full", "tp2 pp2 compiled"], WEIGHTS, slow=True),
    Row("packed-bloom", "bloom packed", SHORT | {"num_layers": 4}, ["pp4 gpipe"], WEIGHTS, slow=True),
    Row("packed-windows", "windows packed", SHORT, ["tp2 dp2 z2 recompute=selective chunks2"], WEIGHTS, slow=True),
    Row("packed-positions-alone", "positions alone", SHORT, ["tp2 pp2"], WEIGHTS, slow=True),
]

SMALL = EXACT | {"global_batch_size": 4, "num_layers": 2}
HALVES = SMALL | {"reproducible_blocks": 2}
HEADS, WIDE = {"num_attention_heads": 8}, {"num_attention_heads": 8, "hidden_size": 64}
ONE_GROUP = LLAMA | {"num_query_groups": 1, "qk_layernorm": True}
LOSS = {"label_smoothing": 0.1, "z_loss": 0.01}
JOINT, EACH = LLAMA | {"qk_layernorm": True, "qk_layernorm_all_heads": True}, ONE_GROUP | {"qk_layernorm_per_head": True}
LAYER_NORM = {"normalization": "LayerNorm", "precision": "bf16"}
PLAIN = {"norm_affine": False, "clip_qkv": 0.5}
FEW = EXACT | {"global_batch_size": 4}  # each microbatch costs tens of messages between ranks
LAYERS: list[tuple[str, Changes, str]] = [
    ("groups", LLAMA | {"num_query_groups": 2}, ""),
    ("one-group", ONE_GROUP, ""),
    ("dropout", {"hidden_dropout": 0.2, "attention_dropout": 0.2}, ""),
    ("bf16", {"precision": "bf16"}, ""),
    ("loss", LOSS, "recompute=light"),
    ("window", HEADS | {"window_size": 5}, ""),
]
MODES: list[tuple[str, str, Changes]] = [
    ("bf16", "gpt2", {"precision": "bf16"}),
    ("fp16", "gpt2", {"precision": "fp16"}),
    ("sgd-untied", "gpt2 untied", {"optimizer": "sgd", "lr": 0.1}),
    ("dropout", "gpt2", {"hidden_dropout": 0.2, "attention_dropout": 0.2}),
    ("two-samples", "gpt2", {"micro_batch_size": 2}),
]
# --reproducible: not a bit depends on the layout.
EXACT_ROWS = [
    Row("exact", "gpt2", UNCUT, ["dp4 z2 bucket_size_mb=1e-6", "pp2 dp2 z1 waits", "pp2 dp2 z3 recompute=selective"], BITWISE, whole=True),
    Row("exact-more", "gpt2", EXACT, ["pp2", "dp2 z2", "dp4 z3 recompute=full", "pp3 dp2 z3 recompute=selective", "pp3", "pp4", "dp2 z0", "dp2 z1", "dp2 z3", "dp4 z0", "pp2 dp2 z2 bucket_size_mb=100.0", "pp2 dp4 z0"], BITWISE, slow=True, whole=True),
    Row("exact-tp", "gpt2", FEW, ["tp2 dp2 sp z3"], BITWISE, more=["tp2 pp2 dp2"]),
    Row("exact-tp-whole", "gpt2", EXACT, ["tp2 pp2 dp2", "tp2 dp2 sp z3", "tp2 pp2 dp2 sp", "tp2 dp2 z3", "tp2 pp3 z1", "tp2 pp3 sp z1"], BITWISE, slow=True, whole=True),
    Row("exact-tp-small", "gpt2", FEW, ["tp2 pp2 dp2 sp", "tp2 dp2 z3", "tp2 pp3 z1", "tp2 pp3 sp z1"], BITWISE, slow=True),
    # More ranks than heads that share keys: three of several features each, and the features one by one.
    *(
        row
        for name, changes, words, is_slow in (
            ("fp16-alibi", {"precision": "fp16", "position_embedding_type": "alibi", "embedding_layernorm": True}, "", True),
            ("bf16-dropout", LLAMA | {"num_query_groups": 2, "precision": "bf16", "hidden_dropout": 0.1, "attention_dropout": 0.1}, "", True),
            ("one-group-window", ONE_GROUP | LOSS | HEADS | {"window_size": 5}, "recompute=light", False),
        )
        for row in (
            Row(f"exact-tp4-{name}", "gpt2", FEW | changes, [f"tp4 {words}"], BITWISE, slow=is_slow, whole=True),
            Row(f"exact-tp4-sp-{name}", "gpt2", FEW | changes, [f"tp4 sp {words}"], BITWISE, slow=True, whole=True),
        )
    ),
    *(
        Row(f"exact-tp4-{name}", "gpt2", FEW | changes, [f"tp4 {words}", f"tp4 sp {words}"], BITWISE, slow=True, whole=True)
        for name, changes, words in LAYERS
    ),
    # Gradients of a block of positions are contiguous here, and parts of a longer tensor in one process.
    Row("exact-one-block-a-rank", "gpt2", FEW | {"micro_batch_size": 2}, ["tp4 sp"], BITWISE),
    *(  # Each mode on one of the two layouts, in turn.
        Row(f"exact-{name}{'' if is_fast else '-more'}", program, UNCUT | changes, [words], BITWISE, slow=not is_fast, whole=True)
        for number, (name, program, changes) in enumerate(MODES)
        for turn, words in enumerate(("pp2 dp2 z1", "dp4 z3"))
        for is_fast in ((number + turn) % 2 == 0,)
    ),
    Row("exact-is-ordinary", "gpt2", {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 2}, ["tp2 reproducible=True blocks1"], more=["reproducible=True", "tp2 reproducible=True"], whole=True),
    Row("exact-blocks", "gpt2", EXACT, ["blocks1 | blocks2"]),
]

EXACT_CONTEXT = [  # over context parallelism, and over tensor parallelism of experts, latent attention, norms of all heads
    Row("exact-cp", "gpt2", SMALL, ["cp2"], BITWISE),
    Row("exact-cp-packed", "gpt2 packed", SMALL | LLAMA | {"num_query_groups": 2}, ["tp2 cp2 sp z3"], BITWISE),
    Row("exact-cp-dropout", "gpt2", SMALL | {"hidden_dropout": 0.1, "attention_dropout": 0.1}, ["tp2 cp2"], BITWISE, slow=True),
    Row("exact-cp-wide-groups", "gpt2", SMALL | WIDE | LLAMA | {"num_query_groups": 2}, ["cp4"], BITWISE, slow=True),
    Row("exact-cp-wide", "gpt2", SMALL | WIDE, ["tp2 cp4"], BITWISE, slow=True),
    Row("exact-cp-wide-bf16", "gpt2", SMALL | WIDE | {"precision": "bf16"}, ["tp2 cp4 sp"], BITWISE, slow=True),
    Row("exact-cp-wide-fp16", "gpt2", SMALL | WIDE | {"precision": "fp16", "hidden_dropout": 0.1}, ["dp2 cp4 z2"], BITWISE, slow=True),
    Row("exact-cp-groups-bf16", "gpt2", SMALL | LLAMA | {"num_query_groups": 2, "precision": "bf16", "qk_layernorm": True}, ["pp2 cp2 zb"], BITWISE, slow=True),
    Row("exact-cp-packed-pp", "gpt2 packed", SMALL, ["pp2 cp2 gpipe recompute=full"], BITWISE, slow=True),
    Row("exact-cp-one-group", "gpt2", SMALL | LLAMA | {"num_query_groups": 1}, ["tp2 pp2 cp2 sp recompute=selective"], BITWISE, slow=True),
    Row("exact-cp-alibi", "bloom", SMALL, ["dp2 cp2 z1"], BITWISE, slow=True),
    Row("exact-cp-window", "gpt2", SMALL | LOSS | {"window_size": 5}, ["tp2 cp2 recompute=light"], BITWISE, slow=True),
    Row("exact-cp-fused-softmax", "gpt2", SMALL | {"attention": "fused-softmax", "micro_batch_size": 2}, ["cp2"], BITWISE, slow=True),
    Row("exact-experts-sp", "sigmoid", HALVES | {"moe_shared_expert_size": 16}, ["tp2 sp"], BITWISE),
    Row("exact-experts-tp4", "softmax", SMALL | {"activation": "gelu"}, ["tp4"], BITWISE, slow=True),
    *(
        Row(f"exact-{name}-{precision}", name, SMALL | {"precision": precision}, ["tp4 sp", "tp2 dp2 ep2 z1", "tp2 dp2 ep2 sp recompute=full", "tp2 pp2 zb", "tp2 cp2"], BITWISE, slow=True)
        for name, precision in (("softmax", "fp32"), ("limited", "bf16"), ("groups", "fp32"), ("bias", "fp16"))
    ),
    Row("exact-experts-cp", "sigmoid", SMALL | {"moe_shared_expert_size": 16}, ["cp2", "tp2 cp2 sp z2"], BITWISE, slow=True),
    Row("exact-latent", "latent", SMALL, ["tp2", "tp4 sp recompute=selective"], BITWISE, slow=True),
    Row("exact-latent-bf16", "latent", SMALL | {"precision": "bf16"}, ["tp2 cp2 sp"], BITWISE, slow=True),
    Row("exact-latent-wide", "latent", SMALL | {"q_lora_rank": None, "v_head_dim": 14, "qk_layernorm": False}, ["tp2 pp2 zb"], BITWISE, slow=True),
    Row("exact-norm-of-all-heads", "gpt2", SMALL | JOINT, ["tp2", "tp4 sp"], BITWISE, slow=True),
    Row("exact-norm-of-each-head", "gpt2", SMALL | EACH, ["tp2 cp2", "tp4 sp"], BITWISE, slow=True),
    Row("exact-plain-norm-of-all-heads", "gpt2", SMALL | JOINT | LAYER_NORM | PLAIN, ["tp2 cp2", "tp4 sp", "dp2 z3"], BITWISE, slow=True),
    Row("exact-layer-norm-of-each-head", "gpt2", SMALL | EACH | LAYER_NORM, ["tp2 cp2 sp"], BITWISE, slow=True),
    Row("exact-layer-norm-of-all-heads", "gpt2", SMALL | JOINT | LAYER_NORM, ["tp2 cp2"], BITWISE, slow=True),
]

# Linear layers in fp8, whose scales belong to 8 features: as many as a rank, or a canonical block, holds.
FP8 = {"fp8": "blockwise", "fp8_tile": 8, "precision": "bf16"}
FP8_EXACT = [
    Row("fp8", "gpt2", FP8 | UNCUT | {"global_batch_size": 4}, ["pp2 dp2 zb z3"], BITWISE),
    Row("fp8-recompute", "gpt2", FP8, ["| recompute=full"], BITWISE, more=["tp2 sp | recompute=light", "pp2 zb | recompute=light"]),
    Row("fp8-reproducible", "llama", FP8 | EXACT | {"ffn_hidden_size": 64, "reproducible_blocks": 4, "global_batch_size": 4}, ["tp2 sp z1"], BITWISE, more=["tp2 cp2 z2", "pp2 dp2 zb z3"]),
    Row("fp8-bert", "bert", FP8 | UNCUT, ["pp2 dp2 z2"], BITWISE, slow=True),
    Row("fp8-experts", "sigmoid", FP8 | UNCUT, ["pp2 dp2 ep2 zb recompute=full"], BITWISE, slow=True),
    Row("fp8-offload", "gpt2", FP8, ["dp2 z2 | offload"], runner.OFFLOADED, slow=True),
    # Layers that leave fp8 on the way, each step some, do so after a resume too.
    Row("fp8-resume", "gpt2", FP8 | {"train_iters": 4, "fp8_check_every": 1, "fp8_budget": 0.036}, ["dp2 z1"], RESUME),
]
FP8_LAYOUTS = [
    Row("fp8-layouts", "gpt2", FP8, ["tp2 sp"], runner.NEAR_FP32, more=["cp2", "dp2 z2", "tp2 pp2 zb"]),
]
