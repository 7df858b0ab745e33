"""Reads the training command of a launch script. The expected words come from bash running the same script."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tools.bash_reader import ScriptError
from megatron.tools.launch_scripts import read_script

# Typical scripts of Megatron users. Together they use every shell feature that the reader supports.
ARRAYS = """
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # of one node
    --nnodes "$NUM_NODES"
)
MODEL_ARGS=(
    --num-layers 16
    --hidden-size $((4 * 128))
    --moe-layer-freq "([0]*1+[1]*15)"
)
MODEL_ARGS+=(--global-batch-size $((WORLD_SIZE * 4)) )
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${MODEL_ARGS[@]}" --save "$SAVE_DIR/run" 2>&1 | tee log.txt
"""
STRINGS = r"""
TP=2
BASE="--num-layers 12 \
    --hidden-size 512 \
    --lr 1e-4"
DATA="--data-path /data/a_${TP}_document"
if [[ -n "$EXTRA" && "$TP" -gt 1 ]]; then
    BASE="$BASE $EXTRA"
elif [ "$TP" = 2 ]; then
    BASE="$BASE --bf16"
else
    BASE="$BASE --fp16"
fi
[ -z "$PROFILE" ] && BASE+=" --no-profile-here"
case "$TP" in
    1) BASE="$BASE --one" ;;
    2|4) BASE="$BASE --two" ;;
    *) BASE="$BASE --many" ;;
