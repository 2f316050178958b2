#!/usr/bin/env bash
# sbatch slurm.sh [options of train.py], from this folder
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8 # a task a device
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@120 # to the tasks: Preemption saves and queues the job again; the next start has the same id
#SBATCH --open-mode=append
set -euo pipefail

run="checkpoints/$SLURM_JOB_ID"
srun python train.py fit -c digits.yaml --ckpt_path newest \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
    --trainer.callbacks+ Preemption --trainer.callbacks.folder "$run" \
    --trainer.callbacks+ ModelCheckpoint --trainer.callbacks.dirpath "$run" \
    --trainer.callbacks.save_last true --trainer.callbacks.every_n_train_steps 100 "$@"
