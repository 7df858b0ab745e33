"""Every argument has one rule that decides between checkpoint and command line, and messages agree with the result."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.core.dist_checkpointing import save_items
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing.folder import iteration_folder
from megatron.training.checkpointing.run_values import (
    args_to_json,
    check_same_model,
    load_args_from_checkpoint,
    noted_differences,
)
from megatron.training.command_line.checkpoint_rules import DERIVED, OnLoad, changes_results, on_load_rules
from megatron.training.command_line.flags import Flag, FlagState, flag_table
from megatron.training.command_line.yaml_config import NOT_IN_FILES

# Two values of flags whose words are neither numbers nor one of their choices.
WORDS = {
    "exit_signal": ("SIGINT", "SIGUSR1"),
    "window_size": ("7,0", "9,0"),
    "window_attn_skip_freq": ("2", "3"),
    "moe_layer_freq": ("2", "[0]+[1]*3"),
    "moe_paged_stash_buffer_bytes": ("1MB", "2MB"),
    "cuda_graph_modules": ("attn", "mlp"),
    "mup_base_head_dim": ("8", "16"),
    "model": ("llama3-8b", "glm-4.5"),
}
WORKING = [flag for flag in flag_table().by_dest.values() if flag.state is FlagState.WORKS]
# Flags that choose sources or the checkpoint or change the launch, an old name of --position-embedding-type rope, and a
# flag whose only value is its default.
OTHERS: tuple[str, ...] = (*NOT_IN_FILES, "model", "model_scale", "load", "pretrained_checkpoint", "ckpt_step")
OTHERS += ("use_rotary_position_embeddings", "moe_use_upcycling", "fake_process_group")
OTHERS += ("yarn_correction_range_round_to_int",)


def words_of(flag: Flag) -> tuple[str, str]:
    """Returns two words with different values that differ from the default, or "" for a flag without a value."""
    if flag.constant is not None:
        return "", ""
    if flag.dest in WORDS:
        return WORDS[flag.dest]
    if names := flag.choice_names():
        first = next(name for name in names if name != flag.default)
        return first, next((name for name in names if name != first), first)
    return {"int": ("3", "5"), "float": ("0.25", "0.75")}.get(flag.type_name, ("one", "two"))


def given(flag: Flag, word: str) -> list[str]:
    """Returns the words that give a flag this value on a command line."""
    times = flag.nargs if isinstance(flag.nargs, int) else 1
    return [flag.flags[0], *([word] * times if flag.constant is None else [])]


def test_every_argument_has_one_rule() -> None:
    """Fails for a rule of an argument without a flag, and for a new derived argument."""
    assert on_load_rules().keys() == {flag.dest for flag in WORKING}
    base = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
        "--lr 1 --mock-data --max-position-embeddings 16"
    )
    experts = "--num-experts 4 --moe-grouped-gemm --bf16"
    for words in (base, f"{base} {experts}", f"{base} --train-samples 9".replace("--train-iters 2", "")):
        args = validate_args(parse_args(argv=words.split()))
        assert vars(args).keys() - flag_table().by_dest.keys() <= DERIVED


def test_a_script_s_argument_may_change_results() -> None:
    assert changes_results("color") and changes_results("seed") and changes_results("num_layers")
    assert not changes_results("log_interval") and not changes_results("use_flash_attn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose run had the first of `words_of` for each argument with a value, and defaults otherwise."""
    path = tmp_path_factory.mktemp("rules")
    args = parse_args(argv=[])
    for flag in WORKING:
        if flag.constant is None and flag.dest not in OTHERS:
            vars(args)[flag.dest] = vars(parse_args(argv=given(flag, words_of(flag)[0])))[flag.dest]
    stored = args_to_json(vars(args))
    contents = {"optimizer": False, "rng": False}
    run = {"iteration": 5, "args": stored, "train_state": {}, "contents": contents, "frozen": []}
    save_items([], iteration_folder(path, 5), common=run)
    return path


LINE = re.compile(r"note: --use-checkpoint-args: (\S+) is (.*) \(the command line\), (.*) in the checkpoint: (.*) used")


