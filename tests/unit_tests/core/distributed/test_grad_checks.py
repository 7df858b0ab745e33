"""GradChecks finds exactly the gradients that are not finite."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.consistency import GradChecks

# Below and above the size that is summed in rows, with and without a remainder.
SIZES = (1, 4095, 4096, 4096 + 256, 5000, 20001)


class Operators(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


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
        # Infinities of opposite signs sum to NaN, which is not finite either.
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


@pytest.mark.parametrize("large", [False, True])
def test_more_parameters_in_a_bucket_need_no_more_operators(large: bool) -> None:
    counts = []
    for num_params in (1, 50):
        checks = GradChecks(nan=True, large=large)
        with Operators() as operators:
            checks.measure([(f"p{number}", torch.ones(40)[:30]) for number in range(num_params)])
        operators.counts -= Counter({"aten::ones": num_params, "aten::slice.Tensor": num_params})
        counts.append(operators.counts)
    assert counts[0] == counts[1] and counts[0]["aten::_foreach_norm.Scalar"] == 1 + large


def test_gradients_of_several_dtypes_are_measured_together(caplog: pytest.LogCaptureFixture) -> None:
    checks = GradChecks(nan=True, large=True)
    dtypes = {"half": torch.float16, "brain": torch.bfloat16, "single": torch.float32, "double": torch.float64}
    for step in range(7):
        # The squares overflow in fp16.
        size = 600.0 if step < 6 else 60000.0
        grads = {name: torch.full((5,), size, dtype=dtype) for name, dtype in dtypes.items()}
        checks.measure([*grads.items()])
        assert checks.non_finite_sync() == []
    assert [name for name in dtypes if f"gradient norm of {name} is 1.34e+05" in caplog.text] == [*dtypes]
    grads["brain"][3], grads["double"][4] = float("inf"), float("nan")
    checks.measure([*grads.items()])
    assert checks.non_finite_sync() == ["brain", "double"]
