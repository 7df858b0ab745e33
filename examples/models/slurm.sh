#!/usr/bin/env bash
# pretrain.sh or continue.sh on several machines with eight GPUs each, as many as the model's layout takes:
#
#   sbatch -N 4 examples/models/slurm.sh pretrain mixtral-8x7b [further flags]
#   sbatch -N 4 examples/models/slurm.sh continue mixtral-8x7b HF_FOLDER [further flags]
#
# From the repository's folder, which every machine sees, as it does OUT. Submitted again, it goes on from its last
# checkpoint. A continued model is given back afterwards, on one machine: STEPS=export examples/models/continue.sh ...
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
case ${1:-} in
pretrain | continue) ;;
*)
    echo "error: the first word is '${1:-}': must be pretrain or continue, then what that script takes" >&2
    exit 2
    ;;
esac
SCRIPT=$1
shift

# One torchrun a node; they find each other, and who is first, at this address.
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export LAUNCH="--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node 8 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $FIRST:29500"
export GPUS=$((SLURM_JOB_NUM_NODES * 8))
export STEPS="${STEPS:-convert train}"

srun --kill-on-bad-exit=1 "examples/models/$SCRIPT.sh" "$@"
