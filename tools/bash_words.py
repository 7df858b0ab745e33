"""Expands the words of a bash script to values, as far as they follow from the script, without running anything.

[Note: captures] An expansion that depends on the outside, such as $(date) or $((RANDOM % 100)), becomes an unknown part
with a name (bash_values.py). Its capture is the source text that yields it, so that a translated command can set a
variable first and use it. Variables of the script that the text mentions are set inside it. Variables that nobody sets
come from the environment and are their own capture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.tools.bash_syntax import (
    BashSyntaxError,
    Commands,
    Redirected,
    Simple,
    Word,
    end_of_double_quotes,
    end_of_expansion,
    parse_script,
)
from megatron.tools.bash_values import (
    UNKNOWN_PART,
    Calculator,
    UnknownPartError,
    Value,
    as_element,
    brace_words,
    counted,
    cut,
    has_marks,
    joined,
    known,
    names_of_unknown,
    quoted_segments,
    quoted_value,
    regex_of_pattern,
    replaced,
    unknown_part,
)

# Variables that a cluster sets differently on each node or for each job.
OF_EACH_NODE = frozenset(
    "RANK NODE_RANK LOCAL_RANK MASTER_ADDR MASTER_PORT SLURM_NODEID SLURM_PROCID OMPI_COMM_WORLD_RANK".split()
)
# Variables that differ whenever they are read, or between two processes.
_CHANGING = frozenset(("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "$", "PPID"))
# Variables that describe the running script, which a translation replaces.
_OF_THE_SCRIPT = frozenset("0 BASH_SOURCE LINENO FUNCNAME ? ! - _ PIPESTATUS BASH_REMATCH OLDPWD REPLY OPTARG".split())
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(
    r"(?P<mark>[#!]?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!_-])(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\033", "E": "\033", "f": "\f", "v": "\v"}


class WrittenFileError(UnknownPartError):
    """Raised for an expansion that reads a file which the script writes."""


@dataclass(frozen=True)
class Capture:
    """An unknown part. source: text that yields it, or None if it cannot be translated. uses: parts in the source.

    level: number of wrappers, such as `srun bash -c`, around the place. doubts: reasons, each with its line. reads:
    other words of the source, which may be variables of the environment.
    """

    name: str
    source: str | None
    uses: tuple[str, ...]
    level: int
    doubts: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an expanded word. is_expanded: whether it is split at blanks. ends: begins a new word."""

    text: str
    is_quoted: bool
    is_expanded: bool = False
    ends: bool = False


Segments = list[tuple[str, bool]]


