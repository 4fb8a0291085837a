"""Flags of Megatron-LM, and of the programs that descend from it, that are refused by name.

A script is refused with these lines instead of a guess at a similar name. docs/guides/coming-from-megatron.md lists the
same.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacore.config.megatron_idle import by_flag

REPLACED: Mapping[str, str] = by_flag(
    ("--aml-data-download-path", "give whole prefixes to --data-path"),
    ("--apply-wd-to-qk-layernorm --no-weight-decay-cond-type", "use --param-group"),
    ("--batch-invariant-mode", "use --reproducible, which is bitwise the same on every layout"),
    ("--batch-size", "use --micro-batch-size"),
    (
        "--bert-no-binary-head",
        "use --sentence-task none and --num-token-types 1, whose one row is added to every token: Megatron-LM has none",
    ),
    (
        "--chat-template --sft-tokenizer-prompt-format",
        "leave it out: preprocess_data.py renders conversations, see docs/guides/data.md",
    ),
    (
        "--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format",
        "use tools/convert_checkpoint.py",
    ),
    ("--ckpt-step --load-tag", "use --load OUTPUT_DIR/step_NNNNNNNN"),
    (
        "--fine-grained-activation-offloading --offload-modules",
        "use --offload-activations",
    ),
    (
        (
            "--fp4-format --fp8-e4m3 --fp8-format --fp8-hybrid --fp8-output-proj --kitchen-attention-backend "
            "--kitchen-config-file --kitchen-recipe-number --moe-router-padding-for-fp8 "
            "--moe-router-padding-for-quantization --te-precision-config-file --use-kitchen-attention"
        ),
        "leave it out, and use --precision bf16: megacore does not compute in fp8",
    ),
    (
        "--enable-full-sharding-in-hsdp",
        "use --zero-stage 3 without --zero-shard-size, which divides over all ranks",
    ),
    ("--encoder-num-layers", "use --num-layers: megacore has no encoder-decoder models"),
    ("--encoder-seq-length", "use --seq-length"),
    ("--fake-process-group", "leave it out: a full dry run takes a step without other ranks"),
    (
        "--fim-fragment-rate --fim-split-sample",
        "leave it out, and make each file a document of the dataset: --fim-rate is for documents",
    ),
    (
        "--fim-no-prefix",
        "leave it out: --fim-rate is for every document; keep the others in a dataset of their own",
    ),
    (
        "--init-method-xavier-uniform",
        "leave it out: initial weights are normal (--init-method-std), and so differ",
    ),
    (
        "--loss-on-targets-only",
        "leave it out: a --data-path of conversations has a loss mask, see docs/guides/data.md",
    ),
    ("--model-parallel-size", "use --tp"),
    ("--moe-extended-tp", "use --etp"),
    ("--most-recent-k", "use --keep-last"),
    ("--muon-fp32-matmul-prec", "use --muon-ns-dtype, the format of the iterations"),
    ("--mup-attn-scale-power", "use --attention-multiplier, the factor itself"),
    ("--mup-base-head-dim", "use --mup-base-head-size"),
    ("--mup-base-hidden-size --use-mup", "use --mup-base-width"),
    ("--mup-width-mult", "leave it out: it follows from --mup-base-width"),
    ("--no-load-lr-state", "use --no-load-optim, which begins the schedule anew too"),
    (
        (
            "--non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-algo "
            "--non-persistent-local-ckpt-dir --non-persistent-save-interval --replication --replication-factor "
            "--replication-jump"
        ),
        "use --save-interval",
    ),
    ("--offload-optimizer-states", "use --offload-optimizer"),
    ("--onnx-safe", "leave it out: tools/convert_checkpoint.py exports models"),
    ("--pipeline-model-parallel-split-rank", "leave it out: megacore has no encoder-decoder models"),
    (
        "--sft",
        (
            "leave it out: a --data-path of conversations has a loss mask, see Supervised fine-tuning in "
            "docs/guides/data.md"
        ),
    ),
    ("--standalone-embedding-stage", "use --pipeline-layout with E alone as the first stage, the embedding"),
    (
        "--tiktoken-special-tokens --tokenizer-special-tokens",
        "leave it out: the file of --tokenizer PATH has them",
    ),
    (
        "--train-weighted-split-paths --train-weighted-split-paths-path",
        "use --train-data-path WEIGHT PREFIX WEIGHT PREFIX if every range is 0:1; otherwise use --data-path WEIGHT "
        "PREFIX with --split, which cuts every PREFIX at the same fractions",
    ),
    (
        "--trust-remote-code",
        "leave it out, and use a --tokenizer with a tokenizer.json: megacore does not run code from model directories",
    ),
    ("--use-layer-wise-distributed-optimizer", "use --zero-stage 1, which shards the state of every optimizer"),
    ("--use-mp-args-from-checkpoint-args", "give --tp and --pp: a checkpoint is loaded on any layout"),
    (
        "--valid-weighted-split-paths --valid-weighted-split-paths-path --validation-set-names",
        "use --valid-sets NAME=PREFIX if every range is 0:1; otherwise use --data-path WEIGHT PREFIX with --split",
    ),
    ("--yaml-cfg", "use --config FILE.toml"),
)
"""Flags that have another name here, or that megacore does not need."""

NOT_YET: Mapping[str, str] = by_flag(
    (
        "--activation-func-clamp-value --quick-geglu",
        "this activation changes the model: use one of --activation",
    ),
    (
        (
            "--adaptive-muon-beta2 --adaptive-muon-eps --adaptive-muon-moment2-method --soap-precondition-frequency "
            "--soap-shampoo-beta"
        ),
        "megacore has neither SOAP nor adaptive Muon: use one of --optimizer",
    ),
    (
        "--allow-ambiguous-pad-tokens",
        "without it, the loss includes tokens that also serve as padding; a loss mask of the dataset can exclude them",
    ),
    (
        (
            "--apply-dsa-kernel-fusion --csa-compress-ratios --csa-compress-rotary-base --csa-dense-mode "
            "--csa-window-size --disable-dsa-indexer-rotate-activation --disable-dsa-indexer-scoring-relu "
            "--dsa-indexer-head-dim --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 --dsa-indexer-loss-coeff "
            "--dsa-indexer-n-heads --dsa-indexer-rope-interleaved --dsa-indexer-skip-topk-offset --dsa-indexer-topk "
            "--dsa-indexer-topk-freq --dsa-indexer-use-sparse-loss --dsa-kernel-backend "
            "--experimental-attention-variant --gdn-conv-pad-alignment --gdn-pre-gated-delta-rule-fusion "
            "--linear-attention-freq --linear-attention-type --linear-conv-kernel-dim --linear-cp-mode "
            "--linear-key-head-dim --linear-num-key-heads --linear-num-value-heads --linear-value-head-dim "
            "--no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu --o-groups --o-lora-rank"
        ),
        "this attention changes the model",
    ),
    (
        "--apply-residual-connection-post-layernorm",
        "without it, residuals start before the norm, which changes the model",
    ),
    (
        "--attention-output-gate --head-wise-attn-gate",
        "without it, attention's output has no gate, which changes the model",
    ),
    (
        (
            "--bert-embedder-type --retro-add-retriever --retro-attention-gate --retro-cyclic-train-iters "
            "--retro-encoder-attention-dropout --retro-encoder-hidden-dropout --retro-encoder-layers "
            "--retro-no-verify-neighbor-count --retro-num-neighbors --retro-num-retrieved-chunks "
            "--retro-project-dir --retro-return-doc-ids --retro-workdir"
        ),
        "megacore has no retrieval models",
    ),
    (
        (
            "--bert-load --biencoder-projection-dim --biencoder-shared-query-context-model --block-data-path "
            "--embedding-path --evidence-data-path --ict-head-size --ict-load --indexer-batch-size "
            "--indexer-log-interval --query-in-block-prob --retriever-report-topk-accuracies "
            "--retriever-score-scaling --retriever-seq-length --titles-data-path --use-one-sent-docs"
        ),
        "megacore has no query-and-context (biencoder) models",
    ),
    (
        (
            "--classes-fraction --data-per-class-fraction --dino-bottleneck-size --dino-freeze-last-layer "
            "--dino-head-hidden-size --dino-local-crops-number --dino-local-img-size --dino-norm-last-layer "
            "--dino-teacher-temp --dino-warmup-teacher-temp --dino-warmup-teacher-temp-epochs "
            "--img-dim --img-h --img-w --iter-per-epoch --mask-factor --mask-type --no-data-sharding --num-channels "
            "--num-classes --patch-dim --swin-backbone-type --vision-backbone-type --vision-pretraining "
            "--vision-pretraining-type"
        ),
        "megacore has no vision models",
    ),
    (
        "--cp-partition-mode --hybrid-context-parallel --max-seqlen-per-dp-cp-rank --thd-max-packed-sequences",
        "without it, all --cp ranks get equal parts of each sequence",
    ),
    (
        (
            "--data-efficiency-curriculum-learning --return-data-index --train-data-exact-num-epochs "
            "--train-desc-path --train-doc-idx-path --train-idx-path --train-sample-idx-path "
            "--train-shuffle-idx-path"
        ),
        "samples come in the order of --sample-order, which changes training",
    ),
    ("--decoder-num-layers --decoder-seq-length", "megacore has no encoder-decoder models"),
    (
        "--disable-bf16-reduced-precision-matmul",
        "without it, the device's library may accumulate bf16 matrix products in bf16",
    ),
    (
        (
            "--disable-mamba-mem-eff-path --hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model "
            "--mamba-head-dim --mamba-num-groups --mamba-num-heads --mamba-state-dim"
        ),
        "megacore has no Mamba layers",
    ),
    (
        "--num-experts-switch",
        (
            "Megatron-DeepSpeed's gates choose and drop tokens differently, which changes training; see "
            "--moe-router-topk"
        ),
    ),
    (
        (
            "--disable-mok-use-mxfp8-weights --mok-bwd-num-comm-sms --mok-fwd-num-comm-sms "
            "--no-mok-use-mxfp8-weights --use-mok-megakernel"
        ),
        "without it, experts compute in the format of --precision, which is more accurate than mxfp8",
    ),
    ("--ds-inference --inference --use-dataset-only", "the program trains; tools/generate.py generates"),
    (
        ("--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size --ds-sequence-parallel-fpdt-offloading"),
        "without it, attention computes the whole sequence of a --cp rank; --offload-activations saves memory",
    ),
    (
        "--embedding-init-method-std",
        "without it, embeddings are initialised with --init-method-std, which changes training",
    ),
    ("--embedding-weights-in-fp32", "without it, the embedding has the format of --precision"),
    (
        (
            "--enable-hyper-connections --mhc-init-gating-factor --mhc-recompute-layer-num "
            "--mhc-sinkhorn-iterations --num-residual-streams --use-fused-mhc"
        ),
        "without it, there is one residual stream, which changes the model",
    ),
    (
        "--eval-global-batch-size",
        ("an evaluation reads --eval-iters batches of --global-batch-size: choose --eval-iters for as many samples"),
    ),
    ("--fp16-lm-cross-entropy", "without it, the loss is computed in fp32, which is more accurate"),
    ("--fp32-residual-connection", "without it, residual sums have the format of --precision"),
    (
        "--full-validation",
        "without it, an evaluation reads --eval-iters batches: choose --eval-iters to cover the validation data",
    ),
    (
        (
            "--grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-default-temperature --grpo-default-top-p "
            "--grpo-entropy-term-weight --grpo-filter-groups-with-same-reward --grpo-group-size --grpo-iterations "
            "--grpo-kl-beta --grpo-prompts-per-step --langrl-env-config --langrl-external-server "
            "--langrl-inference-server-conversation-template --langrl-inference-server-type --perform-rl-step "
            "--refit-method --rl-calculate-intra-group-similarity --rl-default-temperature --rl-default-top-k "
            "--rl-default-top-p --rl-importance-sampling-truncation-coef --rl-inference-expert-model-parallel-size "
            "--rl-inference-logprobs-is-correction --rl-inference-model-unified-memory-level "
            "--rl-inference-pipeline-model-parallel-size --rl-inference-tensor-model-parallel-size "
            "--rl-offload-kv-cache-during-training --rl-offload-optimizer-during-inference "
            "--rl-parallel-generation-tasks --rl-partial-rollouts --rl-prompts-per-eval "
            "--rl-remove-kv-cache-during-training --rl-reset-cuda-graphs --rl-sequence-packing-algo "
            "--rl-sequence-packing-bin-size --rl-sequence-packing-max-sequences-per-bin --rl-skip-bos-token "
            "--rl-training-cuda-graphs --rl-use-sequence-packing --rl-verify-model-weights-swap"
        ),
        "megacore has no reinforcement learning",
    ),
    (
        "--heterogeneous-layers-config-encoded-json --heterogeneous-layers-config-path",
        "without it, all blocks have the same shape, which changes the model",
    ),
    (
        "--kd --load-teacher --mos --reset-iteration",
        "megacore has no distillation: the model learns from data only",
    ),
    (
        "--iterations-to-skip --result-rejected-tracker-filename --skip-train-iteration-range",
        "without it, the run trains on these batches too; --on-spike skip skips spikes",
    ),
    (
        "--moe-apply-probs-on-input",
        "without it, router weights multiply the outputs of experts and not the inputs, which changes the model",
    ),
    ("--moe-enable-routing-replay", "megacore has no reinforcement learning, which would replay the choice of experts"),
    (
        "--moe-expert-rank-capacity-factor",
        "without it, an --ep rank accepts all tokens; --moe-expert-capacity-factor limits each expert",
    ),
    ("--moe-latent-size", "without it, experts have the full --hidden-size, which changes the model"),
    (
        "--moe-router-force-biased --moe-router-force-load-balancing",
        "without it, the router chooses the experts, instead of at random",
    ),
    (
        "--moe-use-upcycling",
        "without it, experts start from random weights; convert_checkpoint.py can upcycle a dense model first",
    ),
    (
        "--mrope-interleaved --mrope-section",
        "without it, positions have one dimension, which changes the model",
    ),
    (
        "--mtp-hybrid-override-pattern",
        (
            "megacore has no multi-token prediction: without it, the loss has no term for later tokens, so training "
            "differs"
        ),
    ),
    ("--no-save-optim", "without it, checkpoints also hold the optimizer state, and need more disk space"),
    (
        "--phase-transition-iterations",
        "without it, the run has one phase; to start another phase, continue with --load and other data flags",
    ),
    (
        "--qk-clip",
        "without it, attention logits are not limited, which changes training; --qk-layernorm limits them",
    ),
    ("--qk-l2-norm", "without it, queries and keys have no norm, which changes the model"),
    ("--random-ltd", "without it, all layers compute all tokens, which changes training"),
    (
        "--relative-attention-max-distance --relative-attention-num-buckets",
        "megacore has no relative positions as in T5",
    ),
    ("--reweight-loss-based-on-position-frequency", "without it, the loss of every token has the same weight"),
    (
        "--rotary-base-per-layer",
        "without it, all blocks have the same rotary base; --window-rotary-base sets it for blocks with a window",
    ),
    (
        "--step-batch-size-schedule",
        "without it, every step has --global-batch-size; --rampup-batch-size starts with a smaller batch",
    ),
    ("--use-bnb-optimizer", "without it, moments have 32 bits; --moments-dtype bf16 halves them"),
)
"""Flags of features that megacore does not have, and what leaving them out changes or what comes nearest."""
