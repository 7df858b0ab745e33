"""Formatted rank ranges parse back to the same ranks."""

import random

import pytest

from megatron.core.parallel_state import RankGenerator
from megatron.planner.report import rank_range


def _read(text: str) -> list[int]:
    if ", " in text:
        return [rank for part in text.split(", ") for rank in _read(part)]
    ranks = [0]
    for term in text.split(" + "):
        ranks = [rank + step for rank in ranks for step in range(*map(int, term.split(":")))]
    return sorted(ranks)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_groups_of_layouts_take_at_most_three_terms(order: str) -> None:
    generator = RankGenerator(4, 1, 16, 8, 2, order)
    for name in ("tp", "cp", "pp", "dp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp", "tp-pp-cp"):
        for ranks in generator.get_ranks(name):
            text = rank_range(ranks)
            assert _read(text) == ranks and len(text.split(" + ")) <= 3 and "," not in text, (name, text)


def test_any_ranks_round_trip() -> None:
    assert rank_range([5]) == "5:6:1" and rank_range(range(262_144)) == "0:262144:1"
    assert rank_range([2, 3, 18, 19]) == "2:4:1 + 0:17:16"
    assert rank_range([0, 1, 2, 7]) == "0:3:1, 7:8:1"
    for seed in range(300):
        chosen = random.Random(seed)
        ranks = sorted(chosen.sample(range(40), chosen.randint(1, 9)))
        assert _read(rank_range(ranks)) == ranks
