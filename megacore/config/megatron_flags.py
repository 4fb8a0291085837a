"""Megatron-LM flags that megacore does not accept, and what to use instead.

A script that comes from Megatron-LM is refused with these lines instead of a guess at a similar name.
docs/coming-from-megatron.md lists the same. Megatron-LM flags with the same meaning are accepted and not listed here:
they are names and aliases of fields. megatron_values.py translates those with the same meaning in another form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REPLACED = {
    "--accumulate-allreduce-grads-in-fp32": "leave it out: gradients are accumulated and reduced in fp32",
    "--apply-query-key-layer-scaling": "leave it out: attention's softmax is computed in fp32",
    "--attention-softmax-in-fp32": "leave it out: attention's softmax is always computed in fp32",
    "--bert-no-binary-head": "use pretrain_bert.py --sentence-task none",
    "--bf16": "use --precision bf16",
    "--bias-dropout-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--bias-gelu-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--calculate-per-token-loss": "leave it out: the loss is always divided by the tokens of the global batch",
    "--check-for-large-grads": "leave it out: --on-spike warn, the default, judges the gradient norm",
    "--check-for-spiky-loss": "leave it out: --on-spike warn, the default, judges the loss",
    "--ckpt-format": "leave it out: checkpoints are safetensors",
    "--ckpt-step": "use --load OUTPUT_DIR/step_NNNNNNNN",
    "--cross-entropy-loss-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--data-args-path": "use --config FILE.toml, with data_path in its table [data]",
    "--dataloader-type": "leave it out: samples come in one order that every layout shares",
    "--ddp-bucket-size": "use --bucket-size-mb, which counts MiB instead of elements",
    "--deterministic-mode": "use --reproducible; on CPUs two runs with one seed and layout are bitwise equal anyway",
    "--dist-ckpt-optim-fully-reshardable": "leave it out: every checkpoint is loaded on any layout",
    "--dist-ckpt-strictness": "leave it out: a checkpoint that does not fit the model is refused",
    "--distributed-backend": "use --device: cuda communicates through NCCL, cpu through gloo",
    "--exit-on-missing-checkpoint": "leave it out: --load DIR needs a checkpoint, and --load auto starts afresh",
    "--exit-signal-handler": "leave it out: SIGTERM and SIGINT always save and end the run",
    "--embed-layernorm": "use --embedding-layernorm",
    "--fp16": "use --precision fp16",
    "--grad-reduce-in-bf16": "use --grad-reduce-dtype bf16",
    "--group-query-attention": "leave it out: --num-query-groups turns it on",
    "--log-memory-to-tensorboard": "leave it out: memory is always in metrics.jsonl",
    "--log-throughput": "leave it out: throughput is always logged",
    "--lr-decay-samples": "use --lr-decay-iters: its value divided by --global-batch-size",
    "--lr-warmup-fraction": "use --lr-warmup-iters: its value times --lr-decay-iters",
    "--lr-warmup-samples": "use --lr-warmup-iters: its value divided by --global-batch-size",
    "--masked-softmax-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--merge-file": "use --tokenizer DIR, with this file in it as merges.txt",
    "--moe-grouped-gemm": "leave it out: the implementation of each operation is chosen and reported",
    "--moe-router-dtype": "leave it out: the router computes in fp32",
    "--moe-router-load-balancing-type": "leave it out: --moe-aux-loss-coeff is that of seq_aux_loss",
    "--moe-token-dispatcher-type": "leave it out: tokens reach their experts by all-to-all",
    "--no-create-attention-mask-in-dataloader": "leave it out: the data loader never makes attention masks",
    "--no-bias-dropout-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--no-bias-gelu-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--no-check-for-nan-in-loss-and-grad": "leave it out: the check is part of the norm; see --max-bad-steps",
    "--no-gradient-accumulation-fusion": "leave it out: there is no such fusion",
    "--no-load-rng": "leave it out: no generator has a state that could be loaded",
    "--no-masked-softmax-fusion": "leave it out, or choose with --attention sdpa or --attention fused-softmax",
    "--no-persist-layer-norm": "leave it out: the implementation of each operation is chosen and reported",
    "--no-rope-fusion": "leave it out: the implementation of each operation is chosen and reported",
    "--no-save-rng": "leave it out: no generator has a state that could be saved",
    "--openai-gelu": "leave it out: --activation gelu is its tanh form",
    "--profile": "use --profile-steps A:B",
    "--profile-ranks": "leave it out: --profile-steps profiles every rank",
    "--profile-step-end": "use --profile-steps A:B, which includes step B",
    "--profile-step-start": "use --profile-steps A:B",
    "--recompute-activations": "use --recompute selective",
    "--recompute-granularity": "use --recompute selective or --recompute full",
    "--recompute-method": "leave it out: --recompute-num-layers counts a stage's first blocks (block)",
    "--recompute-modules": "use --recompute selective, which is core_attn, or --recompute full",
    "--rotary-seq-len-interpolation-factor": "use --rope-scaling linear and --rope-scaling-factor",
    "--swiglu": "use --activation swiglu",
    "--tensorboard-log-interval": "use --log-interval, which holds for every place that metrics go to",
    "--tensorboard-queue-size": "leave it out: events are written beside training",
    "--tiktoken-pattern": "use --tokenizer PATH, with the tokenizer's tokenizer.json",
    "--tokenizer-type": "leave it out: the type follows from --tokenizer PATH",
    "--train-samples": "use --train-iters: its value divided by --global-batch-size",
    "--transformer-impl": "leave it out: the fastest available implementation is chosen and reported",
    "--use-checkpoint-args": "use --config OUTPUT_DIR/config.toml, which every run writes",
    "--use-cpu-initialization": "leave it out: initial weights are the same on every device and layout",
    "--use-dist-ckpt": "leave it out: every checkpoint is loaded on any layout",
    "--use-distributed-optimizer": "use --zero-stage 1",
    "--use-mcore-models": "leave it out: there is one kind of model",
    "--use-rope-scaling": "use --rope-scaling llama3, with --rope-scaling-factor and --rope-original-max-positions",
    "--use-rotary-position-embeddings": "use --position-embedding-type rope",
    "--vocab-file": "use --tokenizer DIR, with this file in it as vocab.json (GPT-2) or vocab.txt (BERT)",
    "--wandb-save-dir": "leave it out: the files of W&B are in OUTPUT_DIR/wandb",
}
"""Flags that have another name here, or that megacore does not need."""

_NOT_YET = """
    --apply-layernorm-1p --decoupled-lr
    --decoupled-min-lr --empty-unused-memory-level --enable-one-logger --end-weight-decay
    --finetune --fp8-amax-compute-algo --fp8-amax-history-len --fp8-format --fp8-param-gather --iterations-to-skip
    --log-num-zeros-in-grad --log-params-norm --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --manual-gc --manual-gc-interval --no-load-optim --no-mmap-bin-files --no-save-optim --num-dataset-builder-threads
    --per-split-data-args-path --pretrained-checkpoint --rampup-batch-size --rotary-interleaved
    --skip-train --squared-relu --start-weight-decay --step-batch-size-schedule --test-data-path --timing-log-level
    --timing-log-option --tp-comm-overlap --train-data-path --use-tp-pp-dp-mapping --valid-data-path --vocab-extra-ids
    --weight-decay-incr-style
"""
NOT_YET = frozenset(_NOT_YET.split())
"""Flags of features that megacore does not have yet."""


NAMES = frozenset({
    "--context-parallel-size", "--exit-duration-in-mins", "--layernorm-epsilon",
    "--pipeline-model-parallel-size", "--save", "--tensor-model-parallel-size", "--tokenizer-model", "--wandb-exp-name",
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
