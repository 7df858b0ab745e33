#!/usr/bin/env bash
# Runs pretrain.sh or continue.sh on several machines with eight GPUs each, as required by the model's layout:
#
#   sbatch -N 4 examples/models/slurm.sh pretrain mixtral-8x7b [further flags]
#   sbatch -N 4 examples/models/slurm.sh continue mixtral-8x7b HF_FOLDER [further flags]
#
# Submit it from the repository's folder. All machines must share this folder and OUT. Before its time limit the job
# saves and requeues itself, and then resumes, until the last iteration (docs/faults.md, "Under Slurm and Kubernetes").
# To export a continued model afterwards, run on one machine: STEPS=export examples/models/continue.sh ...
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
    echo "error: the first word is '${1:-}': must be pretrain or continue, followed by the arguments of that script" >&2
    exit 2
    ;;
esac
SCRIPT=$1
shift
# The same default OUT as in pretrain.sh and continue.sh, because attempt.py needs the folder.
if [[ $SCRIPT == pretrain ]]; then
    export OUT=${OUT:-$PWD/runs/${1:-}${SCALE:+-$SCALE}}
else
    export OUT=${OUT:-$PWD/runs/${1:-}-continued}
fi

# One torchrun per node. They rendezvous at this address.
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
export LAUNCH="--nnodes $SLURM_JOB_NUM_NODES --nproc-per-node $GPUS_PER_NODE --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint $FIRST:${MASTER_PORT:-29500}"
export GPUS=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
export STEPS="${STEPS:-convert train}"
# Time from SIGTERM until torchrun kills its ranks: longer than a step and a save, shorter than the 120 s of --signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# After a SIGTERM torchruns exit with 1 at slightly different times: --kill-on-bad-exit=1 would kill the slower ones
# while they save. --wait ends tasks that hang after another node's task has ended.
STATUS=0
examples/attempt.py --signals-reach-command "$OUT/checkpoints" srun --kill-on-bad-exit=0 --wait=60 \
    "examples/models/$SCRIPT.sh" "$@" || STATUS=$?
# 75: unfinished, with a newer checkpoint than at the start. --requeue alone only covers node failures and preemption.
((STATUS != 75)) || scontrol requeue "$SLURM_JOB_ID"
exit "$STATUS"
