#!/usr/bin/env bash
# Shows that a run that stops and resumes is the run that never stopped: same losses and gradient norms, bit for bit,
# with dropout on. Further flags go to pretrain_gpt.py: examples/resume.sh --bf16
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads cost more than they give at this size

train() {
    "$PYTHON" "$ROOT/pretrain_gpt.py" \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope \
        --hidden-dropout 0.1 --attention-dropout 0.1 \
        --seq-length 64 --max-position-embeddings 64 --micro-batch-size 4 --global-batch-size 8 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 0 \
        --lr 1e-3 --lr-decay-style cosine \
        --train-iters 20 --log-interval 5 --eval-iters 0 "$@"
}
# A warm-up for any number of steps, unless another is given.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.25
# Everything that steps.jsonl has of a step but its time.
numbers() { sed 's/, "seconds".*//' "$1/steps.jsonl"; }

echo "== 20 steps without a stop"
train --save "$OUT/whole" "$@"
echo "== the same, stopped after step 3 ..."
train --save "$OUT/parts" --exit-interval 3 "$@"
echo "== ... and resumed"
train --save "$OUT/parts" --load "$OUT/parts" "$@"

diff <(numbers "$OUT/whole") <(numbers "$OUT/parts")
echo "All $(numbers "$OUT/parts" | wc -l) steps are equal, bit for bit: $OUT"
