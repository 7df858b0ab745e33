"""Extracts the command that a launch script runs, without running the script: bash, or a model_config.yaml.

Bash is parsed by tree-sitter. This module evaluates the subset that launch scripts use: variables, arrays, expansions
with defaults, arithmetic, `if`, `case`, `for`, functions, `eval` and `bash -c`. Nothing is executed. Variables set
outside the script are therefore unknown unless the caller gives their values, and so is the output of commands.

[Note: words and strings] A node is converted to a text by _string, or to the words of an argument by _words. Both are
needed because an unquoted expansion or an array may yield no word or several words.

- _words: a list. Arrays (_array, in quotes _quoted_array) yield their elements; other unquoted expansions are split at
blanks after _string; everything else is one word.
- _string: one text, by kind of node. Quotes and concatenations join their parts (_joined). ${...} is a variable's value
(_expanded_text), changed by the operator after the name (_apply_operator), whose default may contain expansions
(_default_text). The elements of an array are joined by blanks.
- A variable without a value remains ${NAME} in both. In conditions, _known makes it empty.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

# Limits that stop a recursive function or a loop over a long list.
_MOST_COMMANDS = 10_000
_MOST_CALLS = 50


# Variables that a cluster sets differently on each node or for each job.
_OF_EACH_NODE = frozenset(
    "RANK NODE_RANK LOCAL_RANK MASTER_ADDR MASTER_PORT SLURM_NODEID SLURM_PROCID OMPI_COMM_WORLD_RANK".split()
)


class ScriptError(ValueError):
    """Raised for a script that cannot be read or that contains no training command."""


@dataclass(frozen=True)
class Launch:
    """A training command of a script.

    launcher: words before the program, such as torchrun's. program: the training script; "" if a file contains only
    flags. words: the program's flags. environment: variables that the script exports. unknown: names of variables
    without a value that are part of the command and appear in words as ${NAME}. line: line number, starting at 1.
    doubts: constructs before the command that could not be followed and may have changed it, each with its line.
    """

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    line: int = 1
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Script:
    """The training commands of a launch script.

    launches: training commands in order of execution. notes: constructs that could not be followed, with their lines.
    """

    launches: tuple[Launch, ...]
    notes: tuple[str, ...]


def read_script(text: str, values: Mapping[str, str], *, name: str) -> Script:
    """Reads a bash script or, if `name` ends in .yaml or .yml, a model_config.yaml.

    values: variables set outside the script; positional parameters are named 1, 2 ... Raises ScriptError for a text
    that is neither, and if no training command is found.
    """
    if name.endswith((".yaml", ".yml")):
        return _read_model_config(text, values, name=name)
    reader = _BashReader(values)
    try:
        reader.run_text(text)
    except _ScriptEnds as end:
        if not reader.launches:
            raise ScriptError(f"{name}: {end}, before any training command; is a --set NAME=VALUE missing?") from None
    if not reader.launches:
        raise ScriptError(
            f"{name}: no command runs a Python program with flags (torchrun ... pretrain_gpt.py --num-layers ...); "
            "if the command depends on a variable, give it with --set NAME=VALUE"
        )
    return Script(tuple(reader.launches), tuple(dict.fromkeys(reader.notes)))


# The key under which Megatron-LM's functional tests store a run's flags.
_MODEL_KEY = "MODEL_ARGS"
_EXPANSION = re.compile(r"\$\{?(\w+)\}?")


def _read_model_config(text: str, values: Mapping[str, str], *, name: str) -> Script:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScriptError(f"{name}: {error}") from None
    if not isinstance(content, dict):
        raise ScriptError(f"{name}: must be a mapping with MODEL_ARGS, or of flags to values")
    flags = content.get(_MODEL_KEY)
    if flags is None:
        flags = {key: value for key, value in content.items() if str(key).startswith("--")}
    if not isinstance(flags, dict) or not flags:
        raise ScriptError(f"{name}: MODEL_ARGS must be a mapping of flags to values, such as --num-layers: 12")
    environment = {key: str(value) for key, value in (content.get("ENV_VARS") or {}).items()}
    known = {**environment, **values}
    unknown: dict[str, None] = {}

    def expand(word: str) -> str:
        def replace(match: re.Match[str]) -> str:
            if match[1] not in known:
                unknown[match[1]] = None
            return known.get(match[1], f"${{{match[1]}}}")

        return _EXPANSION.sub(replace, word)

    words = [expand(word) for flag, value in flags.items() for word in _words_of_setting(str(flag), value)]
    return Script((Launch((), "", tuple(words), environment, tuple(unknown)),), ())


def _words_of_setting(flag: str, value: Any) -> list[str]:
    if value is True or value is None:
        return [flag]
    if value is False:
        return []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    # Several values of a list are stored in one string. Patterns such as ([0]*1+[1]*15) have no spaces.
    return [flag, *shlex.split(text)] if isinstance(value, str) and not text.startswith("(") else [flag, text]


# End of a note about a condition that cannot be evaluated here.
_GUESS = "is assumed to be false"


class _ScriptEnds(Exception):
    """Raised when the script or the subshell calls exit."""


class _FunctionEnds(Exception):
    """Raised when a function calls return."""


class _LoopEnds(Exception):
    """Raised when a loop's body calls break or continue. goes_on: whether the loop continues."""

    def __init__(self, *, goes_on: bool) -> None:
        super().__init__()
        self.goes_on = goes_on


