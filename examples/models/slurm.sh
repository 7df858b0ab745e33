#!/usr/bin/env bash
# pretrain.sh or continue.sh on several machines with eight GPUs each, as many as the model's layout takes:
#
#   sbatch -N 4 examples/models/slurm.sh pretrain mixtral-8x7b [further flags]
#   sbatch -N 4 examples/models/slurm.sh continue mixtral-8x7b HF_FOLDER [further flags]
#
# From the repository's folder, which every machine sees, as it does OUT. Before its time is up the job saves, requeues
# itself and goes on from there, until the last iteration (docs/faults.md, "Under Slurm and Kubernetes"). A continued
# model is given back afterwards, on one machine: STEPS=export examples/models/continue.sh ...
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
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
# The default OUT of pretrain.sh and continue.sh: attempt.py needs to know the folder.
if [[ $SCRIPT == pretrain ]]; then
    export OUT=${OUT:-$PWD/runs/${1:-}${SCALE:+-$SCALE}}
else
    export OUT=${OUT:-$PWD/runs/${1:-}-continued}
fi

# One torchrun a node; they find each other, and who is first, at this address.
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
export LAUNCH="--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node $GPUS_PER_NODE --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $FIRST:${MASTER_PORT:-29500}"
export GPUS=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
export STEPS="${STEPS:-convert train}"
# From SIGTERM until torchrun kills its ranks. More than a step and a save take, and less than the 120 s of --signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# After a SIGTERM torchruns end with 1 at slightly different times: --kill-on-bad-exit=1 would kill the slower ones in
# their save. --wait ends what hangs after another node's part has ended.
STATUS=0
examples/attempt.py --signals-reach-command "$OUT/checkpoints" srun --kill-on-bad-exit=0 --wait=60 \
    "examples/models/$SCRIPT.sh" "$@" || STATUS=$?
# 75: unfinished, with a newer checkpoint than at the start. --requeue alone is for nodes that fail and for preemption.
((STATUS != 75)) || scontrol requeue "$SLURM_JOB_ID"
exit "$STATUS"
