"""Expert biases are added, weighted, exactly once to each live row and to no other row; their gradients are exact."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash import add_expert_bias
from megatron.core.transformer.moe.paged_stash.expert_ops import ops

# Rows per expert, and rows of the buffer: empty, all rows in one expert, a full buffer, a buffer with spare capacity.
ROUTINGS = [([3, 0, 9, 5], 40), ([0, 33, 0], 33), ([0, 0], 4), ([1, 70, 0, 2], 73)]
SHARE = 0.5


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yields the CPU operators, or the Triton launchers of the same names on CPU tensors."""
    yield ops if request.param == "cpu" else request.getfixturevalue("interpreted")("triton_biases")


def made(*shape: int, dtype: torch.dtype = torch.float32, rows: int | None = None) -> Tensor:
    """Returns random values, with NaN from row `rows` on."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    values[shape[0] if rows is None else rows :] = math.nan
    return values.to(dtype)


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("counts", "capacity"), ROUTINGS)
@pytest.mark.parametrize(("width", "dtype"), [(24, torch.float32), (300, torch.bfloat16), (7, torch.float16)])
def test_live_rows_get_their_experts_bias(
    kernels: Any, width: int, dtype: torch.dtype, counts: list[int], capacity: int, is_scaled: bool
) -> None:
    live, offsets = sum(counts), torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, bias = made(capacity, width, dtype=dtype, rows=live), made(len(counts), width, dtype=dtype)
    scale = made(capacity, rows=live) if is_scaled else None
    factor = torch.ones(live, 1).double() if scale is None else scale[:live, None].double()
    of_row = bias.double().repeat_interleave(torch.tensor(counts), 0)
    expected = (rows[:live].double() + of_row * factor * SHARE).to(dtype)
    grad = made(capacity, 2 * width, dtype=dtype, rows=live)[:, ::2]
    kernels.add_expert_bias(rows, bias, scale=scale, offsets=offsets, share=SHARE)
    torch.testing.assert_close(rows[:live], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert rows[live:].isnan().all()
    found = torch.full_like(bias, math.nan)
    kernels.expert_bias_grad(grad, scale=scale, offsets=offsets, out=found)
    sums = [part.sum(0) for part in (grad[:live].double() * factor).split(counts)]
    torch.testing.assert_close(found, torch.stack(sums).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    of_scale = torch.full((capacity,), math.nan)
    kernels.expert_bias_scale_grad(grad, bias, offsets=offsets, share=SHARE, out=of_scale)
    wanted = (grad[:live].double() * of_row).sum(1) * SHARE
    torch.testing.assert_close(of_scale[:live].double(), wanted, rtol=1e-5, atol=1e-5)
    assert of_scale[live:].isnan().all()


def test_gradients_are_those_of_autograd() -> None:
    counts, offsets = [2, 0, 3], torch.tensor([2, 2, 5], dtype=torch.int32)
    rows, bias, scale = (t.double().requires_grad_() for t in (made(5, 4), made(3, 4), made(5)))

    def summed(rows: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        return add_expert_bias(rows * 1, bias, offsets=offsets, scale=scale)

    assert torch.autograd.gradcheck(summed, (rows, bias, scale))
    # A share of a bias that all ranks add up to: its gradient is the gradient of the whole bias.
    part = add_expert_bias(rows * 1, bias, offsets=offsets, scale=scale, share=0.25)
    whole = (rows + bias.repeat_interleave(torch.tensor(counts), 0) * scale[:, None]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), bias)[0] for out in (part, whole)))


def test_mistakes_are_named() -> None:
    rows, offsets = torch.zeros(4, 6), torch.zeros(2, dtype=torch.int32)
    for bias, words in ((torch.zeros(2, 5), r"bias \[2, 5\]"), (torch.zeros(2, 6).double(), "float64")):
        with pytest.raises(ValueError, match=words):
            add_expert_bias(rows, bias, offsets=offsets)


def test_operators_keep_torchs_rules() -> None:
    rows, bias, scale, offsets = made(5, 6), made(2, 6), made(5), torch.tensor([1, 4], dtype=torch.int32)
    for operator, sources, named in (
        (ops.add_expert_bias, (rows, bias), {"scale": scale, "offsets": offsets, "share": 1.0}),
        (ops.expert_bias_grad, (rows,), {"scale": None, "offsets": offsets, "out": torch.zeros(2, 6)}),
        (ops.expert_bias_scale_grad, (rows, bias), {"offsets": offsets, "share": 1.0, "out": torch.zeros(5)}),
    ):
        torch.library.opcheck(operator.default, sources, named)
