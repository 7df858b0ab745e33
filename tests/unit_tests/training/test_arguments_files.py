"""Tests of configuration files: precedence, types, and the round trip through --print-config."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.arguments import parse_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import Flag, FlagState, flag_table
from megatron.training.command_line.yaml_config import NOT_IN_FILES
from tests.counts import long_count


def parsed(folder: Path, text: str, words: str = "") -> Any:
    file = folder / "run.yaml"
    file.write_text(text)
    return parse_args(argv=["--config", str(file), *words.split()])


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    args = parsed(tmp_path, "num_layers: 2\nhidden_size: 64\nlr: 1e-4\n", "--num-layers 3")
    assert (args.num_layers, args.hidden_size, args.lr, args.min_lr) == (3, 64, 1e-4, 0.0)


def test_keys_may_be_nested_below_titles_and_use_any_name_of_a_flag(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "mixed precision and determinism: {bf16: true}",
            "learning_rate_and_weight_decay: {lr_warmup_iters: 3}",
            "moe: {num_moe_experts: 4, moe_layer_freq: '[0]+[1]', moe-router-topk: 1}",
            "checkpointing:",
            "norm_epsilon: 1e-6",
            "add_bias_linear: false",
            "data_path: [0.3, books, 0.7, web]",
            "attention_backend: local",
            "exit_signal: SIGUSR1",
        ]
    )
    args = parsed(tmp_path, text)
    assert args.bf16 and args.lr_warmup_iters == 3 and args.num_experts == 4 and args.moe_router_topk == 1
    assert args.moe_layer_freq == [0, 1] and args.layernorm_epsilon == 1e-6 and args.add_bias_linear is False
    assert args.data_path == ["0.3", "books", "0.7", "web"] and args.attention_backend.name == "local"
    assert args.exit_signal == 10


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("num_layer: 2", ["unknown key num_layer", "did you mean num_layers?"]),
        ("optimiser: {lr: 1}", ["unknown group 'optimiser'", "optimizer?"]),
        ("num_layers: 2.5", ["num_layers: '2.5' is not an integer"]),
        ("num_layers: true", ["num_layers: True is not an integer"]),
        ("num_layers: [2]", ["num_layers: [2] is not an integer"]),
        ("seed:", ["seed: None is not an integer"]),
        ("lr: fast", ["lr: 'fast' is not a number"]),
        ("bf16: 1", ["bf16: 1 is not true or false"]),
        ("load: 5", ["load: 5 is not a string"]),
        ("normalization: GroupNorm", ["is not one of LayerNorm, RMSNorm"]),
        ("disable_bias_linear: true", ["write add_bias_linear: false"]),
        ("rl_profile: true", ["rl_profile: not supported"]),
        ("dry_run: true", ["dry_run belongs on the command line"]),
        ("lr: 1\nlr: 2", ["lr is given twice"]),
        ("lr: 1\noptimizer: {lr: 2}", ["lr is given twice"]),
        ("config: other.yaml", ["config belongs on the command line"]),
        ("- lr", ["name: value"]),
        ("3: 4", ["3 is not the name of a flag"]),
        ("lr: [", ["not valid YAML"]),
    ],
)
def test_mistakes_in_files_are_named_in_one_line(tmp_path: Path, text: str, fragments: list[str]) -> None:
    with pytest.raises(CommandLineError) as caught:
        parsed(tmp_path, text)
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments) and "\n" not in message, message


def test_missing_and_empty_files(tmp_path: Path) -> None:
    assert vars(parsed(tmp_path, "# nothing\n")).items() >= {"seed": 1234}.items()
    with pytest.raises(CommandLineError, match="cannot read .*absent.yaml"):
        parse_args(argv=["--config", str(tmp_path / "absent.yaml")])


def test_scripts_flags_may_stand_in_files(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("color: 3\n")

    def provider(parser: Any) -> Any:
        parser.add_argument("--color", type=int, default=1)
        return parser

    assert parse_args(provider, argv=["--config", str(file)]).color == 3
    assert yaml.safe_load(_printed(["--config", str(file)], provider))["color"] == 3


def _printed(words: list[str], provider: Any = None) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        with pytest.raises(SystemExit) as caught:
            parse_args(provider, argv=[*words, "--print-config"])
    assert caught.value.code == 0
    return out.getvalue()


_PARSED_WORDS = {
    "moe_paged_stash_buffer_bytes": ["512MB", "1000000"],
    "moe_layer_freq": ["2", "[0]+[1]*3"],
    "window_attn_skip_freq": ["2", "[0]+[1]*3"],
    "window_size": ["128,0", "(-1, 0)"],
    "model": ["llama3-8b", "glm-4.5"],
}


def _words(flag: Flag) -> st.SearchStrategy[list[str]]:
    """Returns words that give the flag a value."""
    if flag.constant is not None:
        return st.just([flag.flags[-1]])
    one: st.SearchStrategy[Any] = st.text(st.characters(codec="ascii", exclude_characters="\n\r"), min_size=1)
    if flag.choice_names():
        one = st.sampled_from(flag.choice_names())
    elif flag.type_name == "int":
        one = st.integers(0, 2**40)
    elif flag.type_name == "float":
        one = st.floats(0, allow_nan=False)
    elif flag.type_name == "value" or flag.dest in _PARSED_WORDS:
        one = st.sampled_from(_PARSED_WORDS.get(flag.dest, ["SIGINT"]))
    if flag.takes_list:
        items = st.lists(one.map(str).filter(lambda word: not word.startswith("-")), min_size=1, max_size=3)
        return items.map(lambda words: [flag.flags[0], *words])
    return one.map(lambda value: [f"{flag.flags[0]}={value}"])


_USABLE = [
    flag
    for flag in flag_table().flags
    if flag.state in (FlagState.WORKS, FlagState.NO_EFFECT)
    # model_scale requires a model.
    and flag.dest not in (*NOT_IN_FILES, "model_scale")
    and not isinstance(flag.nargs, int)
]


@pytest.mark.slow
@settings(max_examples=long_count(15, soak=500))
@given(st.lists(st.sampled_from(_USABLE).flatmap(_words), max_size=8))
def test_printed_configuration_reads_back_to_the_same_arguments(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[str]]
) -> None:
    words = [word for group in groups for word in group]
    text = _printed(words)
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    file.write_text(text)
    with contextlib.redirect_stderr(io.StringIO()):
        direct, again = vars(parse_args(argv=words)), vars(parse_args(argv=["--config", str(file)]))
    assert {**direct, "config": None} == {**again, "config": None}
    assert _printed(["--config", str(file)]) == text