@pytest.mark.parametrize("rule", OnLoad, ids=lambda rule: rule.value)
def test_a_given_flag_is_used_or_named_with_the_value_that_is(
    folder: Path, rule: OnLoad, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in WORKING if on_load_rules()[flag.dest] is rule and flag.dest not in OTHERS]
    args = parse_args(argv=[word for flag in flags for word in given(flag, words_of(flag)[1])])
    args.load = str(folder)
    before = args_to_json(vars(args))
    stored = json.loads((iteration_folder(folder, 5) / "common.json").read_text())["args"]
    capsys.readouterr()
    after = args_to_json(vars(load_args_from_checkpoint(args)))
    found = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines() if "the command line" in line]
    lines = {line[1]: line for line in found if line is not None}
    adopts = rule in (OnLoad.WEIGHTS, OnLoad.MODEL)
    assert len(lines) == len(found) == (len(flags) if adopts or rule is OnLoad.GIVEN else 0)
    for flag in flags:
        assert after[flag.dest] == (stored if adopts else before)[flag.dest], flag.dest
        if lines:
            assert before[flag.dest] != stored[flag.dest], "the test needs two values"
            _, value, _, used = lines[flag.flags[0]].groups()
            assert used == ("the checkpoint's value is" if after[flag.dest] == stored[flag.dest] else f"{value} is")


@pytest.fixture(scope="module")
def defaults() -> argparse.Namespace:
    return parse_args(argv=[])


@pytest.mark.parametrize("flag", WORKING, ids=lambda flag: flag.dest)
def test_on_resume_a_difference_is_an_error_or_a_line_or_changes_nothing(
    defaults: argparse.Namespace, flag: Flag
) -> None:
    args = argparse.Namespace(**vars(defaults))
    args.micro_batch_size, args.num_experts, args.num_layers = 1, 4, 4
    args.unpadded_vocab_size, args.position_embedding_type = 64, "learned_absolute"
    args.max_position_embeddings = args.seq_length = 8
    args.num_attention_heads, args.kv_channels, args.rotary_percent = 4, 8, 0.5
    args.lora_rank, args.group_query_attention, args.add_bias_linear = 4, True, False
    stored = args_to_json(vars(args))
    assert noted_differences(vars(args), stored, trains=True, optimizer=True) == []
    other = {"vocab_size": "unpadded_vocab_size", "group_query_attention": "num_query_groups"}.get(flag.dest, flag.dest)
    stored[other] = not stored[other] if flag.constant is not None and other == flag.dest else 1.5
    if flag.dest == "moe_layer_freq":
        stored[other] = [0, 1, 1, 1]
    rule = on_load_rules()[flag.dest]
    lines = noted_differences(vars(args), stored, trains=True, optimizer=False)
    with_optimizer = noted_differences(vars(args), stored, trains=True, optimizer=True)
    evaluated = noted_differences(vars(args), stored, trains=False, optimizer=False)
    name = flag.flags[0] if other == flag.dest else ""
    if rule is OnLoad.WEIGHTS and not flag.dest.startswith("lora_") or flag.dest == "max_position_embeddings":
        assert not lines
        with pytest.raises(ValueError, match=f"another model: .*{name}.* in the checkpoint"):
            check_same_model(vars(args), stored)
        return
    check_same_model(vars(args), stored)
    assert all(line.startswith(f"{name} is ") and line.endswith(" in the checkpoint") for line in lines)
    assert len(lines) == (rule in (OnLoad.MODEL, OnLoad.GIVEN, OnLoad.RUN, OnLoad.OPTIMIZER))
    assert len(with_optimizer) == (rule in (OnLoad.MODEL, OnLoad.GIVEN, OnLoad.RUN))
    assert len(evaluated) == (rule in (OnLoad.MODEL, OnLoad.GIVEN))


def test_a_checkpoint_without_an_argument_or_a_run_names_nothing_else() -> None:
    args = argparse.Namespace(**{**vars(parse_args(argv=[])), "seed": 7, "color": 3, "micro_batch_size": 1})
    stored = {"color": 4, "seed": 5, "weight": 3, "rank": 1, "data_parallel_size": 8}
    assert noted_differences(vars(args), stored, trains=True, optimizer=True) == [
        "--seed is 7 here, 5 in the checkpoint",
        "color is 3 here, 4 in the checkpoint",
    ]
    # A converted checkpoint stores the model of a run that has not begun.
    assert noted_differences(vars(args), {**stored, "micro_batch_size": None}, trains=True, optimizer=False) == []