esac
NAME=pretrain.v2.sh
torchrun --nproc-per-node $TP ./megatron/pretrain_gpt.py $BASE $DATA --log ${NAME%.sh} ${NAME##*.} \
    ${NAME#*.} ${NAME%%.*}
"""
FUNCTIONS = """
OPTIONS=""
for name in a b; do OPTIONS="$OPTIONS --flag-$name 1"; done
train() {
    local lr=$1
    shift
    torchrun pretrain_gpt.py --lr $lr $OPTIONS --rest "$@"
}
mkdir_like=1 && train 0.5 x y
"""
EVALUATED = """
CMD="torchrun pretrain_gpt.py --num-layers 3 --split '9,1,0'"
eval $CMD
"""


def _by_bash(script: str, environment: dict[str, str]) -> list[str]:
    """Returns the arguments that bash passes to torchrun when it runs the script, starting with the program."""
    function = "torchrun() { printf '%s\\0' \"$@\" >&3; }\n"
    run = subprocess.run(
        ["bash", "-c", f"exec 3>&1\n{function}{script}"],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        check=False,
        text=True,
        cwd="/tmp",
    )
    words = run.stdout.split("\0")[:-1]
    return words


def _by_reader(script: str, environment: dict[str, str]) -> list[str]:
    (launch,) = read_script(script, environment, name="run.sh").launches
    return [*launch.launcher[1:], launch.program, *launch.words]


@pytest.mark.parametrize("environment", [{}, {"NNODES": "4"}], ids=["defaults", "given"])
def test_arrays_and_arithmetic_are_those_of_bash(environment: dict[str, str]) -> None:
    environment = {"SAVE_DIR": "/tmp/out dir", **environment}
    # Otherwise `tee` would write its log file into the current folder.
    script = ARRAYS.replace(" | tee log.txt", "")
    assert _by_reader(script, environment) == _by_bash(script, environment)


@pytest.mark.parametrize(
    "environment", [{}, {"EXTRA": "--swiglu --tied"}, {"PROFILE": "1"}], ids=["none", "extra", "profile"]
)
def test_strings_and_conditions_are_those_of_bash(environment: dict[str, str]) -> None:
    assert _by_reader(STRINGS, environment) == _by_bash(STRINGS, environment)


def test_evaluated_strings_are_those_of_bash() -> None:
    assert _by_reader(EVALUATED, {}) == _by_bash(EVALUATED, {})


@given(words=st.lists(st.text(st.characters(blacklist_characters="\0\r\n", codec="utf-8"), max_size=8), max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_quoted_words_are_read_as_they_are(words: list[str]) -> None:
    # The last word starts with `--`, which makes the array a training command whatever the other words are.
    array, rest = shlex.join([*words, "--end"]), shlex.join(words)
    script = f'ARGS=({array})\ntorchrun pretrain_gpt.py "${{ARGS[@]}}" --and {rest}\n'
    (launch,) = read_script(script, {}, name="run.sh").launches
    assert launch.words == (*words, "--end", "--and", *words)


def test_an_exported_variable_is_part_of_the_command() -> None:
    (launch,) = read_script(ARRAYS, {"SAVE_DIR": "/out"}, name="run.sh").launches
    assert launch.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_a_variable_that_nobody_gives_stays_and_is_named() -> None:
    (launch,) = read_script(ARRAYS, {}, name="run.sh").launches
    assert launch.words[-1] == "${SAVE_DIR}/run"
    assert launch.unknown == ("SAVE_DIR",)


def test_what_the_caller_gives_wins_over_the_script() -> None:
    (launch,) = read_script(STRINGS, {"TP": "4"}, name="run.sh").launches
    assert launch.launcher == ("torchrun", "--nproc-per-node", "4")
    assert "--fp16" in launch.words


def test_functions_and_loops_are_those_of_bash() -> None:
    assert _by_reader(FUNCTIONS, {}) == _by_bash(FUNCTIONS, {})


@pytest.mark.parametrize("count", ["", "2", "9"], ids=["one", "two", "more than there are"])
def test_shifted_arguments_are_those_of_bash(count: str) -> None:
    script = f'set -- a b c\nshift {count}\ntorchrun pretrain_gpt.py --rest "$@"\n'
    assert _by_reader(script, {}) == _by_bash(script, {})


@pytest.mark.parametrize(("count", "shown"), [("$N", "${N}"), ("x", "x"), ("-1", "-1")])
def test_a_shift_by_no_number_is_noted(count: str, shown: str) -> None:
    script = read_script(f'set -- a b\nshift {count}\ntorchrun pretrain_gpt.py --rest "$@"\n', {}, name="run.sh")
    assert script.notes == (f"line 2: shift {shown} is ignored, because {shown} is not a number",)
    assert script.launches[0].words == ("--rest", "a", "b")


def test_the_name_of_the_script_survives_new_arguments() -> None:
    script = 'f() { torchrun pretrain_gpt.py --tag "$0" --rest "$@"; }\nset -- a b\nf c\n'
    (launch,) = read_script(script, {"0": "run.sh", "1": "x"}, name="run.sh").launches
    assert launch.words == ("--tag", "run.sh", "--rest", "c")


def test_a_command_for_a_scheduler_is_found_in_its_string() -> None:
    script = 'run="python -u /opt/m/pretrain_gpt.py --num-layers 2 --lr ${LR}"\nsrun -l --output=x sh -c "${run}"\n'
    (launch,) = read_script(script, {"LR": "0.1"}, name="run.sub").launches
    assert (launch.program, launch.words) == ("/opt/m/pretrain_gpt.py", ("--num-layers", "2", "--lr", "0.1"))


def test_conditions_that_depend_on_files_are_named() -> None:
    script = "if [ -f /there ]; then A=1; fi\ntorchrun pretrain_gpt.py --lr 1\n"
    assert read_script(script, {}, name="run.sh").notes == ("line 1: the condition '-f /there' is assumed to be false",)


def test_nothing_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "file"
    victim.write_text("x", encoding="utf-8")
    script = f"rm -f {victim}\nX=$(rm -f {victim})\n> {victim}\ntorchrun pretrain_gpt.py --lr 1 --tag $X\n"
    (launch,) = read_script(script, {}, name="run.sh").launches
    assert victim.read_text(encoding="utf-8") == "x"
    assert launch.words == ("--lr", "1", "--tag", "${X}")
    assert launch.setup == (f"X=$(rm -f {victim})",)


def test_several_commands_are_found_in_order() -> None:
    script = "for lr in 1 2; do torchrun pretrain_gpt.py --lr $lr; done\n"
    launches = read_script(script, {}, name="run.sh").launches
    assert [launch.words for launch in launches] == [("--lr", "1"), ("--lr", "2")]


@pytest.mark.parametrize("text", ["", "echo hello\n", "f() { f; }\nf\n"], ids=["empty", "no training", "endless"])
def test_a_script_without_a_command_is_refused(text: str) -> None:
    with pytest.raises(ScriptError, match=r"run\.sh|more than"):
        read_script(text, {}, name="run.sh")


def test_flags_of_a_model_config() -> None:
    text = """
    ENV_VARS: {LR: 0.1}
    MODEL_ARGS:
      --num-layers: 12
      --swiglu: true
      --untie-embeddings-and-output-weights: false
      --lr: ${LR}
      --data-path: ${DATA}/text
      --recompute-modules: "moe_act layernorm"
      --moe-layer-freq: ([0]*1 + [1]*15)
    """
    (launch,) = read_script(text, {}, name="model_config.yaml").launches
    assert launch.words == (
        *("--num-layers", "12", "--swiglu", "--lr", "0.1", "--data-path", "${DATA}/text"),
        *("--recompute-modules", "moe_act", "layernorm", "--moe-layer-freq", "([0]*1 + [1]*15)"),
    )
    assert launch.unknown == ("DATA",)


@pytest.mark.parametrize("text", ["[1, 2]", "a: b", "MODEL_ARGS: 3", "a: [", ""], ids=str)
def test_other_yaml_is_refused(text: str) -> None:
    with pytest.raises(ScriptError, match=r"model\.yaml"):
        read_script(text, {}, name="model.yaml")


LAUNCH = "torchrun pretrain_gpt.py --num-layers $N --lr ${LR:-1} ${A[@]}\n"


@pytest.mark.parametrize(
    "lines",
    [
        "N=2; LR=1e-4; LR=${LR/1e-4/5e-4}",
        "N=2; LR=a.a.a; LR=${LR//a/b}; LR=${LR/.}",
        "N=2; A=(--x 2 --y 3); A[1]=8; A[3]=9",
        "N=2; ( N=7; A=(--lost) )",
        "for m in 4 6 8; do if [ $m -eq 6 ]; then break; fi; N=$m; done",
        "for m in 4 6 8; do if [ $m -eq 8 ]; then continue; fi; N=$m; done",
        "f() { N=3; return; N=4; }; f",
        "N=2; LR=5; unset LR",
        "N=2; [ $N -eq 2 ] && N=3",
        "N=2; (( N += 1 )); let LR=N*2",
        "N=2; LR=abc; LR=${LR^^}",
    ],
)
def test_values_are_those_of_bash(lines: str) -> None:
    script = f"{lines}\n{LAUNCH}"
    assert _by_reader(script, {}) == _by_bash(script, {})
    assert read_script(script, {}, name="run.sh").launches[0].doubts == ()


@pytest.mark.parametrize(
    ("lines", "construct"),
    [
        ("N=2; while read -r a; do A+=($a); done < list", "loops with a condition"),
        ("N=2; (( N += $(nproc) ))", "(( N += $(nproc) )) is not followed"),
        ("N=2; source env.sh", "source is not followed"),
        ("N=2; LR=abc; LR=${LR@Q}$0", "the value of LR is not followed"),
        ("read -r N LR < list", "read is not followed"),
        ("printf -v N %d 2", "printf is not followed"),
        ("N=2; declare -A A; A[x]=1", "declare -A A is not followed"),
        ("N=2; IFS=,", "IFS is not followed"),
        ("N=2; if [ -f list ]; then N=3; fi", "is assumed to be false"),
        ("N=2; [ -d list ] && N=3", "is assumed to be false"),
    ],
)
def test_what_may_have_changed_a_command_is_a_doubt(lines: str, construct: str) -> None:
    (launch,) = read_script(f"{lines}\n{LAUNCH}", {}, name="run.sh").launches
    assert len(launch.doubts) == 1 and construct in launch.doubts[0] and launch.doubts[0].startswith("line 1: ")


def test_folders_that_are_made_and_what_follows_a_command_are_no_doubts() -> None:
    script = f"N=2\nif [ ! -d out ]; then mkdir out; fi\n{LAUNCH}let N=3\n"
    assert read_script(script, {}, name="run.sh").launches[0].doubts == ()


def test_a_script_that_exits_before_a_command_is_refused() -> None:
    script = 'if [ "$1" = moe ]; then N=2; else echo usage; exit 1; fi\n' + LAUNCH
    with pytest.raises(ScriptError, match="line 1: the script ends with exit, before any training command"):
        read_script(script, {}, name="run.sh")
    assert read_script(script, {"1": "moe"}, name="run.sh").launches[0].words[:2] == ("--num-layers", "2")


def test_defaults_of_variables_that_differ_between_nodes_are_noted() -> None:
    text = "LR=${LR:-1e-3}\ntorchrun --node_rank ${RANK:-0} pretrain_gpt.py --lr $LR\n"
    script = read_script(text, {}, name="train.sh")
    assert script.notes == ("line 2: RANK is not set, so its default 0 is used: set it on each node",)
    assert read_script(text, {"RANK": "3"}, name="train.sh").notes == ()
