"""Follows a bash script without running it, and collects the training commands that bash would run.

bash_syntax.py parses the script and bash_words.py expands its words. Every construct is either followed exactly or
named with its line in the doubts of each command that it may change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megatron.tools.bash_syntax import (
    DECLARATIONS,
    AndOr,
    Arithmetic,
    Assignment,
    BashSyntaxError,
    Case,
    Commands,
    Condition,
    CountingFor,
    For,
    Function,
    Group,
    If,
    Loop,
    Node,
    Pipeline,
    Redirect,
    Redirected,
    Simple,
    Word,
    parse_script,
)
from megatron.tools.bash_values import (
    UnknownPartError,
    Value,
    as_element,
    counted,
    has_lost_blanks,
    joined,
    names_of_unknown,
    quoted_segments,
    quoted_value,
    shown,
    unknown_part,
)
from megatron.tools.bash_words import OF_EACH_NODE, Expander, Segments, Shell, echoed

# Limits that stop a recursive function or a loop over a long list.
_MOST_COMMANDS = 10_000
_MOST_CALLS = 50
# Commands that neither run their arguments nor change what follows.
_HARMLESS = frozenset(
    """
    [ awk basename cat chmod chown cp curl cut date df diff dirname du echo expr false find free git grep head hostname
    kill ln logger ls lscpu md5sum mkdir mkfifo mktemp mv nvidia-smi ping popd printf pushd pwd realpath rm rmdir rsync
    scancel scontrol scp sed sha256sum sinfo sleep sort squeue stat tail tar tee test touch tr true type ulimit umask
    uname unzip wait wc wget which zip :
    """.split()
)
# Those that change no file.
_READERS = frozenset("[ cat chmod du echo false grep head ls printf stat tail test true wc :".split())
# Commands whose effects are ignored: they change search paths, or how the shell runs later commands.
_ENVIRONMENTS = frozenset(("module", "ml", "conda", "mamba", "spack", "alias", "hash", "shopt", "trap", "set"))
_SHELLS = frozenset(("bash", "sh", "dash", "zsh"))
# Programs that do not pass on the environment.
_REMOTE = frozenset(("ssh", "pdsh", "clush", "docker", "podman", "kubectl", "su", "sudo"))
# Programs that append words of their own to a command.
_APPENDING = frozenset(("xargs", "parallel"))
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_FALSE = "is assumed to be false"


class ScriptError(ValueError):
    """Raised for a script that cannot be read or that contains no training command."""


class ShellWord(str):
    """A word with unknown parts as ${NAME}. source: shell source for it, in which the script's quotes count."""

    source: str

    def __new__(cls, segments: Segments) -> ShellWord:
        """Creates the word from an expanded argument."""
        word = super().__new__(cls, shown(_text(segments)))
        word.source = quoted_segments(segments)
        return word


@dataclass(frozen=True)
class Launch:
    """A training command of a script.

    launcher: words before the program, such as torchrun's. program: the training script; "" if a file contains only
    flags. words: the program's flags. environment: variables that the script exports. unknown: names of variables that
    the environment of the command must contain, and that appear in words as ${NAME}. line: line number, starting at 1.
    doubts: constructs before the command that could not be followed and may have changed it, each with its line.
    setup: shell lines that set other variables in words, such as D=$(date). splitting: variables that are arguments
    outside quotes, so that they may contain flags. assumed: variables that a condition or default takes as unset.
    wrapper: shell source of a command that receives the whole command as its last argument, such as srun bash -c.
    outer: shell lines before the wrapper.
    """

    launcher: tuple[str, ...]
    program: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    line: int = 1
    doubts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    splitting: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()


class ScriptEndError(Exception):
    """Raised when the script or a subshell calls exit."""


class _FunctionEndError(Exception):
    """Raised when a function calls return. code: its argument, if any."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


class _LoopEndError(Exception):
    """Raised by break and continue. goes_on: whether the loop continues. levels: number of loops."""

    def __init__(self, *, goes_on: bool, levels: int) -> None:
        super().__init__()
        self.goes_on = goes_on
        self.levels = levels


@dataclass(frozen=True)
class _Status:
    """Whether a command succeeds. guess: a note, if that is not known. is_test: whether it is a condition."""

    succeeds: bool
    guess: str = ""
    is_test: bool = False


_SUCCEEDS, _FAILS = _Status(True), _Status(False)


class BashReader:
    """Follows commands, and collects launches, notes and doubts."""

    def __init__(self, values: Mapping[str, str]) -> None:
        given = {name: value for name, value in values.items() if not name.isdigit()}
        arguments = {int(name): value for name, value in values.items() if name.isdigit() and name != "0"}
        if "0" in values:
            given["0"] = values["0"]
        self.shell = Shell(given, variables=dict(given), arguments=arguments)
        self.expander = Expander(self.shell)
        self.launches: list[Launch] = []
        self.doubts: list[str] = []
        self.parents: list[tuple[Shell, tuple[str, ...]]] = []
        self.locals: list[dict[str, Value | None]] = []
        self.exports_all = False
        self.read_only: set[str] = set()
        self.num_commands = 0

    @property
    def files(self) -> dict[str, str | None]:
        """Texts of the files that the script writes, by path."""
        return self.shell.files

    @property
    def notes(self) -> list[str]:
        """Lines about assumptions and constructs that are not followed."""
        return self.shell.notes

    def all_doubts(self) -> list[str]:
        """Returns the constructs that are not followed, whether or not a command depends on them."""
        of_values = [doubt for capture in self.shell.captures.values() for doubt in capture.doubts]
        return list(dict.fromkeys([*self.doubts, *self.shell.unreadable.values(), *of_values]))

    def run_text(self, text: str, *, first_line: int = 1) -> _Status:
        """Follows a script. Raises ScriptError for a text that cannot be parsed."""
        try:
            commands = parse_script(text, first_line=first_line)
        except BashSyntaxError as error:
            raise ScriptError(str(error)) from None
        return self._run(commands)

    def _note(self, line: int, text: str) -> None:
        self.notes.append(f"line {line}: {text}")

    def _doubt(self, line: int, text: str) -> None:
        """Records a construct that may change any later command."""
        self._note(line, text)
        self.doubts.append(self.notes[-1])

    # Section: lists.

    def _run(self, commands: Commands) -> _Status:
        status = _SUCCEEDS
        for command in commands:
            status = self._and_or(command)
        return status

    def _and_or(self, node: AndOr) -> _Status:
        if node.is_background:
            with self._subshell():
                self._and_or(replace(node, is_background=False))
            return _SUCCEEDS
        status = self._pipeline(node.commands[0])
        for operator, command in zip(node.operators, node.commands[1:]):
            runs = status.succeeds == (operator == "&&")
            if status.guess and _only_exits((AndOr(command.line, (command,), (), False),)):
                self.notes.append(f"line {command.line}: the script is assumed not to exit")
                status = _Status(operator == "||")
                continue
            if status.guess:
                changes = _changes((AndOr(command.line, (command,), (), False),), beyond_assignments=status.is_test)
                if changes:
                    self.notes.append(status.guess)
                    self.doubts.append(status.guess)
            if runs:
                status = self._pipeline(command)
        return status

    def _pipeline(self, node: Pipeline) -> _Status:
        if len(node.commands) == 1:
            status = self._command(node.commands[0])
        else:
            given: str | None = None
            for command in node.commands:
                with self._subshell():
                    status = self._command(command, stdin=given)
                given = self._output_of(command)
        if not node.is_negated:
            return status
        # A condition that is not known counts as false, whether it is negated or not.
        return replace(status, succeeds=not status.succeeds and not (status.guess and status.is_test))

    def _output_of(self, node: Node) -> str | None:
        """Returns the output of an echo, or None for other commands."""
        if not isinstance(node, Simple) or not node.words or not all(isinstance(word, Word) for word in node.words):
            return None
        with self._subshell():
            try:
                return _echoed(self.expander.elements(word for word in node.words if isinstance(word, Word)))
            except UnknownPartError:
                return None

    @contextmanager
    def _subshell(self) -> Iterator[None]:
        """Keeps changes of variables inside the block."""
        outer = self.shell
        inner = replace(
            outer,
            variables=dict(outer.variables),
            exported=set(outer.exported),
            arguments=dict(outer.arguments),
            functions=dict(outer.functions),
            unreadable=dict(outer.unreadable),
        )
        self._enter(inner)
        try:
            yield
        except ScriptEndError:
            pass
        finally:
            self._enter(outer)

    def _enter(self, shell: Shell) -> None:
        self.shell = shell
        self.expander = Expander(shell)

    # Section: compound commands.

    def _command(self, node: Node, *, stdin: str | None = None) -> _Status:
        self.num_commands += 1
        if self.num_commands > _MOST_COMMANDS:
            raise ScriptError(f"line {node.line}: more than {_MOST_COMMANDS:,} commands; is it a loop?")
        match node:
            case Simple():
                return self._simple(node, stdin)
            case Redirected():
                self._keep_names(node.redirects)
                return self._command(node.command)
            case Pipeline():
                return self._pipeline(node)
            case If():
                return self._if(node)
            case Loop():
                return self._loop(node)
            case For():
                return self._for(node)
            case CountingFor():
                return self._counting_for(node)
            case Case():
                return self._case(node)
            case Group(is_subshell=True):
                with self._subshell():
                    return self._run(node.body)
                return _SUCCEEDS
            case Group():
                return self._run(node.body)
            case Arithmetic():
                return self._arithmetic(node.text, node.line, f"(({node.text[:60]}))")
            case Condition():
                return self._guessed(node.line, _words_of_test(node.tokens), lambda: _Test(self, node).value())
            case Function():
                self.shell.functions[node.name] = node.body
                return _SUCCEEDS

    def _if(self, node: If) -> _Status:
        guesses: list[str] = []
        status = _SUCCEEDS
        for condition, body in node.branches:
            holds = self._run(condition)
            if holds.guess:
                succeeds = holds.succeeds if holds.is_test else _is_negated(condition)
                guesses.append(holds.guess if holds.is_test else _guess_of(condition, succeeds=succeeds))
                self.notes.append(guesses[-1])
                if succeeds and _only_exits(body):
                    self.notes[-1] = f"line {node.line}: the script is assumed not to exit"
                    guesses.pop()
                    continue
            else:
                succeeds = holds.succeeds
            if succeeds:
                self._doubt_guesses(guesses, node)
                return self._run(body)
        self._doubt_guesses(guesses, node)
        return self._run(node.otherwise) if node.otherwise else status

    def _doubt_guesses(self, guesses: Sequence[str], node: If) -> None:
        bodies = [body for _, body in node.branches] + [node.otherwise]
        if any(_changes(body, beyond_assignments=True) and not _only_exits(body) for body in bodies):
            self.doubts += guesses

    def _loop(self, node: Loop) -> _Status:
        while True:
            status = self._run(node.condition)
            if status.guess:
                self._doubt(node.line, "loops with a condition are not followed unless it is known")
                return _SUCCEEDS
            if status.succeeds == node.is_until or not self._runs_body(node.body):
                return _SUCCEEDS

    def _runs_body(self, body: Commands) -> bool:
        """Runs a loop's body once. Returns whether the loop continues."""
        try:
            self._run(body)
        except _LoopEndError as end:
            if end.levels > 1:
                raise _LoopEndError(goes_on=end.goes_on, levels=end.levels - 1) from None
            return end.goes_on
        return True

    def _for(self, node: For) -> _Status:
        try:
            if node.words is None:
                values = counted(self.shell.all_arguments())
            else:
                fields = [one for word in node.words for one in self.expander.fields(word)]
                if any(not is_quoted and re.search(r"[*?\[]", text) for one in fields for text, is_quoted in one):
                    raise UnknownPartError("names of files")
                values = counted([as_element(one) for one in fields])
        except UnknownPartError as error:
            self._doubt(node.line, f"the loop over {node.name} is not followed: {error}")
            return _SUCCEEDS
        for value in values:
            self._set(node.name, value)
            if not self._runs_body(node.body):
                break
        return _SUCCEEDS

    def _counting_for(self, node: CountingFor) -> _Status:
        try:
            self.expander.number(node.first, node.line)
            while not node.condition.strip() or self.expander.number(node.condition, node.line):
                if not self._runs_body(node.body):
                    break
                self.num_commands += 1
                if self.num_commands > _MOST_COMMANDS:
                    raise ScriptError(f"line {node.line}: more than {_MOST_COMMANDS:,} commands; is it a loop?")
                self.expander.number(node.step, node.line)
        except UnknownPartError as error:
            self._doubt(node.line, f"the loop is not followed: {error}")
        return _SUCCEEDS

    def _case(self, node: Case) -> _Status:
        try:
            subject = self.shell.without_outside(self.expander.text(node.subject))
            falls_through = False
            for patterns, body, terminator in node.items:
                if falls_through or any(re.fullmatch(self.expander.pattern(one), subject) for one in patterns):
                    status = self._run(body)
                    if terminator == ";;":
                        return status
                    falls_through = terminator == ";&"
        except UnknownPartError as error:
            self._note(node.line, f"the case of {node.subject.text} is assumed to match nothing: {error}")
            if any(_changes(body, beyond_assignments=True) for _, body, _ in node.items):
                self.doubts.append(self.notes[-1])
        return _SUCCEEDS

    def _arithmetic(self, text: str, line: int, shown_text: str) -> _Status:
        try:
            return _Status(self.expander.number(text, line) != 0)
        except UnknownPartError as error:
            if re.search(r"\+\+|--|[^=!<>]=[^=]", text):
                self._doubt(line, f"{shown_text} is not followed: {error}")
                return _SUCCEEDS
            return _Status(False, f"line {line}: the condition {shown_text!r} {_FALSE}", is_test=True)

    def _guessed(self, line: int, text: str, evaluate: Callable[[], bool]) -> _Status:
        try:
            return _Status(evaluate(), is_test=True)
        except UnknownPartError:
            return _Status(False, f"line {line}: the condition {text!r} {_FALSE}", is_test=True)

    # Section: assignments.

    def _set(self, name: str, value: Value) -> None:
        if name == "IFS":
            raise UnknownPartError("IFS")
        self.shell.unreadable.pop(name, None)
        self.shell.assign(name, value)
        if self.exports_all:
            self.shell.exported.add(name)

    def _assign(self, node: Assignment) -> None:
        name = node.name
        if name in self.shell.given:
            return
        if name == "IFS" or name in self.read_only:
            self._doubt(node.line, f"{name} is not followed{': it is read-only' if name != 'IFS' else ''}")
            return
        try:
            value = self._value_of(node)
        except UnknownPartError as error:
            reason = f"line {node.line}: the value of {name} is not followed: {error}"
            if re.search(r"\$\{\w+:?=|\$\(\(.*(\+\+|--|[^=!<>]=[^=])", str(node.value)):
                self._doubt(node.line, f"the value of {name} is not followed: {error}")
            if isinstance(node.value, Word) and node.index is None and not node.appends:
                self._set(name, self.shell.capture(name, None, doubts=[reason]))
            else:
                self.shell.unreadable[name] = reason
            return
        self.shell.unreadable.pop(name, None)
        self._set(name, value)

    def _value_of(self, node: Assignment) -> Value:
        old = self.shell.look_up(node.name)
        if node.index is not None:
            assert isinstance(node.value, Word)
            table = dict(old) if isinstance(old, dict) else {} if old is None else {0: old}
            number = self.expander.number(node.index, node.line)
            number += max(table, default=-1) + 1 if number < 0 else 0
            if number < 0:
                # bash ends the whole list of commands.
                self._doubt(node.line, f"{node.name}[{node.index}] is not followed: there is no such element")
                raise UnknownPartError("a negative index")
            text = self.expander.text(node.value, hint=node.name)
            table[number] = table.get(number, "") + text if node.appends else text
            return table
        if isinstance(node.value, Word):
            if re.search(r":~(?![\w\\])", node.value.text):
                raise UnknownPartError("~ after a colon")
            text = self.expander.text(node.value, hint=f"{node.name}_PART" if node.appends else node.name)
            if not node.appends:
                return text
            return (self.shell.text_of(node.name) if old is not None else self._outside(node.name)) + text
        table = {}
        if node.appends and old is not None:
            table = dict(old) if isinstance(old, dict) else {0: old}
        following = max(table, default=-1) + 1
        for word in node.value:
            if match := re.match(r"\[([^\]]+)\]=", word.text):
                following = self.expander.number(match[1], word.line)
                table[following] = self.expander.text(Word(word.text[match.end() :], word.line), hint=node.name)
                following += 1
                continue
            for segments in self.expander.fields(word):
                if any(not is_quoted and re.search(r"[*?\[][^(]*$", text) for text, is_quoted in segments):
                    raise UnknownPartError("names of files in an array")
                table[following] = as_element(segments)
                following += 1
        return table

    def _outside(self, name: str) -> str:
        """Returns the value to which a script appends that has not set the variable."""
        return "" if name in self.shell.hidden else self.shell.text_of(name)

    def _declare(self, node: Simple) -> None:
        first, *rest = node.words
        assert isinstance(first, Word)
        kind, options = first.text, ""
        items: list[Assignment | str] = []
        for item in rest:
            if isinstance(item, Assignment):
                items.append(item)
                continue
            for text in self.expander.elements([item]):
                if re.match(r"[-+]\w", text) and not items:
                    options += text if text[0] == "-" else ""
                else:
                    name, equals, value = text.partition("=")
                    plain = Assignment(
                        name.rstrip("+"), None, name.endswith("+"), Word(quoted_value(value), node.line), node.line
                    )
                    items.append(plain if equals else name)
        if set(options) & set("fFp"):
            return
        for one in items:
            name = one if isinstance(one, str) else one.name
            if self.locals and kind != "export" and "g" not in options and kind != "readonly":
                self.locals[-1].setdefault(name, self.shell.variables.get(name))
                if isinstance(one, str) and name not in self.shell.given:
                    self.shell.variables[name] = ""
            if isinstance(one, Assignment):
                self._assign(one)
            if "n" in options and kind != "export":
                self._doubt(node.line, f"{kind} -n {name} is not followed")
            if set(options) & set("Ailu") and kind != "export":
                self.shell.unreadable[name] = f"line {node.line}: {kind} {options} {name} is not followed"
            if kind == "readonly" or "r" in options:
                self.read_only.add(name)
            if kind == "export" and "n" in options:
                self.shell.exported.discard(name)
            elif kind == "export" or "x" in options:
                self.shell.exported.add(name)

    # Section: simple commands.

    def _simple(self, node: Simple, stdin: str | None) -> _Status:
        first = node.words[0] if node.words else None
        if isinstance(first, Word) and first.text in DECLARATIONS:
            try:
                self._declare(node)
            except UnknownPartError as error:
                self._doubt(node.line, f"{first.text} is not followed: {error}")
            return _SUCCEEDS
        fields = [segments for word in node.words if isinstance(word, Word) for segments in self._fields(word)]
        if not fields:
            for assignment in node.assignments:
                self._assign(assignment)
            return _SUCCEEDS
        with self._prefixed(node, fields):
            return self._execute(node, fields, stdin)

    def _fields(self, word: Word) -> list[Segments]:
        try:
            return self.expander.fields(word)
        except UnknownPartError as error:
            reason = str(error) if str(error).startswith("line ") else f"line {word.line}: {word.text[:60]}: {error}"
            return [[(self.shell.capture("UNKNOWN", None, doubts=[reason]), False)]]

    @contextmanager
    def _prefixed(self, node: Simple, fields: Sequence[Segments]) -> Iterator[None]:
        """Sets the variables before a command while it runs."""
        if not node.assignments:
            yield
            return
        names = {assignment.name for assignment in node.assignments}
        outer = {name: self.shell.variables.get(name) for name in names}
        exported, unreadable = set(self.shell.exported), dict(self.shell.unreadable)
        for assignment in node.assignments:
            if assignment.name != "IFS":
                self._assign(assignment)
                self.shell.exported.add(assignment.name)
        try:
            yield
        finally:
            for name, value in outer.items():
                if value is None:
                    self.shell.variables.pop(name, None)
                else:
                    self.shell.variables[name] = value
                self.shell.unreadable.pop(name, None)
                if name in unreadable:
                    self.shell.unreadable[name] = unreadable[name]
            self.shell.exported &= exported | (self.shell.exported - names)

    def _execute(self, node: Simple, fields: list[Segments], stdin: str | None) -> _Status:
        words = [_text(segments) for segments in fields]
        line = node.line
        while words[0] in ("command", "builtin", "exec") and len(words) > 1 and not words[1].startswith("-"):
            if words[0] == "exec":
                self._execute(node, fields[1:], stdin)
                raise ScriptEndError(f"line {line}: the script ends with exec")
            words, fields = words[1:], fields[1:]
        name = words[0]
        if name in self.shell.functions:
            return self._call(name, list(map(as_element, fields[1:])), line)
        if name in _BUILTINS:
            return _BUILTINS[name](self, [name, *map(as_element, fields[1:])], line)
        if words[:2] == ["printf", "-v"]:
            return self._do_read(words, line)
        if name in ("[", "test"):
            return self._test(node, fields)
        self._keep_file(node, list(map(as_element, fields)))
        if os.path.basename(name) in _HARMLESS:
            return _Status(True, f"line {line}: {name} is assumed to succeed")
        if name in _ENVIRONMENTS:
            return _SUCCEEDS
        before = len(self.launches)
        if not self._run_strings(node, fields, stdin):
            self._look_for_launch(node, fields)
        if len(self.launches) > before:
            return _SUCCEEDS
        return _Status(True, f"line {line}: {shown(name)} is assumed to succeed")

    def _test(self, node: Simple, fields: Sequence[Segments]) -> _Status:
        raw = [word.text for word in node.words if isinstance(word, Word)][1:]
        raw = raw[:-1] if raw[-1:] == ["]"] else raw

        def evaluate() -> bool:
            words = []
            for segments in fields[1:]:
                text = self.shell.without_outside(_text(segments))
                if text or any(is_quoted for _, is_quoted in segments):
                    words.append(text)
            return _plain_test(words[:-1] if words[-1:] == ["]"] else words, self.shell)

        return self._guessed(node.line, " ".join(raw), evaluate)

    def _call(self, name: str, arguments: Sequence[str], line: int) -> _Status:
        if len(self.locals) >= _MOST_CALLS:
            raise ScriptError(
                f"line {line}: functions are nested more than {_MOST_CALLS} levels deep, the last one is {name}"
            )
        shell = self.shell
        outer, had = dict(shell.arguments), shell.has_arguments
        shell.arguments, shell.has_arguments = dict(enumerate(arguments, start=1)), True
        self.locals.append({})
        status = _SUCCEEDS
        try:
            body = shell.functions[name]
            assert isinstance(body, Node)
            status = self._command(body)
        except _FunctionEndError as end:
            status = _Status(end.code == "0" if end.code.isdigit() else True)
            if not end.code.isdigit():
                status = replace(status, guess=f"line {line}: {name} is assumed to succeed")
        finally:
            for variable, value in self.locals.pop().items():
                shell.unreadable.pop(variable, None)
                if value is None:
                    shell.variables.pop(variable, None)
                else:
                    shell.variables[variable] = value
            shell.arguments, shell.has_arguments = outer, had
        return status

    # Section: builtins, by name in _BUILTINS.

    def _do_eval(self, words: list[str], line: int) -> _Status:
        text = joined(words[1:])
        if names := names_of_unknown(text):
            self._note(line, f"eval: {', '.join(dict.fromkeys(names))} must not contain quotes or other shell syntax")
        return self.run_text(text, first_line=line)

    def _do_source(self, words: list[str], line: int) -> _Status:
        path = "".join(words[1:2])
        text = self.files.get(os.path.normpath(path))
        if len(words) == 2 and text is not None:
            return self.run_text(text, first_line=line)
        if re.search(r"/bin/activate$|/conda\.sh$|^/etc/", path):
            self._note(line, f"{shown(path)} is assumed to change only paths of programs")
        else:
            self._doubt(line, f"{words[0]} is not followed: {shown(path)}")
        return _SUCCEEDS

    def _do_set(self, words: list[str], line: int) -> _Status:
        rest = words[1:]
        while rest and re.fullmatch(r"[-+]\w+", rest[0]):
            if "a" in rest[0]:
                self.exports_all = rest[0][0] == "-"
            takes_value = rest[0].endswith("o")
            if takes_value and rest[1:2] == ["allexport"]:
                self.exports_all = rest[0][0] == "-"
            rest = rest[2 if takes_value else 1 :]
        if rest[:1] in (["--"], ["-"]):
            self._set_arguments(rest[1:])
        elif rest:
            self._set_arguments(rest)
        return _SUCCEEDS

    def _set_arguments(self, words: Sequence[str]) -> None:
        self.shell.arguments, self.shell.has_arguments = dict(enumerate(words, start=1)), True

    def _do_shift(self, words: list[str], line: int) -> _Status:
        count = words[1] if len(words) > 1 else "1"
        if not count.isdigit():
            self._doubt(line, f"shift {shown(count)} is ignored, because {shown(count)} is not a number")
            return _SUCCEEDS
        try:
            arguments = counted(self.shell.all_arguments())
        except UnknownPartError as error:
            self._doubt(line, f"shift is not followed: {error}")
            return _SUCCEEDS
        if int(count) > len(arguments):  # bash shifts all or none
            return _FAILS
        self.shell.arguments = dict(enumerate(arguments[int(count) :], start=1))
        return _SUCCEEDS

    def _do_exit(self, words: list[str], line: int) -> _Status:
        raise ScriptEndError(f"line {line}: the script ends with exit")

    def _do_return(self, words: list[str], line: int) -> _Status:
        raise _FunctionEndError("".join(words[1:2]))

    def _do_break(self, words: list[str], line: int) -> _Status:
        levels = int(words[1]) if words[1:] and words[1].isdigit() else 1
        raise _LoopEndError(goes_on=words[0] == "continue", levels=levels)

    def _do_unset(self, words: list[str], line: int) -> _Status:
        for word in words[1:]:
            if "f" in words[1] and words[1].startswith("-"):
                self.shell.functions.pop(word, None)
            elif re.fullmatch(r"\w+", word) and word not in self.shell.given:
                self.shell.variables.pop(word, None)
                self.shell.unreadable.pop(word, None)
                self.shell.exported.discard(word)
                self.shell.hidden |= {word}
            elif not word.startswith("-"):
                self._doubt(line, f"unset {word} is not followed")
        return _SUCCEEDS

    def _do_let(self, words: list[str], line: int) -> _Status:
        status = _SUCCEEDS
        for word in words[1:]:
            status = self._arithmetic(word, line, f"let {shown(word)}")
        return status

    def _do_read(self, words: list[str], line: int) -> _Status:
        """Makes the variables that a command sets unreadable: read, mapfile, getopts and printf -v."""
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        if words[0] == "printf":
            names = words[2:3] if words[1:2] == ["-v"] else []
        elif words[0] == "getopts":
            names = [*words[2:3], "OPTARG", "OPTIND"]
        for name in [*names, *(["REPLY", "MAPFILE"] if words[0] != "printf" else [])]:
            if name not in self.shell.given:
                self.shell.unreadable[name] = f"line {line}: {words[0]} is not followed"
        return _Status(True, f"line {line}: the condition {shown(' '.join(words))!r} {_FALSE}")

    def _do_cd(self, words: list[str], line: int) -> _Status:
        self._note(line, f"{shown(' '.join(words))} is left out: relative paths below it refer to that folder")
        return _SUCCEEDS

    def _do_true(self, words: list[str], line: int) -> _Status:
        return _SUCCEEDS

    def _do_false(self, words: list[str], line: int) -> _Status:
        return _FAILS

    # Section: files, strings and other shells.

    def _keep_names(self, redirects: Sequence[Redirect]) -> list[tuple[str, str]]:
        """Records the files that redirections write, whose texts are not known yet. Returns operators and paths."""
        found = []
        for one in redirects:
            if one.operator not in (">", ">>", ">|", "&>", "&>>"):
                continue
            try:
                path = self.expander.path(one.target)
            except UnknownPartError:
                continue
            if not path.startswith("/dev/"):
                found.append((one.operator, path))
                if one.operator not in (">>", "&>>") or path not in self.files:
                    self.files[path] = None
        return found

    def _keep_file(self, node: Simple, words: Sequence[str]) -> None:
        """Keeps the text that echo, cat or tee writes to a file, in case the file is run or read later."""
        kept = {path: self.files.get(path) for path in self.files}
        targets = self._keep_names(node.redirects)
        body = self._document(node.redirects, node.line)
        text = body if words == ["cat"] or words[0] == "tee" else _echoed(words)
        if words[0] in _HARMLESS and words[0] not in _READERS:
            for word in words[1:]:
                if (path := os.path.normpath(word)) in self.files:
                    self.files[path] = None
        if words[0] == "tee" and len(words) > 1:
            targets = [(">>" if "-a" in words else ">", os.path.normpath(words[-1]))]
        for operator, path in targets:
            before = kept.get(path) if operator == ">>" else ""
            if operator == ">>" and path not in kept:
                continue  # the file may exist
            self.files[path] = None if text is None or before is None else before + text

    def _document(self, redirects: Sequence[Redirect], line: int) -> str | None:
        """Returns the text of the last here-document or here-string, or None if it is not known."""
        try:
            for one in reversed(redirects):
                if one.body is not None:
                    return one.body if one.is_literal else self.expander.here_document(one.body, line)
                if one.operator == "<<<":
                    return self.expander.text(one.target) + "\n"
        except UnknownPartError:
            pass
        return None

    def _run_strings(self, node: Simple, fields: list[Segments], stdin: str | None) -> bool:
        """Follows a command that receives other commands: bash -c, a file, stdin, ssh. Returns whether it does."""
        words = [_text(segments) for segments in fields]
        shell = next((index for index, word in enumerate(words) if os.path.basename(word) in _SHELLS), None)
        if shell is not None:
            at = shell + 1
            while at < len(words) and re.fullmatch(r"-\w*|--\w+|-o", words[at]):
                if re.fullmatch(r"-\w*c\w*", words[at]):
                    # Other options may follow -c.
                    at += 1
                    while at < len(words) and words[at].startswith("-"):
                        at += 1
                    if at < len(words):
                        rest = list(map(as_element, fields[at + 1 :]))
                        self._run_child(node, fields[:shell], words[at], rest, shell=fields[shell:at])
                    return True
                at += 1
            if at == len(words) or words[shell + 1 : at][-1:] == ["-s"]:
                text = self._document(node.redirects, node.line) or stdin
                if text is not None:
                    rest = ["bash", *map(as_element, fields[at:])]
                    self._run_child(node, fields[:shell], text, rest, shell=[[("bash", True)], [("-c", True)]])
                    return True
                if not node.redirects and at == len(words) and stdin is None:
                    self._doubt(node.line, f"the commands that {words[shell]} reads are not followed")
                    return True
        known_files = {path for path, text in self.files.items() if text is not None}
        script = next((index for index, word in enumerate(words) if os.path.normpath(word) in known_files), None)
        if script is not None and (script == 0 or os.path.basename(words[0]) not in ("vi", "python", "python3")):
            self._run_file(node, fields, script)
            return True
        if shell is not None and shell == 0 and len(words) > 1:
            self._note(node.line, f"{shown(words[1])} is not read")
            return False
        for index, word in enumerate(words[1:], start=1):
            # A scheduler receives the whole command as one word: ssh host "python pretrain_gpt.py --num-layers 12".
            option, equals, given = word.partition("=")
            is_option = bool(equals) and option in ("--wrap", "--command")
            command = given if is_option else word
            if re.search(r"\.py\s", command) and re.search(r"\s--", command):
                before = [*fields[:index], *([[(option, True)]] if is_option else [])]
                self._run_child(node, before, command, [], shell=[])
                return True
        if words[0] in ("ssh", "sbatch") and (text := self._document(node.redirects, node.line)) is not None:
            if words[0] == "ssh":
                self._run_child(node, fields, text, [], shell=[])
            else:
                self._run_batch(node, fields, text, [])
            return True
        return False

    def _run_file(self, node: Simple, fields: list[Segments], script: int) -> None:
        words = [_text(segments) for segments in fields]
        text, arguments = self.files[os.path.normpath(words[script])] or "", list(map(as_element, fields[script:]))
        before = fields[:script]
        if before and os.path.basename(_text(before[-1])) in _SHELLS:
            before = before[:-1]
        if words[0] == "sbatch":
            self._run_batch(node, before, text, arguments)
        else:
            self._run_child(node, before, text, arguments, shell=[[("bash", True)], [("-c", True)]])

    def _run_batch(self, node: Simple, before: list[Segments], text: str, arguments: Sequence[str]) -> None:
        """Follows the text of a batch script, whose #SBATCH lines become options."""
        options = re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE)
        words = [word for line in options for word in line.split("#")[0].split()]
        before = [before[0], *[[(word, True)] for word in words], *before[1:]]
        self._run_child(node, before, text, arguments, shell=[[("--wrap", True)]])

    def _run_child(
        self, node: Simple, before: list[Segments], text: str, arguments: Sequence[str], *, shell: list[Segments]
    ) -> None:
        """Follows a text in a new shell, which has only exported variables.

        before: words that start the shell. arguments: $0 and the positional parameters.
        """
        outer, line = self.shell, node.line
        is_remote = any(os.path.basename(_text(segments)) in _REMOTE for segments in before)
        wrapper = tuple(quoted_segments(segments) for segments in [*before, *shell]) if before else ()
        names = names_of_unknown(text)
        if wrapper:
            programs = [os.path.basename(_text(segments)) for segments in before]
            if "env" in programs and any(re.match(r"-[iu-]", _text(segments)) for segments in before):
                self._doubt(line, "the options of env are not followed")
            if appending := [program for program in programs if program in _APPENDING]:
                self._doubt(line, f"the words that {appending[0]} appends are not followed")
            if self.parents:
                self._doubt(line, f"{shown(_text(before[0]))} inside another shell is not followed")
            own = [name for name in names if is_remote or name in OF_EACH_NODE or name.startswith("SLURM_")]
            if own:
                self._doubt(line, f"{', '.join(dict.fromkeys(own))} is read before {shown(_text(before[0]))} runs")
        variables = {} if is_remote else {name: outer.variables[name] for name in outer.exported & set(outer.variables)}
        child = replace(
            outer,
            variables={**variables, **outer.given},
            exported=set() if is_remote else set(outer.exported),
            arguments=dict(enumerate(arguments[1:], start=1)),
            has_arguments=True,
            hidden=outer.hidden | (set(outer.variables) - set(variables)),
            functions={},
            unreadable={},
            level=outer.level + bool(wrapper),
        )
        if wrapper:
            self.parents.append((outer, wrapper))
        outer_locals, self.locals = self.locals, []
        self._enter(child)
        try:
            self.run_text(text, first_line=line)
        except ScriptEndError:
            pass
        finally:
            self._enter(outer)
            self.locals = outer_locals
            if wrapper:
                self.parents.pop()

    # Section: launches.

    def _look_for_launch(self, node: Simple, fields: Sequence[Segments]) -> None:
        words = [_text(segments) for segments in fields]
        program = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
        if program is None or not any(word.startswith("--") for word in words[program + 1 :]):
            return
        values = self._environment(self.shell)
        if self.parents:
            outside = self._environment(self.parents[-1][0])
            values = {name: value for name, value in values.items() if outside.get(name) != value}
        doubts = list(self.doubts)
        if appending := [word for word in map(os.path.basename, words[:program]) if word in _APPENDING]:
            doubts.append(f"line {node.line}: the words that {appending[0]} appends are not followed")
        if any(map(has_lost_blanks, fields)):
            doubts.append(f"line {node.line}: blanks in unknown values are not followed")
        # The translator replaces the path of pretrain_gpt.py.
        needed = [word for word in words if word is not words[program] or not word.endswith("pretrain_gpt.py")]
        used = self._used([*needed, *values.values()])
        captured = [self.shell.captures[name] for name in used if name in self.shell.captures]
        doubts += [doubt for capture in captured for doubt in capture.doubts]
        before = {**(outside if self.parents else {}), **values}
        reads = [name for capture in captured for name in capture.reads]
        for name in [*used, *reads]:
            if name in before and before[name] != unknown_part(name):
                doubts.append(f"line {node.line}: {name} has another value before the script sets it")
        lines: dict[int, list[str]] = {0: [], 1: []}
        for capture in captured:
            lines[min(capture.level, 1)] += [f"{capture.name}={capture.source}"] if capture.source else []
        level = self.shell.level
        outer: list[str] = []
        if self.parents:
            outer = [f"export {name}={quoted_value(value)}" for name, value in outside.items()]
            outer = [f"export {text}" for text in lines[0]] + outer
        splitting = {
            name for one in fields if not any(is_quoted for _, is_quoted in one) for name in _alone(_text(one))
        }
        launch_words = tuple(map(ShellWord, fields))
        launch = Launch(
            launch_words[:program],
            launch_words[program],
            launch_words[program + 1 :],
            {name: ShellWord([(value, True)]) for name, value in values.items()},
            tuple(name for name in used if name not in self.shell.captures),
            node.line,
            tuple(dict.fromkeys(doubts)),
            tuple(lines[min(level, 1)]),
            frozenset(splitting),
            tuple(self.shell.assumed),
            self.parents[-1][1] if self.parents else (),
            tuple(outer),
        )
        self.launches.append(launch)

    def _environment(self, shell: Shell) -> dict[str, str]:
        values = {}
        for name in (name for name in shell.variables if name in shell.exported):
            value = shell.variables.get(name)
            if name in shell.unreadable:
                value = shell.capture("UNKNOWN", None, doubts=[shell.unreadable[name]])
            if isinstance(value, str):
                values[name] = value
        return values

    def _used(self, texts: Sequence[str]) -> list[str]:
        """Returns the names of unknown parts in texts, each after the parts that its capture uses."""
        found: dict[str, None] = {}

        def visit(name: str) -> None:
            capture = self.shell.captures.get(name)
            for use in capture.uses if capture is not None else ():
                if use not in found:
                    visit(use)
            found[name] = None

        for text in texts:
            for name in names_of_unknown(text):
                visit(name)
        return list(found)


