#!/usr/bin/env bash
# Shows that a run that is stopped and resumed is identical to an uninterrupted run: losses and gradient norms are
# bitwise equal, including with dropout. Further flags are passed to pretrain_gpt.py: examples/resume.sh --bf16
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads are slower at this size

train() {
    "$PYTHON" "$ROOT/pretrain_gpt.py" \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope \
        --hidden-dropout 0.1 --attention-dropout 0.1 \
        --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 8 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 0 \
        --lr 1e-3 --lr-decay-style cosine \
        --train-iters 20 --log-interval 5 --eval-iters 0 "$@"
}
# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.25
# The fields of each step in steps.jsonl, without times.
numbers() { sed 's/, "seconds".*//' "$1/steps.jsonl"; }

echo "== 20 steps without interruption"
train --save "$OUT/whole" "$@"
echo "== the same, stopped after step 3 ..."
train --save "$OUT/parts" --exit-interval 3 "$@"
echo "== ... and resumed"
train --save "$OUT/parts" --load "$OUT/parts" "$@"

diff <(numbers "$OUT/whole") <(numbers "$OUT/parts")
echo "All $(numbers "$OUT/parts" | wc -l) steps are bitwise equal: $OUT"
