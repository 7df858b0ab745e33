"""Chooses a few cases that cover all pairs of options. Contains no tests."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


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


def _case(values: dict[str, Sequence[Any]], row: tuple[int, ...]) -> Case:
    return {name: values[name][at] for name, at in zip(values, row, strict=True)}
