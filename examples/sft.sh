#!/usr/bin/env bash
# Trains a small GPT on chats: a template formats them as text, loss masks restrict the loss to the assistant's tokens,
# and whole chats are packed into samples without attention between chats. Then the model answers a question.
#
#   examples/sft.sh                     generated chats that count up from a number
#   examples/sft.sh chats.jsonl         your chats, one {"messages": [{"role": "user", "content": "..."}, ...]} per line
#   examples/sft.sh chats.jsonl --bf16  further flags are passed to pretrain_gpt.py and override the flags below
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads are slower at this size
SEQUENCE=${SEQUENCE:-64}

if [ -f "${1:-}" ]; then
    CHATS=$1
    shift
else
    CHATS=$OUT/chats.jsonl
    for ((i = 0; i < 500; i++)); do
        n=$((i % 50))
        echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$n\"}," \
            "{\"role\": \"assistant\", \"content\": \"$((n + 1)) $((n + 2)) $((n + 3))\"}]}"
    done >"$CHATS"
fi
# The loss includes the text between {% generation %} and {% endgeneration %}.
cat >"$OUT/template.jinja" <<'TEMPLATE'
{% for message in messages %}{% if message.role == 'assistant' %}A:{% generation %}{{ message.content }}
{% endgeneration %}{% else %}Q:{{ message.content }} {% endif %}{% endfor %}
TEMPLATE

"$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$CHATS" --output-prefix "$OUT/chats" \
    --tokenizer-type ByteLevelTokenizer --chat-key messages --chat-template "$OUT/template.jinja" \
    --pack-length "$SEQUENCE"

# Default warm-up, which fits any number of steps.
[[ " $* " == *" --lr-warmup-"* ]] || set -- "$@" --lr-warmup-fraction 0.1

"$PYTHON" "$ROOT/pretrain_gpt.py" \
    --data-path "$OUT/chats_messages_document" --tokenizer-type ByteLevelTokenizer --split 90,10,0 \
    --reset-position-ids --reset-attention-mask \
    --seq-length "$SEQUENCE" --max-position-embeddings "$SEQUENCE" --micro-batch-size 8 --global-batch-size 8 \
    --num-layers 2 --hidden-size 128 --num-attention-heads 4 \
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \
    --hidden-dropout 0 --attention-dropout 0 \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine \
    --train-iters 120 --log-interval 20 --eval-iters 2 --num-workers 0 \
    --save "$OUT/checkpoints" "$@"

echo "An answer:"
"$PYTHON" "$ROOT/tools/generate.py" --load "$OUT/checkpoints" --prompt "Q:17 A:" --max-new-tokens 16 --temperature 0
