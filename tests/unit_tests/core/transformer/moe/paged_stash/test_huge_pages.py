"""Requesting huge pages changes no byte, whatever part of a memory region is requested."""

import pytest
import torch

from megatron.core.transformer.moe.paged_stash.page_pool import use_huge_pages


@pytest.mark.parametrize("start, size", [(0, 0), (1, 100), (12345, 3 << 20), (0, 9 << 20)])
def test_bytes_stay_as_they_are(start, size):
    memory = torch.arange(10 << 20).to(torch.uint8)
    expected = memory.clone()
    use_huge_pages(memory[start : start + size])
    assert torch.equal(memory, expected)
