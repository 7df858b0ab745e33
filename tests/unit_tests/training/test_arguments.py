"""Tests of flag parsing: names, values and rejected values. test_arguments_files.py tests configuration files."""

import argparse
import difflib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import Flag, FlagState, flag_table
from megatron.training.command_line.parser import REFUSED, build_parser
from megatron.training.config import CheckpointConfig, areas_with_flags
from tests.structure.megatron_flags import working_megatron_flags

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 3 --lr 1e-3 --mock-data --position-embedding-type rope"
)


def error_of(words: str) -> str:
    with pytest.raises(CommandLineError) as caught:
        parse_args(argv=words.split())
    assert all("--" in line or line.startswith("unexpected word") for line in str(caught.value).splitlines())
    return str(caught.value)


def test_arguments_hold_every_flag_that_is_not_refused_with_its_default() -> None:
    args = vars(parse_args(argv=[]))
    launcher = {"rank", "world_size", "local_rank"}
    for flag in flag_table().flags:
        if flag.state is FlagState.REFUSED:
            assert flag.dest not in args or flag.dest in launcher, flag.dest
        elif flag.dest not in launcher:
            assert args[flag.dest] == flag.default
            assert type(args[flag.dest]) is type(flag.default)


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        ("--num-layers 3", "num_layers", 3),
        ("--num-layers=3", "num_layers", 3),
        ("--num-layers 3 --num-layers 4", "num_layers", 4),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--num-experts 8", "num_experts", 8),
        ("--moe-layer-freq ([0]+[1]*2)*2", "moe_layer_freq", [0, 1, 1, 0, 1, 1]),
        ("--moe-aux-loss-coeff 1e-2", "moe_aux_loss_coeff", 0.01),
        ("--moe-aux-loss-coeff 1e-2 0.1", "moe_aux_loss_coeff", [0.01, 0.1]),
        ("--data-path 0.3 books 0.7 web", "data_path", ["0.3", "books", "0.7", "web"]),
        ("--persistent-save-interval 5", "save_interval", 5),
        ("--override-opt_param-scheduler", "override_opt_param_scheduler", True),
        ("--override-opt-param-scheduler", "override_opt_param_scheduler", True),
        ("--exit-signal usr1", "exit_signal", 10),
        ("--tensor-model-parallel-size 1", "tensor_model_parallel_size", 1),
        ("--moe-token-dispatcher-type allgather", "moe_token_dispatcher_type", "allgather"),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 1", "tensor_model_parallel_size", 1),
        ("--expert-tensor-parallel-size 1", "expert_tensor_parallel_size", 1),
    ],
)
def test_words_become_values(words: str, dest: str, value: object) -> None:
    assert vars(parse_args(argv=words.split()))[dest] == value


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--num-layer 3", ["unknown flag --num-layer;", "did you mean --num-layers?"]),
        ("--num_layers=3", ["unknown flag --num_layers;", "--num-layers?"]),
        ("--seq 8", ["unknown flag --seq"]),  # no abbreviations
        ("books", ["'books'", "does not belong to a flag"]),
        ("--num-layers", ["--num-layers", "expected one argument"]),
        ("--num-layers two", ["--num-layers: 'two' is not an integer"]),
        ("--lr fast", ["--lr: 'fast' is not a number"]),
        ("--bf16=1", ["--bf16: does not take a value"]),
        ("--exit-signal SIGNOT", ["--exit-signal", "SIGTERM"]),
        ("--moe-layer-freq [0", ["--moe-layer-freq: '[0'"]),
        ("--normalization GroupNorm", ["'GroupNorm' is not one of LayerNorm, RMSNorm"]),
        ("--ckpt-format torch_dcp", ["'torch_dcp' is not available here", "torch_dist"]),
        ("--optimizer lion", ["'lion' is not available here", "adam, sgd"]),
        (
            "--optimizer dist_muon",
            ["'dist_muon' is not available here; use muon, with --use-distributed-optimizer to shard its state"],
        ),
        ("--rl-profile", ["--rl-profile: not supported", "RL trainer"]),
        ("--batch-size 4", ["--micro-batch-size"]),
        ("--img-h", ["only text models"]),
        (
            "--num-layer 3 --batch-size 4",
            ["unknown flag --num-layer; did you mean --num-layers?\n--batch-size is 4: not supported; "],
        ),
        ("--softmax-type hard", ["--softmax-type", "vanilla"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_advice(words: str, fragments: list[str]) -> None:
    message = error_of(words)
    assert all(fragment in message for fragment in fragments), message


def _words_for(flag: Flag) -> list[str]:
    if flag.constant is not None:
        return [flag.flags[-1]]
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    value = {"int": "7", "float": "0.5"}.get(flag.type_name, "x")
    return [flag.flags[0], *[str(flag.choices[-1]) if flag.choices else value] * count]


def test_every_accepted_flag_takes_megatrons_number_of_words_and_every_refused_flag_is_refused() -> None:
    parser, *_ = build_parser(flag_table(), None)
    for flag in flag_table().flags:
        if flag.state is FlagState.REFUSED:
            refused = vars(parser.parse_known_args(_words_for(flag))[0])[REFUSED]
            assert len(refused) == 1 and "not supported; " in refused[0]
        elif flag.state is not FlagState.WORKS:
            args, leftovers = parser.parse_known_args([*_words_for(flag), "--unknown"])
            assert leftovers == ["--unknown"]
            assert vars(args)[flag.dest] is not None


def _other_value(flag: Flag) -> list[str]:
    """Returns words that give the flag a value other than its default."""
    if flag.constant is not None:
        return [flag.flags[0]]
    drawn = {"int": "7", "float": "0.7"}.get(flag.type_name, "x")
    values = [str(choice) for choice in flag.choices or [drawn]]
    others = [value for value in values if value != str(flag.default)]
    return [flag.flags[0], *others[:1] * (flag.nargs if isinstance(flag.nargs, int) else 1)]


@pytest.mark.parametrize("flag", flag_table().in_state(FlagState.DEFAULT_ONLY), ids=lambda flag: flag.dest)
def test_flags_that_would_train_another_model_are_refused_with_value_and_advice(flag: Flag) -> None:
    words = _other_value(flag)
    given = rf" is .*{re.escape(words[1])}" if words[1:] else ""
    assert re.match(rf"{flag.flags[0]}{given}.*: not supported; .{{20,}}", error_of(" ".join(words)))


def test_such_flags_may_say_what_happens_anyway() -> None:
    said = "--muon-scalar-optimizer adam --fp8-recipe delayed --linear-conv-kernel-dim 4 --fim-rate 0.5"
    assert parse_args(argv=said.split()).fim_rate == 0.5


def test_flags_without_effect_are_named_once_in_one_line_on_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--nvtx-ranges --nvtx-ranges --no-rope-fusion --empty-unused-memory-level 0".split()
    assert parse_args(argv=words).nvtx_ranges
    notice = capsys.readouterr().err
    assert notice.count("\n") == notice.count("--nvtx-ranges") == notice.count("--no-rope-fusion") == 1
    assert "memory-level" not in notice, "a default needs no notice"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse_args(argv=words)
    assert capsys.readouterr().err == ""


def test_help_groups_working_flags_and_hides_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv=["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"\n{title}:\n" in text for title in flag_table().working_groups())
    assert "(default: 1234)" in text
    assert "--nvtx-ranges" not in text and "--rl-profile" not in text
    assert f"{852 - len(working_megatron_flags())} more Megatron-LM flags" in text
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        parse_args(argv=["--help"])
    assert capsys.readouterr().out == ""


def _provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("my script")
    group.add_argument("--color", default="7", type=int)
    group.add_argument("--num-classes", type=int, default=10)  # rejected unless a script defines it
    return parser


def _redefine_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed")


def _define_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version")


def test_scripts_add_flags_and_reuse_names_that_do_nothing_here() -> None:
    args = parse_args(_provider, argv=["--num-classes", "3"])
    assert (args.color, args.num_classes) == (7, 3)
    with pytest.raises(CommandLineError, match="--num-classes is 3: not supported"):
        parse_args(argv=["--num-classes", "3"])
    with pytest.raises(argparse.ArgumentError, match="--seed"):
        parse_args(_redefine_seed, argv=[])
    assert parse_args(_define_version, argv=["--version", "v2"]).version == "v2"


def test_unknown_flags_pass_where_the_script_asks_for_it() -> None:
    args = parse_args(None, True, argv=["--mine", "3", "--num-layers", "2"])
    assert args.num_layers == 2


def test_nearest_names_are_searched_only_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda name, *_, **__: searched.append(name) or [])
    args = parse_args(argv=MINIMAL.split())
    assert not hasattr(args, "num_layer")
    assert searched == []
    with pytest.raises(AttributeError, match="there is no argument num_layer$"):
        _ = args.num_layer
    assert set(searched) == {"num_layer"}


def test_every_configuration_can_be_built_from_arguments() -> None:
    args = validate_args(parse_args(argv=MINIMAL.split()))
    for config_class in set(areas_with_flags().values()) - {TransformerConfig}:
        assert isinstance(config_from_args(config_class, args), config_class)
    assert config_from_args(CheckpointConfig, args).ckpt_format == "torch_dist"
    assert config_from_args(OptimizerConfig, args).params_dtype is torch.float32


def test_transformer_config_follows_from_model_flags() -> None:
    words = (
        f"{MINIMAL} --bf16 --swiglu --num-experts 4 --group-query-attention --num-query-groups 2 --disable-bias-linear"
    )
    args = validate_args(parse_args(argv=words.split()))
    config = core_transformer_config_from_args(args)
    assert config.params_dtype is args.params_dtype is torch.bfloat16
    assert (config.num_moe_experts, config.num_query_groups, config.kv_channels) == (4, 2, 16)
    assert config.gated_linear_unit and config.activation_func is F.silu
    assert config.ffn_hidden_size == args.ffn_hidden_size == int((4 * 64 * 2 / 3) / 64) * 64
    assert not config.add_bias_linear
    dense = core_transformer_config_from_args(validate_args(parse_args(argv=MINIMAL.split())))
    assert (dense.ffn_hidden_size, dense.num_query_groups, dense.activation_func) == (256, 4, F.gelu)


def test_wrong_words_unknown_flags_and_refused_ones_are_told_together(tmp_path: Path) -> None:
    words = "--num-layers two --lr abc --no-fp8-wgrad --nonsense --optimizer muon --muon-coefficient-type quintic"
    assert [line.partition(": ")[0] for line in error_of(words).splitlines()] == [
        error_of("--nonsense"),
        "--num-layers",
        "--lr",
        "--no-fp8-wgrad",
        "--muon-coefficient-type is quintic",
    ]
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: two\nnonsense: 3\nsft: true\n")
    with pytest.raises(CommandLineError) as caught:
        parse_args(argv=["--config", str(file)])
    told = [line.split(": ")[1].split(";")[0] for line in str(caught.value).splitlines()]
    assert told == ["num_layers", "unknown key nonsense", "sft"]


def test_the_error_of_an_attention_variant_names_it_and_not_what_depends_on_it() -> None:
    words = f"{MINIMAL} --experimental-attention-variant gdn --linear-attention-freq 4 --apply-wd-to-qk-layernorm"
    message = error_of(words)
    assert message.startswith("--experimental-attention-variant is gdn: not supported; ")
    assert "qk-layernorm" not in message
