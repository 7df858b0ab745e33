"""The command line of a training program: parse_args, validate_args and configurations built from the result.

How flags are made from fields, refused or explained is in command_line/.
"""

import argparse
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

from megatron.training.command_line.config_builder import core_transformer_config_from_args
from megatron.training.command_line.errors import CommandLineError, is_first_rank
from megatron.training.command_line.flags import (
    Flag,
    FlagState,
    FlagTable,
    flag_table,
    no_effect_notice,
    refusal,
)
from megatron.training.command_line.model_presets import preset_file, table_of_models, tiny
from megatron.training.command_line.parser import REFUSED, build_parser, problems_of_leftovers
from megatron.training.command_line.refusals import AGREED_VALUES
from megatron.training.command_line.validation import read_launcher, validate_args
from megatron.training.command_line.values import text_of_value
from megatron.training.command_line.yaml_config import config_text, read_config_file

__all__ = [
    "core_transformer_config_from_args",
    "parse_args",
    "validate_args",
]


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None] | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """The arguments from, in rising precedence, defaults, the file of --config and `argv` (None: the process's own).

    Holds every known flag that is not refused, under Megatron's name. Raises CommandLineError; --help and
    --print-config print on rank 0 and exit.
    """
    table = flag_table()
    # Copied: the caller may go on using its list.
    words = list(sys.argv[1:] if argv is None else argv)
    parser, script_dests, mistakes = build_parser(table, extra_args_provider)
    for word in words:
        # Of which argparse makes an empty list.
        if word.startswith("--") and word.endswith("=--"):
            raise CommandLineError(f"{word.removesuffix('=--')}: '--' is no value")
    # Defaults, so that the command line wins without a word about precedence elsewhere.
    parser.set_defaults(**_values_of_files(words, table=table, script_dests=script_dests))
    args, leftovers = parser.parse_known_args(words)
    # All at once: a long launch script is then corrected once.
    problems = [] if ignore_unknown_args else problems_of_leftovers(leftovers, parser, table=table)
    problems += [*mistakes, *vars(args).pop(REFUSED, [])]
    _judge_values(args, [flag for flag in table.flags if flag.dest not in script_dests], problems=problems)
    if args.list_models:
        _print_and_exit(table_of_models())
    # Before validation: half a configuration may be shown and completed by hand.
    if args.print_config:
        _print_and_exit(config_text(args, table=table, script_dests=script_dests))
    # Last: --world-size of the planner has the same name as what the launcher says.
    read_launcher(args)
    return args


def _values_of_files(words: Sequence[str], *, table: FlagTable, script_dests: Set[str]) -> dict[str, Any]:
    """Returns the values of the model of --model, and over them those of the file of --config, by argument name."""
    named = _named_first(words)
    values = {}
    if "config" in named:
        values = read_config_file(named["config"], table=table, script_dests=script_dests)
    # A file may name a model too, if the flag is not a script's own.
    model, scale = ({**values, **named}.get(name) for name in ("model", "model_scale"))
    if model is None or "model" in script_dests:
        if scale is not None and "model_scale" not in script_dests:
            raise CommandLineError(f"--model-scale is {scale} without --model: give the name of the model")
        return values
    preset = read_config_file(preset_file(model), table=table, script_dests=frozenset())
    return {**(tiny(preset) if scale == "tiny" else preset), **values}


def _named_first(words: Sequence[str]) -> dict[str, str]:
    """The values of flags that are needed before the other flags have defaults, of those that are given."""
    # No errors and no help from this one: it looks for a few flags among many.
    finder = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for flag in ("--config", "--model", "--model-scale"):
        finder.add_argument(flag)
    try:
        return vars(finder.parse_known_args(words)[0])
    except argparse.ArgumentError:
        # A --config without a file name: the real parser says so.
        return {}


def _judge_values(args: argparse.Namespace, flags: list[Flag], *, problems: list[str]) -> None:
    """Raises the problems that are known already, with values that would train another model; says which flags change
    nothing.
    """
    without_effect = []
    for flag in flags:
        # Refused flags never get this far.
        if flag.state in (FlagState.WORKS, FlagState.REFUSED):
            continue
        value = vars(args)[flag.dest]
        # Scripts pass many flags at their defaults; nothing is lost, so nothing is said.
        if value == flag.default or value in AGREED_VALUES.get(flag.flags[0], ()):
            continue
        if flag.state is FlagState.NO_EFFECT:
            without_effect.append(flag)
        else:
            given = "" if flag.constant is not None else f" is {text_of_value(value)}"
            problems.append(f"{flag.flags[0]}{given}: {refusal(flag)}")
    if problems:
        raise CommandLineError("\n".join(problems))
    if without_effect and is_first_rank():
        print(no_effect_notice(without_effect), file=sys.stderr, flush=True)


def _print_and_exit(text: str) -> None:
    if is_first_rank():
        print(text, end="", flush=True)
    raise SystemExit(0)
