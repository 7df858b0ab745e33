#!/usr/bin/env bash
# Trains a small mixture-of-experts GPT (8 experts, top-2, every second layer dense) on two processes.
# The log shows the router's losses in addition to the model's loss. Compare with --moe-aux-loss-coeff 0.
#
#   examples/moe.sh                    mock data
#   examples/moe.sh text.txt           your text (.txt or .jsonl), one token per byte
#   examples/moe.sh text.txt --bf16    further flags are passed to pretrain_gpt.py and override the flags below
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
    shift
else
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 256)
fi

# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.1

PROCESSES=${PROCESSES:-2}
FLAGS=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4
    --num-experts 8 --moe-layer-freq "[0,1]*2" --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --train-iters 100 --log-interval 20 --eval-iters 4 --num-workers 0
    "${DATA[@]}" --save "$OUT/checkpoints" "$@"
)
"$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run --world-size "$PROCESSES"
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
echo "Checkpoint and steps.jsonl: $OUT/checkpoints"