class _Test:
    """Evaluates [[ ... ]]."""

    def __init__(self, reader: BashReader, node: Condition) -> None:
        self.tokens = list(node.tokens)
        self.expander = reader.expander
        self.shell = reader.shell
        self.line = node.line

    def value(self) -> bool:
        value = self.either()
        if self.tokens:
            raise UnknownPartError("the condition")
        return value

    def either(self) -> bool:
        value = self.both()
        while self.tokens[:1] == ["||"]:
            self.tokens.pop(0)
            value = self.both() or value
        return value

    def both(self) -> bool:
        value = self.negated()
        while self.tokens[:1] == ["&&"]:
            self.tokens.pop(0)
            value = self.negated() and value
        return value

    def negated(self) -> bool:
        if self.tokens[:1] == ["!"]:
            self.tokens.pop(0)
            return not self.negated()
        if self.tokens[:1] == ["("]:
            self.tokens.pop(0)
            value = self.either()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise UnknownPartError("the condition")
            return value
        return self.primary()

    def primary(self) -> bool:
        if not self.tokens:
            raise UnknownPartError("the condition")
        first = self.tokens.pop(0)
        operator = self.tokens[0] if self.tokens else None
        if (
            isinstance(first, str)
            and first.startswith("-")
            and not (isinstance(operator, str) and operator[0] in "=!<>")
        ):
            if not self.tokens:
                raise UnknownPartError("the condition")
            operand = self.tokens.pop(0)
            return _unary(first, self.text(operand), self.shell)
        if not isinstance(operator, str) or operator in ("&&", "||", ")"):
            return bool(self.text(first))
        self.tokens.pop(0)
        if not self.tokens:
            raise UnknownPartError("the condition")
        second = self.tokens.pop(0)
        return self.binary(first, operator, second)

    def binary(self, first: Word | str, operator: str, second: Word | str) -> bool:
        if operator in _COMPARISONS:
            left, right = (self.expander.number(self.text(one), self.line) for one in (first, second))
            return _COMPARISONS[operator](left, right)
        left_text = self.text(first)
        if operator in ("=", "==", "!="):
            pattern = re.escape(second) if isinstance(second, str) else self.expander.pattern(second)
            return (re.fullmatch(pattern, left_text) is not None) == (operator != "!=")
        if operator == "=~" and isinstance(second, Word) and re.fullmatch(r"[\w.^$*+?|()\[\]{}/-]+", second.text):
            # Signs that mean the same in Python. A $ before a name or brace is an expansion.
            if not re.search(r"\$[\w{(]|\{|\\", second.text):
                return re.search(second.text, left_text) is not None
        raise UnknownPartError(f"the condition {operator}")

    def text(self, token: Word | str) -> str:
        return token if isinstance(token, str) else self.shell.without_outside(self.expander.text(token))


