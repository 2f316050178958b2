#!/usr/bin/env bash
# The same on each machine: RUN=/shared/runs/a NODES=4 DEVICES=8 HEAD=node-0 bash torchrun.sh [options of train.py]
set -euo pipefail
cd "$(dirname "$0")"

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.5 to 2.13: a restart finds the addresses of the dead otherwise
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${GRACE:-110}" # seconds to save in after SIGTERM; torchrun kills after 30 otherwise
exec torchrun --nnodes "$NODES" --nproc_per_node "$DEVICES" --max-restarts 20 \
    --rdzv_backend c10d --rdzv_id digits --rdzv_endpoint "$HEAD:${PORT:-29500}" \
    train.py fit -c digits.yaml --ckpt_path newest --trainer.num_nodes "$NODES" --trainer.devices "$DEVICES" \
    --trainer.callbacks+ Preemption --trainer.callbacks.folder "$RUN" \
    --trainer.callbacks+ ModelCheckpoint --trainer.callbacks.dirpath "$RUN" \
    --trainer.callbacks.save_last true --trainer.callbacks.every_n_train_steps 100 "$@"
