"""Parses the command line of a training program: parse_args, validate_args and the transformer's configuration.

The modules in command_line/ define, parse, reject and check the flags.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from megatron.core.device import adopt_launcher
from megatron.training.command_line.checkpoint_rules import changes_results
from megatron.training.command_line.config_builder import core_transformer_config_from_args, run_config_of
from megatron.training.command_line.errors import CommandLineError, is_first_rank
from megatron.training.command_line.flags import (
    Flag,
    FlagState,
    FlagTable,
    flag_table,
    no_effect_notice,
    refusal,
    text_of_value,
)
from megatron.training.command_line.model_presets import preset_file, table_of_models, tiny
from megatron.training.command_line.parser import (
    COMMAND_LINE,
    REFUSED,
    RunArguments,
    build_parser,
    given_dests,
    problems_of_leftovers,
    repeated_flags,
)
from megatron.training.command_line.validation import read_launcher, validate_args
from megatron.training.command_line.yaml_config import config_text, read_config_file
from megatron.training.config import RunConfig

__all__ = [
    "core_transformer_config_from_args",
    "parse_args",
    "read_run_config",
    "validate_args",
]


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None] | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parses the arguments from defaults, --model, the --config file and `argv`, in rising precedence.

    argv: None means sys.argv. Returns a namespace with the value of every supported flag, under Megatron-LM's names.
    Rank 0 prints a line for values of a file or a preset that others replace, if they change results. Raises
    CommandLineError for mistakes. --help, --list-models and --print-config print on rank 0 and exit.
    """
    adopt_launcher()
    table = flag_table()
    # A copy, because the caller may reuse its list.
    words = list(sys.argv[1:] if argv is None else argv)
    parser, script_dests, mistakes = build_parser(table, extra_args_provider)
    for word in words:
        # argparse would turn it into an empty list.
        if word.startswith("--") and word.endswith("=--"):
            raise CommandLineError(f"{word.removesuffix('=--')}: '--' is not a value")
    sources = _sources_of_files(words, table=table, script_dests=script_dests)
    # Set as defaults, so that the command line takes precedence.
    parser.set_defaults(**{name: value for source in sources for name, value in source.values.items()})
    args, leftovers = parser.parse_known_args(words, RunArguments())
    sources.append(_Source(COMMAND_LINE, {name: vars(args)[name] for name in given_dests(parser, words)}))
    # A file of --print-config has an empty value for arguments that are not set.
    args.given = {name: source.name for source in sources for name, value in source.values.items() if value is not None}
    notes = _notes_of_replaced_values(sources, table=table)
    for flag, times in repeated_flags(parser, words).items():
        if flag.dest not in script_dests and changes_results(flag.dest):
            value = text_of_value(vars(args)[flag.dest])
            notes.append(f"note: {flag.option_strings[0]} is given {times} times: the last value, {value}, is used")
    if notes and is_first_rank():
        print("\n".join(notes), file=sys.stderr, flush=True)
    # All problems are collected, so that a launch script can be corrected in one go.
    problems = [] if ignore_unknown_args else problems_of_leftovers(leftovers, parser, table=table)
    problems += [*mistakes, *vars(args).pop(REFUSED, [])]
    _check_values(args, [flag for flag in table.flags if flag.dest not in script_dests], problems=problems)
    if args.list_models:
        _print_and_exit(table_of_models())
    # Before validation, so that an incomplete configuration can be printed and completed.
    if args.print_config:
        _print_and_exit(config_text(vars(args), table=table, script_dests=script_dests))
    # Last, because it sets --world-size to the launcher's number of ranks.
    read_launcher(args)
    return args


def read_run_config(argv: Sequence[str]) -> RunConfig:
    """Returns the settings that a command line describes. Raises CommandLineError for mistakes."""
    return run_config_of(validate_args(parse_args(argv=argv)))


@dataclass(frozen=True)
class _Source:
    """A source of settings, and its values by argument name. name: in words, for messages."""

    name: str
    values: Mapping[str, Any]


def _sources_of_files(words: Sequence[str], *, table: FlagTable, script_dests: Set[str]) -> list[_Source]:
    """Returns the --model preset and the --config file, as far as they are named, in rising precedence."""
    named = _values_needed_early(words)
    values, sources = {}, []
    if "config" in named:
        values = read_config_file(named["config"], table=table, script_dests=script_dests)
        sources.append(_Source(named["config"], values))
    # A file may also name a model, unless --model is a flag of the script.
    model, scale = ({**values, **named}.get(name) for name in ("model", "model_scale"))
    if model is None or "model" in script_dests:
        if scale is not None and "model_scale" not in script_dests:
            raise CommandLineError(f"--model-scale is {scale} without --model: choose the model with --model")
        return sources
    preset = read_config_file(preset_file(model), table=table, script_dests=frozenset())
    is_tiny = scale == "tiny"
    name = f"--model {model}{' --model-scale tiny' if is_tiny else ''}"
    return [_Source(name, tiny(preset) if is_tiny else preset), *sources]


def _notes_of_replaced_values(sources: Sequence[_Source], *, table: FlagTable) -> list[str]:
    """Describes values that a later source replaces and that change results, with a line per pair of sources."""
    lines = []
    for index, earlier in enumerate(sources):
        # A value that a source in between has replaced is described as that source's.
        left = dict(earlier.values)
        for later in sources[index + 1 :]:
            both = [name for name in left if name in later.values]
            replaced = [
                f"{table.by_dest[name].flags[0] if name in table.by_dest else name} is "
                f"{text_of_value(later.values[name])} instead of {text_of_value(left[name])}"
                for name in both
                if later.values[name] != left[name] and changes_results(name)
            ]
            left = {name: value for name, value in left.items() if name not in later.values}
            if replaced:
                lines.append(f"note: {later.name} replaces values of {earlier.name}: {', '.join(replaced)}")
    return lines


def _values_needed_early(words: Sequence[str]) -> dict[str, str]:
    """Returns the values of --config, --model and --model-scale, which determine the main parser's defaults."""
    # Ignores all other flags, and leaves errors and --help to the main parser.
    finder = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for flag in ("--config", "--model", "--model-scale"):
        finder.add_argument(flag)
    try:
        return vars(finder.parse_known_args(words)[0])
    except argparse.ArgumentError:
        # A flag without its value, which the main parser reports.
        return {}


def _check_values(args: argparse.Namespace, flags: list[Flag], *, problems: list[str]) -> None:
    """Raises CommandLineError with `problems` and a line for each unsupported flag, if there are any.

    Prints a notice with the names of flags that are accepted without effect.
    """
    without_effect = []
    for flag in flags:
        # The parser has already reported rejected flags.
        if flag.state in (FlagState.WORKS, FlagState.REFUSED):
            continue
        value = vars(args)[flag.dest]
        # Scripts pass many flags with their default values, which require no message.
        if value == flag.default:
            continue
        if flag.state is FlagState.NO_EFFECT:
            without_effect.append(flag)
        else:
            given = "" if flag.constant is not None else f" is {text_of_value(value)}"
            problems.append(f"{flag.flags[0]}{given}: not supported; {refusal(flag)}")
    if problems:
        raise CommandLineError("\n".join(problems))
    if without_effect and is_first_rank():
        print(no_effect_notice(without_effect), file=sys.stderr, flush=True)


def _print_and_exit(text: str) -> None:
    if is_first_rank():
        print(text, end="", flush=True)
    raise SystemExit(0)
