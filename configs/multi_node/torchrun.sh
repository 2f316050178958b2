#!/usr/bin/env bash
# The same on each machine: NODES=4 DEVICES=8 HEAD=node-0 bash torchrun.sh [options of train.py]
set -euo pipefail
cd "$(dirname "$0")"

torchrun --nnodes "$NODES" --nproc_per_node "$DEVICES" \
    --rdzv_backend c10d --rdzv_id digits --rdzv_endpoint "$HEAD:${PORT:-29500}" \
    train.py fit -c digits.yaml --trainer.num_nodes "$NODES" --trainer.devices "$DEVICES" "$@"
