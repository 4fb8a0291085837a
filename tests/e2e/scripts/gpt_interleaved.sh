#!/bin/bash
# Megatron-LM, its scripts for the paper of 2021: an interleaved pipeline with sequence parallelism, on 16 devices.
CHECKPOINT_PATH=$1
VOCAB_FILE=$3
MERGE_FILE=$4
DATA_PATH=$5

MEGATRON_EXTRA_PARAMS="--recompute-granularity selective --sequence-parallel --num-layers-per-virtual-pipeline-stage 2"

options=" \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 4 \
    --num-layers 16 \
    --hidden-size 6144 \
    --num-attention-heads 48 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --train-samples 20000000 \
    --lr-decay-samples 19000000 \
    --lr-warmup-samples 100000 \
    --lr 1.0e-4 \
    --min-lr 1.0e-5 \
    --lr-decay-style cosine \
    --log-interval 10 \
    --eval-iters 10 \
    --eval-interval 1000 \
    --data-path ${DATA_PATH} \
    --vocab-file ${VOCAB_FILE} \
    --merge-file ${MERGE_FILE} \
    --save-interval 1000 \
    --save ${CHECKPOINT_PATH} \
    --load ${CHECKPOINT_PATH} \
    --split 98,2,0 \
    --clip-grad 1.0 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --init-method-std 0.006 \
    --fp16 \
    --no-bias-dropout-fusion \
    --DDP-impl local \
    --use-cpu-initialization \
    ${MEGATRON_EXTRA_PARAMS}"

torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py ${options}