@dataclass
class Shell:
    """The state of a shell: variables, positional parameters, functions and captures.

    given: the caller's values, which take precedence over the script's own assignments. arguments: positional
    parameters by number; none are known unless has_arguments. unreadable: variables whose values are not followed, with
    the reason and its line. hidden: variables that a parent shell has not exported.
    assumed: variables that nobody sets and that a condition or default takes as unset. files: texts of the files that
    the script writes, by path; None if a text is not known.
    """

    given: Mapping[str, str]
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    arguments: dict[int, str] = field(default_factory=dict)
    has_arguments: bool = False
    hidden: frozenset[str] = frozenset()
    functions: dict[str, object] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    captures: dict[str, Capture] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    assumed: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    level: int = 0

    def look_up(self, name: str) -> Value | None:
        """Returns a variable's value, or None if nobody has set it. Raises UnknownPartError if it is unreadable."""
        if name in self.unreadable:
            raise UnknownPartError(self.unreadable[name])
        if name.isdigit() and name != "0":
            counted(list(self.arguments.values()))
            value: Value | None = self.arguments.get(int(name))
            return "" if value is None and self.has_arguments else value
        if name in self.hidden and name not in self.variables:
            return ""
        return self.variables.get(name)

    def is_unset(self, name: str) -> bool:
        """Returns whether a variable is known to be unset, so that it does not come from the environment either."""
        if name.isdigit() and name != "0":
            return self.has_arguments and int(name) not in self.arguments
        return name in self.hidden and name not in self.variables

    def assign(self, name: str, value: Value) -> None:
        """Sets a variable, unless the caller has given it. A text becomes the first element of an array."""
        if name in self.given:
            return
        old = self.variables.get(name)
        if isinstance(old, dict) and isinstance(value, str):
            value = {**old, 0: value}
        self.variables[name] = value

    def text_of(self, name: str) -> str:
        """Returns a variable's text, of which the first element counts for an array."""
        value = self.look_up(name)
        if value is None:
            if name in _CHANGING:
                # Not the variable's own name, which bash changes at each use.
                return self.capture(f"{name}_VALUE" if name != "$" else "PID", f'"${{{name}}}"')
            if name in _OF_THE_SCRIPT:
                raise UnknownPartError(f"${name} is not known here")
            if name in self.captures:
                raise UnknownPartError(f"the value that {name} had before the script set it is not known")
            self.outside.add(name)
            return unknown_part(name)
        return "".join(counted([value.get(0, "")])) if isinstance(value, dict) else value

    def all_arguments(self) -> list[str]:
        """Returns $@."""
        if not self.has_arguments and not self.arguments:
            self.assumed["1"] = None
        return [self.arguments[number] for number in sorted(self.arguments)]

    def capture(
        self,
        name: str,
        source: str | None,
        uses: Iterable[str] = (),
        doubts: Iterable[str] = (),
        reads: Iterable[str] = (),
    ) -> str:
        """Registers an unknown part, and returns it as a value."""
        unique, number = name, 1
        while unique in self.captures or unique in self.outside or (number > 1 and unique in self.variables):
            number += 1
            unique = f"{name}_{number}"
        self.captures[unique] = Capture(unique, source, tuple(uses), self.level, tuple(doubts), tuple(reads))
        return unknown_part(unique)

    def is_empty(self, text: str) -> bool:
        """Returns whether a value is empty, if variables that nobody sets are unset. Raises UnknownPartError."""
        if UNKNOWN_PART.sub("", text):
            return False
        return self.without_outside(text) == ""

    def without_outside(self, text: str) -> str:
        """Returns a value in which variables that nobody sets are empty. Raises UnknownPartError for other parts."""
        names = names_of_unknown(text)
        if inner := [name for name in names if name in self.captures]:
            raise UnknownPartError(f"{', '.join(inner)} is not known")
        self.assumed.update(dict.fromkeys(names))
        return UNKNOWN_PART.sub("", text)


