#!/usr/bin/env bash
# sbatch slurm.sh [options of train.py], from this folder
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8 # a task a device
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:SIGUSR1@120 # to this script only: tasks that save when signalled, amid a step, wait for each other
#SBATCH --open-mode=append
set -euo pipefail

trap 'scontrol requeue "$SLURM_JOB_ID"' USR1 # ends the tasks; the next start has the same id
srun python train.py fit -c digits.yaml --ckpt_path last \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
    --trainer.callbacks+ ModelCheckpoint --trainer.callbacks.dirpath "checkpoints/$SLURM_JOB_ID" \
    --trainer.callbacks.save_last true --trainer.callbacks.every_n_train_steps 100 "$@" &
wait $! # a trap waits for a command in the foreground
