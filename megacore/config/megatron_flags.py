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
    "--apply-wd-to-qk-layernorm": "use --param-group",
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
    "--fine-grained-activation-offloading": "use --offload-activations",
    "--first-last-layers-bf16": _NO_FP8,
    "--fp4-format": _NO_FP8,
    "--fp4-param-gather": _NO_FP8,
    "--fp8-amax-compute-algo": _NO_FP8,
    "--fp8-amax-history-len": _NO_FP8,
    "--fp8-format": _NO_FP8,
    "--fp8-interval": _NO_FP8,
    "--fp8-margin": _NO_FP8,
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
    "--moe-router-padding-for-quantization": _NO_FP8,
    "--muon-fp32-matmul-prec": "use --muon-ns-dtype, the format of the iterations",
    "--no-fp8-wgrad": _NO_FP8,
    "--non-persistent-ckpt-type": "use --save-interval",
    "--non-persistent-local-ckpt-dir": "use --save-interval",
    "--non-persistent-save-interval": "use --save-interval",
    "--num-distributed-optimizer-instances": "use --zero-shard-size, the ranks that one instance is divided over",
    "--num-layers-at-end-in-bf16": _NO_FP8,
    "--num-layers-at-start-in-bf16": _NO_FP8,
    "--offload-modules": "use --offload-activations",
    "--optimizer-offload-fraction": "use --offload-optimizer, which offloads all of it",
    "--original-max-position-embeddings": "use --rope-original-max-positions",
    "--outer-dp-sharding-strategy": "use --zero-shard-size, the ranks that one copy is divided over",
    "--rope-type": "use --position-embedding-type rope, with --rope-scaling yarn for yarn",
    "--rotary-scaling-factor": "use --rope-scaling yarn with --rope-scaling-factor",
    "--save-retain-interval": "use --keep-every, with --keep-last 1",
    "--sft": "leave it out: a --data-path of conversations has a loss mask, see Supervised fine-tuning in "
    "docs/guides/data.md",
    "--sft-tokenizer-prompt-format": "leave it out: preprocess_data.py renders conversations, see docs/guides/data.md",
    "--standalone-embedding-stage": "use --pipeline-layout with E alone as the first stage, the embedding",
    "--tiktoken-special-tokens": "leave it out: the file of --tokenizer PATH has them",
    "--tokenizer-special-tokens": "leave it out: the file of --tokenizer PATH has them",
    "--trust-remote-code": "leave it out, and use a --tokenizer with a tokenizer.json: no code of others is run",
    "--use-custom-fsdp": _FSDP,
    "--use-layer-wise-distributed-optimizer": "use --zero-stage 1, which divides the state of every optimizer",
    "--use-megatron-fsdp": _FSDP,
    "--use-mp-args-from-checkpoint-args": "give --tp and --pp: a checkpoint is loaded on any layout",
    "--use-mup": "use --mup-base-width",
    "--use-precision-aware-optimizer": _DTYPES,
    "--use-torch-fsdp2": "use --zero-stage 3, which divides the same",
}
"""Flags that have another name here, or that megacore does not need."""

_NO_MAMBA = "there are no Mamba layers, so that no flags give that model"
_NO_MTP = (
    "there is no multi-token prediction: without it the loss has no term for later tokens, so that training differs"
)
_NO_ENCODER = "there are no models of an encoder and a decoder"
_ANOTHER_ACTIVATION = "without it the activation, and so the model, is another one: use one of --activation"
NOT_YET: Mapping[str, str] = {
    "--activation-func-clamp-value": _ANOTHER_ACTIVATION,
    "--apply-residual-connection-post-layernorm": "without it residuals begin before the norm: another model",
    "--attention-output-gate": "without it attention's output has no gate, and the model is another one",
    "--decoder-seq-length": _NO_ENCODER,
    "--decrease-batch-size-if-needed": "choose a --global-batch-size that the data-parallel ranks divide",
    "--embedding-init-method-std": "without it embeddings begin with --init-method-std, so that training differs",
    "--encoder-pipeline-model-parallel-size": _NO_ENCODER,
    "--encoder-tensor-model-parallel-size": _NO_ENCODER,
    "--eval-global-batch-size": "an evaluation reads --eval-iters batches of --global-batch-size: choose "
    "--eval-iters for as many samples",
    "--eval-micro-batch-size": "an evaluation has --micro-batch-size, which changes memory only: leave it out",
    "--experimental-attention-variant": "without it attention, and so the model, is another one",
    "--fp16-lm-cross-entropy": "without it the loss is computed in fp32, which is more exact",
    "--fp32-residual-connection": "without it sums of residuals are rounded to the format of --precision",
    "--full-validation": "without it an evaluation reads --eval-iters batches: use as many as the validation data has",
    "--glu-linear-offset": _ANOTHER_ACTIVATION,
    "--heterogeneous-layers-config-path": "without it all blocks have one shape, and the model is another one",
    "--hybrid-attention-ratio": _NO_MAMBA,
    "--hybrid-layer-pattern": _NO_MAMBA,
    "--hybrid-override-pattern": _NO_MAMBA,
    "--is-hybrid-model": _NO_MAMBA,
    "--iterations-to-skip": "without it the run trains on these batches too; --on-spike skip leaves spikes out",
    "--linear-attention-freq": "without it attention, and so the model, is another one",
    "--load-main-params-from-ckpt": "checkpoints hold fp32 weights, from which a run always continues: leave it out",
    "--mamba-head-dim": _NO_MAMBA,
    "--mamba-state-dim": _NO_MAMBA,
    "--moe-apply-probs-on-input": "without it experts' outputs are weighted, not their inputs: another model",
    "--moe-latent-size": "without it experts compute with all of --hidden-size, and the model is another one",
    "--moe-router-force-load-balancing": "without it tokens go where the router sends them, and not to random experts",
    "--moe-use-upcycling": "without it experts begin with weights of their own, not with those of a dense model",
    "--mrope-section": "without it positions have one dimension, and the model is another one",
    "--mtp-loss-scaling-factor": _NO_MTP,
    "--mtp-num-layers": _NO_MTP,
    "--no-rope-freq": "use --attention-pattern, whose n is a block without rotary positions: 3*f,n for 4",
    "--no-save-optim": "without it checkpoints hold the optimizer's state too, and take more room",
    "--phase-transition-iterations": "without it the run is one phase; to begin another one, continue with --load and "
    "other flags of data",
    "--qk-clip": "without it attention's logits have no limit, so that training differs; --qk-layernorm bounds them",
    "--qk-l2-norm": "without it queries and keys have no norm, and the model is another one",
    "--quick-geglu": _ANOTHER_ACTIVATION,
    "--relative-attention-num-buckets": "there are no relative positions, as in T5",
    "--retro-add-retriever": "without it nothing is retrieved, and the model is another one",
    "--spec": "leave it out if it names Megatron-LM's usual layers; no flags give others",
    "--step-batch-size-schedule": "without it every step has --global-batch-size; --rampup-batch-size begins with less",
    "--use-tp-pp-dp-mapping": "without it other ranks communicate with each other, and the result is the same",
    "--vocab-extra-ids": "without it the vocabulary has no further tokens: use a --tokenizer that has them",
}
"""Flags of features that megacore does not have, and what leaving them out changes or what comes nearest."""


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
        return f"is Megatron-LM's, and megacore does not have it: {NOT_YET[flag]}"
    return None
