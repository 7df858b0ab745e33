#!/usr/bin/env bash
# Trains a small mixture of experts with fixed-size buffers and the paged stash: first with larger buffers than
# necessary, then with the sizes that the first run's report recommends. Both runs have the same losses.
#
#   examples/paged_stash.sh                         mock data, two processes that share the experts
#   examples/paged_stash.sh --moe-router-topk 4     further flags are passed to both runs
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads are slower at this size

train() { # name of the run, flags
    echo "Run: $*"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$ROOT/pretrain_gpt.py" \
        --num-layers 6 --hidden-size 64 --num-attention-heads 4 --expert-model-parallel-size 2 \
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2 \
        --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \
        --hidden-dropout 0 --attention-dropout 0 \
        --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8 \
        --lr 3e-3 --lr-decay-style constant --train-iters 40 --log-interval 10 --eval-iters 0 --num-workers 0 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 256 \
        --moe-paged-stash --moe-paged-stash-page-size 16 --save "$OUT/$1" "${@:2}"
}

train spacious --moe-expert-rank-capacity-factor 2 "$@"
"$PYTHON" "$ROOT/tools/report.py" "$OUT/spacious" --output "$OUT/report.html"
grep -o '"[^"]*factor needed at p99.9[^"]*"' "$OUT/report.html"
train small --moe-expert-rank-capacity-factor 1.25 --moe-paged-stash-buffer-size-factor-cuda 0.7 "$@"
losses() { grep -o '"iteration": [0-9]*, "lm_loss": [^,]*' "$OUT/$1/steps.jsonl"; }
diff <(losses spacious) <(losses small)
echo "All $(losses small | wc -l) losses are bitwise equal: $OUT"
