#!/bin/bash
# Megatron-LM, older: BERT 345M on one device, with flags in one string.
CHECKPOINT_PATH=$1
VOCAB_FILE=$7
DATA_PATH=$8

BERT_ARGS="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
    --lr 0.0001 --lr-decay-iters 990000 --train-iters 2000000 --min-lr 0.00001 --lr-warmup-fraction 0.01
    --micro-batch-size 4 --global-batch-size 8 --vocab-file $VOCAB_FILE --split 949,50,1 --fp16
    --tokenizer-type BertWordPieceLowerCase --no-query-key-layer-scaling"
OUTPUT_ARGS="--log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10"

python pretrain_bert.py $BERT_ARGS $OUTPUT_ARGS --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --data-path $DATA_PATH
