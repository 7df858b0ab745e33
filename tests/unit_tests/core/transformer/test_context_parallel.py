"""Splitting sequences over context-parallel ranks is exact, balanced and invertible."""

import pytest
import torch

from megatron.core.transformer.context_parallel import chunks_of_rank, join_sequence, slice_batch, split_sequence


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_an_early_and_a_late_chunk_and_join_to_the_whole(size: int) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = [split_sequence(whole, 1, size=size, rank=rank) for rank in range(size)]
    assert torch.equal(join_sequence(parts, 1), whole)
    # A causal token attends to itself and all tokens before it. All ranks have equal work, up to the size of a chunk.
    seen = [sum(part[0, :, 0].div(3, rounding_mode="floor").tolist()) for part in parts]
    assert len(set(seen)) == 1


def test_a_length_that_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"10 tokens and context_parallel_size is 2.*divisible by .* \(4\)"):
        chunks_of_rank(10, size=2, rank=0)


def test_one_rank_keeps_its_batch() -> None:
    batch = {"tokens": torch.zeros(1, 7), "cu_seqlens": torch.tensor([0, 3, 7])}
    assert slice_batch(batch, None) is batch
