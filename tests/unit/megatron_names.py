"""The flags of Megatron-LM from 2021 to 2026, and of BigScience's and DeepSpeed's Megatron-DeepSpeed, by the number of
values they take: without the dashes in front, and with dashes for underscores."""

from __future__ import annotations

SWITCHES = """
abort-on-unmet-fused-kernel-constraints account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
accumulate-allreduce-grads-in-fp32 add-qkv-bias adlr-autoresume allow-ambiguous-pad-tokens apply-dsa-kernel-fusion
apply-layernorm-1p apply-query-key-layer-scaling apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm
async-ckpt-use-cpu-shm async-save attention-output-gate attention-softmax-in-fp32 auto-detect-ckpt-format
batch-invariant-mode bert-no-binary-head bf16 biencoder-shared-query-context-model cache-mla-latents calc-ft-timeouts
calculate-per-token-loss check-for-large-grads check-for-spiky-loss checkpoint-activations checkpoint-in-cpu
checkpoint-writer-decoupled ckpt-assume-constant-structure ckpt-convert-update-legacy-dist-opt-format
ckpt-fully-parallel-load ckpt-fully-parallel-load-replicate-local ckpt-fully-parallel-save
ckpt-fully-parallel-save-replicate-local contigious-checkpointing cpu-offloading-retain-pinned-cpu-buffers
cpu-optimizer cpu-torch-adam create-all-gather-group create-moe-param-group cross-entropy-loss-fusion csa-dense-mode
cuda-graph-dynamic-microbatches cuda-graph-retain-backward-graph data-efficiency-curriculum-learning
data-parallel-random-init dataloader-defer-npy-index-mmap dataloader-fast-cache-load ddp-average-in-collective
ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs
decrease-batch-size-if-needed deepscale deepspeed deepspeed-activation-checkpointing deepspeed-mpi
defer-embedding-wgrad-compute delay-grad-reduce delay-offload-until-cuda-graph delay-wgrad-compute dense-grouped-gemm
deterministic-mode dino-norm-last-layer disable-align-grad-reduce disable-bf16-reduced-precision-matmul
disable-bias-linear disable-chunked-prefill disable-ckpt-load-validate-sharding-integrity
disable-clone-scatter-output-in-embedding disable-create-attention-mask-in-dataloader
disable-cuda-graph-use-single-mempool disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu
disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
disable-flight-recorder-include-only-active disable-fp8-wgrad disable-gloo-process-groups disable-jit-fuser
disable-log-loss-scale-to-tensorboard disable-mamba-mem-eff-path disable-manual-gc-eval disable-mem-efficient-ln
disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling disable-mok-use-mxfp8-weights disable-msc
disable-pad-vocab-size disable-save-tokenizer-assets disable-straggler-on-startup disable-strict-fsdp-dtensor-load
disable-symmetric-registration disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad
disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
disable-tp-comm-split-rs disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-optim-fully-reshardable
dist-ckpt-save-pre-mcore-014 distrib-optim-fully-reshardable-mem-efficient distribute-checkpointed-activations
distribute-saved-activations ds-fused-adam ds-inference ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-offloading
dsa-indexer-k-norm-fp32 dsa-indexer-rope-interleaved dsa-indexer-use-sparse-loss embed-layernorm
embedding-weights-in-fp32 enable-chunked-prefill enable-cuda-graph enable-experimental
enable-expert-tensor-parallelism enable-ft-package enable-full-sharding-in-hsdp enable-hyper-connections
enable-one-logger enable-zbh1-exact-semantics enable-zbh1-pipeline eod-mask-loss ep-overlap-early-attn-memory-release
exit-on-missing-checkpoint exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training
external-cuda-graph fake-process-group fallback-to-eager-attn fim-data fine-grained-activation-offloading finetune
first-last-layers-bf16 flash-decode flight-recorder-include-stack-trace force-ds-sequence-parallel fp16
fp16-lm-cross-entropy fp32-residual-connection fp4-param-gather fp8-e4m3 fp8-hybrid fp8-output-proj fp8-param-gather
fsdp-double-buffer fsdp-manual-registration full-validation fused-residual-rmsnorm gdn-pre-gated-delta-rule-fusion
grad-reduce-in-bf16 group-query-attention grpo-filter-groups-with-same-reward head-wise-attn-gate
high-priority-a2a-comm-stream hybrid-context-parallel inference inference-disable-triton-nvls-kernels
inference-dynamic-batching inference-dynamic-batching-track-generated-token-events
inference-dynamic-batching-track-paused-request-events inference-fuse-tp-communication
inference-moe-disable-fused-quant-kernels inference-rng-tracker inference-wandb-logging init-method-xavier-uniform
init-model-with-meta-device inprocess-empty-cuda-cache inprocess-restart is-hybrid-model kd keep-fp8-transpose-cache
langrl-external-server legacy-tokenizer load-main-params-from-ckpt log-batch-size-to-tensorboard
log-device-memory-used log-energy log-max-attention-logit log-memory-to-tensorboard log-moe-overload-factor
log-num-zeros-in-grad log-optimizer-states-to-tensorboard log-params-norm log-progress log-straggler log-throughput
log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard loss-on-targets-only
manual-gc memory-centric-tiled-linear mla-down-proj-fusion mmap-warmup mock-data moe-apply-probs-on-input
moe-enable-deepep moe-enable-routing-replay moe-extended-tp moe-grouped-gemm moe-hybridep-pad-variable-tokens
moe-layer-recompute moe-ncclep-static-shape moe-ncclep-use-symm-mem moe-pad-expert-input-to-capacity
moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-per-layer-logging moe-permute-fusion
moe-permute-fusion-into-hybridep moe-router-enable-expert-bias moe-router-force-load-balancing moe-router-fusion
moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits moe-routing-trace-dump-weights
moe-shared-expert-gate moe-shared-expert-overlap moe-single-grouped-bias moe-single-grouped-weight
moe-use-device-initiated-grouped-gemm moe-use-legacy-grouped-gemm moe-use-upcycling mos mrope-interleaved
mtp-detach-heads mtp-use-repeated-layer multi-latent-attention multiple-validation-sets muon-no-split-qkv
muon-use-nesterov nccl-all-reduce-for-prefill no-align-grad-reduce no-align-param-gather
no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion
no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save
no-ckpt-load-validate-sharding-integrity no-clone-scatter-output-in-embedding no-contiguous-buffers-in-local-ddp
no-create-attention-mask-in-dataloader no-cuda-graph-use-single-mempool no-data-sharding
no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-flight-recorder-dump-on-timeout
no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-fp8-wgrad
no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-inference-wandb-logging no-initialization
no-load-lr-state no-load-optim no-load-rng no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard
no-manual-gc-eval no-masked-softmax-fusion no-mmap-bin-files no-mok-use-mxfp8-weights no-one-logger
no-overlap-p2p-communication no-pad-vocab-size no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params
no-pipeline-parallel no-position-embedding no-query-key-layer-scaling no-rope-fusion no-save-optim no-save-rng
no-save-tokenizer-assets no-scatter-gather-tensors-in-pipeline no-strict-fsdp-dtensor-load
no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs no-use-tokenizer-model-from-checkpoint-args nvtx-ranges
offload-optimizer-states one-logger-async openai-gelu optimizer-cpu-offload optimizer-cuda-graph
output-bert-embeddings overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad overlap-grad-reduce
overlap-moe-expert-parallel-comm overlap-p2p-communication overlap-p2p-communication-warmup-flush overlap-param-gather
overlap-param-gather-with-optimizer-step override-lr-scheduler override-opt-param-scheduler partition-activations
perform-rl-step profile profile-backward pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
pytorch-profiler-collect-shapes qk-clip qk-l2-norm qk-layernorm quick-geglu random-ltd recompute-activations
record-memory-history record-shapes repeated-dataloader replication reset-attention-mask reset-iteration
reset-position-ids retriever-score-scaling retro-add-retriever retro-no-verify-neighbor-count retro-return-doc-ids
return-data-index reuse-grad-buf-for-mxfp8-param-ag reweight-loss-based-on-position-frequency
rl-calculate-intra-group-similarity rl-inference-logprobs-is-correction rl-offload-kv-cache-during-training
rl-offload-optimizer-during-inference rl-partial-rollouts rl-remove-kv-cache-during-training rl-reset-cuda-graphs
rl-skip-bos-token rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap rotary-interleaved
run-workload-inspector-server scattered-embeddings sequence-parallel sft skip-train split-transformers squared-relu
standalone-embedding-stage store-param-remainders swiglu sync-tp-duplicated-parameters synchronize-each-layer
te-rng-tracker test-mode tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens
tokenizer-hf-no-use-fast tokenizer-hf-use-fast tokenizer-sentencepiece-legacy torch-adam
torch-fsdp2-no-reshard-after-forward tp-comm-overlap tp-comm-overlap-rs-dgrad trust-remote-code universal-checkpoint
untie-embeddings-and-output-weights use-bnb-optimizer use-checkpoint-args use-checkpoint-lr-scheduler
use-checkpoint-opt-param-scheduler use-contiguous-buffers-in-ddp use-cpu-initialization use-custom-fsdp use-dist-ckpt
use-distributed-optimizer use-flash-attn use-flash-attn-builder use-flash-attn-triton use-flash-attn-v1
use-flash-attn-v2 use-fused-mhc use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
use-grouped-gemm-for-shared-expert use-kitchen-attention use-layer-wise-distributed-optimizer use-legacy-models
use-legacy-static-engine use-mcore-models use-megatron-fsdp use-mok-megakernel use-mp-args-from-checkpoint-args
use-mup use-nccl-ub use-one-sent-docs use-persistent-ckpt-worker use-pin-memory use-precision-aware-optimizer
use-pytorch-profiler use-ring-exchange-p2p use-rope-scaling use-rotary-position-embeddings use-sharp
use-te-activation-func use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping
use-transformer-engine-op-fuser use-tutel verify-integrity vision-pretraining zero-contigious-gradients
zero-reduce-scatter
"""
"""Without a value."""

