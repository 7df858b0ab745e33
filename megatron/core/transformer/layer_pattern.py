"""Parses patterns that describe a model layer by layer, such as ([0]+[1]*3)*2, into lists of integers.

The fields that use patterns define the meaning of the integers: see moe_config.py and attention_config.py.
"""

import re

# One token of a pattern: a list, an integer, an operator or a parenthesis.
_TOKEN = re.compile(r"\s*(\[[\d\s,]*\]|\d+|[+*()])")
MAX_LAYERS = 100_000
# Maximum nesting of parentheses, beyond which the parser would exhaust Python's stack.
_MAX_DEPTH = 50


def parse_layer_pattern(word: str, *, field: str) -> int | list[int]:
    """Parses an integer, or a pattern of lists, +, * and parentheses: "[0]+[1]*3" -> [0, 1, 1, 1].

    Raises ValueError naming `field` for any other text.
    """
    stripped = word.strip()
    if stripped.isdigit():
        return int(stripped)
    value = _PatternReader(stripped, field).read()
    if not isinstance(value, list):
        raise ValueError(f"{field} is {word!r}: must be an integer or a pattern of lists, such as [0]+[1]*3")
    return value


# A parser instead of eval, because the pattern comes from command lines and files.
class _PatternReader:
    """Recursive-descent parser of a pattern: sum := product ("+" product)*, product := atom ("*" atom)*."""

    def __init__(self, pattern: str, field: str) -> None:
        self.pattern, self.field = pattern, field
        self.tokens = self._split(pattern)
        self.depth = 0

    def read(self) -> int | list[int]:
        value = self._sum()
        if self.tokens:
            raise self._error(f"unexpected {self.tokens[0]!r}")
        return value

    def _split(self, pattern: str) -> list[str]:
        tokens, position = [], 0
        while position < len(pattern):
            match = _TOKEN.match(pattern, position)
            if match is None:
                raise self._error(f"cannot read {pattern[position:]!r}")
            tokens.append(match.group(1))
            position = match.end()
        return tokens

    def _sum(self) -> int | list[int]:
        value = self._product()
        while self._accept("+"):
            other = self._product()
            if isinstance(value, list) != isinstance(other, list):
                raise self._error("a list and a number cannot be added")
            value = value + other  # type: ignore[operator]
        return value

    def _product(self) -> int | list[int]:
        value = self._atom()
        while self._accept("*"):
            other = self._atom()
            if isinstance(value, list) and isinstance(other, list):
                raise self._error("two lists cannot be multiplied")
            value = self._repeated(value, other)
        return value

    def _repeated(self, left: int | list[int], right: int | list[int]) -> int | list[int]:
        # Checks the length before building the list, because a typing mistake must not exhaust the memory.
        sizes = [len(side) if isinstance(side, list) else side for side in (left, right)]
        if sizes[0] * sizes[1] > MAX_LAYERS:
            raise self._error(f"more than {MAX_LAYERS} layers")
        return left * right  # type: ignore[operator]

    def _atom(self) -> int | list[int]:
        if not self.tokens:
            raise self._error("unexpected end")
        token = self.tokens.pop(0)
        if token == "(":
            if self.depth == _MAX_DEPTH:
                raise self._error(f"more than {_MAX_DEPTH} nested parentheses")
            self.depth += 1
            value = self._sum()
            self.depth -= 1
            if not self._accept(")"):
                raise self._error("a parenthesis is not closed")
            return value
        if token.startswith("["):
            return self._list(token)
        if token.isdigit():
            return int(token)
        raise self._error(f"unexpected {token!r}")

    def _list(self, token: str) -> list[int]:
        words = [word.strip() for word in token[1:-1].split(",")]
        if words[-1] == "":  # "[]" and a trailing comma
            words.pop()
        if not all(word.isdigit() for word in words):
            raise self._error(f"{token!r} is not a list of integers")
        return [int(word) for word in words]

    def _accept(self, token: str) -> bool:
        if self.tokens and self.tokens[0] == token:
            self.tokens.pop(0)
            return True
        return False

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{self.field} is {self.pattern!r}: {reason}; examples: 2, [1,0,1,0], ([0]+[1]*3)*2")
