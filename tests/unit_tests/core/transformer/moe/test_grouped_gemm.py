"""Selection of the grouped GEMM kernel for expert rows, and accumulation of weight gradients on a GPU."""

import pytest
import torch

from megatron.core.transformer.moe import grouped_gemm
from megatron.core.transformer.moe.grouped_gemm import ProductKernel, product_kernel, row_offsets

HOPPER, AMPERE = (9, 0), (8, 0)
WIDTHS = (2048, 768)


@pytest.mark.parametrize(
    ("dtype", "capability", "widths", "is_recomputed", "expected"),
    [
        (torch.bfloat16, HOPPER, WIDTHS, False, ProductKernel.TORCH),
        (torch.bfloat16, (10, 0), WIDTHS, False, ProductKernel.TORCH),
        (torch.bfloat16, HOPPER, WIDTHS, True, ProductKernel.STASH),
        (torch.bfloat16, HOPPER, (2048, 770), False, ProductKernel.STASH),  # strides that torch's kernel rejects
        (torch.bfloat16, AMPERE, WIDTHS, False, ProductKernel.STASH),
        (torch.float16, HOPPER, WIDTHS, False, ProductKernel.STASH),
        (torch.float32, HOPPER, WIDTHS, False, ProductKernel.STASH),
        (torch.float64, HOPPER, WIDTHS, True, ProductKernel.TORCH),
    ],
)
def test_torch_multiplies_where_it_needs_no_read_of_the_host(
    dtype, capability, widths, is_recomputed, expected, monkeypatch
):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    choose = product_kernel.__wrapped__
    assert choose(dtype, torch.device("cuda"), widths=widths, is_recomputed=is_recomputed) is expected
    assert choose(dtype, torch.device("cpu"), widths=widths, is_recomputed=is_recomputed) is ProductKernel.TORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_multiplies_without_numbers(dtype):
    rows, weight, offsets = (one.to("meta") for one in operands(dtype))
    kernel = product_kernel(dtype, rows.device, widths=(8, 8), is_static=True)
    assert grouped_gemm.multiply(rows, weight, offsets=offsets, kernel=kernel).shape == (6, 8)


def operands(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*size, generator=generator).to(dtype) for size in ((6, 8), (8, 3 * 8)))
    return rows.requires_grad_(), torch.nn.Parameter(weight), row_offsets(torch.tensor([2, 0, 4]))


@pytest.mark.parametrize("kernel", ProductKernel)
def test_a_gradient_of_half_precision_is_added_to_fp32_unrounded(kernel, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "_adds_in_kernel", lambda _: True)  # simulates a GPU
    rows, weight, offsets = operands()
    main_grad, scale = torch.full(weight.shape, 0.5), 0.3
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    product = grouped_gemm.ExpertGrads(rows.detach(), grad, offsets, weight.shape, kernel)
    assert product.fits(main_grad)
    product.add_to(main_grad, scale=scale, is_zero=False)
    parts = zip(rows.detach().double().split([2, 0, 4]), grad.double().split([2, 0, 4]))
    expected = torch.stack([a.T @ b for a, b in parts]).view(weight.shape)
    torch.testing.assert_close(main_grad.double(), 0.5 + scale * expected, rtol=0, atol=1e-6)
    product.add_to(main_grad, scale=scale, is_zero=True)
    torch.testing.assert_close(main_grad.double(), scale * expected, rtol=0, atol=1e-6)


def test_both_kernels_give_one_result():
    rows, weight, offsets = operands(torch.float32)
    results = []
    for kernel in ProductKernel:
        with torch.no_grad():
            output = grouped_gemm.multiply(rows, weight, offsets=offsets, kernel=kernel)
            back = grouped_gemm.input_grad(2 * output, weight, offsets=offsets)
        product = grouped_gemm.ExpertGrads(rows.detach(), 2 * output, offsets, weight.shape, kernel)
        results.append((output, back, product.compute()))
    assert all(map(torch.equal, *results))
    asked = grouped_gemm.multiply(rows, weight, offsets=offsets)
    assert all(map(torch.equal, results[0][1:], torch.autograd.grad(asked.square().sum(), (rows, weight))))
