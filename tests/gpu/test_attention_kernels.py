"""Attention kernels that return the log-sum-exp on a GPU agree with plain fp64 operations. Skipped without a GPU."""

from functools import partial

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention_tiles import PlainKernel, SoftmaxResult, Tile, TileInputs, tile_kernel
from megatron.core.transformer.dot_product_attention import (
    DotProductAttention,
    attend_by_segment,
    attend_in_window,
    attend_varlen,
    reference_attention,
)
from megatron.core.transformer.enums import AttnBackend
from tests.unit_tests.core.models.small_models import small_config

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 96, 64


@pytest.mark.parametrize("limits", [{}, {"last": 0}, {"first": -20, "last": 0}])
@pytest.mark.parametrize(("groups", "value_width"), [(2, WIDTH), (8, WIDTH), (8, 40), (8, 80)])
def test_a_tile_of_a_larger_softmax_agrees_with_plain_operations(
    groups: int, value_width: int, limits: dict[str, int]
) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    query, key, value, grad = (
        torch.randn(2, heads, 2 * ROWS, width, device="cuda", generator=generator).bfloat16()
        for heads, width in ((8, WIDTH), (groups, WIDTH), (groups, value_width), (8, value_width))
    )
    kernel = tile_kernel(query.device, scale=0.125, plain=False, widths=(WIDTH, value_width))
    tile = Tile(slice(ROWS, 2 * ROWS), slice(0, ROWS), **limits)
    # The tile covers only part of each tensor's rows, as with two chunks per rank.
    half = TileInputs(query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys])
    exact = TileInputs(*(t.double() for t in vars(half).values()))
    found, expected = kernel.forward(half, tile), PlainKernel(0.125).forward(exact, tile)
    torch.testing.assert_close(found.output.double(), expected.output, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.log_sum.double(), expected.log_sum, rtol=1e-3, atol=1e-3)
    # The larger log-sum-exp means that other tiles have about the same share of the probability.
    whole = SoftmaxResult(expected.output.bfloat16(), expected.log_sum.float() + 0.7)
    exact_whole = SoftmaxResult(whole.output.double(), whole.log_sum.double())
    grad = grad[:, :, tile.queries]
    shares = kernel.backward(grad, half, result=whole, tile=tile)
    exact_shares = PlainKernel(0.125).backward(grad.double(), exact, result=exact_whole, tile=tile)
    for share, exact_share in zip(vars(shares).values(), vars(exact_shares).values(), strict=True):
        assert (share.double() - exact_share).norm() <= 2e-2 * exact_share.norm()


@pytest.mark.parametrize(
    ("backend", "window"),
    [(AttnBackend.auto, None), (AttnBackend.auto, (20, 0)), (AttnBackend.flash, None), (AttnBackend.fused, None)],
)
def test_keys_and_values_of_two_widths_agree_with_plain_operations(
    backend: AttnBackend, window: tuple[int, int] | None
) -> None:
    fields = {"num_attention_heads": 8, "kv_channels": 192, "window_size": window}
    core, plain = (
        DotProductAttention(small_config(**fields, attention_backend=kind), 1)
        for kind in (backend, AttnBackend.unfused)
    )
    generator = torch.Generator("cuda").manual_seed(4)
    half = [
        torch.randn(ROWS, 2, 8, width, device="cuda", generator=generator).bfloat16().requires_grad_()
        for width in (192, 192, 128)
    ]
    exact = [t.detach().double().requires_grad_() for t in half]
    found, expected = core(*half), plain(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(found)
    shares = torch.autograd.grad(found, half, grad)
    for share, exact_share in zip(shares, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert (share.double() - exact_share).norm() <= 2e-2 * exact_share.norm()


@pytest.mark.parametrize("left", [-1, 20])
@pytest.mark.parametrize("groups", [2, 8])
def test_a_sink_in_packed_segments_agrees_with_plain_operations(groups: int, left: int) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 30, 31, ROWS, 2 * ROWS], dtype=torch.int32))
    half = [
        torch.randn(ROWS, 2, heads, WIDTH, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (8, groups, groups)
    ]
    sink = torch.randn(8, device="cuda", generator=generator).bfloat16().requires_grad_()
    parts = dict(zip(("key", "value"), half[1:], strict=True))
    found = attend_varlen(half[0], **parts, packed=packed, scale=0.125, window=(left, 0), sink=sink)
    exact = [t.detach().double().requires_grad_() for t in (*half, sink)]
    options = {"allowed": None, "is_causal": True, "dropout": 0.0, "scale": 0.125, "sink": exact[3]}
    attend = partial(attend_in_window, attend=reference_attention, window=(left, 0), **options)
    if left == -1:
        attend = partial(reference_attention, **options)
    expected = attend_by_segment(exact[0], key=exact[1], value=exact[2], packed=packed, attend=attend)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(found)
    shares = torch.autograd.grad(found, (*half, sink), grad)
    for share, exact_share in zip(shares, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert (share.double() - exact_share).norm() <= 2e-2 * exact_share.norm()
