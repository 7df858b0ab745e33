"""Values of bash scripts whose parts may be unknown, and operations on them: patterns, numbers, quoting.

bash_words.py expands words to such values.

[Note: unknown parts] A value is a str. An unknown part, such as the output of a command, is a name between two marks,
which no script contains. Operations that would depend on an unknown part raise UnknownPartError. The first mark tells
how bash has split the part: not yet; into several or no elements of an array (a list part); or into elements that were
joined again by blanks (a joined part). A list part remains outside quotes in source text, also in "${A[@]}".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping

_BEGIN, _LIST, _JOINED, _END = "\ue000", "\ue001", "\ue002", "\ue003"
UNKNOWN_PART = re.compile(f"[{_BEGIN}{_LIST}{_JOINED}]([^{_END}]*){_END}")
_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "xdigit": "0-9a-fA-F",
}
Value = str | dict[int, str]


class UnknownPartError(Exception):
    """Raised by an operation that depends on an unknown part, or on a construct that is not evaluated."""


def unknown_part(name: str) -> str:
    """Returns a text that consists of one unknown part."""
    return f"{_BEGIN}{name}{_END}"


def has_marks(text: str) -> bool:
    """Returns whether a text contains the marks, which scripts must not."""
    return re.search(f"[{_BEGIN}-{_END}]", text) is not None


def names_of_unknown(text: str) -> list[str]:
    """Returns the names of a value's unknown parts."""
    return UNKNOWN_PART.findall(text)


def shown(text: str) -> str:
    """Returns a value with its unknown parts as ${NAME}."""
    return UNKNOWN_PART.sub(r"${\1}", text)


def known(text: str) -> str:
    """Returns `text`. Raises UnknownPartError if a part is unknown."""
    if names := names_of_unknown(text):
        raise UnknownPartError(f"{', '.join(names)} is not known")
    return text


def as_element(segments: list[tuple[str, bool]]) -> str:
    """Returns an argument as an element of an array, in which parts outside quotes become list parts."""
    return "".join(text if is_quoted else re.sub(f"[{_BEGIN}{_JOINED}]", _LIST, text) for text, is_quoted in segments)


def joined(values: Iterable[str]) -> str:
    """Joins elements by blanks."""
    return " ".join(values).replace(_LIST, _JOINED)


def counted(values: list[str]) -> list[str]:
    """Returns elements whose number is needed. Raises UnknownPartError if a list part makes it unknown."""
    for value in values:
        if _LIST in value:
            raise UnknownPartError(f"the number of words in {', '.join(names_of_unknown(value))} is not known")
    return values


def has_lost_blanks(segments: list[tuple[str, bool]]) -> bool:
    """Returns whether a joined part is in quotes, so that the blanks inside it would differ from bash's."""
    return any(is_quoted and _JOINED in text for text, is_quoted in segments)


def quoted_value(text: str) -> str:
    """Returns source text for which bash yields this value as one word."""
    if not has_marks(text):
        return shlex.quote(text)
    return '"' + UNKNOWN_PART.sub(r"${\1}", re.sub(r'(["`\\$])', r"\\\1", text)) + '"'


def quoted_segments(segments: list[tuple[str, bool]]) -> str:
    """Returns source text of a word. segments: text, and whether its unknown parts and patterns were in quotes."""
    text = "".join(text for text, _ in segments)
    if _LIST not in text and all(is_quoted or not has_marks(part) for part, is_quoted in segments):
        globs = any(not is_quoted and re.search(r"[*?\[]", part) for part, is_quoted in segments)
        if not globs or "(" in text or text.startswith("-") or has_marks(text):
            return quoted_value(text)
        return "".join(shlex.quote(part) if is_quoted else _escaped(part) for part, is_quoted in segments if part)
    result = ""
    for part, is_quoted in segments:
        at = 0
        for match in [*UNKNOWN_PART.finditer(part), None]:
            end = len(part) if match is None else match.start()
            result += shlex.quote(part[at:end]) if end > at else ""
            if match is not None:
                is_split = not is_quoted or match[0][0] == _LIST
                result += f"${{{match[1]}}}" if is_split else f'"${{{match[1]}}}"'
                at = match.end()
    return result or "''"


def _escaped(text: str) -> str:
    """Escapes everything but patterns for file names, which bash expands when the command runs."""
    return re.sub(r"([^\w@%+=:,./*?\[\]-])", r"\\\1", text)


# Section: patterns.


def regex_of_pattern(segments: list[tuple[str, bool]]) -> str:
    """Converts a pattern to a regular expression. segments: text, and whether it was quoted, which makes it literal."""
    result = ""
    for text, is_quoted in segments:
        known(text)
        result += re.escape(text) if is_quoted else _regex(text)
    return f"(?s:{result})"


