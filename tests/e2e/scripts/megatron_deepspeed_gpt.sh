#!/bin/bash
# Megatron-DeepSpeed: GPT-3 1.3B by ZeRO 1, tensor parallel 2 and pipeline parallel 2, started by deepspeed's launcher.
CHECKPOINT_PATH=$1
TENSORBOARD_DIR=$2
VOCAB_PATH=$3
MERGE_PATH=$4
DATA_PATH=$5

SEQ_LEN=2048
GLOBAL_BATCH_SIZE=512
BATCH_SIZE=8
ZERO_STAGE=1

CONFIG_JSON="$CHECKPOINT_PATH.ds_config.json"
cat <<EOT > $CONFIG_JSON
{
  "train_batch_size": $GLOBAL_BATCH_SIZE,
  "train_micro_batch_size_per_gpu": $BATCH_SIZE,
  "steps_per_print": 10,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "gradient_clipping": 1.0,
  "prescale_gradients": false,
  "fp16": { "enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11 },
  "wall_clock_breakdown": false
}
EOT

data_options=" --vocab-file ${VOCAB_PATH} --merge-file ${MERGE_PATH} --data-path ${DATA_PATH} --data-impl mmap"
megatron_options=" \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --init-method-std 0.013 \
    --lr-decay-samples 100000 \
    --lr-warmup-samples 3000 \
    --micro-batch-size ${BATCH_SIZE} \
    --global-batch-size ${GLOBAL_BATCH_SIZE} \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length ${SEQ_LEN} \
    --max-position-embeddings ${SEQ_LEN} \
    --train-samples 200000 \
    --lr 2.0e-4 \
    --min-lr 1.0e-6 \
    --lr-decay-style cosine \
    --split 949,50,1 \
    --log-interval 10 \
    --eval-interval 100 \
    --eval-iters 10 \
    --save-interval 1000 \
    --weight-decay 0.1 \
    --clip-grad 1.0 \
    --hysteresis 2 \
    --num-workers 0 \
    --fp16 \
    --seed 1234 \
    --load ${CHECKPOINT_PATH} \
    --save ${CHECKPOINT_PATH} \
    --tensorboard-queue-size 1 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --tensorboard-dir ${TENSORBOARD_DIR} \
    --checkpoint-activations"
deepspeed_options=" --deepspeed --deepspeed_config ${CONFIG_JSON} --zero-stage ${ZERO_STAGE} --deepspeed-activation-checkpointing"

deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py ${megatron_options} ${data_options} ${deepspeed_options}