VALUES = """
activations-checkpoint-granularity activations-checkpoint-method activations-checkpoint-num-layers
DDP-impl activation-func-clamp-value activation-offload-fraction adam-beta1 adam-beta2 adam-eps adaptive-muon-beta2
adaptive-muon-eps adaptive-muon-moment2-method adlr-autoresume-interval aio-intra-op-parallelism
aml-data-download-path app-tag-run-name app-tag-run-version async-ckpt-cpu-priority async-ckpt-io-priority
async-strategy attention-backend attention-dropout batch-size bert-embedder-type bert-load beta-fast beta-slow
biencoder-projection-dim block-data-path chat-template check-weight-hash-across-dp-replicas-interval
checkpoint-data-parallel checkpoint-granularity checkpoint-io-buffer-size checkpoint-method checkpoint-num-layers
ckpt-convert-format ckpt-convert-save ckpt-format ckpt-fully-parallel-load-exchange-algo
ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-step classes-fraction clip-grad
codecarbon-dir config-logger-dir context-parallel-size cp-partition-mode cpu-offloading-num-layers
cross-entropy-fusion-impl csa-compress-rotary-base csa-window-size cuda-graph-impl cuda-graph-warmup-steps
data-args-path data-cache-path data-impl data-parallel-sharding-strategy data-per-class-fraction dataloader-type
ddp-bucket-size ddp-num-buckets decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers
decoder-seq-length decoupled-lr decoupled-min-lr deepscale-config deepspeed-config delta-offload-bytes-across-pp-ranks
dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number dino-local-img-size
dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs dist-ckpt-format dist-ckpt-strictness
dist-ckpt-workers distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-size dsa-indexer-head-dim dsa-indexer-k-norm-epsilon
dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq
dsa-kernel-backend dump-param-to-param-group-map embedding-init-method-std embedding-path empty-unused-memory-level
encoder-num-layers encoder-pipeline-model-parallel-size encoder-seq-length encoder-tensor-model-parallel-size
end-weight-decay error-injection-rate error-injection-type eval-global-batch-size eval-interval eval-iters
eval-micro-batch-size eval-only evidence-data-path exit-duration-in-mins exit-interval exit-signal exp-avg-dtype
exp-avg-sq-dtype experimental-attention-variant expert-interval expert-model-parallel-size expert-tensor-parallel-size
ffn-hidden-size fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-rate
fim-split-sample fim-spm-rate fim-suffix-token fine-grained-offloading-max-inflight-offloads flight-recorder-dump-path
flight-recorder-trace-buffer-size fp4-format fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo
fp8-amax-history-len fp8-format fp8-interval fp8-margin fp8-quantizer-factory fp8-recipe ft-num-warmup-iters
gdn-conv-pad-alignment global-batch-size glu-activation glu-linear-offset gpu-sniff-test-interval grpo-clamp-eps-lower
grpo-clamp-eps-upper grpo-default-temperature grpo-default-top-p grpo-entropy-term-weight grpo-group-size
grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult heterogeneous-layers-config-encoded-json
heterogeneous-layers-config-path hidden-dropout hidden-size hidden-size-teacher hybrid-attention-ratio
hybrid-layer-pattern hybrid-mlp-ratio hybrid-override-pattern hysteresis ict-head-size ict-load img-dim img-h img-w
indexer-batch-size indexer-log-interval inference-batch-times-seqlen-threshold inference-coordinator-port
inference-cuda-graph-scope inference-dynamic-batching-block-size inference-dynamic-batching-buffer-guaranteed-fraction
inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
inference-dynamic-batching-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-mixed-prefill-count
inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens
inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-unified-memory-level
inference-grouped-gemm-backend inference-logging-step-interval inference-max-batch-size inference-max-requests
inference-max-seq-length inference-moe-token-dispatcher-type inference-wandb-logging-step-interval init-method-std
initial-loss-scale inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval inprocess-monitor-thread-interval
inprocess-progress-watchdog-interval inprocess-soft-timeout inprocess-termination-grace-time iter-per-epoch
kd-alpha-ce kd-beta-ce kd-temp kill-switch-file kill-switch-path kitchen-attention-backend kitchen-config-file
kitchen-recipe-number kv-channels kv-lora-rank langrl-env-config langrl-inference-server-conversation-template
langrl-inference-server-type layernorm-epsilon lazy-mpu-init linear-attention-freq linear-attention-type
linear-conv-kernel-dim linear-cp-mode linear-key-head-dim linear-num-key-heads linear-num-value-heads
linear-value-head-dim lion-beta1 lion-beta2 load load-tag load-teacher local-rank log-interval log-level
log-level-replica log-memory-interval log-path logging-level loss-scale loss-scale-window lr lr-decay-iters
lr-decay-samples lr-decay-style lr-decay-tokens lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
lr-warmup-tokens lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype main-params-dtype
megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
make-vocab-size-divisible-by mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim manual-gc-interval
mask-factor mask-prob mask-type max-position-embeddings max-seqlen-per-dp-cp-rank max-tokens-to-oom
memory-snapshot-path merge-file mhc-init-gating-factor mhc-recompute-layer-num mhc-sinkhorn-iterations
micro-batch-size microbatch-group-size-per-virtual-pipeline-stage mid-level-dataset-surplus min-loss-scale min-lr
min-offloaded-tensor-size mlp-chunks-for-prefill mlp-chunks-for-training mlp-type model-parallel-size
moe-deepep-num-sms moe-eval-capacity-factor moe-expert-capacity-factor moe-expert-parallel-size
moe-expert-rank-capacity-factor moe-ffn-hidden-size moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms
moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
moe-hybridep-num-sms-preprocessing moe-input-jitter-eps moe-latent-size moe-layer-freq moe-loss-coeff moe-min-capacity
moe-mlp-glu-interleave-size moe-n-hash-layers moe-paged-stash-buffer-size-factor-cpu
moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size moe-router-bias-update-rate moe-router-dtype
moe-router-force-biased moe-router-group-topk moe-router-num-groups moe-router-score-function moe-router-topk
moe-router-topk-scaling-factor moe-routing-trace-max-training-iters moe-routing-trace-path
moe-shared-expert-glu-interleave-size moe-shared-expert-intermediate-size moe-token-dispatcher-type
moe-token-drop-policy moe-train-capacity-factor moe-upcycling-granularity moe-z-loss-coeff mok-bwd-num-comm-sms
mok-fwd-num-comm-sms most-recent-k mscale mscale-all-dim mtp-hybrid-override-pattern mtp-loss-scaling-factor
mtp-num-layers muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum muon-num-ns-steps
muon-scalar-optimizer muon-scale-mode muon-tp-mode mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
mup-embedding-mult mup-output-mult mup-width-mult nccl-communicator-config-path no-rope-freq no-weight-decay-cond-type
non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
non-persistent-save-interval norm-epsilon normalization null-tokenizer-eod-id null-tokenizer-pad-id
num-attention-heads num-attention-heads-teacher num-channels num-classes num-dataset-builder-threads
num-distributed-optimizer-instances num-experts num-experts-switch num-key-value-heads num-layers
num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-layers-teacher
num-query-groups num-residual-streams num-virtual-stages-per-pipeline-rank num-workers o-groups o-lora-rank
object-storage-cache-path one-logger-entity one-logger-project one-logger-run-name onnx-safe optimizer
optimizer-offload-fraction original-max-position-embeddings outer-dp-sharding-strategy pad-vocab-size-to
padded-vocab-size patch-dim per-dataset-sequences-path per-split-data-args-path persistent-save-interval
phase-transition-iterations pipeline-model-parallel-comm-backend pipeline-model-parallel-layout
pipeline-model-parallel-size pipeline-model-parallel-split-rank position-embedding-type pp-partition-method
pretrained-checkpoint profile-step-end profile-step-start profile-steps q-lora-rank qk-clip-alpha qk-clip-threshold
qk-head-dim qk-pos-emb-head-dim query-in-block-prob recompute-granularity recompute-method recompute-num-layers
refit-method relative-attention-max-distance relative-attention-num-buckets remote-device replication-factor
replication-jump rerun-mode result-rejected-tracker-filename retriever-seq-length retro-attention-gate
retro-cyclic-train-iters retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers
retro-num-neighbors retro-num-retrieved-chunks retro-project-dir retro-workdir rl-default-temperature rl-default-top-k
rl-default-top-p rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
rl-inference-model-unified-memory-level rl-inference-pipeline-model-parallel-size
rl-inference-tensor-model-parallel-size rl-parallel-generation-tasks rl-prompts-per-eval rl-sequence-packing-algo
rl-sequence-packing-bin-size rl-sequence-packing-max-sequences-per-bin rope-scaling-factor rope-type rotary-base
rotary-percent rotary-position-embeddings-theta rotary-scaling-factor rotary-seq-len-interpolation-factor
s3-cache-path sample-rate save save-activations-interval save-dgrads-interval save-interval save-params-interval
save-retain-interval save-tokens-per-expert-interval save-wgrads-interval seed seq-length sft-tokenizer-prompt-format
sgd-momentum sharp-enabled-group short-seq-prob soap-precondition-frequency soap-shampoo-beta softmax-type split
start-eval-at-iter start-weight-decay step-batch-size-schedule straggler-ctrlr-port straggler-minmax-count
suggested-communication-unit-size swin-backbone-type symmetric-ar-type te-precision-config-file
tensor-model-parallel-size tensorboard-dir tensorboard-log-interval tensorboard-queue-size
test-weighted-split-paths-path thd-max-packed-sequences tiktoken-num-special-tokens tiktoken-pattern tile-factor
timing-log-level timing-log-option titles-data-path tokenizer-metadata tokenizer-model tokenizer-name-or-path
tokenizer-type topk tp-comm-bootstrap-backend tp-comm-overlap-cfg train-data-exact-num-epochs train-desc-path
train-doc-idx-path train-idx-path train-iters train-sample-idx-path train-samples train-shuffle-idx-path
train-sync-interval train-tokens train-weighted-split-paths-path transformer-impl use-dataset-only v-head-dim
valid-weighted-split-paths-path vision-backbone-type vision-pretraining-type vocab-extra-ids vocab-file vocab-size
wandb-entity wandb-exp-name wandb-project wandb-save-dir warmup weight-decay weight-decay-incr-style
wgrad-deferral-limit window-attn-skip-freq window-size yaml-cfg zero-allgather-bucket-size zero-reduce-bucket-size
zero-stage
"""
"""With one value."""

LISTS = """
cp-comm-type csa-compress-ratios cuda-graph-modules cuda-graph-scope data-path hierarchical-context-parallel-sizes
high-priority-stream-groups iterations-to-skip moe-aux-loss-coeff moe-router-load-balancing-type mrope-section
num-experts-teacher offload-modules profile-ranks rampup-batch-size recompute-modules retriever-report-topk-accuracies
rotary-base-per-layer skip-train-iteration-range spec test-data-path test-weighted-split-paths tiktoken-special-tokens
tokenizer-special-tokens train-data-path train-weighted-split-paths valid-data-path valid-weighted-split-paths
validation-set-names
"""
"""With any number of values."""
