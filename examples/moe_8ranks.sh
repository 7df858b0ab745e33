#!/usr/bin/env bash
# Trains a mixture of experts on 8 ranks: tensor and sequence parallelism over 2 ranks, expert parallelism over 4.
# slurm.sh and kubernetes.yaml start the same command on two machines; only LAUNCH differs.
#
#   examples/moe_8ranks.sh                        one machine, 8 processes, mock data
#   examples/moe_8ranks.sh --bf16 --save folder   further flags are passed to pretrain_gpt.py and override those below
#
# LAUNCH: arguments of torchrun. RANKS: number of ranks, for the memory plan. DATA: flags for data and tokenizer.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
LAUNCH=${LAUNCH:---standalone --nproc-per-node 8}
DATA=${DATA:---mock-data --tokenizer-type NullTokenizer --vocab-size 256}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.1

# DATA and LAUNCH contain several words.
# shellcheck disable=SC2206
FLAGS=(
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall --distributed-timeout-minutes 10
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 32
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --train-iters 200 --log-interval 10 --eval-iters 4 --num-workers 0
    $DATA "$@"
)
if [[ ${NODE_RANK:-${SLURM_NODEID:-0}} == 0 ]]; then
    "$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run --world-size "${RANKS:-8}"
fi
# shellcheck disable=SC2086
exec "$PYTHON" -m torch.distributed.run $LAUNCH "$ROOT/pretrain_gpt.py" "${FLAGS[@]}"