class Expander:
    """Expands words. hint: name for the next capture."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.hint = "OUTPUT"
        self.line = 1

    # Section: entry points.

    def fields(self, word: Word) -> list[Segments]:
        """Returns the arguments that a word yields, each as texts with whether they were in quotes."""
        result = []
        for text in brace_words(word.text, _end_of_part) if "{" in word.text else [word.text]:
            result += _split(self._pieces(text, word.line))
        return result

    def elements(self, words: Iterable[Word]) -> list[str]:
        """Returns the arguments that words yield, as elements of an array."""
        return [as_element(segments) for word in words for segments in self.fields(word)]

    def text(self, word: Word, *, hint: str | None = None) -> str:
        """Returns a value without splitting, as in an assignment."""
        outer = self.hint
        if hint is not None:
            # The capture of the whole value may have the variable's name, that of a part may not.
            begin = word.text[:1] == '"'
            inner = word.text[begin : len(word.text) - begin]
            is_whole = inner[:1] in "$`" and inner and end_of_expansion(inner, 0, is_quoted=begin) == len(inner)
            self.hint = hint if is_whole else f"{hint}_PART"
        try:
            return _joined(self._pieces(word.text, word.line))
        finally:
            self.hint = outer

    def here_document(self, body: str, line: int) -> str:
        """Returns the text of a here-document."""
        return _joined(self._pieces(body, line, is_quoted=True, is_document=True))

    def pattern(self, word: Word) -> str:
        """Returns the regular expression of a pattern."""
        pieces = self._pieces(word.text, word.line)
        return regex_of_pattern([(self.shell.without_outside(piece.text), piece.is_quoted) for piece in pieces])

    def number(self, text: str, line: int) -> int:
        """Evaluates arithmetic, whose own expansions come first."""
        expanded = _joined(self._pieces(text, line, is_quoted=True))
        return Calculator(self._number_of, self.shell.assign).value(expanded)

    def _number_of(self, name: str) -> str:
        text = self.shell.text_of(name)
        return known(text)

    # Section: words.

    def _pieces(self, text: str, line: int, *, is_quoted: bool = False, is_document: bool = False) -> list[Piece]:
        self.line = line
        pieces: list[Piece] = []
        at = 0
        if not is_quoted and text.startswith("~"):
            if not re.match(r"~(/|$)", text):
                raise UnknownPartError("~ with a name")
            pieces.append(Piece(self.shell.text_of("HOME"), is_quoted=True))
            at = 1
        while at < len(text):
            mark = text[at]
            if mark == "\\":
                following = text[at + 1 : at + 2]
                at += 2
                if following == "\n":
                    continue
                if is_quoted and following not in ("$`\\" if is_document else '$`"\\'):
                    pieces.append(Piece("\\" + following, is_quoted=True))
                else:
                    pieces.append(Piece(following or "\\", is_quoted=True))
            elif mark == "'" and not is_quoted:
                end = text.index("'", at + 1)
                pieces.append(Piece(text[at + 1 : end], is_quoted=True))
                at = end + 1
            elif mark == '"' and not is_document:
                end = end_of_double_quotes(text, at)
                inner = self._pieces(text[at + 1 : end - 1], line, is_quoted=True)
                # "" is an argument, but "$@" without arguments is none.
                is_array = re.fullmatch(r"\$\{?(@|\w+\[@\])[^}]*\}?", text[at + 1 : end - 1])
                pieces += inner or ([] if is_array else [Piece("", is_quoted=True)])
                at = end
            elif mark in "$`":
                end = end_of_expansion(text, at, is_quoted=is_quoted)
                pieces += self._expansion(text[at:end], line, is_quoted=is_quoted)
                at = end
            elif text.startswith(("<(", ">("), at) and not is_quoted:
                raise UnknownPartError("a process substitution")
            else:
                end = at + 1
                while end < len(text) and text[end] not in "\\'\"$`" and not has_marks(text[at : end + 1]):
                    end += 1
                if match := UNKNOWN_PART.match(text, at):
                    pieces.append(Piece(match[0], is_quoted, is_expanded=not is_quoted))
                    end = match.end()
                else:
                    pieces.append(Piece(text[at:end], is_quoted))
                at = end
        return pieces

    def _expansion(self, text: str, line: int, *, is_quoted: bool) -> list[Piece]:
        """Expands the text of one $ or backtick expansion."""
        if text == "$":
            return [Piece("$", is_quoted)]
        if text.startswith("$'"):
            return [Piece(_unescaped(text[2:-1]), is_quoted=True)]
        if text.startswith('$"'):
            return self._pieces(text[1:], line) or [Piece("", is_quoted=True)]
        if text.startswith(("$(", "`")) and not text.startswith("$(("):
            return [Piece(self._output(text, line), is_quoted, is_expanded=not is_quoted)]
        is_arithmetic = text.startswith("$((") and text.endswith("))")
        if is_arithmetic or text.startswith("$["):
            try:
                value = str(self.number(text[3:-2] if is_arithmetic else text[2:-1], line))
            except UnknownPartError:
                if re.search(r"\+\+|--|[^=!<>]=[^=]", text):
                    raise
                value = self._capture(text, f'"{text}"')
            return [Piece(value, is_quoted, is_expanded=not is_quoted)]
        inner = text[2:-1] if text.startswith("${") else text[1:]
        unreadable = self.shell.unreadable
        try:
            return self._parameter(inner, line, is_quoted=is_quoted)
        except UnknownPartError:
            # Arrays have several words, and the operators = and ? have effects.
            match = _PARAMETER.fullmatch(inner)
            if match is None or match["name"] in ("@", "*") or match["index"] in ("[@]", "[*]"):
                raise
            if not match["rest"] and not match["mark"] and match["index"] is None:
                raise
            if re.match(":?[=?]", match["rest"]) or match["name"] in _OF_THE_SCRIPT or match["name"] in unreadable:
                raise
            return [Piece(self._capture(text, f'"{text}"'), is_quoted, is_expanded=not is_quoted)]

    # Section: unknown parts.

    def _output(self, text: str, line: int) -> str:
        """Returns the output of a command substitution: of a few commands that only print, or an unknown part."""
        inner = re.sub(r"\\([$`\\])", r"\1", text[1:-1]) if text.startswith("`") else text[2:-1]
        try:
            commands = parse_script(inner, first_line=line)
        except BashSyntaxError as error:
            raise UnknownPartError(str(error)) from None
        try:
            shell = replace(self.shell, variables=dict(self.shell.variables))
            expander = Expander(shell)
            output = expander._printed(commands)
            if output is None:
                expander._refuse_written_files(commands)
        except WrittenFileError:
            raise
        except UnknownPartError:
            output = None
        return self._capture(inner, f"$({inner})") if output is None else output.rstrip("\n")

    def _printed(self, commands: Commands) -> str | None:
        """Returns the output of echo, cat with a known text, basename, dirname and seq, and None for others."""
        if not commands:
            return ""  # a comment
        if len(commands) != 1 or len(commands[0].commands) != 1 or commands[0].is_background:
            return None
        pipeline = commands[0].commands[0]
        command = pipeline.commands[0]
        if len(pipeline.commands) != 1 or pipeline.is_negated or isinstance(command, Redirected):
            return None
        if not isinstance(command, Simple) or command.assignments:
            return None
        if not all(isinstance(word, Word) for word in command.words):
            return None
        words = self.elements(word for word in command.words if isinstance(word, Word))
        if words == ["cat"] and [one.operator for one in command.redirects] in (["<<"], ["<<-"]):
            document = command.redirects[0]
            body = document.body or ""
            return body if document.is_literal else self.here_document(body, command.line)
        if not words and [one.operator for one in command.redirects] == ["<"]:
            return self.shell.files.get(self.path(command.redirects[0].target))
        if not words or command.redirects or words[0] in self.shell.functions:
            return None
        name, *rest = words
        if name == "cat" and len(rest) == 1:
            return self.shell.files.get(os.path.normpath(known(rest[0])))
        if name in (":", "true"):
            return ""
        if name == "echo":
            return echoed(rest)
        if 1 <= len(rest) <= {"basename": 2, "dirname": 1}.get(name, 0) and not rest[0].startswith("-"):
            return _path_part(name, [known(word) for word in rest])
        if name == "seq" and 1 <= len(rest) <= 3 and all(re.fullmatch(r"-?[1-9]\d*|0", known(word)) for word in rest):
            first, step, last = {1: ("1", "1", *rest), 2: (rest[0], "1", rest[-1]), 3: tuple(rest)}[len(rest)]
            if int(step) == 0:
                return None
            stop = int(last) + (1 if int(step) > 0 else -1)
            return "\n".join(map(str, range(int(first), stop, int(step))))
        return None

    def _refuse_written_files(self, commands: Commands) -> None:
        """Raises WrittenFileError for a command that names a file which the translation does not write."""
        for node in (node for and_or in commands for pipeline in and_or.commands for node in pipeline.commands):
            inner = node.command if isinstance(node, Redirected) else node
            words = [word for word in inner.words if isinstance(word, Word)] if isinstance(inner, Simple) else []
            redirects = [*node.redirects] if isinstance(node, Simple | Redirected) else []
            for word in [*words, *(one.target for one in redirects if one.operator == "<")]:
                try:
                    path = self.path(word)
                except UnknownPartError:
                    continue
                if path in self.shell.files:
                    raise WrittenFileError(f"the script writes {path}")

    def path(self, word: Word) -> str:
        """Returns the path that a word names."""
        return os.path.normpath(known(self.text(word)))

    def _capture(self, text: str, source: str) -> str:
        """Makes a capture of an expansion. Variables of the script that its text mentions are set inside it."""
        for part in re.findall(r"\$\{?([0?!_-])(?!\w)", text):
            raise UnknownPartError(f"${part} is not known here")
        shell = self.shell
        names = list(dict.fromkeys(_NAME.findall(UNKNOWN_PART.sub("", text))))
        if unknown := [name for name in names if name in shell.functions]:
            raise UnknownPartError(f"the output of the function {unknown[0]} is not known")
        if special := [name for name in names if name in _OF_THE_SCRIPT and name != "_"]:
            raise UnknownPartError(f"${special[0]} is not known here")
        prefix, uses = "", list(names_of_unknown(text))
        for name in names:
            value = shell.look_up(name)
            if value is None or name in shell.given:
                continue
            values = list(value.values()) if isinstance(value, dict) else [value]
            uses += [use for one in values for use in names_of_unknown(one)]
            if isinstance(value, dict):
                prefix += f"{name}=({' '.join(_element_source(key, one, value) for key, one in value.items())}); "
            elif value != unknown_part(name):
                prefix += f"{'export ' if name in shell.exported else ''}{name}={quoted_value(value)}; "
        if re.search(r"\$\{?[#@*1-9]", text) and (shell.has_arguments or shell.arguments):
            arguments = shell.all_arguments()
            uses += [use for one in arguments for use in names_of_unknown(one)]
            prefix += f"set -- {' '.join(quoted_segments([(one, True)]) for one in arguments)}; "
        if prefix:
            body = source[2:-1].lstrip() if source.startswith("$(") else f"printf %s {source}"
            newline = "\n" if "\n" in body else ""
            source = f"$({prefix}{newline}{body})"
        source = UNKNOWN_PART.sub(r"${\1}", source)
        reads = [name for name in names if shell.look_up(name) is None]
        return shell.capture(self.hint, source, uses, reads=reads)

    # Section: parameters.

    def _parameter(self, inner: str, line: int, *, is_quoted: bool) -> list[Piece]:
        shell = self.shell
        if inner in ("#", "#@", "#*"):
            return [Piece(str(len(counted(shell.all_arguments()))), is_quoted, is_expanded=not is_quoted)]
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            raise UnknownPartError(f"${{{inner}}}")
        mark, name, index, rest = match["mark"], match["name"], match["index"], match["rest"]
        if name in ("@", "*") or index in ("[@]", "[*]"):
            return self._elements(match, line, is_quoted=is_quoted)
        if mark == "!":
            name = known(shell.text_of(name))
            if not _NAME.fullmatch(name) or index:
                raise UnknownPartError(f"${{{inner}}}")
        value: str | None
        held = shell.look_up(name)
        if index is not None:
            value = self._element(name, held, index[1:-1], line)
        elif held is None or (shell.is_unset(name) and rest):
            value = None
        else:
            value = shell.text_of(name) if isinstance(held, str) or 0 in held else ""
        if mark == "#":
            if rest:
                raise UnknownPartError(f"${{{inner}}}")
            return [Piece(str(len(known(shell.text_of(name) if value is None else value))), is_quoted)]
        default = re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.DOTALL)
        if default is not None:
            return self._with_default(name, value, default, line, is_quoted=is_quoted)
        if value is None and shell.is_unset(name):
            value = ""
        if value is None:
            if rest:
                raise UnknownPartError(f"${{{inner}}} is not known")
            value = shell.text_of(name)
        return [Piece(self._changed(value, rest, line), is_quoted, is_expanded=not is_quoted)]

    def _element(self, name: str, held: Value | None, index: str, line: int) -> str | None:
        if held is None:
            raise UnknownPartError(f"{name} is not known")
        number = self.number(index, line)
        values = held if isinstance(held, dict) else {0: held}
        counted(list(values.values()))
        return values.get(number if number >= 0 else max(values, default=-1) + 1 + number, "")

    def _elements(self, match: re.Match[str], line: int, *, is_quoted: bool) -> list[Piece]:
        """Expands $@, $*, ${A[@]} and ${A[*]} with their operators."""
        shell, name, rest = self.shell, match["name"], match["rest"]
        if name in ("@", "*"):
            values, is_joined = shell.all_arguments(), name == "*"
            keys = list(range(1, len(values) + 1))
        else:
            held, is_joined = shell.look_up(name), match["index"] == "[*]"
            if held is None and name not in shell.variables:
                shell.outside.add(name)
                shell.assumed[name] = None
            table = held if isinstance(held, dict) else {} if held is None else {0: held}
            keys = sorted(table)
            values = [table[key] for key in keys]
        if match["mark"] == "#" and not rest:
            return [Piece(str(len(counted(values))), is_quoted)]
        if match["mark"] == "!":
            counted(values)
            if rest or name in ("@", "*"):
                raise UnknownPartError(f"${{{match[0]}}}")
            values = [str(key) for key in keys]
        default = re.fullmatch(r"(:?)([-+])(.*)", rest, re.DOTALL)
        if default is not None:
            is_set = bool(counted(values)) and not (default[1] and len(values) == 1 and shell.is_empty(values[0]))
            if is_set == (default[2] == "+"):
                return self._default(default[3], line, is_quoted=is_quoted)
            values = values if default[2] == "-" else []
        elif rest.startswith(":"):
            counted(values)
            offset, _, length = rest[1:].partition(":")
            if name in ("@", "*"):
                keys, values = [0, *keys], ["", *values]  # $0 precedes the first argument
                if self.number(offset, line) == 0:
                    raise UnknownPartError("$0 is not known here")
            elif keys != list(range(len(keys))):
                raise UnknownPartError(f"${{{match[0]}}}")
            begin = self.number(offset, line)
            values = values[begin if begin >= 0 else max(len(values) + begin, 0) :]
            if length:
                count = self.number(length, line)
                if count < 0:
                    raise UnknownPartError(f"${{{match[0]}}}")
                values = values[:count]
        elif rest:
            values = [self._changed(value, rest, line) for value in values]
        if is_joined and is_quoted:
            return [Piece(joined(values), is_quoted=True)]
        pieces = []
        for number, value in enumerate(values):
            if number:
                pieces.append(Piece("", is_quoted, ends=True))
            pieces.append(Piece(value, is_quoted, is_expanded=not is_quoted))
        return pieces

    def _default(self, word: str, line: int, *, is_quoted: bool) -> list[Piece]:
        pieces = self._pieces(word, line, is_quoted=is_quoted)
        # Outside quotes, the text itself is split at blanks as well.
        return [piece if piece.is_quoted else replace(piece, is_expanded=True) for piece in pieces]

    def _with_default(
        self, name: str, value: str | None, match: re.Match[str], line: int, *, is_quoted: bool
    ) -> list[Piece]:
        shell = self.shell
        if value is None and not shell.is_unset(name):
            shell.assumed[name] = None
        is_set = value is not None and not (match[1] and shell.is_empty(value))
        if match[2] == "+":
            return self._default(match[3], line, is_quoted=is_quoted) if is_set else [Piece("", is_quoted)] * is_quoted
        if is_set and value is not None:
            return [Piece(value, is_quoted, is_expanded=not is_quoted)]
        if match[2] == "?":
            # The script would end, so the variable must be set.
            if value is None and not shell.is_unset(name):
                return [Piece(shell.text_of(name), is_quoted, is_expanded=not is_quoted)]
            raise UnknownPartError(f"{name} is empty, so the script ends")
        pieces = self._default(match[3], line, is_quoted=is_quoted)
        if name in OF_EACH_NODE:
            default = _joined(pieces)
            shell.notes.append(f"line {line}: {name} is not set, so its default {default} is used: set it on each node")
        if match[2] == "=":
            shell.assign(name, _joined(pieces))
        return pieces

    def _changed(self, value: str, operator: str, line: int) -> str:
        """Applies the operator after a name in ${...}: a slice, a pattern to remove or replace, or a case."""
        if not operator:
            return value
        if operator.startswith(":"):
            value = known(value)
            offset, colon, length = operator[1:].partition(":")
            begin = self.number(offset, line)
            if begin < 0:
                begin += len(value)
                if begin < 0:
                    return ""
            if not colon:
                return value[begin:]
            count = self.number(length, line)
            return value[begin : begin + count] if count >= 0 else value[begin : len(value) + count]
        if match := re.match(r"##?|%%?", operator):
            return cut(known(value), self._pattern(operator[match.end() :], line), match[0])
        if operator.startswith("/"):
            mode = operator[1] if operator[1:2] in ("/", "#", "%") else ""
            body = operator[1 + len(mode) :]
            at = 0
            while at < len(body) and body[at] != "/":
                at = _end_of_part(body, at)
            if not body[:at] and mode not in ("#", "%"):
                return value
            new = self._pieces(body[at + 1 :], line)
            if any("&" in piece.text and not piece.is_quoted for piece in new):
                raise UnknownPartError("& in a replacement")
            return replaced(known(value), self._pattern(body[:at], line), _joined(new), mode=mode)
        if operator in ("^^", ",,", "^", ","):
            value = known(value)
            count = len(value) if len(operator) == 2 else 1
            changed = value[:count].upper() if operator[0] == "^" else value[:count].lower()
            return changed + value[count:]
        raise UnknownPartError(f"the operator {operator[:10]}")

    def _pattern(self, text: str, line: int) -> str:
        return self.pattern(Word(text, line))


def echoed(words: Sequence[str]) -> str | None:
    """Returns the text that echo prints for its arguments, without a newline after it. None: with escapes."""
    if words and re.fullmatch(r"-[neE]+", words[0]):
        return joined(words[1:]) if words[0] == "-n" and not words[1:2] == ["-n"] else None
    return joined(words)


def _joined(pieces: Sequence[Piece]) -> str:
    return joined(["".join(" " if piece.ends else piece.text for piece in pieces)])


def _split(pieces: Sequence[Piece]) -> list[Segments]:
    """Splits expanded text at blanks."""
    fields: list[Segments] = []
    current: Segments | None = None
    for piece in pieces:
        if piece.ends:
            if current is not None:
                fields.append(current)
            current = None
        elif not piece.is_expanded:
            current = [*(current or []), (piece.text, piece.is_quoted)]
        else:
            for number, part in enumerate(re.split(r"[ \t\n]+", piece.text)):
                if number and current is not None:
                    fields.append(current)
                    current = None
                if part:
                    current = [*(current or []), (part, False)]
    fields += [] if current is None else [current]
    for segments in fields:
        if len(segments) > 1:
            # Text before or after an element that may be several words or none.
            counted([text for text, is_quoted in segments if is_quoted])
    return fields


def _element_source(key: int, text: str, values: Mapping[int, str]) -> str:
    """Returns the source of an element of NAME=(...). Several list parts have no numbers."""
    source = quoted_segments([(text, True)])
    return source if list(values) == list(range(len(values))) else f"[{key}]={source}"


def _end_of_part(text: str, at: int) -> int:
    """Returns the end of the character, quote or expansion at a position."""
    mark = text[at]
    if mark == "\\":
        return at + 2
    if mark == "'":
        return text.index("'", at + 1) + 1
    if mark == '"':
        return end_of_double_quotes(text, at)
    return end_of_expansion(text, at, is_quoted=False) if mark in "$`" else at + 1


def _unescaped(text: str) -> str:
    """Replaces the escapes of $'...'."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0].isdigit():
            return chr(int(code, 8))
        if code in _ESCAPES:
            return _ESCAPES[code]
        if code in "\\'\"?":
            return code
        return "\\" + code

    if re.search(r"\\c", text):
        raise UnknownPartError("a control character in $'...'")
    return re.sub(
        r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|[0-7]{1,3}|.)", character, text, flags=re.DOTALL
    )


def _path_part(program: str, words: Sequence[str]) -> str:
    path = words[0].rstrip("/") or ("/" if words[0] else "")
    if program == "dirname":
        head, slash, _ = path.rpartition("/")
        return head.rstrip("/") or "/" if slash else "."
    name = path if path == "/" else path.rpartition("/")[2]
    suffix = words[1] if len(words) > 1 else ""
    return name.removesuffix(suffix) if suffix and name != suffix else name
