#!/usr/bin/env bash
# Trains a published model from scratch in its layout of layouts.yaml. Prints the memory plan first. When restarted, it
# resumes from the last checkpoint.
#
#   examples/models/pretrain.sh                                lists the models and their numbers of GPUs
#   examples/models/pretrain.sh qwen3-30b-a3b                  mock data, the smallest layout
#   SCALE=tiny examples/models/pretrain.sh qwen3-30b-a3b       a tiny model with the same features, on two CPU processes
#   examples/models/pretrain.sh qwen3-30b-a3b --lr 1e-4        further flags of pretrain_gpt.py, which take precedence
#
# GPUS: number of processes on all machines. DATA: flags for data and tokenizer. OUT: folder of the checkpoints.
# slurm.sh and kubernetes.yaml run this script on each of several machines. They set LAUNCH, the arguments of torchrun,
# and NODE_RANK.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

MODEL=${1:-}
if [[ -z $MODEL || $MODEL == -* ]]; then
    echo "usage: examples/models/pretrain.sh MODEL [flags of pretrain_gpt.py]; MODEL is one of:" >&2
    "$PYTHON" "$HERE/layouts.py" >&2
    exit 2
fi
shift
case ${SCALE:-full} in
full)
    SMALLEST=$("$PYTHON" "$HERE/layouts.py" "$MODEL")
    GPUS=${GPUS:-$SMALLEST}
    LAYOUT=$("$PYTHON" "$HERE/layouts.py" "$MODEL" "$GPUS")
    ;;
tiny)
    GPUS=${GPUS:-2}
    LAYOUT=$("$PYTHON" "$HERE/layouts.py" "$MODEL" "$GPUS" --tiny)
    ;;
*)
    echo "error: SCALE is $SCALE: must be full or tiny" >&2
    exit 2
    ;;
esac
mapfile -t LAYOUT <<<"$LAYOUT"
if [[ -z ${LAUNCH:-} ]] && ((GPUS > 8)); then
    echo "error: $MODEL on $GPUS GPUs requires several machines: start it with examples/models/slurm.sh or kubernetes.yaml" >&2
    exit 2
fi
LAUNCH=${LAUNCH:---standalone --nproc-per-node $GPUS}
DATA=${DATA:---mock-data --tokenizer-type NullTokenizer}
OUT=${OUT:-$ROOT/runs/$MODEL${SCALE:+-$SCALE}}

# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.01
# DATA contains several words.
# shellcheck disable=SC2206
FLAGS=(--model "$MODEL" "${LAYOUT[@]}" $DATA --save "$OUT/checkpoints" --load "$OUT/checkpoints" "$@")

if [[ ${NODE_RANK:-${SLURM_NODEID:-0}} == 0 ]]; then
    echo "== Memory plan for $GPUS ranks"
    "$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run --world-size "$GPUS"
    echo "== Training; checkpoints and log: $OUT/checkpoints"
fi
# shellcheck disable=SC2086
exec "$PYTHON" -m torch.distributed.run $LAUNCH "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
