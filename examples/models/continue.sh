#!/usr/bin/env bash
# Continues training a Hugging Face model. Converts its folder, trains with pretrain.sh, which first prints the memory
# plan, and converts the result for transformers. When restarted, it resumes from the last completed step.
#
#   examples/models/continue.sh qwen3-30b-a3b HF_FOLDER                 mock data
#   examples/models/continue.sh qwen3-30b-a3b HF_FOLDER text.jsonl      your text (.txt or .jsonl), with its tokenizer
#   examples/models/continue.sh qwen3-30b-a3b HF_FOLDER --lr 1e-6       further flags, which take precedence
#
# HF_FOLDER: config.json, safetensors and tokenizer, as written by the hub or save_pretrained. Nothing is downloaded.
# The shape of the model comes from its config.json. MODEL selects the layout of the training.
# OUT: folder shared by all machines, for converted/, checkpoints/ and hugging_face-ITERATION/.
# STEPS: which steps to run, by default "convert train export".
# SCALE=tiny: a tiny model on two CPU processes. GPUS, DATA, LAUNCH, NODE_RANK: see pretrain.sh.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
STEPS=${STEPS:-convert train export}

MODEL=${1:-} HUB=${2:-}
if [[ -z $MODEL || -z $HUB || $MODEL$HUB == -* ]]; then
    echo "usage: examples/models/continue.sh MODEL HF_FOLDER [TEXT] [flags of pretrain_gpt.py]; MODEL is one of:" >&2
    "$PYTHON" "$HERE/layouts.py" >&2
    exit 2
fi
shift 2
"$PYTHON" "$HERE/layouts.py" "$MODEL" >/dev/null
if [[ ! -f $HUB/config.json ]]; then
    echo "error: HF_FOLDER is $HUB: contains no config.json; give a folder from the hub or save_pretrained" >&2
    exit 2
fi
OUT=${OUT:-$ROOT/runs/$MODEL-continued}
export OUT
CONVERTED=$OUT/converted CHECKPOINTS=$OUT/checkpoints TRACKER=latest_checkpointed_iteration.txt
FIRST_NODE=$((${NODE_RANK:-${SLURM_NODEID:-0}} == 0))
step() { [[ " $STEPS " == *" $1 "* ]]; }

TEXT=
if [[ -f ${1:-} ]]; then
    TEXT=$1
    shift
fi
TOKENIZER="--tokenizer-type HuggingFaceTokenizer --tokenizer-model $CONVERTED/hugging_face"

if step convert && ((FIRST_NODE)) && [[ ! -f $CONVERTED/$TRACKER ]]; then
    echo "== Converting $HUB"
    "$PYTHON" "$ROOT/tools/checkpoint.py" convert --from hf --to megatron --load "$HUB" --save "$CONVERTED"
fi
if step convert && ((FIRST_NODE)) && [[ -n $TEXT && ! -f $OUT/tokens_text_document.idx ]]; then
    echo "== Tokenizing the text"
    # shellcheck disable=SC2086
    "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$TEXT" --output-prefix "$OUT/tokens" $TOKENIZER --append-eod
fi

if step train; then
    # The first machine converts. The others wait for the files that it writes last.
    until [[ -f $CONVERTED/$TRACKER && (-z $TEXT || -f $OUT/tokens_text_document.idx) ]]; do
        ((FIRST_NODE)) && echo "error: STEPS is $STEPS: there is nothing in $OUT to train; convert first" >&2 && exit 2
        sleep 5
    done
    if [[ -n $TEXT ]]; then
        DATA="--data-path $OUT/tokens_text_document --split 98,2,0 $TOKENIZER"
    fi
    export DATA=${DATA:---mock-data $TOKENIZER}
    # The converted checkpoint contains only weights. Later checkpoints also contain optimizer state.
    LOAD=$CONVERTED
    [[ ! -f $CHECKPOINTS/$TRACKER ]] || LOAD=$CHECKPOINTS
    RUN=("$HERE/pretrain.sh" "$MODEL" --load "$LOAD" --use-checkpoint-args --lr 1e-5 --min-lr 1e-6 "$@")
    # Nothing left to do: replace this shell, so that signals reach the run.
    step export || exec "${RUN[@]}"
    # Otherwise forward SIGTERM once and wait for the save; a shell that waits for a program in its foreground would end
    # immediately and leave it running.
    STOPPED=0
    "${RUN[@]}" &
    RUN_ID=$!
    trap 'STOPPED=1; trap "" TERM; kill -TERM "$RUN_ID"' TERM
    trap : INT # a terminal sends it to the run as well
    STATUS=0
    wait "$RUN_ID" || STATUS=$?
    while kill -0 "$RUN_ID" 2>/dev/null; do # the signal ended the wait
        STATUS=0
        wait "$RUN_ID" || STATUS=$?
    done
    # torchrun may exit with 0 on a node that was not signalled, so a stopped run is not exported.
    ((STATUS == 0 && !STOPPED)) || exit "$((STATUS ? STATUS : 143))"
    trap - TERM INT
fi

if step export && ((FIRST_NODE)); then
    BACK=$OUT/hugging_face-$(cat "$CHECKPOINTS/$TRACKER")
    echo "== Converting the checkpoint for Hugging Face"
    [[ -d $BACK ]] ||
        "$PYTHON" "$ROOT/tools/checkpoint.py" convert --from megatron --to hf --load "$CHECKPOINTS" --save "$BACK"
    echo "For AutoModelForCausalLM.from_pretrained and AutoTokenizer: $BACK"
fi