def _regex(text: str) -> str:
    result, at = "", 0
    while at < len(text):
        mark = text[at]
        at += 1
        if mark == "*":
            result += ".*"
        elif mark == "?":
            result += "."
        elif mark == "\\" and at < len(text):
            result += re.escape(text[at])
            at += 1
        elif mark == "[" and (match := re.compile(r"([!^]?)(\]?(?:\[:\w+:\]|[^\]])*)\]").match(text, at)):
            inner = re.sub(r"([\\\[&~|])", r"\\\1", re.sub(r"\[:(\w+):\]", _class, match[2]))
            inner = inner.replace("\0", "\\") if "\0" in inner else inner
            result += f"[{'^' if match[1] else ''}{inner}]"
            at = match.end()
        else:
            if mark in "?*+@!" and text[at : at + 1] == "(":
                raise UnknownPartError("an extended pattern")
            result += re.escape(mark)
    return result


def _class(match: re.Match[str]) -> str:
    if match[1] not in _CLASSES:
        raise UnknownPartError(f"the class {match[0]}")
    return _CLASSES[match[1]].replace("\\", "\0")


def cut(value: str, pattern: str, operator: str) -> str:
    """Removes the shortest (#, %) or longest (##, %%) prefix or suffix that the regular expression matches."""
    ends = range(len(value) + 1)
    matches = re.compile(pattern).fullmatch
    if operator.startswith("#"):
        found = [end for end in ends if matches(value[:end])]
        return value[(max if operator == "##" else min)(found) :] if found else value
    found = [start for start in ends if matches(value[start:])]
    return value[: (min if operator == "%%" else max)(found)] if found else value


def replaced(value: str, pattern: str, new: str, *, mode: str) -> str:
    """Replaces the longest match: the first one, all (mode "/"), at the start ("#") or at the end ("%")."""
    if mode == "#":
        ends = [end for end in range(len(value), -1, -1) if re.fullmatch(pattern, value[:end])]
        return new + value[ends[0] :] if ends else value
    if mode == "%":
        starts = [start for start in range(len(value) + 1) if re.fullmatch(pattern, value[start:])]
        return value[: starts[0]] + new if starts else value
    result, at = "", 0
    while at < len(value):
        end = next((end for end in range(len(value), at, -1) if re.fullmatch(pattern, value[at:end])), None)
        if end is None:
            result += value[at]
            at += 1
            continue
        result += new
        at = end
        if mode != "/":
            break
    return result + value[at:]


# Section: numbers.

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
_PRECEDENCE = {
    "||": 1,
    "&&": 2,
    "|": 3,
    "^": 4,
    "&": 5,
    "==": 6,
    "!=": 6,
    "<": 7,
    ">": 7,
    "<=": 7,
    ">=": 7,
    "<<": 8,
    ">>": 8,
    "+": 9,
    "-": 9,
    "*": 10,
    "/": 10,
    "%": 10,
    "**": 11,
}


class Calculator:
    """Evaluates bash's integer arithmetic. look_up returns a variable's text, and assign sets it."""

    def __init__(self, look_up: Callable[[str], str], assign: Callable[[str, str], None]) -> None:
        self.look_up = look_up
        self.assign = assign
        self.depth = 0

    def value(self, text: str) -> int:
        """Returns the value. Raises UnknownPartError for other text than the supported arithmetic."""
        self.depth += 1
        if self.depth > 50:
            raise UnknownPartError("arithmetic that refers to itself")
        tokens, at = [], 0
        text = known(text).rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise UnknownPartError(f"the arithmetic {text[:40]!r}")
            tokens.append(match[1])
            at = match.end()
        expression = _Expression(tokens, self)
        result = expression.comma() if tokens else 0
        if expression.tokens:
            raise UnknownPartError(f"the arithmetic {text[:40]!r}")
        self.depth -= 1
        return result

    def of_variable(self, name: str) -> int:
        """Returns a variable's value, whose text is an expression itself."""
        return self.value(self.look_up(name))


