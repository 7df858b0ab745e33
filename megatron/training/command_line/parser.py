"""Implements the argument parser: arity and type of every known flag, help for working flags, and errors with advice.

arguments.py defines the precedence of configuration files. validation.py and conflicts.py check combinations of flags.
"""

import argparse
import difflib
import functools
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.command_line.errors import CommandLineError, is_first_rank
from megatron.training.command_line.flags import Flag, FlagState, FlagTable, flag_table, refusal, text_of_value
from megatron.training.config import RunConfig
from megatron.version_flag import PrintVersions

_METAVARS = {"int": "N", "float": "X", "str": "TEXT"}


class FlagParser(argparse.ArgumentParser):
    """ArgumentParser that raises CommandLineError for mistakes and prints help on rank 0 only.

    mistakes: messages about invalid values, which are collected instead of raised.
    """

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.mistakes: list[str] = []

    def error(self, message: str) -> NoReturn:
        # argparse writes `argument --lr/--rate: ...`.
        message = message.removeprefix("argument ")
        name, explicit, _ = message.partition(": ignored explicit argument")
        raise CommandLineError(f"{name}: does not take a value" if explicit else message)

    def print_help(self, file: Any = None) -> None:
        if is_first_rank():
            super().print_help(file)


# The source of arguments that parse_args reads from `argv`.
COMMAND_LINE = "the command line"
# The source of values that --use-checkpoint-args has adopted.
CHECKPOINT = "the checkpoint"
# Arguments whose flags existed in released versions of Megatron-LM and were removed. Scripts still read them.
_FORMER_ARGUMENTS = {"use_legacy_models": False, "moe_use_legacy_grouped_gemm": False}


class RunArguments(argparse.Namespace):
    """Parsed arguments. Reading the argument of a rejected flag returns its default; `vars` does not contain it.

    Scripts written for Megatron-LM read such arguments to pass them on or to select a code path. given: sources of the
    arguments that are not defaults, by name; see given_arguments. _run_config: the settings built from the arguments;
    see run_config_of.
    """

    # Slots, so that `vars` contains only arguments.
    __slots__ = ("given", "_run_config")

    given: Mapping[str, str]
    _run_config: RunConfig | None

    def __init__(self, run_config: RunConfig | None = None) -> None:
        super().__init__()
        self._run_config = run_config
        if run_config is not None:
            self.__dict__ = run_config.values

    def __getattr__(self, name: str) -> Any:
        """Returns the default of a rejected flag. Python calls this only for absent attributes."""
        defaults = _refused_defaults()
        if name not in defaults:
            raise _AbsentArgument(name, tuple(vars(self)))
        return defaults[name]

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the state of copies and pickles: dict and slots. Settings are built again from the copied dict."""
        given = {"given": self.given} if hasattr(self, "given") else {}
        return vars(self), {**given, "_run_config": None}


def given_arguments(args: argparse.Namespace) -> Mapping[str, str]:
    """Returns the source of each argument that was given, in words: the command line, a file, a preset or CHECKPOINT.

    In a namespace that parse_args did not create, arguments that differ from their flag's default count as given.
    """
    if isinstance(args, RunArguments) and hasattr(args, "given"):
        return args.given
    flags = flag_table().by_dest
    return {name: COMMAND_LINE for name, value in vars(args).items() if name in flags and value != flags[name].default}


class _AbsentArgument(AttributeError):
    """Raised for an absent argument. Searches for the nearest name only when the message is formatted.

    argparse calls hasattr for every flag, and each search takes milliseconds.
    """

    def __str__(self) -> str:
        name, present = self.args
        return f"there is no argument {name}{did_you_mean(name, present)}"


@functools.cache
def _refused_defaults() -> dict[str, Any]:
    return _FORMER_ARGUMENTS | {flag.dest: flag.default for flag in flag_table().in_state(FlagState.REFUSED)}


class _HelpFormatter(argparse.HelpFormatter):
    """Help formatter with wider lines and without line breaks inside flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


REFUSED = "refused_flags"


class _Refuse(argparse.Action):
    """Action of rejected flags. Collects their error messages in the argument REFUSED."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, flag: Flag, **spec: Any) -> None:
        # Accepts any number of words, so that the error is the rejection rather than a missing value.
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **spec)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = f" is {' '.join(values)}" if values else ""
        vars(namespace).setdefault(REFUSED, []).append(f"{option_string}{given}: not supported; {refusal(self.flag)}")


class _StoreUnwrapped(argparse.Action):
    """Action that stores a list of values, or a bare value if the flag accepts one and a single word is given."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, flag: Flag, **spec: Any) -> None:
        super().__init__(option_strings, dest, **spec)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        # A plain list would make `--moe-aux-loss-coeff 0.1` differ in type from the default 0.1.
        vars(namespace)[self.dest] = self.flag.unwrapped(values)


