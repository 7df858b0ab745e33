"""Pages and bytes remain correct in every interleaving of small steps, and the search finds all protocol violations."""

from dataclasses import replace
from itertools import permutations, product

import pytest

from tests.counts import long_count
from tests.unit_tests.core.transformer.moe.paged_stash.protocol_model import MUTANTS, Case, explore

TIERS = [(2, 0), (0, 2), (1, 1), (2, 1)]
NEEDS = [((1,), (1,), (1,)), ((2,), (1,), (1,)), ((1,), (2,), (1, 1)), ((0, 1), (1, 2), (2,))]
THREE = [Case(*sizes) for sizes in product(TIERS, NEEDS, permutations(range(3)), (1, 2, 3))]
FOUR = [
    Case(tiers, needs, order, room)
    for tiers in ((1, 1), (2, 1), (3, 0))
    for needs in (((1,), (1,), (1,), (1,)), ((1,), (2,), (1,), (2,)), ((1, 1), (1,), (2,), (1,)))
    for order, room in (((0, 1, 2, 3), 2), ((1, 0, 3, 2), 2), ((1, 0, 2, 3), 3), ((1, 2, 0, 3), 3), ((3, 2, 1, 0), 4))
]
LATE = [case for case in [*THREE, *FOUR] if case.possible]
POSSIBLE = [*LATE, *(replace(case, early=True) for case in LATE)]


@pytest.mark.slow
def test_no_interleaving_breaks_the_protocol() -> None:
    states = [explore(case) for case in POSSIBLE[:: long_count(5, soak=1)]]
    print(f"{len(states)} cases, {sum(states)} states, {max(states)} in the largest")
    assert sum(states) == long_count(67039, soak=487404)  # fewer states would mean that some are no longer explored


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_search_finds_each_departure_from_the_protocol(mutant: str) -> None:
    # The assumption of the reserve has a separate check.
    message = "freed" if mutant.startswith("the main stream") else "group|tier|page"
    with pytest.raises(AssertionError, match=message):
        for case in reversed(POSSIBLE):  # largest first
            explore(replace(case, mutant=mutant))
