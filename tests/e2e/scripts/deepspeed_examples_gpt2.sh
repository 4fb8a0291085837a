#!/bin/bash
# DeepSpeedExamples: GPT-2 1.5B by Megatron and ZeRO 2 on 4 devices, with a cosine schedule by iterations.
CHECKPOINT_PATH=$1
VOCAB_FILE=$3
MERGE_FILE=$4
DATA_PATH=$5
NUM_WORKERS=1
NUM_GPUS_PER_WORKER=4
config_json="$CHECKPOINT_PATH.ds_zero_stage_2_config.json"

cat <<EOT > $config_json
{
  "train_batch_size": 32,
  "gradient_accumulation_steps": 1,
  "steps_per_print": 1,
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 50000000,
    "reduce_bucket_size": 50000000,
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "gradient_clipping": 1.0,
  "fp16": { "enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1 },
  "wall_clock_breakdown": true,
  "zero_allow_untested_optimizer": false
}
EOT

gpt_options=" \
    --tensor-model-parallel-size 1 \
    --num-layers 48 \
    --hidden-size 1600 \
    --num-attention-heads 16 \
    --micro-batch-size 8 \
    --global-batch-size 32 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --train-iters 100000 \
    --save ${CHECKPOINT_PATH} \
    --load ${CHECKPOINT_PATH} \
    --data-path ${DATA_PATH} \
    --vocab-file ${VOCAB_FILE} \
    --merge-file ${MERGE_FILE} \
    --data-impl mmap \
    --split 949,50,1 \
    --distributed-backend nccl \
    --lr 1.5e-4 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --lr-decay-iters 320000 \
    --clip-grad 1.0 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction 0.01 \
    --checkpoint-activations \
    --log-interval 100 \
    --save-interval 10000 \
    --eval-interval 1000 \
    --eval-iters 10 \
    --fp16 \
    --deepspeed \
    --deepspeed_config ${config_json} \
    "
deepspeed --num_nodes ${NUM_WORKERS} --num_gpus ${NUM_GPUS_PER_WORKER} pretrain_gpt.py ${gpt_options}