@cache
def _bash_parser() -> Parser:
    """Creates the parser. Raises ScriptError if its packages, which belong to an extra, are not installed."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        raise ScriptError(
            "bash requires the packages tree-sitter and tree-sitter-bash: pip install 'megatron-stash[translate]'"
        ) from error
    return Parser(Language(tree_sitter_bash.language()))


class _BashReader:
    """Evaluates a script's commands and collects the training commands."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.variables: dict[str, str | list[str]] = dict(values)
        self.given = dict(values)  # the caller's values take precedence over the script's own assignments
        self.environment: dict[str, str] = {}
        self.functions: dict[str, Node] = {}
        self.launches: list[Launch] = []
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.commands = 0
        self.depth = 0
        self.first_line = 1

    def run_text(self, text: str) -> None:
        source = text.encode()
        self.run_children(_bash_parser().parse(source).root_node)

    def run_children(self, node: Node) -> None:
        for child in node.named_children:
            self.run(child)

    def run(self, node: Node) -> None:
        self.commands += 1
        if self.commands > _MOST_COMMANDS:
            raise ScriptError(f"line {self._line(node)}: more than {_MOST_COMMANDS:,} commands; is it a loop?")
        runner = self._RUNNERS.get(node.type)
        if runner is not None:
            runner(self, node)
        elif node.type in ("while_statement", "c_style_for_statement"):
            self._doubt(node, "loops with a condition are not followed")
        elif node.type == "ERROR":
            self._doubt(node, f"cannot interpret {_text(node)[:60]!r}")

    def _line(self, node: Node) -> int:
        return node.start_point[0] + self.first_line

    def _note(self, node: Node, text: str) -> None:
        self.notes.append(f"line {self._line(node)}: {text}")

    def _doubt(self, node: Node, text: str) -> None:
        """Records a construct that may change a later command."""
        self._note(node, text)
        self.doubts.append(self.notes[-1])

    # Section: statements.

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target is not None
        if target.type == "subscript":
            self._assign_element(node, target, value)
            return
        name = _text(target)
        if name in self.given:
            return
        new: str | list[str]
        if value is None:
            new = ""
        elif value.type == "array":
            new = [word for child in value.named_children if child.type != "comment" for word in self._words(child)]
        else:
            new = self._string(value)
        old = self.variables.get(name)
        if any(child.type == "+=" for child in node.children) and old is not None:
            if isinstance(old, list):
                new = [*old, *(new if isinstance(new, list) else [new])]
            else:
                new = old + (new if isinstance(new, str) else " ".join(new))
        self.variables[name] = new

    def _assign_element(self, node: Node, target: Node, value: Node | None) -> None:
        array, index = target.child_by_field_name("name"), target.child_by_field_name("index")
        assert array is not None and index is not None
        held, place = self.variables.get(_text(array), []), _known(self._string(index))
        if not isinstance(held, list) or not place.isdigit() or int(place) > len(held) or "+=" in _text(node):
            self._doubt(node, f"{_text(node)[:60]} is not followed")
            return
        new = "" if value is None else self._string(value)
        self.variables[_text(array)] = [*held[: int(place)], new, *held[int(place) + 1 :]]

    def _declare(self, node: Node) -> None:
        exported = node.children[0].type == "export"
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
                target = child.child_by_field_name("name")
                assert target is not None
                value = self.variables.get(_text(target), self.given.get(_text(target), ""))
                if exported and isinstance(value, str):
                    self.environment[_text(target)] = value
            elif child.type == "variable_name" and exported and isinstance(self.variables.get(_text(child)), str):
                self.environment[_text(child)] = str(self.variables[_text(child)])

    def _if(self, node: Node) -> None:
        notes = len(self.notes)
        self._follow_if(node)
        if len(self.notes) > notes and _changes_commands(node):
            self.doubts += [note for note in self.notes[notes:] if _GUESS in note and note not in self.doubts]

    def _follow_if(self, node: Node) -> None:
        condition, body = _parts_of_if(node)
        if self._holds(condition):
            for statement in body:
                if statement.type not in ("elif_clause", "else_clause"):
                    self.run(statement)
            return
        for clause in body:
            if clause.type == "else_clause":
                self.run_children(clause)
            elif clause.type == "elif_clause":
                condition, statements = _parts_of_if(clause)
                if self._holds(condition):
                    for statement in statements:
                        self.run(statement)
                    return

    def _holds(self, condition: Sequence[Node]) -> bool:
        # The last of several commands determines the result.
        return bool(condition) and self._is_true(condition[-1])

    def _case(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = "" if subject is None else _known(self._string(subject))
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if any(fnmatchcase(value, self._string(pattern)) for pattern in patterns):
                for statement in item.named_children[len(patterns) :]:
                    self.run(statement)
                return

    def _for(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert variable is not None and body is not None
        for word in [word for item in node.children_by_field_name("value") for word in self._words(item)]:
            self.variables[_text(variable)] = word
            try:
                self.run_children(body)
            except _LoopEnds as end:
                if not end.goes_on:
                    return

    def _define(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        assert name is not None and body is not None
        self.functions[_text(name)] = body

    def _list(self, node: Node) -> None:
        # Only tests are evaluated. Every other command is assumed to succeed.
        left, right = node.named_children[0], node.named_children[-1]
        if left.type == "test_command":
            notes = len(self.notes)
            succeeded = self._is_true(left)
            if _changes_commands(right):
                self.doubts += self.notes[notes:]
        else:
            self.run(left)
            succeeded = True
        is_and = any(child.type == "&&" for child in node.children)
        runs_right = succeeded if is_and else not succeeded
        if runs_right:
            self.run(right)

    def _command(self, node: Node) -> None:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
            elif child.type == "command_name":
                words += self._words(child.named_children[0])
            elif not child.type.endswith("redirect"):
                words += self._words(child)
        if not words:
            return
        if words[0] == "eval" or (os.path.basename(words[0]) in ("bash", "sh") and "-c" in words[1:2]):
            self._run_string(node, " ".join(words[1:]) if words[0] == "eval" else words[2] if len(words) > 2 else "")
        elif words[0] in self.functions:
            self._call(words[0], words[1:])
        elif words[0] == "set" and "--" in words:
            self._set_positional(words[words.index("--") + 1 :])
        elif words[0] == "shift":
            self._shift(node, words[1:])
        elif words[0] == "exit":
            raise _ScriptEnds(f"line {self._line(node)}: the script ends with exit")
        elif words[0] == "return":
            raise _FunctionEnds
        elif words[0] in ("break", "continue"):
            raise _LoopEnds(goes_on=words[0] == "continue")
        elif words[0] in ("let", "read", "readarray", "mapfile", "getopts", "source", "."):
            self._doubt(node, f"{words[0]} is not followed")
        else:
            self._look_for_launch(node, words)

    def _run_string(self, node: Node, text: str) -> None:
        outer, self.first_line = self.first_line, self._line(node)
        self.run_text(text)
        self.first_line = outer

    def _call(self, name: str, arguments: Sequence[str]) -> None:
        self.depth += 1
        if self.depth > _MOST_CALLS:
            raise ScriptError(f"functions are nested more than {_MOST_CALLS} levels deep, the last one is {name}")
        outer = {key: self.variables[key] for key in self._positional_keys()}
        self._set_positional(arguments)
        try:
            self.run_children(self.functions[name])
        except _FunctionEnds:
            pass
        self._set_positional(())
        self.variables.update(outer)  # by key, because the caller may give $2 without $1
        self.depth -= 1

    def _shift(self, node: Node, words: Sequence[str]) -> None:
        count = words[0] if words else "1"
        if not _is_integer(count) or int(count) < 0:
            self._doubt(node, f"shift {count} is ignored, because {count} is not a number")
            return
        arguments = self._positional()
        if int(count) <= len(arguments):  # bash shifts all or none
            self._set_positional(arguments[int(count) :])

    def _positional_keys(self) -> list[str]:
        """Returns the names of the positional parameters in order, except $0, the script's name."""
        return sorted((key for key in self.variables if key.isdigit() and key != "0"), key=int)

    def _positional(self) -> list[str]:
        return [str(self.variables[key]) for key in self._positional_keys()]

    def _set_positional(self, arguments: Sequence[str]) -> None:
        for key in self._positional_keys():
            del self.variables[key]
        self.variables.update({str(index): word for index, word in enumerate(arguments, start=1)})

    def _look_for_launch(self, node: Node, words: Sequence[str]) -> None:
        # A scheduler receives the whole command as one word: srun ... "python pretrain_gpt.py --num-layers 12".
        for word in words[1:]:
            if ".py " in word and " --" in word:
                self._run_string(node, word)
                return
        program = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if program is None or not any(word.startswith("--") for word in words[program + 1 :]):
            return
        text = " ".join(words)
        unknown = tuple(dict.fromkeys(re.findall(r"\$\{(\w+)\}", text)))
        launch = Launch(
            tuple(words[:program]),
            words[program],
            tuple(words[program + 1 :]),
            dict(self.environment),
            unknown,
            self._line(node),
            tuple(dict.fromkeys(self.doubts)),
        )
        self.launches.append(launch)

    def _run_first_part(self, node: Node) -> None:
        self.run(node.named_children[0])

    def _run_subshell(self, node: Node) -> None:
        outer = dict(self.variables), dict(self.environment), dict(self.functions)
        try:
            self.run_children(node)
        except _ScriptEnds:
            pass
        self.variables, self.environment, self.functions = outer

    def _unset(self, node: Node) -> None:
        for child in node.named_children:
            self.variables.pop(_text(child), None)

    def _run_compound(self, node: Node) -> None:
        if _text(node).startswith("(("):
            self._doubt(node, f"{_text(node)[:60]} is not followed")
        else:
            self.run_children(node)

    _RUNNERS: Final[dict[str, Callable[[_BashReader, Node], None]]] = {
        "variable_assignment": _assign,
        "variable_assignments": run_children,
        "declaration_command": _declare,
        "if_statement": _if,
        "case_statement": _case,
        "for_statement": _for,
        "function_definition": _define,
        "list": _list,
        "command": _command,
        "redirected_statement": _run_first_part,
        "pipeline": _run_first_part,
        "subshell": _run_subshell,
        "unset_command": _unset,
        "compound_statement": _run_compound,
        "do_group": run_children,
    }

    # Section: words. See [Note: words and strings].

    def _words(self, node: Node) -> list[str]:
        """Returns the words of one argument. An unquoted expansion may yield none or several."""
        if node.type == "string":
            array = self._quoted_array(node)
            return [self._string(node)] if array is None else array
        if node.type in ("simple_expansion", "expansion"):
            value = self._array(node)
            if value is not None:
                return [part for word in value for part in word.split()]
            text = self._string(node)
            return [text] if "$(" in text else text.split()  # the output of a command is unknown: one word
        if node.type == "concatenation":
            text = self._string(node)
            splits = "$(" not in text and any(
                child.type in ("simple_expansion", "expansion") for child in node.named_children
            )
            return text.split() if splits else [text]
        return [self._string(node)]

    def _quoted_array(self, node: Node) -> list[str] | None:
        parts = node.named_children
        if len(parts) != 1 or _text(node) != f'"{_text(parts[0])}"':
            return None
        return self._array(parts[0])

    def _array(self, node: Node) -> list[str] | None:
        """Returns the elements of `${NAME[@]}`, `$@` or `$*`, or None for other expansions."""
        text = _text(node).lstrip()
        if text in ("$@", "$*", "${@}", "${*}"):
            return self._positional()
        match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", text)
        if match is None:
            return None
        value = self.variables.get(match[1], [])
        return value if isinstance(value, list) else [value]

    def _string(self, node: Node) -> str:
        kind = node.type
        if kind in ("simple_expansion", "expansion"):
            # Inside quotes, the parser counts blanks before an expansion as part of it.
            text = _text(node)
            return text[: len(text) - len(text.lstrip())] + self._expanded_text(node)
        if kind == "raw_string":
            return _text(node)[1:-1]
        if kind == "arithmetic_expansion":
            return self._arithmetic(node)
        if kind == "command_substitution":
            return _text(node)
        if kind in ("string", "concatenation", "translated_string"):
            return self._joined(node)
        text = _text(node)
        # Outside quotes, a backslash escapes the next character, and before a line break it joins lines.
        return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""), flags=re.DOTALL)

    def _joined(self, node: Node) -> str:
        start, end = node.start_byte, node.end_byte
        quoted = node.type == "string"
        if quoted:
            start, end = start + 1, end - 1
        source = node.text or b""
        text, position = "", start
        for child in node.named_children:
            if child.type == "string_content":
                continue
            text += _unescaped(source[position - node.start_byte : child.start_byte - node.start_byte], quoted=quoted)
            text += self._string(child)
            position = child.end_byte
        return text + _unescaped(source[position - node.start_byte : end - node.start_byte], quoted=quoted)

    def _expanded_text(self, node: Node) -> str:
        text = _text(node).lstrip()
        array = self._array(node)
        if array is not None:
            return " ".join(array)
        match = re.fullmatch(r"\$\{?(#?)(\w+)(?:\[(\d+)\])?(.*?)\}?", text, flags=re.DOTALL)
        if match is None:
            return text
        counts, name, index, change = match[1], match[2], match[3], match[4]
        value = self.variables.get(name)
        if counts:
            return str(len(value or ""))
        if isinstance(value, list):
            place = int(index or 0)
            value = value[place] if place < len(value) else None
        return self._apply_operator(name, value, change, node)

    def _apply_operator(self, name: str, value: str | None, change: str, node: Node) -> str:
        """Applies the operator after a name in ${...}: a default value, or a prefix, suffix or text to replace."""
        for mark, empty_counts in ((":-", True), (":=", True), ("-", False), ("=", False)):
            if change.startswith(mark):
                if value is None or (empty_counts and not value):
                    value = self._default_text(node, change[len(mark) :])
                    if name in _OF_EACH_NODE:
                        self._note(node, f"{name} is not set, so its default {value} is used: set it on each node")
                    if mark.endswith("="):
                        self.variables[name] = value
                return value
        if change.startswith((":+", "+")):
            return self._default_text(node, change.lstrip(":").removeprefix("+")) if value else ""
        if value is None:
            return f"${{{name}}}"
        for mark, cut in _CUTS.items():
            if change.startswith(mark):
                return cut(value, change[len(mark) :])
        if change.startswith("/"):
            old, separator, new = change[1:].removeprefix("/").partition("/")
            if not set(old) & set("*?[#%$\\") and "$" not in new and "/" not in new and (separator or not new) and old:
                return value.replace(old, new, -1 if change.startswith("//") else 1)
        if change and not change.startswith((":?", "?")):
            self._doubt(node, f"{_text(node)} is assumed to be ${{{name}}}")
        return value

    def _default_text(self, node: Node, text: str) -> str:
        parts = [child for child in node.named_children[1:] if child.type != "variable_name"]
        return "".join(self._string(part) for part in parts) if parts else text

    def _arithmetic(self, node: Node) -> str:
        text = _text(node)[3:-2]
        for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)):
            value = self.variables.get(name)
            if not isinstance(value, str):
                return _text(node)
            text = re.sub(rf"\$?\{{?\b{name}\b\}}?", value, text)
        try:
            return str(_integer(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return _text(node)

    # Section: tests.

    def _is_true(self, node: Node) -> bool:
        kind = node.type
        if kind in ("test_command", "parenthesized_expression"):
            return all(self._is_true(child) for child in node.named_children)
        if kind == "negated_command":
            return not self._is_true(node.named_children[0])
        if kind == "unary_expression":
            return self._unary(node)
        if kind == "binary_expression":
            return self._binary(node)
        if kind == "list":
            left, right = node.named_children[0], node.named_children[-1]
            if any(child.type == "&&" for child in node.children):
                return self._is_true(left) and self._is_true(right)
            return self._is_true(left) or self._is_true(right)
        if kind == "command":
            self._note(node, f"the condition {_text(node)!r} {_GUESS}")
            return False
        return bool(_known(self._string(node)))

    def _unary(self, node: Node) -> bool:
        operand = node.named_children[-1]
        sign = _text(node.children[0])
        if sign == "!":
            return not self._is_true(operand)
        value = _known(self._string(operand))
        if sign in ("-z", "-n"):
            return bool(value) == (sign == "-n")
        if sign == "-v":
            return _text(operand) in self.variables
        self._note(node, f"the condition {_text(node)!r} {_GUESS}")
        return False

    def _binary(self, node: Node) -> bool:
        left, right = node.named_children[0], node.named_children[-1]
        sign = _text(node.children[1])
        if sign in ("&&", "-a"):
            return self._is_true(left) and self._is_true(right)
        if sign in ("||", "-o"):
            return self._is_true(left) or self._is_true(right)
        one, other = _known(self._string(left)), _known(self._string(right))
        if sign in ("=", "=="):
            return fnmatchcase(one, other)
        if sign == "!=":
            return not fnmatchcase(one, other)
        if sign == "=~":
            return re.search(other, one) is not None
        compare = _COMPARISONS.get(sign)
        if compare is None or not (_is_integer(one) and _is_integer(other)):
            self._note(node, f"the condition {_text(node)!r} {_GUESS}")
            return False
        return compare(int(one), int(other))


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _changes_commands(node: Node) -> bool:
    """Returns whether a statement assigns a variable, ends the script, or runs or defines something that may do so."""
    if node.type in ("variable_assignment", "function_definition", "declaration_command"):
        return True
    if node.type == "command_name" and _text(node) not in _HARMLESS_COMMANDS:
        return True
    return any(_changes_commands(child) for child in node.named_children)


def _parts_of_if(node: Node) -> tuple[list[Node], list[Node]]:
    """Returns the commands before `then`, and the commands and elif/else clauses after it."""
    then = next(index for index, child in enumerate(node.children) if child.type == "then")
    before, after = node.children[:then], node.children[then:]
    return [child for child in before if child.is_named], [child for child in after if child.is_named]


def _known(text: str) -> str:
    """Removes variables without a value from a condition, as bash does."""
    return re.sub(r"\$\{\w+\}", "", text)


def _unescaped(source: bytes, *, quoted: bool) -> str:
    text = source.decode().replace("\\\n", "")
    return re.sub(r'\\([$`"\\])', r"\1", text) if quoted else re.sub(r"\\(.)", r"\1", text)


def _cut_prefix(value: str, pattern: str, *, choose: Callable[[list[int]], int]) -> str:
    ends = [end for end in range(len(value) + 1) if fnmatchcase(value[:end], pattern)]
    return value[choose(ends) :] if ends else value


def _cut_suffix(value: str, pattern: str, *, choose: Callable[[list[int]], int]) -> str:
    starts = [start for start in range(len(value) + 1) if fnmatchcase(value[start:], pattern)]
    return value[: choose(starts)] if starts else value


# A doubled operator removes the longest match: the prefix that ends last, the suffix that starts first.
_CUTS: Final[dict[str, Callable[[str, str], str]]] = {
    "##": partial(_cut_prefix, choose=max),
    "#": partial(_cut_prefix, choose=min),
    "%%": partial(_cut_suffix, choose=min),
    "%": partial(_cut_suffix, choose=max),
}
# Commands in a conditional branch that do not affect later commands.
_HARMLESS_COMMANDS = frozenset(
    ("mkdir", "echo", "printf", "rm", "cp", "ln", "touch", "chmod", "wget", "curl", "cat", "ls", "test", "[")
)
_COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_OPERATORS: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"-?\d+", text) is not None


def _integer(tree: ast.expr) -> int:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_integer(tree.left), _integer(tree.right))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_integer(tree.operand)
    raise ValueError("not an integer expression")
