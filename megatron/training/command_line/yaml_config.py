"""Reads configuration files of `--config file.yaml`, and writes the output of `--print-config`.

Keys are the names of flags in the parsed arguments, either at the top level or below the group titles of --help. Files
contain names, lists, numbers and words. Other YAML features are rejected, and the size of files is limited.
"""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import Flag, FlagState, FlagTable, flag_table, refusal, yaml_of_value
from megatron.training.command_line.parser import did_you_mean

# Limits for configuration files. A few lines of YAML references can expand to more values than fit in memory.
_MAX_CHARACTERS = 1 << 20
_MAX_VALUES = 100_000
_MAX_DEPTH = 20
_PREFIX = "tag:yaml.org,2002:"
_COLLECTIONS = {f"{_PREFIX}map", f"{_PREFIX}seq"}
_SCALARS = {f"{_PREFIX}{name}" for name in ("str", "int", "float", "bool", "null")}
_MERGE = f"{_PREFIX}merge"


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that limits nesting, and rejects duplicate keys, of which YAML would silently use the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth == _MAX_DEPTH:
            raise _error(f"it is nested deeper than {_MAX_DEPTH} levels", self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Checked before the base class merges equal keys.
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _error(f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def check(self, node: yaml.Node, sizes: dict[yaml.Node, int | None]) -> int:
        """Checks a node and returns the number of values that it expands to.

        sizes: results for nodes visited so far; None for a node that is being visited.
        """
        if node in sizes:
            size = sizes[node]
            if size is None:
                raise _error("it refers to itself", node.start_mark)
            return size
        sizes[node] = None
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        elif node.tag not in _COLLECTIONS:
            raise _error(f"{node.tag} is not available: must be lists and names with values", node.start_mark)
        total = 1 + sum(self.check(inner, sizes) for inner in _inside(node))
        if total > _MAX_VALUES:
            raise _error(f"it expands to more than {_MAX_VALUES} values", node.start_mark)
        sizes[node] = total
        return total

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        if node.tag == _MERGE:
            return
        if node.tag not in _SCALARS:
            kind = node.tag.removeprefix(_PREFIX)
            raise _error(f"YAML reads {node.value!r:.60} as a {kind}: put it in quotes", node.start_mark)
        # For scalars with an explicit type tag.
        if node.tag not in (self.resolve(yaml.ScalarNode, node.value, (True, False)), f"{_PREFIX}str"):
            raise _error(f"{node.value!r:.60} is not a valid {node.tag.removeprefix(_PREFIX)}", node.start_mark)


def plain_values(text: str) -> Any:
    """Parses a YAML text into plain values. Raises ValueError with the problem and its position."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters: must be at most {_MAX_CHARACTERS}")
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        loader.check(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error("a list or mapping cannot be the name of a value", key.start_mark)
    return [part for pair in node.value for part in pair]


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, problem, mark)


# Flags that are not part of a configuration, because they control how it is used.
NOT_IN_FILES = ("config", "print_config", "list_models", "dry_run", "world_size")


class _InlineListDumper(yaml.SafeDumper):
    """SafeDumper that writes one line per flag, lists included."""


_InlineListDumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def read_config_file(path: str, *, table: FlagTable, script_dests: Set[str]) -> dict[str, Any]:
    """Reads a configuration file and returns its values by argument name.

    script_dests: names of arguments that a script added to the parser. Raises CommandLineError for an unreadable file,
    and with a line for each unknown or rejected key and each value of the wrong type.
    """
    aliases = _aliases(table)
    values: dict[str, Any] = {}
    problems = []
    for key, data in _flatten(_load(path), path=path, table=table):
        # Keys may be copied from flags, with dashes.
        name = key.replace("-", "_")
        try:
            # argparse converts a string default to the type that the script requested.
            if name in script_dests:
                dest, value = name, data
            else:
                flag = _flag_of_key(name, table, aliases=aliases, path=path)
                dest, value = flag.dest, flag.value_of_yaml(data)
        except CommandLineError as error:
            problems.append(str(error))
            continue
        except ValueError as error:
            problems.append(f"{path}: {flag.dest}: {error}")
            continue
        # The value is given both at the top level and below a title, or under two names.
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
    # Includes the groups of unsupported flags, whose keys have a better message than "unknown group".
    titles = {flag.group for flag in table.flags}
    for key, data in content.items():
        if not isinstance(key, str):
            raise CommandLineError(f"{path}: {key!r} is not the name of a flag")
        if not isinstance(data, dict):
            # A title without keys, as in a file whose lines are commented out, is not a flag.
            if not (data is None and key in titles):
                yield key, data
        # Titles may be written with underscores instead of spaces.
        elif key in titles or key.replace("_", " ") in titles:
            yield from ((str(name), inner) for name, inner in data.items())
        else:
            raise CommandLineError(f"{path}: unknown group {key!r}{did_you_mean(key, titles)}")


def _aliases(table: FlagTable) -> dict[str, Flag]:
    """Returns flags by every name that a file may use: names of arguments, fields and flags."""
    # Names of arguments take precedence over spellings, and working flags over others, hence reversed.
    aliases = {flag.dest: flag for flag in reversed(table.flags)}
    for flag in table.flags:
        # Flags that disable a feature use the argument's name, because `disable_bias_linear: true` would be confusing.
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
        raise CommandLineError(f"{path}: {name}: not supported; {refusal(flag)}")
    return flag


def config_text(values: Mapping[str, Any], *, table: FlagTable, script_dests: Set[str]) -> str:
    """Formats the arguments as a YAML file from which `--config` restores the same arguments."""
    groups: dict[str, dict[str, Any]] = {}
    for flag in shown_flags(values, table):
        if flag.dest not in script_dests:
            groups.setdefault(flag.group, {})[flag.dest] = yaml_of_value(values[flag.dest])
    flat = {dest: yaml_of_value(values[dest]) for dest in sorted(script_dests)}
    return yaml.dump({**flat, **groups}, Dumper=_InlineListDumper, sort_keys=False, width=110)


def shown_flags(values: Mapping[str, Any], table: FlagTable) -> list[Flag]:
    """Returns the flags of which a configuration consists: working flags, and others with non-default values."""
    flags = [flag for flag in table.flags if flag.state is not FlagState.REFUSED and flag.dest not in NOT_IN_FILES]
    return [flag for flag in flags if flag.state is FlagState.WORKS or values[flag.dest] != flag.default]


# Arguments that hold the progress of a run or the rank of a process are not settings.
_NOT_SETTINGS = ("rank", "local_rank", "iteration", "consumed_train_samples", "consumed_valid_samples")


def config_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run as JSON values, by argument name: settings of --print-config and of scripts."""
    table = flag_table()
    known = {flag.dest: yaml_of_value(values[flag.dest]) for flag in shown_flags(values, table)}
    # Arguments that a script added, and derived ones such as the padded vocabulary.
    silent = {*table.by_dest, *_NOT_SETTINGS}
    plain = (bool, int, float, str, type(None))
    others = {name: value for name, value in values.items() if name not in silent and isinstance(value, plain)}
    return {**known, **others}
