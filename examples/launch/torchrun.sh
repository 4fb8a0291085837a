#!/bin/bash
# Start this on every node, with the same arguments except the first:  torchrun.sh NODE_RANK FIRST_NODE [FLAGS]
#
#   node0$ examples/launch/torchrun.sh 0 node0 --config examples/launch/run.toml
#   node1$ examples/launch/torchrun.sh 1 node0 --config examples/launch/run.toml
set -euo pipefail
usage='torchrun.sh NODE_RANK FIRST_NODE [FLAGS]'
node_rank=${1:?$usage} first=${2:?$usage}
shift 2
exec torchrun --nnodes "${NNODES:-4}" --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --node-rank "$node_rank" --master-addr "$first" --master-port "${MASTER_PORT:-29500}" \
    --redirects 3 --log-dir "logs/$(hostname)" \
    pretrain_gpt.py "$@"
