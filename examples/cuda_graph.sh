#!/usr/bin/env bash
# Checks whether one CUDA graph can capture a training step of a mixture of experts with the paged stash, including the
# optimizer step, and trains it. With a GPU it trains eagerly and with the graph, and compares the losses. Without a GPU
# the check also replays three steps on a tape, which replaces the graph on the CPU, and compares them with eager steps.
#
#   examples/cuda_graph.sh                          mock data, one process
#   examples/cuda_graph.sh --moe-router-topk 4      further flags are passed to the check and the runs
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads are slower at this size

FLAGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --deterministic-mode
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8
    --lr 3e-3 --lr-decay-style constant --train-iters 40 --log-interval 10 --eval-iters 0 --num-workers 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256
    --moe-expert-rank-capacity-factor 2 --moe-paged-stash --moe-paged-stash-page-size 16 "$@")
GRAPH=(--cuda-graph-impl full_iteration --optimizer-cuda-graph)

REPLAY=(--replay 3)
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then REPLAY=(); fi
"$PYTHON" "$ROOT/tools/check_capture.py" "${REPLAY[@]}" "${FLAGS[@]}" "${GRAPH[@]}"

train() { # name of the run, further flags
    echo "Run: $*"
    "$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --save "$OUT/$1" "${@:2}"
}

train eager
if [ ${#REPLAY[@]} = 0 ]; then
    train graph "${GRAPH[@]}"
    losses() { grep -o '"iteration": [0-9]*, "lm_loss": [^,]*' "$OUT/$1/steps.jsonl"; }
    diff <(losses eager) <(losses graph)
    echo "All $(losses graph | wc -l) losses are bitwise equal: $OUT"
else
    echo "No GPU: the run with the graph is skipped."
fi