# The values are written by hand: (command line, stored arguments, used, fragments of the lines).
ADOPTIONS = [
    (
        "--rotary-base 500000",
        {"rotary_base": 10000},
        {"rotary_base": 10000},
        ["--rotary-base is 500000", "checkpoint's"],
    ),
    ("--window-size 15,0", {"window_size": None}, {"window_size": None}, ["--window-size is [15, 0]", "None in the"]),
    ("--window-size 15,0", {"window_size": [15, 0]}, {"window_size": [15, 0]}, []),
    ("--seq-length 64", {"seq_length": 32}, {"seq_length": 64}, ["32 in the checkpoint: 64 is used"]),
    ("", {"seq_length": 32}, {"seq_length": 32}, []),
    ("", {"hidden_dropout": 0.0}, {"hidden_dropout": 0.0}, ["--hidden-dropout is not given: 0.0 is used"]),
    ("--hidden-dropout 0.2", {"hidden_dropout": 0.0}, {"hidden_dropout": 0.2}, ["0.0 in the checkpoint: 0.2 is used"]),
    (
        "--position-embedding-type yarn",
        {"position_embedding_type": "rope", "rope_type": "yarn"},
        {"position_embedding_type": "rope", "rope_type": "yarn"},
        [],
    ),
    (
        "--use-rotary-position-embeddings",
        {"position_embedding_type": "none"},
        {"position_embedding_type": "none", "use_rotary_position_embeddings": False},
        ["--position-embedding-type is rope (the command line), none in the checkpoint: the checkpoint's"],
    ),
    (
        "--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)",
        {"num_layers": 4, "num_experts": 4, "moe_layer_freq": [0, 1, 1, 1]},
        {"moe_layer_freq": [0, 1, 1, 1]},
        [],
    ),
    (
        "--num-layers 4 --num-experts 4 --moe-layer-freq 2",
        {"num_layers": 4, "num_experts": 4, "moe_layer_freq": [1, 0, 1, 0]},
        {"moe_layer_freq": [1, 0, 1, 0]},
        [],
    ),
    ("--swiglu", {"swiglu": False}, {"swiglu": False}, ["--swiglu is on (the command line), off in the checkpoint"]),
    (
        "--moe-aux-loss-coeff 0.1 --seed 3 --lr 0.5",
        {"moe_aux_loss_coeff": 0.2, "seed": 4, "lr": 0.1},
        {"moe_aux_loss_coeff": 0.1, "seed": 3, "lr": 0.5},
        [],
    ),
    (
        "--moe-use-upcycling --num-experts 4",
        {"num_experts": None, "moe_router_topk": 2},
        {"num_experts": 4},
        ["--num-experts is 4 (the command line), None in the checkpoint: 4 is used"],
    ),
    (
        "--vocab-size 100 --norm-epsilon 1e-6",
        {"vocab_size": 128, "tokenizer_type": "HuggingFaceTokenizer", "layernorm_epsilon": 1e-5},
        {"vocab_size": 128, "layernorm_epsilon": 1e-5},
        ["--vocab-size is 100", "--norm-epsilon is 1e-06"],
    ),
]


@pytest.mark.parametrize("words, stored, used, fragments", ADOPTIONS, ids=str)
def test_use_checkpoint_args_says_what_it_uses(
    words: str,
    stored: dict[str, Any],
    used: dict[str, Any],
    fragments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = {"iteration": 5, "args": stored, "train_state": {}, "contents": {"optimizer": False, "rng": False}}
    save_items([], iteration_folder(tmp_path, 5), common={**run, "frozen": []})
    args = parse_args(argv=[*words.split(), "--load", str(tmp_path)])
    capsys.readouterr()
    found = args_to_json(vars(load_args_from_checkpoint(args)))
    assert {name: found[name] for name in used} == used
    lines = capsys.readouterr().err
    assert all(fragment in lines for fragment in fragments) and bool(lines) == bool(fragments), lines


def test_values_of_a_file_and_a_preset_lose_with_a_line_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"rotary_base": 10, "num_layers": 3, "seq_length": 8, "hidden_dropout": 0.5}
    run = {"iteration": 5, "args": stored, "train_state": {}, "contents": {"optimizer": False, "rng": False}}
    save_items([], iteration_folder(tmp_path, 5), common={**run, "frozen": []})
    file = tmp_path / "run.yaml"
    file.write_text(f"load: {tmp_path}\nrotary_base: 20\nseq_length:\nhidden_dropout: 0.25\n")
    argv = ["--config", str(file), "--model", "llama3-8b", "--model-scale", "tiny"]
    args = load_args_from_checkpoint(parse_args(argv=argv))
    assert (args.rotary_base, args.num_layers, args.seq_length, args.hidden_dropout) == (10, 3, 8, 0.25)
    lines = capsys.readouterr().err
    assert f"--rotary-base is 20 ({file}), 10 in the checkpoint: the checkpoint's value is used" in lines
    assert "--num-layers is 4 (--model llama3-8b --model-scale tiny), 3 in the checkpoint: the checkpoint's" in lines
    assert f"--hidden-dropout is 0.25 ({file}), 0.5 in the checkpoint: 0.25 is used" in lines


