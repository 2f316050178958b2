#!/usr/bin/env bash
# sbatch slurm.sh [options of train.py], from this folder
#SBATCH --job-name=digits
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8 # a task a device
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@120 # Lightning then saves, has the job queued again and resumes it
set -euo pipefail

srun python train.py fit -c digits.yaml \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" "$@"