def _plain_test(words: Sequence[str], shell: Shell) -> bool:
    """Evaluates the arguments of `test`, by their number as POSIX defines it."""
    if len(words) == 0:
        return False
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 3 and words[1] in ("=", "==", "!=", "-a", "-o", *_COMPARISONS):
        left, operator, right = words
        if operator in ("-a", "-o"):
            return bool(left and right) if operator == "-a" else bool(left or right)
        if operator in _COMPARISONS:
            if not all(re.fullmatch(r"\s*[-+]?\d+\s*", one) for one in (left, right)):
                raise UnknownPartError(f"{left} {operator} {right}")
            return _COMPARISONS[operator](int(left), int(right))
        return (left == right) == (operator != "!=")
    if words[0] == "!" and len(words) <= 4:
        return not _plain_test(words[1:], shell)
    if len(words) == 2:
        return _unary(words[0], words[1], shell)
    for operator in ("-o", "-a"):
        if operator in words[1:-1] and not set(words) & {"(", ")"}:
            at = words.index(operator, 1)
            both = (_plain_test(words[:at], shell), _plain_test(words[at + 1 :], shell))
            return any(both) if operator == "-o" else all(both)
    raise UnknownPartError("a condition of many words")


def _unary(operator: str, operand: str, shell: Shell) -> bool:
    if operator in ("-z", "-n"):
        return bool(operand) == (operator == "-n")
    if operator == "-v" and re.fullmatch(r"\w+", operand):
        if operand not in shell.variables and operand not in shell.hidden:
            shell.assumed[operand] = None
        return operand in shell.variables
    raise UnknownPartError(f"{operator} {operand}")


