"""Parses bash: a script becomes a tree of commands, whose words keep their source text. Nothing is evaluated.

bash_words.py expands the words, bash_reader.py follows the commands. A construct outside the grammar below raises
BashSyntaxError with its line, so that no command is ever read differently from bash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class BashSyntaxError(ValueError):
    """Raised for a text that this grammar does not cover. line: starts at 1."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(f"line {line}: cannot interpret {what}")
        self.line = line


@dataclass(frozen=True)
class Word:
    """An argument with its quotes and expansions."""

    text: str
    line: int


@dataclass(frozen=True)
class Assignment:
    """NAME=value, NAME[index]=value or NAME+=value. value: a list for NAME=(...)."""

    name: str
    index: str | None
    appends: bool
    value: Word | tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Redirect:
    """A redirection. body: the text of a here-document, whose expansions count unless is_literal."""

    operator: str
    target: Word
    body: str | None = None
    is_literal: bool = False


@dataclass
class Simple:
    """A command with its arguments. Arguments of export, local and so on may be assignments."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word | Assignment] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass(frozen=True)
class Pipeline:
    """Commands connected by |."""

    line: int
    commands: tuple[Node, ...]
    is_negated: bool


@dataclass(frozen=True)
class AndOr:
    """Commands connected by && and ||, from left to right. operators[i] precedes commands[i + 1]."""

    line: int
    commands: tuple[Pipeline, ...]
    operators: tuple[str, ...]
    is_background: bool


@dataclass(frozen=True)
class If:
    """Conditions with their commands, in order. otherwise: the commands after else."""

    line: int
    branches: tuple[tuple[Commands, Commands], ...]
    otherwise: Commands


@dataclass(frozen=True)
class Loop:
    """while and until."""

    line: int
    condition: Commands
    body: Commands
    is_until: bool


@dataclass(frozen=True)
class For:
    """for NAME in words. words: None for the positional parameters."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: Commands


@dataclass(frozen=True)
class CountingFor:
    """for ((first; condition; step))."""

    line: int
    first: str
    condition: str
    step: str
    body: Commands


@dataclass(frozen=True)
class Case:
    """case subject in ... items: patterns, commands and the terminator, such as ;;."""

    line: int
    subject: Word
    items: tuple[tuple[tuple[Word, ...], Commands, str], ...]


@dataclass(frozen=True)
class Group:
    """{ ... } or ( ... )."""

    line: int
    body: Commands
    is_subshell: bool


@dataclass(frozen=True)
class Arithmetic:
    """(( text ))."""

    line: int
    text: str


@dataclass(frozen=True)
class Condition:
    """[[ ... ]]. tokens: words, and operators as str."""

    line: int
    tokens: tuple[Word | str, ...]


@dataclass(frozen=True)
class Function:
    """A function definition."""

    line: int
    name: str
    body: Node


@dataclass(frozen=True)
class Redirected:
    """A compound command with redirections."""

    line: int
    command: Node
    redirects: tuple[Redirect, ...]


Node = Simple | Pipeline | If | Loop | For | CountingFor | Case | Group | Arithmetic | Condition | Function | Redirected
Commands = tuple[AndOr, ...]

DECLARATIONS = frozenset(("export", "local", "declare", "typeset", "readonly"))
# An index may contain ${#NAME[@]} and other elements.
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^\[\]\n]|\[[^\[\]\n]*\])*)\])?(\+?)=")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<>|<&|>>|>\||>&|<|>)")
_OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "\n", ";", "&", "|", "(", ")")
_META = " \t\n;&|()<>"
_CLOSERS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))
_UNSUPPORTED = frozenset(("select", "coproc"))


def parse_script(text: str, *, first_line: int = 1) -> Commands:
    """Parses a whole script."""
    return _Parser(text, first_line=first_line).script()


def end_of_expansion(text: str, start: int, *, is_quoted: bool) -> int:
    """Returns the end of the expansion at text[start], which is $ or a backtick. A $ alone ends after itself."""
    parser = _Parser(text)
    parser.at = start
    parser.skip_expansion(is_quoted=is_quoted)
    return parser.at


def end_of_double_quotes(text: str, start: int) -> int:
    """Returns the end of the string whose opening quote is text[start]."""
    parser = _Parser(text)
    parser.at = start
    parser.skip_double_quotes()
    return parser.at


