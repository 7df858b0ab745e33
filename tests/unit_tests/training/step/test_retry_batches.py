"""A second read of a step's batches returns the same batches, and results in the same random state."""

import random
from collections.abc import Iterator

import torch

from megatron.training.step.step_runner import RetryBatches


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
