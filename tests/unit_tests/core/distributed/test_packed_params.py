"""Weights of experts that are gathered in 8 bits: shards that end anywhere between blocks, and those that do not."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron.core.block_scaled.format import BlockFormat, SquareBlocks
from megatron.core.block_scaled.operators import dequantize_rows, quantize_weight
from megatron.core.distributed import packed_params
from megatron.core.distributed.layout import ALIGNMENT, ParamRange, Span, round_up
from megatron.core.distributed.packed_params import PackedParams
from megatron.core.tensor_parallel.param_attributes import set_square_blocks

FORM = BlockFormat(32)


def weights(*sizes: tuple[int, int, int]) -> tuple[list[ParamRange], Tensor, list[Tensor]]:
    """Returns the ranges of stacks of matrices in a flat tensor, the flat tensor, and the stacks in 8 bits."""
    ranges, values, decoded, start = [], [], [], 0
    for number, (count, height, width) in enumerate(sizes):
        stack = torch.randn(count, height, width, generator=torch.Generator().manual_seed(number)).bfloat16()
        param = nn.Parameter(stack)
        set_square_blocks(param, SquareBlocks(FORM, height, width))
        ranges.append(ParamRange(f"weight{number}", param, Span(start, stack.numel()), 0))
        padding = torch.zeros(round_up(start + stack.numel(), ALIGNMENT) - start - stack.numel(), dtype=stack.dtype)
        values += [stack.view(-1), padding]
        start += stack.numel() + len(padding)
        packed = quantize_weight(stack, FORM)
        decoded.append(torch.stack([dequantize_rows(one, FORM, out=torch.empty(height, width)) for one in packed]))
    return ranges, torch.cat(values), decoded


def gathered(
    ranges: Sequence[ParamRange], flat: Tensor, *, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Returns the flat tensors of all ranks after a gather, each of which had only its own shard."""
    size = len(flat) // ranks
    monkeypatch.setattr(packed_params, "group_size", lambda group: ranks)
    every, flats, messages = [], [], []
    for rank in range(ranks):
        monkeypatch.setattr(packed_params, "group_rank", lambda group, rank=rank: rank)
        every.append(PackedParams(list(ranges), group=None, numel=len(flat)))
        own = torch.full_like(flat, float("nan"))
        own[rank * size :][:size] = flat[rank * size :][:size]
        flats.append(own)
        messages.append(every[-1].message(own))
    for rank, (one, message) in enumerate(zip(every, messages, strict=True)):
        for other, sent in enumerate(messages):
            if other != rank:
                message.view(ranks, -1)[other] = sent.view(ranks, -1)[other]
        one.unpack(flats[rank])
        one.unpack(flats[rank])  # without a gather in flight it changes nothing
    return flats


# Shards begin within matrices and end after several; the last block of a matrix has 8 rows; a block is a whole matrix,
# and rows have 24 elements and 1 scale.
SHAPES = {"many": [(4, 96, 64), (2, 192, 64)], "short blocks": [(6, 40, 16)], "narrow": [(12, 8, 24), (6, 16, 24)]}


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [(shape, ranks) for shape in SHAPES for ranks in ((2, 3, 6) if "short" in shape else (2, 3, 4, 6))],
)
def test_each_rank_receives_the_numbers_of_8_bits(shape: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, flat, decoded = weights(*SHAPES[shape])
    size = len(flat) // ranks
    for rank, found in enumerate(gathered(ranges, flat, ranks=ranks, monkeypatch=monkeypatch)):
        expected = flat.clone()
        for part, values in zip(ranges, decoded, strict=True):
            part.view_of(expected).copy_(values.view(-1))
        own = slice(rank * size, (rank + 1) * size)
        expected[own] = flat[own]  # the rank's own shard remains as it is
        for part in ranges:
            assert torch.equal(part.view_of(found), part.view_of(expected))


def test_a_shard_that_ends_within_a_block_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, flat, _ = weights((6, 40, 16))
    words = r"shard of rank 0 begins or ends at element 320 of a matrix of weight0, .* at a multiple of 512 elements"
    with pytest.raises(ValueError, match=words):
        gathered(ranges, flat, ranks=4, monkeypatch=monkeypatch)
