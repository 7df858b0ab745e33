#!/usr/bin/env bash
# Runs moe_8ranks.sh on two machines with four GPUs each: sbatch examples/slurm.sh [further flags]
#
# /checkpoints stands for a folder that both machines share. Before its time limit the job saves and requeues itself,
# and then resumes, until the last iteration. docs/faults.md explains this under "Under Slurm and Kubernetes".
#SBATCH --job-name=moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# One torchrun per node. They rendezvous at this address.
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-4}
export LAUNCH="--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node $GPUS_PER_NODE --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $FIRST:${MASTER_PORT:-29500}"
export RANKS=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
# Time from SIGTERM until torchrun kills its ranks: longer than a step and a save, shorter than the 120 s of --signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# After a SIGTERM torchruns exit with 1 at slightly different times: --kill-on-bad-exit=1 would kill the slower ones
# while they save. --wait ends tasks that hang after another node's task has ended.
STATUS=0
examples/attempt.py --signals-reach-command /checkpoints/moe srun --kill-on-bad-exit=0 --wait=60 \
    examples/moe_8ranks.sh --bf16 --save /checkpoints/moe --load /checkpoints/moe --save-interval 50 --exit-signal-handler "$@" ||
    STATUS=$?
# 75: unfinished, with a newer checkpoint than at the start. --requeue alone only covers node failures and preemption.
((STATUS != 75)) || scontrol requeue "$SLURM_JOB_ID"
exit "$STATUS"
