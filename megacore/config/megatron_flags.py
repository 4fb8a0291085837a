"""Megatron-LM flags that megacore does not accept, and what to use instead.

A script that comes from Megatron-LM is refused with these lines instead of a guess at a similar name.
docs/guides/coming-from-megatron.md lists the same. Megatron-LM flags with the same meaning are accepted and not listed
here: they are names and aliases of fields. megatron_values.py translates those with the same meaning in another form,
and those that change nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_FP8 = "leave it out, and use --precision bf16: megacore does not compute in fp8"
_DTYPES = "use --moments-dtype for the moments and --grad-reduce-dtype for gradients; master weights are fp32"
_FSDP = "use --zero-stage: 0 is no_shard, 1 optim, 2 optim_grads, 3 optim_grads_params"
_FIM_FRAGMENTS = "leave it out, and make each file a document of the dataset: --fim-rate is for documents"
REPLACED = {
    "--bert-no-binary-head": "use pretrain_bert.py --sentence-task none",
    "--ckpt-convert-format": "use tools/convert_checkpoint.py",
    "--ckpt-convert-save": "use tools/convert_checkpoint.py",
    "--ckpt-step": "use --load OUTPUT_DIR/step_NNNNNNNN",
    "--cpu-offloading-num-layers": "use --offload-activations",
    "--data-parallel-sharding-strategy": _FSDP,
    "--ddp-bucket-size": "use --bucket-size-mb, which counts MiB instead of elements",
    "--encoder-seq-length": "use --seq-length",
    "--exp-avg-dtype": _DTYPES,
    "--exp-avg-sq-dtype": _DTYPES,
    "--fim-fragment-rate": _FIM_FRAGMENTS,
    "--fim-no-prefix": "leave it out: --fim-rate is for every document; keep the others in a dataset of their own",
    "--fim-split-sample": _FIM_FRAGMENTS,
    "--first-last-layers-bf16": _NO_FP8,
    "--fp4-format": _NO_FP8,
    "--fp8-amax-compute-algo": _NO_FP8,
    "--fp8-amax-history-len": _NO_FP8,
    "--fp8-format": _NO_FP8,
    "--fp8-param-gather": _NO_FP8,
    "--fp8-recipe": _NO_FP8,
    "--hierarchical-context-parallel-sizes": "use --cp with --cp-comm ring, allgather or ulysses: one level of ranks",
    "--init-method-xavier-uniform": "leave it out: initial weights are normal (--init-method-std), and so differ",
    "--main-grads-dtype": _DTYPES,
    "--main-params-dtype": _DTYPES,
    "--moe-extended-tp": "use --etp",
    "--moe-layer-recompute": "use --recompute full",
    "--moe-pad-expert-input-to-capacity": "leave it out: only the tokens that there are are sent and computed",
    "--moe-router-padding-for-fp8": _NO_FP8,
    "--non-persistent-save-interval": "use --save-interval",
    "--num-distributed-optimizer-instances": "use --zero-shard-size, the ranks that one instance is divided over",
    "--optimizer-offload-fraction": "use --offload-optimizer, which offloads all of it",
    "--rope-type": "use --position-embedding-type rope, with --rope-scaling yarn for yarn",
    "--rotary-scaling-factor": "use --rope-scaling yarn with --rope-scaling-factor",
    "--sft": "leave it out: a --data-path of conversations has a loss mask, see Supervised fine-tuning in "
    "docs/guides/data.md",
    "--sft-tokenizer-prompt-format": "leave it out: preprocess_data.py renders conversations, see docs/guides/data.md",
    "--standalone-embedding-stage": "use --pipeline-layout with E alone as the first stage, the embedding",
    "--use-custom-fsdp": _FSDP,
    "--use-megatron-fsdp": _FSDP,
    "--use-precision-aware-optimizer": _DTYPES,
    "--use-torch-fsdp2": "use --zero-stage 3, which divides the same",
}
"""Flags that have another name here, or that megacore does not need."""

_NOT_YET = """
    --apply-residual-connection-post-layernorm --attention-output-gate --decrease-batch-size-if-needed
    --fp16-lm-cross-entropy --fp32-residual-connection --full-validation --heterogeneous-layers-config-path
    --hybrid-override-pattern --is-hybrid-model --iterations-to-skip --load-main-params-from-ckpt
    --mamba-state-dim --moe-apply-probs-on-input --moe-router-force-load-balancing --moe-use-upcycling
    --mtp-loss-scaling-factor --mtp-num-layers --no-rope-freq --no-save-optim
    --phase-transition-iterations --qk-clip --relative-attention-num-buckets --retro-add-retriever
    --softmax-type --spec --step-batch-size-schedule --use-tp-pp-dp-mapping --vocab-extra-ids
    --window-attn-skip-freq
"""
NOT_YET = frozenset(_NOT_YET.split())
"""Flags of features that megacore does not have yet."""


NAMES = frozenset({
    "--context-parallel-size", "--exit-duration-in-mins", "--layernorm-epsilon",
    "--pipeline-model-parallel-size", "--save", "--tensor-model-parallel-size", "--tokenizer-model", "--vocab-file",
    "--tokenizer-name-or-path", "--wandb-exp-name",
})  # fmt: skip
"""Aliases that are Megatron-LM's names."""
REQUIRED = frozenset({
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "micro_batch_size",
})  # fmt: skip
"""Fields that Megatron-LM does not start without. With one of its names they make a command line a script of its."""
DEFAULTS: Mapping[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "adam_beta2": 0.999,
    "weight_decay": 0.01,
    "min_lr": 0.0,
    "muon_momentum": 0.9,
    "muon_nesterov": False,
    "muon_extra_scale_factor": 1.0,
    "precision": "fp32",
    "eval_iters": 100,
}
"""What Megatron-LM does where a script leaves these out, by megacore's field; megacore's own defaults differ."""


def advice(flag: str) -> str | None:
    """What to use instead of a flag of Megatron-LM that is not accepted; None for any other flag."""
    if flag in REPLACED:
        return f"is Megatron-LM's: {REPLACED[flag]}"
    if flag in NOT_YET:
        return "is Megatron-LM's, and megacore does not have it yet: leave it out"
    return None
