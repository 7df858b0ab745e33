"""Tiles of all ranks cover a causal mask exactly once, and kernels compute each tile's softmax and gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention_tiles import (
    MergedSoftmax,
    Stretch,
    Tile,
    TileInputs,
    segments_of_samples,
    stretches,
    tile_kernel,
    tiles_of_batch,
)
from megatron.core.transformer.context_parallel import chunks_of_rank, join_sequence, split_sequence

SEQ, BATCH = 24, 2


def pairs(tile: Tile) -> Tensor:
    """Returns the mask of allowed pairs in a tile: [rows, columns], bool."""
    rows = torch.arange(tile.queries.stop - tile.queries.start).unsqueeze(1)
    columns = torch.arange(tile.keys.stop - tile.keys.start)
    low = True if tile.first is None else columns >= rows + tile.first
    high = True if tile.last is None else columns <= rows + tile.last
    return torch.ones(len(rows), len(columns), dtype=torch.bool) & low & high


@pytest.mark.parametrize("window", [None, 0, 5, 40])
@pytest.mark.parametrize("borders", [None, [0, 3, 4, 19, SEQ, SEQ + 9, 2 * SEQ]])
@pytest.mark.parametrize(("size", "gathered"), [(1, True), (2, False), (3, False), (4, True)])
def test_tiles_hold_every_pair_that_sees_each_other_once(
    size: int, gathered: bool, borders: list[int] | None, window: int | None
) -> None:
    packed = None if borders is None else PackedSeqParams(cu_seqlens_q=torch.tensor(borders))
    segments = segments_of_samples(packed, batch=BATCH, seq_length=SEQ)
    held = [stretches(chunks_of_rank(SEQ, size=size, rank=rank)) for rank in range(size)]
    blocks = [[Stretch(0, 0, SEQ)]] if gathered else held
    parts = []
    for rank in range(size):
        columns = [torch.zeros(BATCH, SEQ // size, SEQ // len(blocks), dtype=torch.int) for _ in blocks]
        for count, keys in zip(columns, blocks):
            for tile in tiles_of_batch(held[rank], keys, segments=segments, window=window):
                assert pairs(tile).any(dim=1).all(), "a row attends to no key of its tile"
                count[tile.batch, tile.queries, tile.keys] += pairs(tile)
        parts.append(join_sequence(columns, 2))
    starts = torch.zeros(BATCH, SEQ, dtype=torch.int) if borders is None else _segment_starts(borders)
    ahead = torch.arange(SEQ) - torch.arange(SEQ).unsqueeze(1)
    allowed = (ahead <= 0) & (torch.arange(SEQ) >= starts.unsqueeze(2))
    if window is not None:
        allowed &= ahead >= -window
    assert torch.equal(join_sequence(parts, 1), allowed.int())


def _segment_starts(borders: list[int]) -> Tensor:
    """Returns the start of each token's segment in its sample: [B, S]."""
    places = torch.arange(BATCH * SEQ)
    starts = torch.tensor(borders)[torch.searchsorted(torch.tensor(borders), places, right=True) - 1]
    return (starts % SEQ).view(BATCH, SEQ)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("window", "value_width"), [(None, 8), (5, 8), (None, 5), (5, 11)])
def test_merged_tiles_are_the_softmax_over_all_of_them(plain: bool, window: int | None, value_width: int) -> None:
    draw: Any = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    query, grad = draw(BATCH, 4, SEQ, 8), draw(BATCH, 4, SEQ, value_width)
    key, value = draw(BATCH, 2, SEQ, 8), draw(BATCH, 2, SEQ, value_width)
    # Rows of one rank, which have gaps in memory.
    rows, grad = (split_sequence(t, 2, size=2, rank=0) for t in (query, grad))
    held = stretches(chunks_of_rank(SEQ, size=2, rank=0))
    tiles = tiles_of_batch(held, [Stretch(0, 0, SEQ)], segments=[[slice(0, SEQ)]], window=window)
    computed = tile_kernel(torch.device("cpu"), scale=0.3, plain=plain, widths=(8, value_width))
    merged = MergedSoftmax(rows, value_width=value_width)
    for tile in tiles:
        merged.add(computed.forward(of_tile(tile, rows, key, value), tile), tile)
    result = merged.result()
    grads = [torch.zeros_like(t) for t in (rows, key, value)]
    for tile in tiles:
        part = type(result)(result.output[:, :, tile.queries], result.log_sum[:, :, tile.queries])
        inputs = of_tile(tile, rows, key, value)
        shares = computed.backward(grad[:, :, tile.queries], inputs, result=part, tile=tile)
        for total, share in zip(vars(of_tile(tile, *grads)).values(), vars(shares).values(), strict=True):
            total += share
    leaves = [t.clone().requires_grad_() for t in (rows, key, value)]
    expected = naive(*leaves, window=window)
    expected.backward(grad)
    torch.testing.assert_close(result.output, expected.detach(), rtol=0, atol=1e-14)
    for found, leaf in zip(grads, leaves):
        torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-14)


def of_tile(tile: Tile, query: Tensor, *keys_and_values: Tensor) -> TileInputs:
    return TileInputs(query[:, :, tile.queries], *(t[:, :, tile.keys] for t in keys_and_values))


def naive(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> Tensor:
    """Computes attention of the first of two ranks' rows with a single mask."""
    places = split_sequence(torch.arange(SEQ), 0, size=2, rank=0)
    ahead = torch.arange(SEQ) - places.unsqueeze(1)
    forbidden = (ahead > 0) | (ahead < -(SEQ if window is None else window))
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    return (query @ key.mT * 0.3).masked_fill(forbidden, -torch.inf).softmax(-1) @ value
