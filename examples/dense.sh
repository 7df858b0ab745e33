#!/usr/bin/env bash
# Trains a small dense GPT (RoPE, RMSNorm, SwiGLU, grouped-query attention) in one process, saves it and continues a
# prompt.
#
#   examples/dense.sh                  mock data
#   examples/dense.sh text.txt         your text (.txt or .jsonl), one token per byte
#   examples/dense.sh text.txt --bf16  further flags are passed to pretrain_gpt.py and override the flags below
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads are slower at this size

if [ -f "${1:-}" ]; then
    "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$1" --output-prefix "$OUT/tokens" \
        --tokenizer-type ByteLevelTokenizer --append-eod
    DATA=(--data-path "$OUT/tokens_text_document" --tokenizer-type ByteLevelTokenizer --split 90,10,0)
    PROMPT="The "
    shift
else
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 256)
    PROMPT="10 12 14 "
fi

# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.1

FLAGS=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 8 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --train-iters 100 --log-interval 20 --eval-iters 4 --num-workers 0
    "${DATA[@]}" --save "$OUT/checkpoints" "$@"
)
"$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run
"$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"

echo "A continuation of '$PROMPT':"
"$PYTHON" "$ROOT/tools/generate.py" --load "$OUT/checkpoints" --prompt "$PROMPT" --max-new-tokens 24 --temperature 0.5
echo "Checkpoint and steps.jsonl: $OUT/checkpoints"
