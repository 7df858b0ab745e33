"""GradChecks finds every gradient that is not finite, and no other."""

import pytest
import torch

from megatron.core.distributed.consistency import GradChecks

# Below and above what is summed in rows, with and without a rest.
SIZES = (1, 4095, 4096, 4096 + 256, 5000, 20001)


def found(grad: torch.Tensor) -> bool:
    checks = GradChecks(nan=True, large=False)
    checks.measure([("weight", grad)])
    return checks.non_finite_sync() == ["weight"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_wherever_it_is(size: int, bad: float) -> None:
    for place in {0, size // 2, max(0, size - 257), size - 1}:
        grad = torch.randn(size, generator=torch.Generator().manual_seed(1))
        assert not found(grad)
        grad[place] = bad
        assert found(grad)
        # Infinities of both signs make a sum NaN, not finite.
        grad[(place + 1) % size] = -bad
        assert found(grad)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_finite_elements_are_no_error(size: int, dtype: torch.dtype) -> None:
    for signs in (torch.ones(size), -torch.ones(size), torch.arange(size) % 2 * 2.0 - 1.0):
        assert not found((signs.double() * torch.finfo(dtype).max).to(dtype))


def test_any_layout_is_measured() -> None:
    grad = torch.zeros(128, 128).t()[:, ::2]
    assert not found(grad) and not found(torch.zeros(0))
    grad[5, 5] = float("inf")
    assert found(grad)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_of_less_precision_report_no_finite_gradient(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert not found(torch.full((1 << 20,), torch.finfo(torch.float32).max))
    finally:
        torch.set_float32_matmul_precision(before)
