"""Chooses a few cases that cover all pairs of options. Contains no tests."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
_Item = tuple[str, Any]
_Pair = tuple[_Item, _Item]


def pairwise(*, allowed: Callable[[Case], bool] = lambda case: True, **values: Sequence[Any]) -> list[Case]:
    """Returns cases {option: value} such that every two values of different options occur together in some case.

    Pairs that occur in no allowed case are ignored. The choice is deterministic: every round adds the case with the
    most uncovered pairs, or the first of these cases in the order of the product.

    allowed: returns whether a complete case can run.
    """
    # Cases are represented by indices, as values need not be hashable.
    rows = [
        row for row in product(*(range(len(options)) for options in values.values())) if allowed(_case(values, row))
    ]
    pairs = {row: set(combinations(enumerate(row), min(2, len(row)))) for row in rows}
    unmet = set().union(*pairs.values())
    chosen = []
    while unmet:
        row = max(rows, key=lambda row: len(pairs[row] & unmet))
        unmet -= pairs[row]
        chosen.append(_case(values, row))
    return chosen


def covering(
    dimensions: Mapping[str, Sequence[Any]], *, draws: int, allowed: Callable[[Case], bool] = lambda case: True
) -> Iterator[Case]:
    """Yields cases {option: value} that together cover each allowed pair of values, new values first.

    For more options than `pairwise` can enumerate. The choice is deterministic. draws: number of random cases of which
    each case is the best. allowed: returns whether a case can run; of an incomplete case, whether it may be completed.
    """
    generator, seen = random.Random(1), Counter[_Item]()
    items = [(name, value) for name, values in dimensions.items() for value in values]
    left = {pair for pair in combinations(items, 2) if pair[0][0] != pair[1][0] and allowed(dict(pair))}
    while left:
        start = min(left, key=lambda pair: (sum(seen[item] for item in pair), repr(pair)))
        drawn = [_complete(dict(start), dimensions, allowed, left=left, generator=generator) for _ in range(draws)]
        best = max(drawn, key=lambda case: len(_pairs(case, dimensions) & left))
        left -= _pairs(best, dimensions)
        seen.update(best.items())
        yield best


def _complete(
    case: Case,
    dimensions: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool],
    *,
    left: set[_Pair],
    generator: random.Random,
) -> Case:
    """Fills in the missing options in random order, with values that make the most pairs not covered so far."""
    for name in generator.sample([*dimensions], len(dimensions)):
        if name not in case:
            fitting = [value for value in dimensions[name] if allowed({**case, name: value})]
            generator.shuffle(fitting)
            case[name] = max(fitting, key=lambda value: len(_pairs({**case, name: value}, dimensions) & left))
    return {name: case[name] for name in dimensions}


def _pairs(case: Case, dimensions: Mapping[str, Sequence[Any]]) -> set[_Pair]:
    return set(combinations([(name, case[name]) for name in dimensions if name in case], 2))


def _case(values: dict[str, Sequence[Any]], row: tuple[int, ...]) -> Case:
    return {name: values[name][at] for name, at in zip(values, row, strict=True)}
