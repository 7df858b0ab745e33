"""Rows reach a static buffer and come back, and no row beyond the live ones is read or written."""

import math
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.static_rows import gather_rows, order_by_expert, row_operators, sum_rows

TOKENS, CHOICES, EXPERTS = 13, 3, 4
# Rows that are live, and rows of the buffer.
SIZES = [(0, 8), (21, 21), (21, 64)]


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Both operators' functions: those of the CPU, and the Triton kernels on CPU tensors."""
    is_cpu = request.param == "cpu"
    package = row_operators.__name__.rpartition(".")[0]
    yield row_operators if is_cpu else request.getfixturevalue("interpreted")("triton_rows", of=package)


@pytest.mark.parametrize(("live", "capacity"), SIZES)
@pytest.mark.parametrize(
    ("width", "dtype"), [(1, torch.float32), (40, torch.float32), (1100, torch.float16), (8, torch.bfloat16)]
)
def test_kernels_keep_to_live_rows(
    kernels: ModuleType, live: int, capacity: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(live)
    x = torch.randn(TOKENS, width, generator=generator).to(dtype)
    source = torch.randint(-1, TOKENS, (capacity,), generator=generator)
    out = torch.full((capacity, width), 7, dtype=dtype)
    kernels.gather_rows(x, source, num_rows=torch.tensor([live]), out=out)
    assert torch.equal(out[:live], x[source[:live]] * (source[:live] >= 0).unsqueeze(1)) and (out[live:] == 7).all()
    out[live:] = math.nan
    row_of_slot = torch.randint(-1, live, (TOKENS, CHOICES), generator=generator)
    found = kernels.sum_rows(out, row_of_slot)
    for token, rows in enumerate(row_of_slot.tolist()):
        expected = sum((out[row].double() for row in rows if row >= 0), torch.zeros(width, dtype=torch.float64))
        assert torch.allclose(found[token].double(), expected, rtol=0, atol=torch.finfo(dtype).eps * 8)


@pytest.mark.parametrize("alignment", [1, 16])
def test_both_directions_are_each_others_gradient(alignment: int) -> None:
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(TOKENS, EXPERTS + 2, generator=generator).topk(CHOICES).indices
    order = order_by_expert(indices, EXPERTS, capacity=EXPERTS * 16, alignment=alignment)
    num_rows = order.rows_per_group.sum(0, keepdim=True)

    def there_and_back(x: Tensor) -> Tensor:
        rows = gather_rows(x, order.token_of_row, row_of_slot=order.row_of_slot, num_rows=num_rows)
        dead = torch.arange(len(rows)) >= num_rows
        rows = (rows * 2).masked_fill(dead.unsqueeze(1), math.nan)
        return sum_rows(rows, order.row_of_slot, source_of_row=order.token_of_row, num_rows=num_rows)

    x = torch.randn(TOKENS, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    uses = ((indices >= 0) & (indices < EXPERTS)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(there_and_back(x), 2 * uses * x)
    assert torch.autograd.gradcheck(there_and_back, x)


def test_operators_fit_what_torch_asks_of_them() -> None:
    x, rows = torch.randn(4, 3), torch.randn(6, 3)
    torch.library.opcheck(
        torch.ops.static_rows.gather_rows.default,
        (x, torch.tensor([0, 3, -1, 1])),
        {"num_rows": torch.tensor([3]), "out": torch.zeros(4, 3)},
    )
    torch.library.opcheck(torch.ops.static_rows.sum_rows.default, (rows, torch.tensor([[0, 5], [-1, 2]])))