def _text(segments: Segments) -> str:
    return "".join(text for text, _ in segments)


def _echoed(words: Sequence[str]) -> str | None:
    """Returns the output of a plain echo, or None for other commands."""
    text = echoed(words[1:]) if words[:1] == ["echo"] else None
    return None if text is None else text + ("" if words[1:2] == ["-n"] else "\n")


def _alone(text: str) -> list[str]:
    names = names_of_unknown(text)
    return names if shown(text) == "".join(f"${{{name}}}" for name in names) else []


def _words_of_test(tokens: Sequence[Word | str]) -> str:
    return " ".join(token if isinstance(token, str) else token.text for token in tokens)


def _is_negated(condition: Commands) -> bool:
    """Returns whether the last command of a condition is negated, so that its assumed failure counts as true."""
    return bool(condition) and condition[-1].commands[-1].is_negated


def _guess_of(condition: Commands, *, succeeds: bool) -> str:
    """Describes the last command of a condition, whose status is not known."""
    pipeline = condition[-1].commands[-1]
    command = pipeline.commands[-1]
    words = [word.text for word in command.words if isinstance(word, Word)] if isinstance(command, Simple) else []
    return f"line {pipeline.line}: the condition {' '.join(words)!r} {_FALSE}"


def _changes(commands: Commands, *, beyond_assignments: bool) -> bool:
    """Returns whether commands may change later commands: assign, define or run something that does.

    beyond_assignments: also counts commands that end the script or run programs.
    """
    return any(
        _node_changes(node, beyond_assignments=beyond_assignments)
        for and_or in commands
        for pipeline in and_or.commands
        for node in pipeline.commands
    )


