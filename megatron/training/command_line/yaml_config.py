"""Configuration files: reading `--config file.yaml` and writing what `--print-config` shows.

Keys are the names that flags have in the parsed arguments, flat or below the group titles of --help.
"""

import argparse
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import yaml

from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flag_table import Flag, FlagState, FlagTable
from megatron.training.command_line.parser import did_you_mean
from megatron.training.command_line.refusals import refusal
from megatron.training.command_line.values import value_of_yaml, yaml_of_value
from megatron.training.command_line.yaml_values import plain_values

# They say what to do with a configuration and are not part of one.
NOT_IN_FILES = ("config", "print_config", "list_models", "dry_run", "world_size")


class _InlineListDumper(yaml.SafeDumper):
    """SafeDumper that writes one line per flag, lists included."""


_InlineListDumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def read_config_file(path: str, *, table: FlagTable, script_dests: Set[str]) -> dict[str, Any]:
    """Values by name in the parsed arguments; `script_dests` are names that a script added to the parser.

    Raises CommandLineError for a file that cannot be read, and with a line for each unknown or refused key and each
    value of the wrong type.
    """
    aliases = _aliases(table)
    values: dict[str, Any] = {}
    problems = []
    for key, data in _flatten(_load(path), path=path, table=table):
        # Who copies flags into a file keeps their dashes.
        name = key.replace("-", "_")
        try:
            # argparse turns a string default into the type that the script asked for.
            if name in script_dests:
                dest, value = name, data
            else:
                flag = _flag_of_key(name, table, aliases=aliases, path=path)
                dest, value = flag.dest, _value(flag, data, path=path, table=table)
        except CommandLineError as error:
            problems.append(str(error))
            continue
        # Flat and below a title, or under two of its names.
        if dest in values:
            problems.append(f"{path}: {dest} is given twice")
        values[dest] = value
    if problems:
        raise CommandLineError("\n".join(problems))
    return values


def _load(path: str) -> dict[Any, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandLineError(f"--config: cannot read {path}: {error}") from None
    try:
        content = plain_values(text)
    except ValueError as error:
        raise CommandLineError(f"--config: {path} is not valid YAML: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise CommandLineError(f"--config: {path} must hold `name: value` lines")
    return content or {}


def _flatten(content: dict[Any, Any], *, path: str, table: FlagTable) -> Iterator[tuple[str, Any]]:
    # Titles of flags that do not work count too, for their keys get a better answer than "unknown group".
    titles = {flag.group for flag in table.flags}
    for key, data in content.items():
        if not isinstance(key, str):
            raise CommandLineError(f"{path}: {key!r} is not the name of a flag")
        if not isinstance(data, dict):
            # A title over nothing, as in a file whose lines are commented out, is no flag.
            if not (data is None and key in titles):
                yield key, data
        # Spaces in keys are unusual in YAML; underscores do as well.
        elif key in titles or key.replace("_", " ") in titles:
            yield from ((str(name), inner) for name, inner in data.items())
        else:
            raise CommandLineError(f"{path}: unknown group {key!r}{did_you_mean(key, titles)}")


def _aliases(table: FlagTable) -> dict[str, Flag]:
    """Flags by every name a file may use: as in the parsed arguments, of the field, or of the flag."""
    # Names in the arguments win over spellings; reversed, so that working flags win over others.
    aliases = {flag.dest: flag for flag in reversed(table.flags)}
    for flag in table.flags:
        # `disable_bias_linear: true` reads like a double negation: such flags go by their name in the arguments.
        words = [] if flag.constant is False else [word.strip("-").replace("-", "_") for word in flag.flags]
        field_names = [flag.field.rpartition(".")[2]] if flag.field else []
        for name in (*words, *field_names):
            aliases.setdefault(name, flag)
    return aliases


def _flag_of_key(name: str, table: FlagTable, *, aliases: dict[str, Flag], path: str) -> Flag:
    if name in NOT_IN_FILES:
        raise CommandLineError(f"{path}: {name} belongs on the command line")
    flag = aliases.get(name)
    if flag is None:
        for other in table.flags:
            if other.constant is False and f"--{name.replace('_', '-')}" in other.flags:
                raise CommandLineError(f"{path}: {name}: write {other.dest}: false")
        usable = [key for key, known in aliases.items() if known.state is not FlagState.REFUSED]
        raise CommandLineError(f"{path}: unknown key {name}{did_you_mean(name, usable)}")
    if flag.state is FlagState.REFUSED:
        raise CommandLineError(f"{path}: {name}: {refusal(flag)}")
    return flag


def _value(flag: Flag, data: Any, *, path: str, table: FlagTable) -> Any:
    try:
        return value_of_yaml(flag, data)
    except ValueError as error:
        raise CommandLineError(f"{path}: {flag.dest}: {error}") from None


def config_text(args: argparse.Namespace, *, table: FlagTable, script_dests: Set[str]) -> str:
    """The arguments as YAML that `--config` reads back to the same arguments."""
    groups: dict[str, dict[str, Any]] = {}
    for flag in shown_flags(args, table):
        if flag.dest not in script_dests:
            groups.setdefault(flag.group, {})[flag.dest] = yaml_of_value(vars(args)[flag.dest])
    flat = {dest: yaml_of_value(vars(args)[dest]) for dest in sorted(script_dests)}
    return yaml.dump({**flat, **groups}, Dumper=_InlineListDumper, sort_keys=False, width=110)


def shown_flags(args: argparse.Namespace, table: FlagTable) -> list[Flag]:
    """The flags that make up a configuration: those that work, and others that somebody set."""
    flags = [flag for flag in table.flags if flag.state is not FlagState.REFUSED and flag.dest not in NOT_IN_FILES]
    # Others would fill the page with what nobody set.
    return [flag for flag in flags if flag.state is FlagState.WORKS or vars(args)[flag.dest] != flag.default]
