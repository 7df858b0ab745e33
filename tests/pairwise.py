"""Chooses few cases out of a large product of options. Holds no tests."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(*, allowed: Callable[[Case], bool] = lambda case: True, **values: Sequence[Any]) -> list[Case]:
    """Returns cases {option: value} in which every two values of different options meet at least once.

    Pairs that meet in no allowed case are left out. The choice is deterministic: every round takes the case with most
    pairs that have not met yet, the first one in the order of the product.

    allowed: tells whether a complete case can run.
    """
    # A case is a row of positions, as values need not be hashable.
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
