#!/usr/bin/env bash
# The command of moe_8ranks.sh on two machines with four GPUs each: sbatch examples/slurm.sh [further flags]
#
# /checkpoints stands for a folder that both machines see. A job that is started again goes on from its last checkpoint.
#SBATCH --job-name=moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

# One torchrun a node; they find each other, and who is first, at this address.
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export LAUNCH="--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node 4 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $FIRST:29500"
export RANKS=$((4 * SLURM_JOB_NUM_NODES))

srun --kill-on-bad-exit=1 \
    examples/moe_8ranks.sh --bf16 --save /checkpoints/moe --load /checkpoints/moe --save-interval 50 --exit-signal-handler "$@"
