"""Gradients with a stash are those without, bit for bit, whatever runs around it, and all pages come back."""

import gc

import pytest
import torch
from torch import nn

from tests.unit_tests.core.transformer.moe.paged_stash.expert_models import (
    HIDDEN,
    C,
    Context,
    Experts,
    Layer,
    gradients,
    is_empty_sync,
    make_stash,
)

LIVE = 37


class Model(nn.Module):
    """A few layers after each other."""

    def __init__(self, context: Context | None, *, num_layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        experts = [Experts(LIVE, dtype=dtype) for _ in range(num_layers)]
        self.layers = nn.ModuleList(Layer(str(number), one, context) for number, one in enumerate(experts))

    def forward(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, probs)
        return hidden


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert not other.isnan().any()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device_pages", "host_pages"), [(400, 0), (0, 400), (21, 400)])
def test_gradients_are_those_without_the_stash(dtype: torch.dtype, device_pages: int, host_pages: int) -> None:
    expected = gradients(Model(None, dtype=dtype), live=LIVE, dtype=dtype)
    stash = make_stash(device_pages, host_pages)
    model = Model(stash.context, dtype=dtype)
    for _ in range(3):
        assert_same(gradients(model, live=LIVE, dtype=dtype), expected)
        assert is_empty_sync(stash) and not stash.is_void_sync()
        stash.reset()


def test_pages_of_a_graph_without_backward_come_back_when_it_is_dropped() -> None:
    stash = make_stash()
    y = Model(stash.context)(torch.randn(C, HIDDEN, requires_grad=True), torch.rand(C))
    assert not is_empty_sync(stash)
    del y
    gc.collect()
    assert is_empty_sync(stash)
