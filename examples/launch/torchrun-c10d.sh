#!/bin/bash
# Start this on every node, with the same arguments:  torchrun-c10d.sh JOB FIRST_NODE [FLAGS]
# The nodes number themselves, and torchrun starts all ranks again, up to MAX_RESTARTS times, when one of them fails.
#
#   $ examples/launch/torchrun-c10d.sh llama-1 node0 --config examples/launch/run.toml
set -euo pipefail
usage='torchrun-c10d.sh JOB FIRST_NODE [FLAGS]'
job=${1:?$usage} first=${2:?$usage}
shift 2
exec torchrun --nnodes "${NNODES:-4}" --nproc-per-node "${GPUS_PER_NODE:-8}" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "$job" --rdzv-endpoint "$first:${MASTER_PORT:-29500}" \
    --redirects 3 --log-dir "logs/$(hostname)" \
    pretrain_gpt.py "$@"