def build_parser(
    table: FlagTable, extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None] | None
) -> tuple[argparse.ArgumentParser, frozenset[str], list[str]]:
    """Builds a parser for all flags of `table` and for flags that a script adds.

    Returns the parser, the names of the script's arguments, and the list to which the parser appends messages about
    invalid values. A script may define a flag that is unsupported here. If it redefines a working flag, argparse
    reports a conflict.
    """
    others = len(table.flags) - len(table.in_state(FlagState.WORKS))
    own = FlagParser(
        prog=Path(sys.argv[0]).name,
        usage="%(prog)s [--config FILE] [flags]",
        epilog=f"{others} more Megatron-LM flags are known; docs/flags.md describes how each of them is treated.",
        # A new flag could make an abbreviation ambiguous.
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser: argparse.ArgumentParser = own
    for title, flags in table.working_groups().items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag, mistakes=own.mistakes)
    # Actions that extra_args_provider adds belong to the script.
    ours = {action.dest for action in parser._actions}
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    # Unsupported flags and --version are added last, and not at all if the script has defined flags of these names.
    script_dests = frozenset(action.dest for action in parser._actions) - ours
    for flag in table.flags:
        if flag.state is not FlagState.WORKS:
            with suppress(argparse.ArgumentError):
                _add_flag(parser, flag, mistakes=own.mistakes)
    with suppress(argparse.ArgumentError):
        parser.add_argument("--version", action=PrintVersions)
    return parser, script_dests, own.mistakes


def given_dests(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Returns the names of the arguments whose flags are among the words of a command line."""
    flags = {word.partition("=")[0] for word in words}
    given = [action for action in parser._actions if not flags.isdisjoint(action.option_strings)]
    # Flags that are rejected, and --help, store no value.
    return list(dict.fromkeys(action.dest for action in given if action.default is not argparse.SUPPRESS))


def repeated_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[argparse.Action, int]:
    """Returns the flags with a value that a command line gives more than once, and how often."""
    flags = Counter(word.partition("=")[0] for word in words)
    counts = {action: sum(flags[word] for word in action.option_strings) for action in parser._actions}
    return {action: count for action, count in counts.items() if count > 1 and action.nargs != 0}


def _add_flag(parser: argparse._ActionsContainer, flag: Flag, *, mistakes: list[str]) -> None:
    if flag.state is FlagState.REFUSED:
        parser.add_argument(*flag.flags, dest=flag.dest, action=_Refuse, flag=flag)
        return
    spec: dict[str, Any] = {"dest": flag.dest, "default": flag.default, "help": flag_help(flag)}
    if flag.constant is not None:
        parser.add_argument(*flag.flags, action="store_const", const=flag.constant, **spec)
        return
    # Not argparse's choices, because value_of_word gives advice about unavailable values.
    names = flag.choice_names()
    metavar = "{" + ",".join(names) + "}" if names else _METAVARS.get(flag.type_name, "TEXT")
    if flag.unwraps:
        spec.update(action=_StoreUnwrapped, flag=flag)
    parser.add_argument(*flag.flags, type=_argparse_type(flag, mistakes), nargs=flag.nargs, metavar=metavar, **spec)


def _argparse_type(flag: Flag, mistakes: list[str]) -> Callable[[str], Any]:
    def convert(word: str) -> Any:
        try:
            return flag.value_of_word(word)
        except ValueError as error:
            # Not raised, because argparse would stop at the first mistake.
            mistakes.append(f"{'/'.join(flag.flags)}: {error}")
            return flag.default

    return convert


def flag_help(flag: Flag) -> str:
    """Returns the help text of a working flag, with its default. Other flags are hidden from the help."""
    if flag.state is not FlagState.WORKS:
        return argparse.SUPPRESS
    # argparse formats help with %.
    text = flag.help.replace("%", "%%")
    if flag.constant is not None or flag.default is None:
        return text
    return f"{text} (default: {text_of_value(flag.default).replace('%', '%%')})"


def problems_of_leftovers(leftovers: Sequence[str], parser: argparse.ArgumentParser, *, table: FlagTable) -> list[str]:
    """Returns error messages for unparsed words: one per unknown flag, with the nearest known flag.

    If no word is a flag, the message names the first word.
    """
    names = [word.partition("=")[0] for word in leftovers if word.startswith("-")]
    if leftovers and not names:
        return [f"unexpected word {leftovers[0]!r}: it does not belong to a flag"]
    return [f"unknown flag {name}{did_you_mean(name, _known_words(parser, table))}" for name in names]


def _known_words(parser: argparse.ArgumentParser, table: FlagTable) -> list[str]:
    # A suggested flag must not be rejected in turn.
    refused = {word for flag in table.in_state(FlagState.REFUSED) for word in flag.flags}
    return [word for action in parser._actions for word in action.option_strings if word not in refused]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns a suffix for errors about an unknown name that suggests the nearest candidate; "" if none is near."""
    names = list(candidates)
    # A prefix of a candidate is preferred, even if another candidate is closer in edit distance.
    begun = difflib.get_close_matches(name, [one for one in names if one.startswith(name)], n=1)
    nearest = begun or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""
