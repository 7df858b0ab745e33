"""The kernel of attention tiles on a GPU against plain operations in fp64; skipped without one."""

import pytest
import torch

from megatron.core.transformer.attention_tiles import Tile
from megatron.core.transformer.tile_kernels import FlashOnGpu, PlainKernel, SoftmaxResult, TileInputs

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 96, 64


@pytest.mark.parametrize("limits", [{}, {"last": 0}, {"first": -20, "last": 0}])
@pytest.mark.parametrize("groups", [2, 8])
def test_a_tile_of_a_larger_softmax_agrees_with_plain_operations(groups: int, limits: dict[str, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    query, key, value, grad = (
        torch.randn(2, heads, 2 * ROWS, WIDTH, device="cuda", generator=generator).bfloat16()
        for heads in (8, groups, groups, 8)
    )
    tile = Tile(slice(ROWS, 2 * ROWS), slice(0, ROWS), **limits)
    # Every other row's memory belongs to another tile, as with two chunks a rank.
    half = TileInputs(query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys])
    exact = TileInputs(*(t.double() for t in vars(half).values()))
    found, expected = FlashOnGpu(0.125).forward(half, tile), PlainKernel(0.125).forward(exact, tile)
    torch.testing.assert_close(found.output.double(), expected.output, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.log_sum.double(), expected.log_sum, rtol=1e-3, atol=1e-3)
    # As if as much probability lay in other tiles.
    whole = SoftmaxResult(expected.output.bfloat16(), expected.log_sum.float() + 0.7)
    exact_whole = SoftmaxResult(whole.output.double(), whole.log_sum.double())
    grad = grad[:, :, tile.queries]
    shares = FlashOnGpu(0.125).backward(grad, half, result=whole, tile=tile)
    exact_shares = PlainKernel(0.125).backward(grad.double(), exact, result=exact_whole, tile=tile)
    for share, exact_share in zip(vars(shares).values(), vars(exact_shares).values(), strict=True):
        assert (share.double() - exact_share).norm() <= 2e-2 * exact_share.norm()
