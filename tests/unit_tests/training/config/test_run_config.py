"""Tests of the areas of RunConfig, of the arguments from which they are built, and of copies of arguments."""

import argparse
import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron.training.arguments import parse_args, read_run_config, validate_args
from megatron.training.command_line.config_builder import build_areas, build_config, run_config_of
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import Flag, FlagState, flag_table
from megatron.training.command_line.parser import COMMAND_LINE, RunArguments, given_arguments
from megatron.training.config import RunConfig
from megatron.training.config.run_config import _areas

DENSE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 3 "
    "--lr 1e-3 --position-embedding-type rope --mock-data --tokenizer-type NullTokenizer --vocab-size 64"
).split()
EXPERTS = [*DENSE, *"--num-experts 4 --swiglu --bf16 --group-query-attention --num-query-groups 2".split()]


def _args(argv: list[str] = DENSE) -> argparse.Namespace:
    return validate_args(parse_args(argv=argv))


def _built(run_config: RunConfig) -> dict[str, Any]:
    """Returns every area that can be built, by name."""
    areas = {}
    for name in _areas():
        try:
            areas[name] = getattr(run_config, name)
        except CommandLineError:
            pass
    return areas


def test_areas_are_built_once() -> None:
    args = parse_args(argv=EXPERTS)
    run_config = run_config_of(args)
    early = _built(run_config)
    assert all(getattr(run_config, name) is config for name, config in early.items())
    validate_args(args)
    assert run_config_of(args) is run_config
    validated = _built(run_config)
    assert validated.keys() == _areas().keys()
    again = _built(build_areas(args))
    assert all(again[name] is config for name, config in validated.items())


def _update(args: argparse.Namespace, name: str, value: Any) -> None:
    vars(args).update({name: value})


@pytest.mark.parametrize(
    ("name", "value", "areas"),
    [
        ("bf16", True, {"transformer", "optimizer"}),
        ("fp16", True, {"transformer", "optimizer", "ddp", "torch_fsdp2"}),
        ("use_distributed_optimizer", True, {"optimizer", "ddp", "torch_fsdp2"}),
        ("deterministic_mode", True, {"transformer", "optimizer"}),
        ("overlap_param_gather", True, {"optimizer", "ddp", "torch_fsdp2"}),
        ("argument_of_a_script", 3, set()),
    ],
)
@pytest.mark.parametrize("write", [setattr, _update])
def test_a_change_by_a_script_reaches_the_areas_that_depend_on_it(
    name: str, value: Any, areas: set[str], write: Callable[[argparse.Namespace, str, Any], None]
) -> None:
    args = _args()
    before = _built(run_config_of(args))
    write(args, name, value)
    after = _built(run_config_of(args))
    assert {area for area in before if after.get(area) is not before[area]} == areas
    for area in areas & after.keys():
        assert vars(after[area]).get(name, value) == value


def test_a_changed_list_reaches_its_area() -> None:
    args = _args([*DENSE, "--recompute-granularity", "selective", "--recompute-modules", "core_attn"])
    before = run_config_of(args).transformer
    args.recompute_modules.append("layernorm")
    after = run_config_of(args).transformer
    assert after is not before and set(after.recompute_modules or ()) == {"core_attn", "layernorm"}


def test_an_error_after_a_change_by_a_script_names_the_flag() -> None:
    args = _args()
    args.lr = -1
    with pytest.raises(CommandLineError, match=r"^--lr is -1: must be more than 0"):
        _ = run_config_of(args).optimizer
    args.lr = 0.5
    assert run_config_of(args).optimizer.lr == 0.5


