"""Samples of each rank: exact resume, and the same samples in a global batch with any parallel layout."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.data_iterators import MegatronPretrainingRandomSampler, MegatronPretrainingSampler


def batches(count: int, *, total: int, consumed: int, micro: int, rank: int = 0, size: int = 1) -> list[list[int]]:
    sampler = MegatronPretrainingSampler(
        total, consumed, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=size
    )
    return list(itertools.islice(sampler, count))


LAYOUTS = [(micro, size) for micro in (1, 2, 3, 4, 6, 12) for size in (1, 2, 3, 4, 6, 12) if 12 % (micro * size) == 0]


@given(total=st.integers(1, 60), consumed=st.integers(0, 200))
def test_a_global_batch_keeps_its_samples_on_every_layout(total: int, consumed: int) -> None:
    expected = [number % total for number in range(consumed, consumed + 12)]
    for micro, size in LAYOUTS:
        ranks = [
            batches(12 // micro // size, total=total, consumed=consumed, micro=micro, rank=rank, size=size)
            for rank in range(size)
        ]
        in_order = [sample for step in zip(*ranks) for batch in step for sample in batch]
        assert in_order == expected


def test_resuming_at_any_step_continues_the_run() -> None:
    whole = batches(40, total=50, consumed=0, micro=2, rank=1, size=3)
    for step in range(40):
        assert batches(40 - step, total=50, consumed=step * 6, micro=2, rank=1, size=3) == whole[step:]


@pytest.mark.parametrize(
    "field, value", [("total_samples", 0), ("consumed_samples", -1), ("micro_batch_size", 0), ("data_parallel_rank", 2)]
)
def test_impossible_numbers_are_refused_by_name(field: str, value: int) -> None:
    numbers = {
        "total_samples": 9,
        "consumed_samples": 0,
        "micro_batch_size": 1,
        "data_parallel_rank": 0,
        "data_parallel_size": 2,
    }
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        MegatronPretrainingSampler(**{**numbers, field: value})


def cyclic(count: int, *, total: int, consumed: int, micro: int, rank: int = 0, size: int = 1, seed: int = 7):
    layout = {"micro_batch_size": micro, "data_parallel_rank": rank, "data_parallel_size": size}
    return list(itertools.islice(MegatronPretrainingRandomSampler(total, consumed, seed=seed, **layout), count))


@given(total=st.integers(1, 30), consumed=st.integers(0, 100))
def test_cyclic_epochs_are_orders_of_all_samples_on_every_layout(total: int, consumed: int) -> None:
    """Compares with a reference that draws each epoch's order independently."""
    stream = [
        int(sample)
        for epoch in range((consumed + 12) // total + 1)
        for sample in np.random.RandomState([7, epoch]).permutation(total)
    ]
    for micro, size in LAYOUTS:
        ranks = [
            cyclic(12 // micro // size, total=total, consumed=consumed, micro=micro, rank=rank, size=size)
            for rank in range(size)
        ]
        in_order = [sample for step in zip(*ranks) for batch in step for sample in batch]
        assert in_order == stream[consumed : consumed + 12]


def test_cyclic_orders_differ_by_epoch_and_seed_and_continue_at_any_step() -> None:
    whole = cyclic(60, total=20, consumed=0, micro=1)
    epochs = [whole[:20], whole[20:40], whole[40:]]
    assert all(sorted(epoch) == [[sample] for sample in range(20)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != sorted(epochs[0])
    assert cyclic(20, total=20, consumed=0, micro=1, seed=8) != epochs[0]
    for step in range(60):
        assert cyclic(60 - step, total=20, consumed=step, micro=1) == whole[step:]