class _Parser:
    """A recursive-descent parser. at: the position in the text."""

    def __init__(self, text: str, *, first_line: int = 1) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.pending: list[tuple[list[Redirect], int, str, Word]] = []

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def fail(self, what: str | None = None) -> BashSyntaxError:
        rest = self.text[self.at :].partition("\n")[0][:40]
        return BashSyntaxError(self.line, what or (repr(rest) if rest else "the end of the script"))

    # Section: lists of commands.

    def script(self) -> Commands:
        commands = self.commands()
        if self.at < len(self.text):
            raise self.fail()
        self.read_here_documents()
        return commands

    def commands(self) -> Commands:
        """Parses commands up to a word or operator that closes them."""
        found: list[AndOr] = []
        while True:
            self.skip_newlines()
            operator = self.operator()
            if self.at >= len(self.text) or operator in (")", ";;", ";&", ";;&") or self.keyword() in _CLOSERS:
                return tuple(found)
            found.append(self.and_or())

    def and_or(self) -> AndOr:
        line, commands, operators = self.line, [self.pipeline()], []
        while self.operator() in ("&&", "||"):
            operators.append(self.take_operator())
            self.skip_newlines()
            commands.append(self.pipeline())
        ends = self.operator()
        if ends in (";", "&", "\n"):
            self.take_operator()
        elif ends == "(" or (ends is None and self.at < len(self.text) and self.keyword() not in _CLOSERS):
            raise self.fail()
        return AndOr(line, tuple(commands), tuple(operators), ends == "&")

    def pipeline(self) -> Pipeline:
        line, is_negated = self.line, False
        while self.keyword() in ("!", "time"):
            if self.take_word().text == "!":
                is_negated = not is_negated
            elif self.keyword() == "-p":
                self.take_word()
        commands = [self.command()]
        while self.operator() in ("|", "|&"):
            self.take_operator()
            self.skip_newlines()
            commands.append(self.command())
        return Pipeline(line, tuple(commands), is_negated)

    def command(self) -> Node:
        line, keyword = self.line, self.keyword()
        if keyword in _UNSUPPORTED:
            raise self.fail()
        if self.operator() == "(":
            if self.text.startswith("((", self.at) and (arithmetic := self.arithmetic()) is not None:
                return self.redirected(Arithmetic(line, arithmetic))
            self.take_operator()
            body = self.commands()
            self.expect(")")
            return self.redirected(Group(line, body, is_subshell=True))
        compound = {
            "{": self.group,
            "if": self.condition,
            "while": self.loop,
            "until": self.loop,
            "for": self.counted,
            "case": self.case,
            "[[": self.test,
            "function": self.function,
        }.get(keyword)
        return self.simple() if compound is None else self.redirected(compound())

    def redirected(self, node: Node) -> Node:
        redirects: list[Redirect] = []
        while self.redirect(redirects):
            pass
        return Redirected(node.line, node, tuple(redirects)) if redirects else node

    # Section: compound commands.

    def group(self) -> Node:
        line = self.line
        self.expect_word("{")
        body = self.commands()
        self.expect_word("}")
        return Group(line, body, is_subshell=False)

    def condition(self) -> Node:
        line, branches = self.line, []
        self.expect_word("if")
        while True:
            test = self.commands()
            self.expect_word("then")
            branches.append((test, self.commands()))
            if self.keyword() != "elif":
                break
            self.expect_word("elif")
        otherwise: Commands = ()
        if self.keyword() == "else":
            self.expect_word("else")
            otherwise = self.commands()
        self.expect_word("fi")
        return If(line, tuple(branches), otherwise)

    def loop(self) -> Node:
        line, kind = self.line, self.take_word().text
        test = self.commands()
        return Loop(line, test, self.body(), kind == "until")

    def body(self) -> Commands:
        self.skip_newlines()
        if self.operator() == ";":
            self.take_operator()
            self.skip_newlines()
        self.expect_word("do")
        body = self.commands()
        self.expect_word("done")
        return body

    def counted(self) -> Node:
        line = self.line
        self.expect_word("for")
        self.skip_blanks()
        if self.text.startswith("((", self.at):
            parts = (self.arithmetic() or "").split(";")
            if len(parts) != 3:
                raise self.fail()
            first, condition, step = parts
            return CountingFor(line, first, condition, step, self.body())
        name = self.take_word().text
        self.skip_newlines()
        words: tuple[Word, ...] | None = None
        if self.keyword() == "in":
            self.take_word()
            found = []
            while self.operator() is None and self.at < len(self.text):
                found.append(self.take_word())
            words = tuple(found)
        return For(line, name, words, self.body())

    def case(self) -> Node:
        line, items = self.line, []
        self.expect_word("case")
        subject = self.take_word()
        self.skip_newlines()
        self.expect_word("in")
        self.skip_newlines()
        while self.keyword() != "esac":
            if self.operator() == "(":
                self.take_operator()
            patterns = [self.take_word()]
            while self.operator() == "|":
                self.take_operator()
                patterns.append(self.take_word())
            self.expect(")")
            body, ends = self.commands(), self.operator()
            if ends in (";;", ";&", ";;&"):
                self.take_operator()
            items.append((tuple(patterns), body, ends or ";;"))
            self.skip_newlines()
        self.expect_word("esac")
        return Case(line, subject, tuple(items))

    def test(self) -> Node:
        line = self.line
        self.expect_word("[[")
        tokens: list[Word | str] = []
        while True:
            self.skip_newlines()
            if tokens[-1:] == ["=~"]:
                tokens.append(self.regular_expression())
                continue
            operator = self.operator()
            if operator in ("&&", "||", "(", ")"):
                tokens.append(self.take_operator())
            elif self.text[self.at : self.at + 1] in ("<", ">"):
                tokens.append(self.text[self.at])
                self.at += 1
            else:
                word = self.take_word()
                if word.text == "]]":
                    return Condition(line, tuple(tokens))
                tokens.append(word.text if re.fullmatch(r"!|-\w+|==?|!=|=~", word.text) else word)

    def regular_expression(self) -> Word:
        line, start, depth = self.line, self.at, 0
        while self.at < len(self.text) and (depth or self.text[self.at] not in " \t\n"):
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.skip_part()
        return Word(self.text[start : self.at], line)

    def function(self) -> Node:
        line = self.line
        self.expect_word("function")
        name = self.take_word().text
        if self.operator() == "(":
            self.take_operator()
            self.expect(")")
        self.skip_newlines()
        return Function(line, name, self.command())

    def arithmetic(self) -> str | None:
        """Takes `((...))` and returns its text, or returns None if the parentheses are two subshells."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            mark = self.text[self.at]
            if depth == 2 and mark == ")":
                if not self.text.startswith("))", self.at):
                    break
                self.at += 2
                return self.text[start + 2 : self.at - 2]
            depth += {"(": 1, ")": -1}.get(mark, 0)
            if mark in "()":
                self.at += 1
            else:
                self.skip_part()
        self.at = start
        return None

    # Section: simple commands.

    def simple(self) -> Node:
        command = Simple(self.line)
        while True:
            self.skip_blanks()
            if self.redirect(command.redirects):
                continue
            if self.at >= len(self.text) or self.operator() is not None:
                break
            declares = any(isinstance(word, Word) and word.text in DECLARATIONS for word in command.words[:1])
            match = _ASSIGNMENT.match(self.text, self.at)
            if match is not None and (not command.words or declares):
                assignment = self.assignment(match)
                if command.words:
                    command.words.append(assignment)
                else:
                    command.assignments.append(assignment)
                continue
            command.words.append(self.take_word())
            if len(command.words) == 1 and not command.assignments and self.operator() == "(":
                name = command.words[0]
                assert isinstance(name, Word)
                self.take_operator()
                self.expect(")")
                self.skip_newlines()
                return Function(command.line, name.text, self.command())
        if not (command.words or command.assignments or command.redirects):
            raise self.fail()
        return command

    def assignment(self, match: re.Match[str]) -> Assignment:
        line = self.line
        self.at = match.end()
        value: Word | tuple[Word, ...]
        if self.text.startswith("(", self.at):
            self.at += 1
            found = []
            while True:
                self.skip_newlines()
                if self.text.startswith(")", self.at):
                    self.at += 1
                    break
                found.append(self.take_word())
            value = tuple(found)
        else:
            value = self.word()
        return Assignment(match[1], match[2], match[3] == "+", value, line)

    def redirect(self, redirects: list[Redirect]) -> bool:
        self.skip_blanks()
        match = _REDIRECT.match(self.text, self.at)
        if match is None or self.text.startswith(("<(", ">("), self.at):
            return False
        self.at = match.end()
        self.skip_blanks()
        target = self.take_word()
        redirects.append(Redirect(match[1], target))
        if match[1] in ("<<", "<<-"):
            self.pending.append((redirects, len(redirects) - 1, match[1], target))
        return True

    def read_here_documents(self) -> None:
        """Reads the bodies of here-documents, which follow the line that names them."""
        pending, self.pending = self.pending, []
        for redirects, index, operator, target in pending:
            end = re.sub(r"['\"\\]", "", target.text)
            lines = []
            while self.at < len(self.text):
                line, newline, _ = self.text[self.at :].partition("\n")
                self.at += len(line) + len(newline)
                line = line.lstrip("\t") if operator == "<<-" else line
                if line == end:
                    break
                lines.append(f"{line}\n")
            redirects[index] = Redirect(operator, target, "".join(lines), is_literal=end != target.text)

    # Section: words and operators.

    def skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#" and (self.at == 0 or self.text[self.at - 1] in _META):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def skip_newlines(self) -> None:
        self.skip_blanks()
        while self.text.startswith("\n", self.at):
            self.at += 1
            self.read_here_documents()
            self.skip_blanks()

    def operator(self) -> str | None:
        self.skip_blanks()
        if self.text.startswith(("&>", "<(", ">("), self.at):
            return None
        return next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None)

    def take_operator(self) -> str:
        operator = self.operator()
        assert operator is not None
        self.at += len(operator)
        if operator == "\n":
            self.read_here_documents()
        return operator

    def expect(self, operator: str) -> None:
        self.skip_newlines()
        if self.operator() != operator:
            raise self.fail()
        self.take_operator()

    def expect_word(self, text: str) -> None:
        self.skip_newlines()
        if self.keyword() != text:
            raise self.fail()
        self.take_word()

    def keyword(self) -> str:
        """Returns the next word's text without taking it; "" at an operator."""
        self.skip_blanks()
        match = re.compile(r"[^\s;&|()<>'\"$`\\]+").match(self.text, self.at)
        ends = match is not None and self.text[match.end() : match.end() + 1] in ("", *_META)
        return match[0] if match is not None and ends else ""

    def take_word(self) -> Word:
        self.skip_blanks()
        word = self.word()
        if not word.text:
            raise self.fail()
        return word

    def word(self) -> Word:
        line, start = self.line, self.at
        while self.at < len(self.text) and (
            self.text[self.at] not in _META or (self.at == start and self.text.startswith(("<(", ">("), self.at))
        ):
            self.skip_part()
        if self.text.startswith("(", self.at) and self.at > start and self.text[self.at - 1] in "?*+@!=":
            raise self.fail()  # an extended pattern
        return Word(self.text[start : self.at], line)

    def skip_part(self) -> None:
        """Skips a character, or a quoted text or expansion."""
        mark = self.text[self.at]
        if mark == "\\":
            self.at += 2
        elif mark == "'":
            self.skip_to("'", self.at + 1)
        elif mark == '"':
            self.skip_double_quotes()
        elif self.text.startswith(("<(", ">("), self.at):
            self.at += 2
            self.commands()
            self.expect(")")
        elif mark in "$`":
            self.skip_expansion(is_quoted=False)
        else:
            self.at += 1

    def skip_to(self, mark: str, start: int) -> None:
        end = self.text.find(mark, start)
        if end < 0:
            raise self.fail("a quote without its end")
        self.at = end + 1

    def skip_double_quotes(self) -> None:
        line = self.line
        self.at += 1
        while self.at < len(self.text):
            mark = self.text[self.at]
            if mark == '"':
                self.at += 1
                return
            if mark == "\\":
                self.at += 2
            elif mark in "$`":
                self.skip_expansion(is_quoted=True)
            else:
                self.at += 1
        raise BashSyntaxError(line, "a quote without its end")

    def skip_expansion(self, *, is_quoted: bool) -> None:
        if self.text[self.at] == "`":
            self.at += 1
            while not self.text.startswith("`", self.at):
                if self.at >= len(self.text):
                    raise self.fail("a quote without its end")
                self.at += 2 if self.text[self.at] == "\\" else 1
            self.at += 1
            return
        self.at += 1
        rest = self.text[self.at : self.at + 2]
        if rest == "((" and self.arithmetic() is not None:
            return
        if rest[:1] == "(":
            self.at += 1
            outer, self.pending = self.pending, []
            self.commands()
            self.expect(")")
            self.pending = outer
        elif rest[:1] == "{":
            self.skip_braces(is_quoted=is_quoted)
        elif rest[:1] == "[":
            self.skip_to("]", self.at + 1)
        elif rest[:1] == "'" and not is_quoted:
            self.at += 1
            while not self.text.startswith("'", self.at):
                if self.at >= len(self.text):
                    raise self.fail("a quote without its end")
                self.at += 2 if self.text[self.at] == "\\" else 1
            self.at += 1
        elif rest[:1] == '"' and not is_quoted:
            self.skip_double_quotes()
        elif match := re.compile(r"\w+|[@*#?$!-]").match(self.text, self.at):
            self.at = self.at + 1 if match[0][0].isdigit() else match.end()

    def skip_braces(self, *, is_quoted: bool) -> None:
        line = self.line
        self.at += 1
        while self.at < len(self.text):
            mark = self.text[self.at]
            if mark == "}":
                self.at += 1
                return
            if mark == "\\":
                self.at += 2
            elif mark == '"':
                self.skip_double_quotes()
            elif mark == "'" and not is_quoted:
                self.skip_to("'", self.at + 1)
            elif mark in "$`":
                self.skip_expansion(is_quoted=is_quoted)
            else:
                self.at += 1
        raise BashSyntaxError(line, "${ without }")