def _other_value(flag: Flag, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    choices = [choice for choice in flag.choices or () if choice != value]
    one = choices[0] if choices else {"int": 8, "float": 0.25}.get(flag.type_name, "1")
    one = one if one != value else 2 * value
    return [one] * (flag.nargs if isinstance(flag.nargs, int) else 1) if flag.takes_list else one


def _fields(build: Callable[[], Any]) -> dict[str, Any] | str:
    """Returns the fields of a configuration, or the error of its build."""
    try:
        # Each object has timers of its own.
        return {name: value for name, value in vars(build()).items() if name != "timers"}
    except CommandLineError as error:
        return str(error)


@pytest.mark.parametrize("argv", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_areas_of_changed_settings_equal_areas_built_from_scratch(argv: list[str]) -> None:
    run_config = run_config_of(_args(argv))
    _built(run_config)
    values = dict(run_config.values)
    stale = []
    for flag in flag_table().in_state(FlagState.WORKS):
        other = {flag.dest: _other_value(flag, values[flag.dest])}
        changed = run_config.changed(**other)
        assert changed.values == {**values, **other} != values
        for area, (config_class, _) in _areas().items():
            fresh = _fields(partial(build_config, config_class, changed.values))
            if _fields(partial(getattr, changed, area)) != fresh:
                stale.append((area, other))
    assert not stale and run_config.values == values


def test_changed_settings_share_the_other_areas() -> None:
    run_config = read_run_config(DENSE)
    before = _built(run_config)
    after = _built(run_config.changed(lr=0.5, seq_length=16))
    assert after["optimizer"].lr == 0.5 and before["optimizer"].lr == 1e-3
    assert {name for name in before if after[name] is not before[name]} == {"optimizer", "data"}
    assert all(getattr(run_config, name) is config for name, config in before.items())


def test_computed_fields_are_shown_to_scripts_without_another_build() -> None:
    args = parse_args(argv=DENSE)
    run_config = run_config_of(args)
    transformer = run_config.transformer
    assert args.ffn_hidden_size is None
    run_config.write_back("transformer", "ffn_hidden_size", "kv_channels")
    assert (args.ffn_hidden_size, args.kv_channels) == (256, 16)
    assert run_config.transformer is transformer


def test_unknown_areas_are_named_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"RunConfig has no area 'optimiser'; areas: .*\boptimizer\b"):
        getattr(read_run_config(DENSE), "optimiser")  # noqa: B009


def test_arguments_over_settings_share_their_values() -> None:
    run_config = read_run_config(DENSE)
    args = RunArguments(run_config)
    assert run_config_of(args) is run_config and vars(args) is run_config.values
    args.lr = 0.5
    assert run_config.optimizer.lr == 0.5


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
@pytest.mark.parametrize(
    "source", [lambda: parse_args(argv=DENSE), _args, lambda: RunArguments(read_run_config(DENSE))]
)
def test_a_copy_of_arguments_is_a_set_of_settings_of_its_own(
    clone: Callable[[Any], Any], source: Callable[[], argparse.Namespace]
) -> None:
    args = source()
    _built(run_config_of(args))
    other = clone(args)
    assert other == args and given_arguments(other) == given_arguments(args)
    assert run_config_of(other) is not run_config_of(args)
    other.lr, args.seed = 0.5, 7
    assert (run_config_of(args).optimizer.lr, run_config_of(other).optimizer.lr) == (1e-3, 0.5)
    assert (run_config_of(args).training.seed, run_config_of(other).training.seed) == (7, 1234)
    # An argument that Megatron-LM has removed.
    assert other.use_legacy_models is False


def test_a_copy_of_arguments_leaves_built_settings_behind() -> None:
    args = _args()
    # Such as the timers and callables of a running model.
    vars(run_config_of(args).transformer)["timers"] = lambda: None
    assert pickle.loads(pickle.dumps(args)) == args
    assert copy.deepcopy(args)._run_config is copy.copy(args)._run_config is None


def test_a_namespace_of_a_script_has_settings_too() -> None:
    args = argparse.Namespace(**vars(parse_args(argv=DENSE)))
    assert validate_args(args) is args
    expected = run_config_of(_args()).values
    assert vars(args) == expected and run_config_of(args).values is vars(args)
    assert given_arguments(args)["lr"] == COMMAND_LINE
    args.lr = 0.5
    assert run_config_of(args).optimizer.lr == 0.5


def test_a_value_of_another_type_is_checked_although_it_is_equal() -> None:
    args = _args()
    args.lr = np.float32(args.lr)
    with pytest.raises(CommandLineError, match="--lr is .*: must be a number"):
        _ = run_config_of(args).optimizer


def test_scripts_may_name_an_argument_like_the_settings() -> None:
    def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--run-config", default="abc")
        return parser

    args = parse_args(add_flag, argv=[*DENSE, "--run-config", "file"])
    validate_args(args)
    assert args.run_config == vars(args)["run_config"] == "file"
    assert run_config_of(args).training.train_iters == 3


def test_changed_settings_refuse_unknown_names() -> None:
    with pytest.raises(ValueError, match="no argument hiden_size"):
        run_config_of(_args()).changed(hiden_size=4)
