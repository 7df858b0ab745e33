"""A second read of a step's batches returns the same batches, and results in the same random state."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron.core.datasets.padding import PaddingCount
from megatron.training.step.step_runner import CountedBatches, RetryBatches

Batch = dict[str, Tensor]


def _drawn_batches() -> Iterator[dict[str, float]]:
    while True:
        yield {"torch": torch.rand(()).item(), "python": random.random()}


def test_a_second_read_leaves_random_numbers_as_the_first_one_did() -> None:
    batches = RetryBatches(_drawn_batches())
    first = [(next(batches), torch.rand(()).item(), random.random()) for _ in range(3)]
    batches.rewind()
    again = [(next(batches), torch.rand(()).item(), random.random()) for _ in range(3)]
    assert again == first


def test_a_second_read_draws_nothing_where_the_first_one_drew_nothing() -> None:
    batches = RetryBatches(iter([1, 2]))
    assert [next(batches), next(batches)] == [1, 2]
    batches.rewind()
    state = torch.get_rng_state()
    assert [next(batches), next(batches)] == [1, 2]
    assert torch.equal(torch.get_rng_state(), state)


class _Marked(Iterator[Batch]):
    """Batches of two sequences of 4 tokens, the last of which are padding."""

    has_padding_mask = True

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        self._lengths = iter(lengths)

    def __next__(self) -> Batch:
        return {"padding_mask": torch.arange(4) >= torch.tensor(next(self._lengths)).unsqueeze(1)}


def test_padding_is_counted_once_however_often_a_step_is_read() -> None:
    counted = CountedBatches(_Marked([(4, 1), (0, 2), (3, 3)]), must_mark_padding=True)
    batches = RetryBatches(counted)
    assert batches.has_padding_mask
    for _ in range(3):
        next(batches), next(batches)
        # Of sequences with 4, 1, 0 and 2 real tokens.
        assert counted.padding == PaddingCount(0 + 3 + 4 + 2, 0 + 15 + 16 + 12)
        batches.rewind()


def test_batches_of_any_other_kind_have_no_padding() -> None:
    counted = CountedBatches(iter([1, (torch.ones(2), None), {"tokens": torch.ones(2, 4)}]), must_mark_padding=True)
    assert len(list(counted)) == 3 and counted.padding == PaddingCount() and not counted.has_padding_mask


def test_masks_that_later_stages_would_not_read_are_refused() -> None:
    batches = list(_Marked([(4, 1)]))
    assert CountedBatches(iter(batches)).__next__() is batches[0]
    with pytest.raises(ValueError, match="contain padding_mask, but has_padding_mask of .* is not True"):
        next(CountedBatches(iter(batches), must_mark_padding=True))