def _only_exits(commands: Commands) -> bool:
    """Returns whether commands end the script and change nothing else, so that no later command depends on them."""
    if not commands or _changes(commands[:-1], beyond_assignments=True) or commands[-1].operators:
        return False
    node = commands[-1].commands[0].commands[0]
    if len(commands[-1].commands[0].commands) > 1:
        return False
    if isinstance(node, Redirected):
        node = node.command
    if isinstance(node, Group) and not node.is_subshell:
        return _only_exits(node.body)
    return isinstance(node, Simple) and any(isinstance(one, Word) and one.text == "exit" for one in node.words[:1])


def _node_changes(node: Node, *, beyond_assignments: bool) -> bool:
    def inner(*parts: Commands) -> bool:
        return any(_changes(part, beyond_assignments=beyond_assignments) for part in parts)

    match node:
        case Simple():
            if not node.words:
                return bool(node.assignments)
            first = node.words[0]
            name = os.path.basename(first.text) if isinstance(first, Word) else ""
            if name in _HARMLESS:
                return any(isinstance(word, Word) and word.text == "-v" for word in node.words[1:2])
            changing = name in DECLARATIONS or name in _ASSIGNING
            return changing or beyond_assignments
        case Redirected():
            return _node_changes(node.command, beyond_assignments=beyond_assignments)
        case Pipeline():
            return any(_node_changes(one, beyond_assignments=beyond_assignments) for one in node.commands)
        case If():
            return inner(*[body for _, body in node.branches], node.otherwise)
        case Loop() | For() | CountingFor() | Group():
            return inner(node.body)
        case Case():
            return inner(*[body for _, body, _ in node.items])
        case Arithmetic():
            return True
        case Function():
            return True
        case Condition():
            return False


# Builtins that change variables or positional parameters.
_ASSIGNING = frozenset("eval source . set shift unset let read readarray mapfile getopts".split())
_BUILTINS: Mapping[str, Callable[[BashReader, list[str], int], _Status]] = {
    "eval": BashReader._do_eval,
    "source": BashReader._do_source,
    ".": BashReader._do_source,
    "set": BashReader._do_set,
    "shift": BashReader._do_shift,
    "exit": BashReader._do_exit,
    "return": BashReader._do_return,
    "break": BashReader._do_break,
    "continue": BashReader._do_break,
    "unset": BashReader._do_unset,
    "let": BashReader._do_let,
    "read": BashReader._do_read,
    "readarray": BashReader._do_read,
    "mapfile": BashReader._do_read,
    "getopts": BashReader._do_read,
    "cd": BashReader._do_cd,
    "pushd": BashReader._do_cd,
    "true": BashReader._do_true,
    ":": BashReader._do_true,
    "false": BashReader._do_false,
}
