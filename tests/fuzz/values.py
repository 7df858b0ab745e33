"""Values that fuzzed inputs are made of: plausible ones, and those that programs have not thought of."""

import random
from typing import Any

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


def some_int(rng: random.Random, *, most: int = 64) -> int:
    """Mostly small; now and then none that anybody meant."""
    return rng.choice(ODD_INTS) if rng.random() < 0.15 else rng.randint(0, most)


def odd_json(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold, or Python makes of it, of any type."""
    kinds = [None, True, False, rng.choice(ODD_INTS), rng.randint(-9, 99), rng.random(), float("nan"), float("inf")]
    kinds += [1e308, -0.0, rng.choice(ODD_WORDS), rng.choice(NO_NUMBERS), [], {}, "1", 1.0]
    if depth < 3:
        kinds.append([odd_json(rng, depth + 1) for _ in range(rng.randint(0, 3))])
        kinds.append({rng.choice(ODD_WORDS): odd_json(rng, depth + 1) for _ in range(rng.randint(0, 3))})
    return rng.choice(kinds)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything inside nested dicts and lists, the whole itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(*path, key), *places_of(inner, (*path, key))]
    return found


def mutate_json(rng: random.Random, value: Any, *, like: Any = None) -> str:
    """Changes one place inside a nested value: its type, sign or size, or takes it away, doubles it, swaps it.

    Returns what it did. like: picks the value where given, else odd_json does.
    """
    path = rng.choice(places_of(value))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, old = path[-1], holder[path[-1]]
    match rng.choice(["drop", "near", "odd", "odd", "swap", "wrap"]):
        case "drop":
            del holder[key]
            return f"{path} dropped"
        case "near" if isinstance(old, int):
            holder[key] = old + rng.choice([-1, 1, 2, 8, 64, -old, -2 * old, 2**32, 2**63])
        case "near" if isinstance(old, str):
            cut = rng.randint(0, len(old))
            holder[key] = rng.choice([old[:cut], old + old, old[:cut] + rng.choice(ODD_WORDS) + old[cut:], old.upper()])
        case "near" if isinstance(old, list):
            holder[key] = rng.choice([old[:-1], old + old, old[::-1], [old]])
        case "swap" if isinstance(holder, (list, dict)) and len(holder) > 1:
            other = rng.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
            holder[key], holder[other] = holder[other], holder[key]
        case "wrap":
            holder[key] = rng.choice([[old], {"value": old}, str(old)])
        case _:
            holder[key] = odd_json(rng)
    return f"{path}: {old!r:.99} is {holder[key]!r:.99}"