class _Expression:
    def __init__(self, tokens: list[str], calculator: Calculator) -> None:
        self.tokens = tokens
        self.calculator = calculator

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self) -> str:
        if not self.tokens:
            raise UnknownPartError("incomplete arithmetic")
        return self.tokens.pop(0)

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise UnknownPartError(f"arithmetic without {token}")

    def comma(self) -> int:
        value = self.assignment()
        while self.next() == ",":
            self.take()
            value = self.assignment()
        return value

    def assignment(self) -> int:
        name = self.next()
        operator = self.tokens[1] if len(self.tokens) > 1 else ""
        if re.match(r"[A-Za-z_]", name) and re.fullmatch(r"(<<|>>|[-+*/%&|^])?=", operator):
            self.take()
            self.take()
            value = self.assignment()
            if operator != "=":
                value = _apply(operator[:-1], self.calculator.of_variable(name), value)
            self.calculator.assign(name, str(value))
            return value
        return self.choice()

    def choice(self) -> int:
        condition = self.binary(1)
        if self.next() != "?":
            return condition
        self.take()
        first = self.side(self.assignment, is_used=bool(condition))
        self.expect(":")
        second = self.side(self.choice, is_used=not condition)
        return first if condition else second

    def side(self, parse: Callable[[], int], *, is_used: bool) -> int:
        """Parses an operand, whose assignments must not happen if it is not used."""
        if is_used:
            return parse()
        outer, self.calculator = self.calculator, Calculator(lambda _: "1", lambda _name, _value: None)
        try:
            return parse()
        finally:
            self.calculator = outer

    def binary(self, lowest: int) -> int:
        left = self.unary()
        while (precedence := _PRECEDENCE.get(self.next(), 0)) >= lowest:
            operator = self.take()
            if operator in ("&&", "||"):
                is_used = bool(left) == (operator == "&&")
                right = self.side(lambda level=precedence + 1: self.binary(level), is_used=is_used)  # type: ignore[misc]
                left = int(bool(right)) if is_used else int(bool(left))
            else:
                # ** groups from the right.
                left = _apply(operator, left, self.binary(precedence + (operator != "**")))
        return left

    def unary(self) -> int:
        token = self.take()
        if token in ("+", "-", "!", "~"):
            value = self.unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token in ("++", "--"):
            name = self.take()
            value = self.calculator.of_variable(name) + (1 if token == "++" else -1)
            self.calculator.assign(name, str(value))
            return value
        if token == "(":
            value = self.comma()
            self.expect(")")
            return value
        if re.match(r"[A-Za-z_]", token):
            value = self.calculator.of_variable(token)
            if self.next() in ("++", "--"):
                self.calculator.assign(token, str(value + (1 if self.take() == "++" else -1)))
            return value
        return _number(token)


def _number(token: str) -> int:
    if not token[:1].isdigit():
        raise UnknownPartError(f"the arithmetic at {token!r}")
    if "#" in token:
        base, _, digits = token.partition("#")
        if not 2 <= int(base) <= 36:
            raise UnknownPartError(f"the number {token}")
        return _digits(digits, int(base))
    if token[:2] in ("0x", "0X"):
        return _digits(token[2:], 16)
    return _digits(token, 8 if token.startswith("0") and len(token) > 1 else 10)


def _digits(text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise UnknownPartError(f"the number {text}") from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%"):
        if right == 0:
            raise UnknownPartError("a division by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # rounds towards zero, as in C
        return quotient if operator == "/" else left - quotient * right
    if operator in ("**", "<<", ">>") and not 0 <= right < 64:
        raise UnknownPartError("an exponent outside 0 to 63")
    result = _BINARY[operator](left, right)
    if not -(1 << 63) <= result < 1 << 63:
        raise UnknownPartError("a number beyond 64 bits")
    return result


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "**": lambda left, right: left**right,
    "<<": lambda left, right: left << right,
    ">>": lambda left, right: left >> right,
    "<": lambda left, right: int(left < right),
    ">": lambda left, right: int(left > right),
    "<=": lambda left, right: int(left <= right),
    ">=": lambda left, right: int(left >= right),
    "==": lambda left, right: int(left == right),
    "!=": lambda left, right: int(left != right),
    "&": lambda left, right: left & right,
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
}

# Section: braces.


def brace_words(text: str, skip: Callable[[str, int], int]) -> list[str]:
    """Expands {a,b} and {1..3} in a word's source text. skip: returns the end of a quote or expansion at a position."""
    at = 0
    while at < len(text):
        if text[at] != "{":
            at = skip(text, at)
            continue
        parts, end = _brace(text, at, skip)
        if parts is None:
            at += 1
            continue
        rest = brace_words(text[end:], skip)
        return [text[:at] + middle + tail for part in parts for middle in brace_words(part, skip) for tail in rest]
    return [text]


def _brace(text: str, start: int, skip: Callable[[str, int], int]) -> tuple[list[str] | None, int]:
    depth, commas, at = 0, [start], start
    while at < len(text):
        mark = text[at]
        if mark == "{":
            depth += 1
        elif mark == "," and depth == 1:
            commas.append(at)
        elif mark == "}":
            depth -= 1
            if depth == 0:
                if len(commas) > 1:
                    cuts = [*commas, at]
                    return [text[one + 1 : two] for one, two in zip(cuts, cuts[1:])], at + 1
                return _sequence(text[start + 1 : at]), at + 1
        at = at + 1 if mark in "{,}" else skip(text, at)
    return None, start


def _sequence(text: str) -> list[str] | None:
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", text)
    if match is None:
        if re.fullmatch(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?", text):
            raise UnknownPartError(f"{{{text}}}")
        return None
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    width = 0
    if any(re.match(r"-?0\d", end) for end in (match[1], match[2])):
        width = max(len(match[1]), len(match[2]))
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if len(numbers) > 10_000:
        raise UnknownPartError(f"{{{text}}}")
    return [str(number).zfill(width) for number in numbers]
