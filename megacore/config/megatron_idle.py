"""Flags of Megatron-LM, and of the programs that descend from it, that change nothing here, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

_CHOSEN = "megacore chooses the implementation of each operation, and reports it"
_COMMUNICATED = "megacore chooses how ranks communicate; this does not change results"
_DIVIDED = "--pipeline-balance divides the layers; the result does not depend on it"
_NO_SERVICE = "megacore has no such service"
_SAVED = "every rank writes its part of a checkpoint, and reads what it needs"
_LOGGED = "metrics.jsonl has the metrics of each --log-interval"
_PROFILED = "--profile-steps A:B profiles steps"
_GENERATION = "tools/generate.py generates text; this program trains"
_TOKENIZED = "tools/preprocess_data.py has already tokenized the data"
_WRITTEN = "megacore does not write such tensors"
_NO_FP8 = "megacore does not compute in fp8 or fp4; flags that turn it on are refused"
_NO_MTP = "megacore has no multi-token prediction; flags that turn it on are refused"
_NO_CLIP = "megacore has no QK-clip; flags that turn it on are refused"
_NO_TEACHER = "megacore has no distillation; flags that turn it on are refused"
_NO_UPCYCLING = "megacore has no upcycling in a run; flags that turn it on are refused"


def by_flag(*reasons: tuple[str, str]) -> dict[str, str]:
    """The reason of each flag.

    Args:
        reasons: flags, with blanks between, and their reason.
    """
    return {flag: why for flags, why in reasons for flag in flags.split()}


IDLE_SWITCHES: Mapping[str, str] = by_flag(
    (
        (
            "--disable-fp8-wgrad --first-last-layers-bf16 --fp4-param-gather --fp8-param-gather "
            "--keep-fp8-transpose-cache --no-fp8-wgrad --reuse-grad-buf-for-mxfp8-param-ag"
        ),
        _NO_FP8,
    ),
    ("--mtp-detach-heads --mtp-use-repeated-layer", _NO_MTP),
    ("--moe-pad-expert-input-to-capacity", "megacore sends and computes only existing tokens, without padding"),
    (
        "--use-precision-aware-optimizer",
        "--moments-dtype is the format of moments, and --grad-reduce-dtype that of gradients; master weights are fp32",
    ),
    (
        (
            "--abort-on-unmet-fused-kernel-constraints --cache-mla-latents "
            "--cpu-offloading-retain-pinned-cpu-buffers --cross-entropy-loss-fusion "
            "--cuda-graph-dynamic-microbatches --cuda-graph-retain-backward-graph --defer-embedding-wgrad-compute "
            "--delay-offload-until-cuda-graph --delay-wgrad-compute --dense-grouped-gemm "
            "--disable-clone-scatter-output-in-embedding --disable-cuda-graph-use-single-mempool "
            "--disable-jit-fuser --disable-mem-efficient-ln --disable-tp-comm-bulk-dgrad "
            "--disable-tp-comm-bulk-wgrad --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs "
            "--disable-tp-comm-split-ag --disable-tp-comm-split-rs --ds-fused-adam --enable-cuda-graph "
            "--enable-experimental --enable-zbh1-exact-semantics --ep-overlap-early-attn-memory-release "
            "--external-cuda-graph --fallback-to-eager-attn --flash-decode --fused-residual-rmsnorm "
            "--inference-rng-tracker --mla-down-proj-fusion --moe-grouped-gemm --moe-paged-stash "
            "--moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap --moe-single-grouped-bias "
            "--moe-single-grouped-weight --moe-use-device-initiated-grouped-gemm --moe-use-legacy-grouped-gemm "
            "--no-async-tensor-model-parallel-allreduce --no-bias-dropout-fusion --no-bias-swiglu-fusion "
            "--no-clone-scatter-output-in-embedding --no-contiguous-buffers-in-local-ddp "
            "--no-cuda-graph-use-single-mempool --no-gradient-accumulation-fusion --no-gradient-reduce-div-fusion "
            "--no-masked-softmax-fusion --no-overlap-p2p-communication --no-persist-layer-norm --no-pin-cpu-grads "
            "--no-pin-cpu-params --no-rope-fusion --no-scatter-gather-tensors-in-pipeline --no-tp-comm-bulk-dgrad "
            "--no-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag "
            "--no-tp-comm-split-rs --optimizer-cuda-graph --overlap-cpu-optimizer-d2h-h2d "
            "--overlap-dispatch-backward-with-experts-wgrad --overlap-moe-expert-parallel-comm "
            "--overlap-p2p-communication --overlap-p2p-communication-warmup-flush --te-rng-tracker --torch-adam "
            "--tp-comm-overlap --tp-comm-overlap-rs-dgrad --use-contiguous-buffers-in-ddp "
            "--use-fused-weighted-squared-relu --use-grouped-gemm-for-dense-mlp "
            "--use-grouped-gemm-for-shared-expert --use-te-activation-func --use-torch-optimizer-for-cpu-offload "
            "--use-transformer-engine-op-fuser --use-tutel"
        ),
        _CHOSEN,
    ),
    (
        (
            "--create-all-gather-group --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw "
            "--delay-grad-reduce --disable-align-grad-reduce --disable-gloo-process-groups "
            "--disable-symmetric-registration --fsdp-double-buffer --fsdp-manual-registration "
            "--high-priority-a2a-comm-stream --moe-enable-deepep --moe-hybridep-pad-variable-tokens "
            "--moe-ncclep-static-shape --moe-ncclep-use-symm-mem --moe-permute-fusion-into-hybridep "
            "--no-align-grad-reduce --no-align-param-gather --overlap-param-gather-with-optimizer-step "
            "--use-nccl-ub --use-ring-exchange-p2p --use-sharp"
        ),
        _COMMUNICATED,
    ),
    ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", _DIVIDED),
    (
        (
            "--decode-only-cuda-graphs --disable-chunked-prefill --enable-chunked-prefill "
            "--inference-disable-triton-nvls-kernels --inference-dynamic-batching "
            "--inference-dynamic-batching-track-generated-token-events "
            "--inference-dynamic-batching-track-paused-request-events --inference-fuse-tp-communication "
            "--inference-moe-disable-fused-quant-kernels --inference-wandb-logging "
            "--moe-pad-experts-for-cuda-graph-inference --nccl-all-reduce-for-prefill --no-inference-wandb-logging "
            "--output-bert-embeddings --use-legacy-static-engine"
        ),
        _GENERATION,
    ),
    (
        (
            "--disable-log-loss-scale-to-tensorboard --log-batch-size-to-tensorboard --log-device-memory-used "
            "--log-max-attention-logit --log-memory-to-tensorboard --log-moe-overload-factor "
            "--log-num-zeros-in-grad --log-params-norm --log-throughput --log-timers-to-tensorboard "
            "--log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard --moe-per-layer-logging "
            "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard"
        ),
        _LOGGED,
    ),
    (
        (
            "--adlr-autoresume --calc-ft-timeouts --disable-flight-recorder-dump-on-timeout "
            "--disable-flight-recorder-extra-dump-on-exec --disable-flight-recorder-include-only-active "
            "--disable-msc --disable-straggler-on-startup --enable-ft-package --enable-one-logger "
            "--flight-recorder-include-stack-trace --inprocess-empty-cuda-cache --inprocess-restart --log-energy "
            "--log-straggler --no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec "
            "--no-flight-recorder-include-only-active --no-one-logger --one-logger-async "
            "--run-workload-inspector-server"
        ),
        _NO_SERVICE,
    ),
    (
        (
            "--nvtx-ranges --profile --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra "
            "--pytorch-profiler-collect-shapes --record-memory-history --record-shapes --use-pytorch-profiler"
        ),
        _PROFILED,
    ),
    (
        (
            "--async-ckpt-use-cpu-shm --ckpt-assume-constant-structure --ckpt-fully-parallel-load "
            "--ckpt-fully-parallel-load-replicate-local --ckpt-fully-parallel-save "
            "--ckpt-fully-parallel-save-replicate-local --dist-ckpt-save-pre-mcore-014 "
            "--distrib-optim-fully-reshardable-mem-efficient --no-ckpt-fully-parallel-save "
            "--use-persistent-ckpt-worker"
        ),
        _SAVED,
    ),
    (
        (
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces "
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-include-special-tokens "
            "--tokenizer-hf-no-include-special-tokens --tokenizer-hf-no-use-fast --tokenizer-hf-use-fast "
            "--tokenizer-sentencepiece-legacy"
        ),
        _TOKENIZED,
    ),
    (
        (
            "--moe-routing-trace-capture-hidden-states --moe-routing-trace-capture-logits "
            "--moe-routing-trace-dump-weights"
        ),
        _WRITTEN,
    ),
    (
        "--accumulate-allreduce-grads-in-fp32 --ddp-reduce-scatter-with-fp32-accumulation",
        "gradients are accumulated and reduced in --grad-reduce-dtype",
    ),
    (
        "--apply-layernorm-1p",
        "norm weights have no weight decay, so the offset has no effect",
    ),
    ("--apply-query-key-layer-scaling --no-query-key-layer-scaling", "attention's softmax is computed in fp32"),
    ("--attention-softmax-in-fp32", "attention's softmax is always computed in fp32"),
    ("--auto-detect-ckpt-format", "checkpoints are safetensors"),
    ("--calculate-per-token-loss", "the loss is always divided by the tokens of the global batch"),
    ("--check-for-large-grads", "--on-spike warn, the default, judges the gradient norm"),
    ("--check-for-spiky-loss", "--on-spike warn, the default, judges the loss"),
    (
        "--data-parallel-random-init",
        "replicas start with the same weights, as in Megatron-LM after the first broadcast",
    ),
    (
        "--dataloader-defer-npy-index-mmap --mmap-warmup --no-mmap-bin-files",
        "data files are always mapped into memory",
    ),
    ("--dataloader-fast-cache-load", "indexes are built by one process per machine"),
    (
        "--decrease-batch-size-if-needed",
        "a --global-batch-size that the data-parallel ranks do not divide is refused",
    ),
    (
        (
            "--disable-ckpt-load-validate-sharding-integrity --no-ckpt-load-validate-sharding-integrity "
            "--verify-integrity"
        ),
        "every checkpoint has checksums, which are verified",
    ),
    (
        "--disable-create-attention-mask-in-dataloader --no-create-attention-mask-in-dataloader",
        "the data loader never creates attention masks",
    ),
    ("--disable-manual-gc-eval --manual-gc --no-manual-gc-eval", "the interpreter collects garbage by itself"),
    (
        "--disable-pad-vocab-size --no-pad-vocab-size",
        "padding of the vocabulary exists in memory only; see --make-vocab-size-divisible-by",
    ),
    ("--disable-save-tokenizer-assets --no-save-tokenizer-assets", "checkpoints hold the tokenizer's hash"),
    (
        "--disable-strict-fsdp-dtensor-load --no-strict-fsdp-dtensor-load",
        "a checkpoint that does not fit the model is refused",
    ),
    (
        (
            "--disable-use-tokenizer-model-from-checkpoint-args --legacy-tokenizer "
            "--no-use-tokenizer-model-from-checkpoint-args"
        ),
        "--tokenizer PATH is the tokenizer",
    ),
    ("--dist-ckpt-optim-fully-reshardable --use-dist-ckpt", "every checkpoint is loaded on any layout"),
    (
        "--exit-on-missing-checkpoint",
        "--load DIR needs a checkpoint; --load auto starts from the beginning without one",
    ),
    (
        "--exit-signal-handler --exit-signal-handler-for-dataloader --exit-signal-handler-for-training",
        "SIGTERM and SIGINT always save and end the run",
    ),
    (
        "--init-model-with-meta-device --use-cpu-initialization",
        "initial weights are the same on every device and layout",
    ),
    ("--load-main-params-from-ckpt", "checkpoints hold fp32 weights, from which a run always continues"),
    ("--log-progress", "events.jsonl has each start, save and end of the run"),
    ("--no-barrier-with-level-1-timing", "use --trace or --profile-steps to measure times"),
    (
        "--no-check-for-nan-in-loss-and-grad",
        "the gradient norm includes this check; --max-bad-steps is the limit",
    ),
    ("--no-initialization", "weights of a checkpoint replace the initial ones"),
    ("--no-load-rng", "no generator has a state that could be loaded"),
    ("--no-save-rng", "no generator has a state that could be saved"),
    (
        "--override-lr-scheduler --override-opt-param-scheduler",
        "the flags of a resumed run decide its learning rate",
    ),
    ("--rotary-interleaved", "megacore rotates the halves of a head: the same model with another order of rows"),
    ("--store-param-remainders", "master weights are fp32"),
    ("--sync-tp-duplicated-parameters", "replicated parameters have equal gradients on every rank"),
    ("--use-checkpoint-args", "without a preset, the checkpoint of --load gives the shape of the model"),
    ("--use-custom-fsdp --use-megatron-fsdp", "--zero-stage sets what is sharded"),
    ("--use-legacy-models --use-mcore-models", "megacore has one implementation of models"),
    ("--test-mode", "it tests and computes nothing else; --replay-interval repeats steps and compares"),
    ("--use-tp-pp-dp-mapping", "the order of ranks does not change results"),
)
"""Switches."""
IDLE_VALUES: Mapping[str, str] = by_flag(
    (
        (
            "--fp4-quantizer-factory --fp4-recipe --fp8-amax-compute-algo --fp8-amax-history-len "
            "--fp8-interval --fp8-margin --fp8-quantizer-factory --fp8-recipe --num-layers-at-end-in-bf16 "
            "--num-layers-at-start-in-bf16"
        ),
        _NO_FP8,
    ),
    ("--mtp-loss-scaling-factor", _NO_MTP),
    ("--qk-clip-alpha --qk-clip-threshold", _NO_CLIP),
    (
        (
            "--hidden-size-teacher --kd-alpha-ce --kd-beta-ce --kd-temp --num-attention-heads-teacher "
            "--num-layers-teacher"
        ),
        _NO_TEACHER,
    ),
    ("--moe-upcycling-granularity", _NO_UPCYCLING),
    (
        (
            "--activation-offload-fraction --cross-entropy-fusion-impl --cuda-graph-impl --cuda-graph-warmup-steps "
            "--delta-offload-bytes-across-pp-ranks --dump-param-to-param-group-map "
            "--fine-grained-offloading-max-inflight-offloads --min-offloaded-tensor-size --mlp-chunks-for-training "
            "--moe-mlp-glu-interleave-size --moe-paged-stash-buffer-size-factor-cpu "
            "--moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-page-size "
            "--moe-shared-expert-glu-interleave-size --tp-comm-overlap-cfg --transformer-impl "
            "--wgrad-deferral-limit"
        ),
        _CHOSEN,
    ),
    (
        (
            "--ddp-num-buckets --moe-deepep-num-sms --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms "
            "--moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms "
            "--moe-hybridep-num-sms-preprocessing --nccl-communicator-config-path "
            "--pipeline-model-parallel-comm-backend --sharp-enabled-group --suggested-communication-unit-size "
            "--tp-comm-bootstrap-backend"
        ),
        _COMMUNICATED,
    ),
    ("--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pp-partition-method", _DIVIDED),
    (
        (
            "--inference-batch-times-seqlen-threshold --inference-coordinator-port --inference-cuda-graph-scope "
            "--inference-dynamic-batching-block-size --inference-dynamic-batching-buffer-guaranteed-fraction "
            "--inference-dynamic-batching-buffer-overflow-factor --inference-dynamic-batching-buffer-size-gb "
            "--inference-dynamic-batching-cuda-graph-max-tokens "
            "--inference-dynamic-batching-cuda-graph-mixed-prefill-count "
            "--inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-max-requests "
            "--inference-dynamic-batching-max-requests-override --inference-dynamic-batching-max-tokens "
            "--inference-dynamic-batching-max-tokens-override --inference-dynamic-batching-num-cuda-graphs "
            "--inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-unified-memory-level "
            "--inference-grouped-gemm-backend --inference-logging-step-interval --inference-max-batch-size "
            "--inference-max-requests --inference-max-seq-length --inference-moe-token-dispatcher-type "
            "--inference-wandb-logging-step-interval --max-tokens-to-oom --mlp-chunks-for-prefill "
            "--symmetric-ar-type"
        ),
        _GENERATION,
    ),
    ("--log-memory-interval --log-path", _LOGGED),
    (
        (
            "--adlr-autoresume-interval --app-tag-run-name --app-tag-run-version --codecarbon-dir "
            "--config-logger-dir --flight-recorder-dump-path --flight-recorder-trace-buffer-size "
            "--ft-num-warmup-iters --gpu-sniff-test-interval --inprocess-active-world-size "
            "--inprocess-barrier-timeout --inprocess-completion-timeout --inprocess-granularity "
            "--inprocess-hard-timeout --inprocess-heartbeat-interval --inprocess-heartbeat-timeout "
            "--inprocess-last-call-wait --inprocess-max-iterations --inprocess-monitor-process-interval "
            "--inprocess-monitor-thread-interval --inprocess-progress-watchdog-interval --inprocess-soft-timeout "
            "--inprocess-termination-grace-time --one-logger-entity --one-logger-project --one-logger-run-name "
            "--straggler-ctrlr-port --straggler-minmax-count"
        ),
        _NO_SERVICE,
    ),
    ("--memory-snapshot-path --profile-step-end --profile-step-start", _PROFILED),
    (
        (
            "--async-ckpt-cpu-priority --async-ckpt-io-priority --async-strategy "
            "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-process-group "
            "--ckpt-fully-parallel-save-process-group --dist-ckpt-workers"
        ),
        _SAVED,
    ),
    (
        (
            "--moe-routing-trace-max-training-iters --moe-routing-trace-path --save-activations-interval "
            "--save-dgrads-interval --save-params-interval --save-tokens-per-expert-interval --save-wgrads-interval"
        ),
        _WRITTEN,
    ),
    (
        "--checkpoint-method --checkpoint-num-layers",
        "all layers are recomputed, which changes memory only",
    ),
    ("--ckpt-format --dist-ckpt-format", "checkpoints are safetensors"),
    ("--data-impl", "data files are always mapped into memory"),
    ("--DDP-impl", "gradients are reduced in buckets, during backward"),
    ("--dist-ckpt-strictness", "a checkpoint that does not fit the model is refused"),
    ("--distributed-backend", "cuda communicates through NCCL, cpu through gloo"),
    (
        "--distributed-timeout-seconds-after-init",
        "--distributed-timeout-minutes applies during the whole run",
    ),
    ("--empty-unused-memory-level", "the allocator keeps its memory"),
    ("--error-injection-type", "no error is injected"),
    ("--eval-micro-batch-size", "an evaluation uses --micro-batch-size, which affects only memory"),
    ("--fim-eod-token --null-tokenizer-eod-id", "documents come from the index of the dataset"),
    (
        "--fim-pad-token --null-tokenizer-pad-id",
        "padding at the end of a sample has no loss, and no token attends to it",
    ),
    ("--kill-switch-file --kill-switch-path", "SIGTERM and SIGINT always save and end the run"),
    ("--lazy-mpu-init", "process groups are created at launch"),
    ("--log-level --log-level-replica --logging-level", "messages have one level"),
    ("--manual-gc-interval", "the interpreter collects garbage by itself"),
    ("--microbatch-group-size-per-virtual-pipeline-stage", "--schedule sets the order of microbatches"),
    ("--mid-level-dataset-surplus", "indexes hold as many samples as the run needs"),
    ("--moe-token-dispatcher-type", "tokens reach their experts by all-to-all"),
    (
        "--num-dataset-builder-threads --per-dataset-sequences-path",
        "indexes are built by one process per machine",
    ),
    ("--object-storage-cache-path --s3-cache-path", "data from an object store is downloaded to --data-cache-path"),
    (
        "--pad-vocab-size-to --padded-vocab-size",
        "padding of the vocabulary exists in memory only; see --make-vocab-size-divisible-by",
    ),
    ("--start-eval-at-iter", "evaluations start after --eval-interval steps, and do not change weights"),
    ("--tensorboard-log-interval", "--log-interval applies to all trackers"),
    ("--tensorboard-queue-size", "a thread writes events, and training does not wait"),
    ("--test-weighted-split-paths-path", "no evaluation reads the test split"),
    (
        "--tiktoken-num-special-tokens --tiktoken-pattern --tokenizer-metadata",
        "the tokenizer file of --tokenizer PATH defines it",
    ),
    ("--timing-log-level --timing-log-option", "use --trace or --profile-steps to measure times"),
    ("--tokenizer-type", "the type follows from --tokenizer PATH; NullTokenizer adds one to --vocab-size"),
    ("--train-sync-interval", "ranks synchronise at every step"),
    ("--wandb-save-dir", "the files of W&B are in OUTPUT_DIR/wandb"),
)
"""Flags with one value."""
IDLE_LISTS: Mapping[str, str] = by_flag(
    ("--num-experts-teacher", _NO_TEACHER),
    ("--cuda-graph-modules --cuda-graph-scope", _CHOSEN),
    ("--hierarchical-context-parallel-sizes --high-priority-stream-groups", _COMMUNICATED),
    ("--profile-ranks", _PROFILED),
    ("--test-data-path --test-weighted-split-paths", "no evaluation reads the test split"),
)
"""Flags with any number of values."""
