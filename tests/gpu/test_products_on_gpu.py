"""GEMMs of experts and linear layers on a GPU: both kernels, also captured, and gradient accumulation in fp32."""

import pytest
import torch
from torch import Tensor

from megatron.core.device import default_device, prepare_device
from megatron.core.device.graphs import CudaGraphs
from megatron.core.tensor_parallel.weight_grads import LinearGrad
from megatron.core.transformer.moe.grouped_gemm import (
    ExpertGrads,
    input_grad,
    multiply,
    product_kernel,
    row_offsets,
)

pytestmark = pytest.mark.gpu

ROWS, INNER, OUTER = 1024, 256, 384
# Rows of each expert: all rows live, no rows live, some experts without rows.
COUNTS = [[256, 256, 256, 256], [0, 0, 0, 0], [0, 700, 0, 300]]
ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}


def operands(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, INNER), (INNER, 4 * OUTER), (ROWS, OUTER))
    rows, weight, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return rows.requires_grad_(), torch.nn.Parameter(weight), grad


def exact_results(rows: Tensor, weight: Tensor, grad: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and the gradients of live rows and weights, in fp64."""
    live = sum(counts)
    x, matrices, up = rows.detach().double(), weight.detach().double().view(4, INNER, OUTER), grad.double()
    parts = list(zip(x[:live].split(counts), matrices, up[:live].split(counts)))
    return (
        torch.cat([a @ m for a, m, _ in parts]),
        torch.cat([g @ m.T for _, m, g in parts]),
        torch.stack([a.T @ g for a, _, g in parts]).view(weight.shape),
    )


def near(found: Tensor, exact: Tensor, error: float) -> bool:
    return bool((found.double() - exact).norm() <= error * exact.norm())


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_product_is_right_in_a_graph_too(dtype: torch.dtype, counts: list[int], is_recomputed: bool) -> None:
    prepare_device(device := default_device())
    kernel = product_kernel(dtype, device, widths=(INNER, OUTER), is_recomputed=is_recomputed)
    rows, weight, grad = operands(dtype, device)
    tokens = torch.tensor(counts, device=device)
    exact = exact_results(rows, weight, grad, counts)

    def passes() -> tuple[Tensor, ...]:
        offsets = row_offsets(tokens)
        output = multiply(rows, weight, offsets=offsets, kernel=kernel)
        product = ExpertGrads(rows, grad, offsets, weight.shape, kernel)
        return output, input_grad(grad, weight, offsets=offsets), product.compute()

    graphs = CudaGraphs(device)
    with torch.no_grad(), graphs.on_capture_stream():
        eager = passes()
    with torch.no_grad(), graphs.capturing() as graph:
        captured = passes()
    graph.replay()
    live = sum(counts)
    for output, grad_rows, grad_weight in (eager, captured):
        assert near(output[:live], exact[0], ERROR[dtype]) and near(grad_rows[:live], exact[1], ERROR[dtype])
        assert near(grad_weight, exact[2], ERROR[dtype])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_gradients_are_added_to_fp32_in_the_product(dtype: torch.dtype, counts: list[int]) -> None:
    prepare_device(device := default_device())
    rows, weight, grad = operands(dtype, device)
    exact = exact_results(rows, weight, grad, counts)[2]
    main_grad, scale = torch.full(weight.shape, 0.5, device=device), 0.3

    kernel = product_kernel(dtype, device, widths=(INNER, OUTER))
    offsets = row_offsets(torch.tensor(counts, device=device))
    grads = ExpertGrads(rows.detach(), grad, offsets, weight.shape, kernel)
    assert grads.fits(main_grad)
    grads.add_to(main_grad, scale=scale, is_zero=False)
    assert near(main_grad, 0.5 + scale * exact, ERROR[torch.float32])
    live = sum(counts)
    product = LinearGrad(grad[:live], rows.detach()[:live])
    out = torch.full((OUTER, INNER), 0.5, device=device)
    assert product.fits(out)
    product.add_to(out, scale=scale, is_zero=False)
    expected = grad[:live].double().T @ rows.detach()[:live].double()
    assert near(out, 0.5 + scale * expected, ERROR[torch.float32])
    product.add_to(out, scale=scale, is_zero=True)
    assert near(out, scale * expected, ERROR[torch.float32])
