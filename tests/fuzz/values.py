"""Random choices that hypothesis makes and shrinks, and the values that fuzzed inputs are built from."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

ODD_INTS = [0, -1, -7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30]
ODD_FLOATS = ["nan", "inf", "-inf", "1e308", "-0.0", "5e-324", "1e400", "-1e-9"]
NO_NUMBERS = [
    "",
    "x",
    "1.5.2",
    "0x10",
    "1e",
    "None",
    "True",
    "--",
    "[1]",
    "\u0663",
    "\u00bd",
    "1_0",
    " 2 ",
    "+3",
    "1,5",
]
ODD_WORDS = ["", " ", ".", "/", "..", "~", "/dev/null", "/proc/self/mem", "\u00e9\u0301\U0001f600", "\udcff", "a\nb"]
ODD_WORDS += ["%s", "{x}", "$HOME", "*", "-", "a" * 5000, "null", "'", '"', "\t", "\\", "[bold]", "a\x00b", "a\x1b[2J"]


class Choices:
    """Random choices for an example. Each choice is a hypothesis draw, so failures shrink towards the first options."""

    def __init__(self, draw: Callable[[SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def one(self, options: Sequence[T]) -> T:
        """Draws one of the options. Shrinks to the first."""
        return options[self.below(len(options))]

    def integer(self, least: int, most: int) -> int:
        """Draws an integer in [least, most]. Shrinks towards zero."""
        return int(self._draw(strategies.integers(least, most)))

    def below(self, limit: int) -> int:
        """Draws an integer in [0, limit). Shrinks to 0."""
        return self.integer(0, limit - 1)

    def chance(self, probability: float) -> bool:
        """Returns True with about this probability. Shrinks to False."""
        return self.below(100) >= 100 - round(100 * probability)

    def fraction(self) -> float:
        """Draws a float in [0, 1)."""
        return self.below(1 << 20) / (1 << 20)

    def bytes(self, count: int) -> bytes:
        """Draws `count` bytes."""
        return bytes(self._draw(strategies.binary(min_size=count, max_size=count)))

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Draws `count` different options, in random order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """Returns all options in random order. Shrinks to the given order."""
        return self.some(options, len(options))


def odd_json(choices: Choices, depth: int = 0) -> Any:
    """Draws a value of any type that Python's JSON reader can return."""
    match choices.one(["constant", "int", "word", "number", "float", *(["list", "dict"] if depth < 3 else [])]):
        case "int":
            return choices.one([choices.integer(-9, 99), choices.one(ODD_INTS)])
        case "word":
            return choices.one([*ODD_WORDS, *NO_NUMBERS])
        case "float":
            return choices.one([1.0, 0.5, -0.0, 1e308, float("nan"), float("inf"), choices.fraction()])
        case "list":
            return [odd_json(choices, depth + 1) for _ in range(choices.integer(0, 3))]
        case "dict":
            return {choices.one(ODD_WORDS): odd_json(choices, depth + 1) for _ in range(choices.integer(0, 3))}
        case _:
            return choices.one([None, True, False, "1", [], {}])


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths to all inner values of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(*path, key), *places_of(inner, (*path, key))]
    return found


def mutate_json(choices: Choices, value: Any) -> str:
    """Changes, drops, wraps or swaps one inner value in place, and returns a description of the change."""
    path = choices.one(places_of(value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, old = path[-1], holder[path[-1]]
    match choices.one(["drop", "near", "odd", "odd", "swap", "wrap"]):
        case "drop":
            del holder[key]
            return f"{path} dropped"
        case "near" if isinstance(old, int):
            holder[key] = old + choices.one([-1, 1, 2, 8, 64, -old, -2 * old, 2**32, 2**63])
        case "near" if isinstance(old, str):
            cut = choices.integer(0, len(old))
            holder[key] = choices.one(
                [old[:cut], old + old, old[:cut] + choices.one(ODD_WORDS) + old[cut:], old.upper()]
            )
        case "near" if isinstance(old, list):
            holder[key] = choices.one([old[:-1], old + old, old[::-1], [old]])
        case "swap" if isinstance(holder, (list, dict)) and len(holder) > 1:
            other = choices.one(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
            holder[key], holder[other] = holder[other], holder[key]
        case "wrap":
            holder[key] = choices.one([[old], {"value": old}, str(old)])
        case _:
            holder[key] = odd_json(choices)
    return f"{path}: {old!r:.99} is {holder[key]!r:.99}"