def test_the_command_line_replaces_a_file_and_names_what_changes_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in WORKING if flag.constant is None and flag.dest not in OTHERS]
    file, content = tmp_path / "run.yaml", {}
    for flag in flags:
        first, times = words_of(flag)[0], flag.nargs if isinstance(flag.nargs, int) else 1
        value = first if flag.type_name in ("str", "value") else yaml.safe_load(first)
        content[flag.dest] = [value] * times if times > 1 else value
    file.write_text(yaml.safe_dump(content))
    assert not _named(["--config", str(file)], flags, file, capsys)
    same = [word for flag in flags for word in given(flag, words_of(flag)[0])]
    assert not _named(["--config", str(file), *same], flags, file, capsys)
    other = [word for flag in flags for word in given(flag, words_of(flag)[1])]
    replaced = {flag.dest for flag in flags if len(set(words_of(flag))) > 1 and changes_results(flag.dest)}
    assert _named(["--config", str(file), *other], flags, file, capsys) == replaced and len(replaced) > 100
    assert {**vars(parse_args(argv=other)), "config": str(file)} == vars(
        parse_args(argv=["--config", str(file), *other])
    )


def _named(argv: list[str], flags: list[Flag], file: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Returns the arguments of the flags that a line names as replaced values of a file."""
    capsys.readouterr()
    parse_args(argv=argv)
    start = f"note: the command line replaces values of {file}: "
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(start)]
    words = set(lines[0].removeprefix(start).split()) if lines else set()
    return {flag.dest for flag in flags if flag.flags[0] in words}


def test_each_replaced_source_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rotary_base: 7\nlr: 0.5\nswiglu: false\nlog_interval: 3\nseed: 5\n")
    words = "--model llama3.1-8b --lr 0.25 --lr 0.125 --log-interval 2 --log-interval 4 --seed 5 --num-layers 3"
    args = parse_args(argv=[*words.split(), "--config", str(file)])
    assert (args.rotary_base, args.lr, args.swiglu, args.log_interval, args.num_layers) == (7, 0.125, False, 4, 3)
    assert capsys.readouterr().err.splitlines() == [
        f"note: {file} replaces values of --model llama3.1-8b: --swiglu is False instead of True, "
        "--rotary-base is 7 instead of 500000",
        "note: the command line replaces values of --model llama3.1-8b: --num-layers is 3 instead of 32",
        f"note: the command line replaces values of {file}: --lr is 0.125 instead of 0.5",
        "note: --lr is given 2 times: the last value, 0.125, is used",
    ]


def test_defaults_of_a_script_that_do_not_apply_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    base = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
        "--mock-data --max-position-embeddings 16 --lr 0.5"
    )
    defaults = {"lr": 1.0, "hidden_dropout": 0.0, "vocab_size": 100, "log_interval": 7}
    args = validate_args(parse_args(argv=base.split()), defaults)
    assert (args.lr, args.hidden_dropout, args.vocab_size) == (0.5, 0.1, 100)
    assert capsys.readouterr().err == (
        "note: defaults of the script are not used: --lr is 0.5 (the command line) instead of 1.0, "
        "--hidden-dropout is 0.1 (the flag's default) instead of 0.0\n"
    )


def test_two_flags_for_positions_must_agree() -> None:
    base = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
        "--mock-data --lr 0.5 --use-rotary-position-embeddings"
    )
    for kind in ("none", "learned_absolute"):
        with pytest.raises(
            ValueError, match=f"--position-embedding-type is {kind} and --use-rotary-position-embeddings"
        ):
            validate_args(parse_args(argv=f"{base} --position-embedding-type {kind}".split()))
    args = validate_args(parse_args(argv=f"{base} --position-embedding-type yarn".split()))
    assert (args.position_embedding_type, args.rope_type) == ("rope", "yarn")
    assert validate_args(parse_args(argv=base.split())).position_embedding_type == "rope"
